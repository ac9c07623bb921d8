"""Measure two sides in turn, so that a busy moment of the machine falls on both."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

import psutil

Found = TypeVar("Found")


def alternate(ours: Callable[[], Found], theirs: Callable[[], Found], repeats: int) -> list[tuple[Found, Found]]:
    """What both sides gave, `repeats` times, one after the other."""
    return [(ours(), theirs()) for _ in range(repeats)]


def seconds(act: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def in_process(module: str, *args: object) -> Any:
    """Run `python -m module ARGS` on its own; the JSON on the last line that it prints."""
    command = [sys.executable, "-m", module, *map(str, args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_processes(
    context: BaseContext, target: Callable[..., object], arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Call `target` in a process for each of the arguments, and a queue; what they have put into it at their end."""
    queue: Any = context.SimpleQueue()
    started = [context.Process(target=target, args=(*values, queue)) for values in arguments]  # type: ignore[attr-defined]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
    found = []
    while not queue.empty():
        found.append(queue.get())
    return found


def command_seconds(*command: str) -> float:
    """Wall time of a command; it must succeed."""
    return seconds(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))


def grown(act: Callable[[], object]) -> int:
    """By how many bytes this process's memory exceeds, at its peak in a call, what it held before (Linux only).

    Not by getrusage: its peak begins with that of the process which started this one.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = psutil.Process().memory_info().rss
    act()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak
    return max(0, int(peak[1]) * 1024 - before)

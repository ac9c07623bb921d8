"""Run whole commands in turns, with the times of their steps."""

import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.compare import Goal, Pairs, compared
from benchmarks.table import Row, time_text

STAMPS = Path(__file__).with_name("stamps")
ROUNDS = 3


class Stamp(NamedTuple):
    """When a step ended, by `time.time`, and a checksum of the weights after each so many as BITS says, else 0."""

    at: float
    bits: int


@dataclass(frozen=True)
class Timed:
    """Seconds of a command, and what it printed. Steps are those of the process that made the most."""

    whole: float
    steps: Sequence[float]  # when each ended, in seconds since the command began
    output: str
    processes: Mapping[int, Sequence[Stamp]] = field(default_factory=dict)  # all steps, by pid

    @property
    def start(self) -> float:
        """Until the first step has ended."""
        return self.steps[0]

    @property
    def step(self) -> float:
        """The median time between a step and the next one."""
        return median(after - before for before, after in pairwise(self.steps))

    @property
    def stepping(self) -> float:
        """From the first step's end to the last one's, with what lies between, as validations."""
        return self.steps[-1] - self.steps[0]


def timed(
    command: Sequence[object],
    cwd: Path | None = None,
    meanwhile: Callable[[Path], None] | None = None,
    /,
    **variables: str,
) -> Timed:
    """Run a command, with one thread for each process unless a variable says otherwise; it must succeed.

    Steps are seen in each process of Python that it starts. A thread may do something `meanwhile`, given the folder
    of the stamps: see `stamps_in`.
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        if meanwhile is not None:
            threading.Thread(target=meanwhile, args=(Path(folder),), daemon=True).start()
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=stamped(folder, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        whole = time.time() - began
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}")
        processes = stamps_in(folder)
    most = max(processes.values(), key=len, default=[])
    return Timed(whole, [stamp.at - began for stamp in most], done.stdout, processes)


def stamped(folder: str | Path, **variables: str) -> dict[str, str]:
    """The environment of a command whose processes keep the times of their steps in this folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables, "STAMPS": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(STAMPS), *filter(None, [environment.get("PYTHONPATH")])])
    return environment


def stamps_in(folder: str | Path) -> dict[int, list[Stamp]]:
    """What each process has kept there so far, by its pid."""
    files = {int(path.name): path.read_bytes() for path in Path(folder).iterdir()}
    return {pid: [Stamp(*each) for each in struct.iter_unpack("dI", kept)] for pid, kept in files.items()}


@dataclass(frozen=True)
class Times:
    """Seconds: until all have made a step, of a step before a kill, and from it until all others have made one."""

    start: float
    step: float
    lost: float


def times_of(stamps: Mapping[int, Sequence[Stamp]], began: float, killed: float, steady: slice) -> Times:
    """What a kill cost the processes that were there before; it was the last of them. `steady` are usual steps."""
    steps = [[stamp.at for stamp in kept] for _, kept in sorted(stamps.items()) if kept[0].at < killed]
    usual = median(after - before for before, after in pairwise(steps[0][steady]))

    def resumed(times: list[float]) -> float:
        # The step in flight may be finished after the kill: of the steps around it, the one that takes longest waits.
        around = [pair for pair in pairwise(times) if killed < pair[1] and pair[0] < killed + 2 * usual]
        return max(around, key=lambda pair: pair[1] - pair[0])[1]

    return Times(max(times[0] for times in steps) - began, usual, max(map(resumed, steps[:-1])) - killed)


def in_turns(sides: Mapping[str, Callable[[], Timed]], rounds: int = ROUNDS) -> dict[str, list[Timed]]:
    """Run all sides, one after the other, `rounds` times."""
    found: dict[str, list[Timed]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            found[name].append(run())
    return found


def rows(
    what: str,
    found: Mapping[str, list[Timed]],
    figure: Callable[[Timed], float],
    goals: Mapping[str, Goal],
    shown: Callable[[float], str] = time_text,
) -> list[Row]:
    """A row for each side that has a goal: dp_ray's figure beside it."""

    def pairs(name: str) -> Pairs:
        return [(figure(ours), figure(theirs)) for ours, theirs in zip(found["dp_ray"], found[name], strict=True)]

    return [compared(what, pairs(name), shown, name, goal) for name, goal in goals.items() if name in found]

"""Two loops take turns every few steps, so that a busy moment of the machine falls on both.

In one process they share all that a process has: the allocator and its settings, the number of threads, the process
group. In two processes they differ in what is to be compared.
"""

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dp_ray.task.step_control import StepControl

Loop = Callable[[StepControl], object]  # calls `before` of its control with each step's number, from 0 on


def take_turns(
    ours: Loop, theirs: Loop, block: int, settle: Callable[[], object] = lambda: None, by_cpu: bool = False
) -> list[tuple[float, float]]:
    """Run both loops in this process, in turns of `block` steps; the seconds of a step in each pair of turns.

    With `by_cpu` they are those of CPU time, as `CpuTurns` measures it.

    A turn's first step is not measured, on either side: it finds the other side's numbers in the caches. `settle` is
    called at both ends of what is measured: it waits for what else works for the loop, like a GPU or the other
    processes. The steps after a loop's last whole turn are not measured.
    """
    mine, others = Baton.of(threading), Baton.of(threading)
    make = functools.partial(CpuTurns, known=set()) if by_cpu else Turns
    sides = make(block, mine, others, settle), make(block, others, mine, settle)
    mine.may_run.release()
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(side.run, loop) for side, loop in zip(sides, (ours, theirs), strict=True)]
        for one in running:
            one.result()
    return list(zip(sides[0].seconds, sides[1].seconds, strict=True))


@dataclass(frozen=True)
class Baton:
    """What one side waits for: a semaphore that is released when it may run, and an event once it has ended."""

    may_run: Any
    has_ended: Any

    @classmethod
    def of(cls, made_by: Any) -> "Baton":
        """A baton between threads or processes, made by `threading` or a context of multiprocessing."""
        return cls(made_by.Semaphore(0), made_by.Event())


class Turns(StepControl):
    """The step control of one of two loops: after each `block` steps, two or more, it lets the other one run."""

    def __init__(self, block: int, mine: Baton, others: Baton, settle: Callable[[], object] = lambda: None) -> None:
        self.seconds: list[float] = []
        self._block = block
        self._mine = mine
        self._others = others
        self._settle = settle
        self._began = 0.0

    def run(self, loop: Loop) -> None:
        """Run the loop, from this side's first turn on."""
        self._mine.may_run.acquire()
        try:
            loop(self)
        finally:
            self._mine.has_ended.set()
            self._others.may_run.release()

    def before(self, step: int) -> None:
        """At a turn's first step: end the last turn, and wait for the next one. At its second: start the clock."""
        if step and step % self._block == 0:
            self._settle()
            self.seconds.append((time.perf_counter() - self._began) / (self._block - 1))
            self._let_other_run()
        if step % self._block == 1:
            self._settle()
            self._began = time.perf_counter()

    def _let_other_run(self) -> None:
        """Let the other side run, unless it has ended, and wait for the next turn."""
        if not self._others.has_ended.is_set():
            self._others.may_run.release()
            self._mine.may_run.acquire()


class CpuTurns(Turns):
    """The same, which measures CPU time: of this process in the side's turns, and of the side's loader processes.

    What else runs on the machine hardly changes it. Loader processes work on in the other side's turn, so theirs
    counts from the end of one turn to that of the next. `known` are the child processes that have a side.
    """

    def __init__(
        self,
        block: int,
        mine: Baton,
        others: Baton,
        settle: Callable[[], object] = lambda: None,
        known: set[int] | None = None,
    ) -> None:
        super().__init__(block, mine, others, settle)
        self._known = set() if known is None else known
        self._loaders: list[int] = []
        self._loaded = 0.0

    def before(self, step: int) -> None:
        """At a turn's first step: end the last turn, and wait for the next one."""
        if step % self._block:
            return
        self._settle()
        if step == self._block:  # its loader has started
            self._loaders = [child.pid for child in psutil.Process().children() if child.pid not in self._known]
            self._known.update(self._loaders)
        loaded = sum(map(_cpu_seconds, self._loaders))
        if step:
            self.seconds.append((time.process_time() - self._began + loaded - self._loaded) / self._block)
            self._let_other_run()
        self._loaded = loaded
        self._began = time.process_time()


def _cpu_seconds(pid: int) -> float:
    """The CPU time of all threads of a process so far (Linux only), to the nanosecond."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9

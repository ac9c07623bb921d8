"""Two loops take turns every few steps, so that a busy moment of the machine falls on both.

In one process they share all that a process has: the allocator and its settings, the number of threads, the process
group. In two processes they differ in what is to be compared.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dp_ray.task.step_control import StepControl

Drain = Callable[[], object]
Loop = Callable[[StepControl], object]  # calls `before` of its control with each step's number, from 0 on


class Cost(NamedTuple):
    """What a step of a turn took: seconds of wall time, and of CPU time of all threads of the process and loaders."""

    wall: float
    cpu: float


def take_turns(
    ours: Loop, theirs: Loop, block: int, settle: Callable[[], object] = lambda: None, drain: Drain = lambda: None
) -> list[tuple[Cost, Cost]]:
    """Run both loops in this process, in turns of `block` steps; the cost of a step in each pair of turns.

    A turn's first step is not measured, on either side: it finds the other side's numbers in the caches. `settle` is
    called at both ends of what is measured: it waits for what else works for the loop, like a GPU or the other
    processes. The steps after a loop's last whole turn are not measured.

    `drain` is called at the end of a turn of `ours`, before the CPU time is read: it waits for the threads that work
    for this side alone. What it waits is no wall time of a step.
    """
    mine, others = Baton.of(threading), Baton.of(threading)
    known: set[int] = set()
    sides = Turns(block, mine, others, settle, drain, known), Turns(block, others, mine, settle, known=known)
    mine.may_run.release()
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(side.run, loop) for side, loop in zip(sides, (ours, theirs), strict=True)]
        for one in running:
            one.result()
    return list(zip(sides[0].costs, sides[1].costs, strict=True))


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
    """The step control of one of two loops: after each `block` steps, two or more, it lets the other one run.

    Loader processes work on in the other side's turn, so their CPU time counts from a turn's end to that of the next.
    `known` are the child processes that have a side.
    """

    def __init__(
        self,
        block: int,
        mine: Baton,
        others: Baton,
        settle: Drain = lambda: None,
        drain: Drain = lambda: None,
        known: set[int] | None = None,
    ) -> None:
        self.costs: list[Cost] = []
        self._block = block
        self._mine = mine
        self._others = others
        self._settle = settle
        self._drain = drain
        self._began = Cost(0.0, 0.0)
        self._known = set() if known is None else known
        self._loaders: list[int] | None = None
        self._loaded = 0.0

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
            wall = time.perf_counter()
            self._drain()
            wall, cpu = wall - self._began.wall, time.process_time() - self._began.cpu
            self.costs.append(Cost(wall / (self._block - 1), cpu / (self._block - 1) + self._loading() / self._block))
            self._let_other_run()
        if step % self._block == 1:
            self._settle()
            self._began = Cost(time.perf_counter(), time.process_time())

    def _loading(self) -> float:
        """The CPU time of this side's loader processes since the last call."""
        if self._loaders is None:
            self._loaders = [child.pid for child in psutil.Process().children() if child.pid not in self._known]
            self._known.update(self._loaders)
        before, self._loaded = self._loaded, sum(map(cpu_seconds, self._loaders))
        return self._loaded - before

    def _let_other_run(self) -> None:
        """Let the other side run, unless it has ended, and wait for the next turn."""
        if not self._others.has_ended.is_set():
            self._others.may_run.release()
            self._mine.may_run.acquire()


def cpu_seconds(pid: int) -> float:
    """The CPU time of all threads of a process so far (Linux only), to the nanosecond."""
    return sum(int(one.read_text().split()[0]) for one in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9

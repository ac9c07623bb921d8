"""Two loops take turns every few steps, so that a busy moment of the machine falls on both.

In one process they share all that a process has: the allocator and its settings, the number of threads, the process
group. In two processes they differ in what is to be compared.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from dp_ray.messages import StepControl

Drain = Callable[[], object]
Loop = Callable[[StepControl], object]  # calls `before` of its control with each step's number, from 0 on


class Cost(NamedTuple):
    """What a step of a turn took: seconds of wall time, and of CPU time of all threads of the process."""

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
    sides = Turns(block, mine, others, settle, drain), Turns(block, others, mine, settle)
    mine.may_run.release()
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(side.run, loop) for side, loop in zip(sides, (ours, theirs), strict=True)]
        for program in running:
            program.result()
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
    """The step control of one of two loops: after each `block` steps, two or more, it lets the other one run."""

    def __init__(
        self, block: int, mine: Baton, others: Baton, settle: Drain = lambda: None, drain: Drain = lambda: None
    ) -> None:
        self.costs: list[Cost] = []
        self._block = block
        self._mine = mine
        self._others = others
        self._settle = settle
        self._drain = drain
        self._began = Cost(0.0, 0.0)

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
            spent = wall - self._began.wall, time.process_time() - self._began.cpu
            self.costs.append(Cost(*(seconds / (self._block - 1) for seconds in spent)))
            self._let_other_run()
        if step % self._block == 1:
            self._settle()
            self._began = Cost(time.perf_counter(), time.process_time())

    def _let_other_run(self) -> None:
        """Let the other side run, unless it has ended, and wait for the next turn."""
        if not self._others.has_ended.is_set():
            self._others.may_run.release()
            self._mine.may_run.acquire()

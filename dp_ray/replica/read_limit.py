"""A time limit for reading samples in the processes of a loader.

Within its process, an alarm turns a read that takes too long into an error. A read that does not return even then, in
C code that ignores signals, is ended with its process: each process notes in shared memory what it reads since when.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from dp_ray.replica.read_requests import ReadRequest

SLOT = 8  # numbers that each process notes: its pid, since when it reads, how long it may, and what
_SINCE, _SAMPLE = 1, 6
TICKS = 4  # how often the limit is checked within its length
_OVER = 1.5  # of its time, a read may take until its process is ended


class ReadTimeout(BaseException):
    """A read takes longer than it may. No Exception, so that a dataset's own `except Exception` lets it pass."""


class HungRead(NamedTuple):
    """A read that did not end, of process `pid`, and its place; `sample` is None if several were read."""

    pid: int
    epoch: int
    step: int
    shard: int
    sample: int | None


class _Noted(list[int]):
    """Sample indices that are noted one after another, as they are iterated."""

    def __init__(self, indices: list[int], slots: Any, at: int) -> None:
        super().__init__(indices)
        self._slots = slots
        self._at = at

    def __iter__(self) -> Iterator[int]:
        slots, since, sample, now = self._slots, self._at + _SINCE, self._at + _SAMPLE, time.monotonic
        for index in super().__iter__():
            slots[sample] = index
            slots[since] = now()
            yield index


class ReadLimit:
    """The time limit of each sample's read, in `processes` loader processes that share it with the worker."""

    def __init__(self, seconds: float, processes: int) -> None:
        self.seconds = seconds
        self._slots: Any = RawArray("d", SLOT * processes)
        self._at: int | None = None

    @property
    def poll_seconds(self) -> float:
        """How often the worker looks at what its loader processes read."""
        return max(1.0, self.seconds / TICKS)

    def arm(self, process: int) -> None:
        """Begin to enforce the limit in this loader process."""
        self._at = SLOT * process
        self._slots[self._at : self._at + SLOT] = [os.getpid(), *[0.0] * (SLOT - 1)]
        signal.signal(signal.SIGALRM, self._tick)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, self.seconds / TICKS, self.seconds / TICKS)

    @contextmanager
    def reading(self, wanted: ReadRequest, indices: Sequence[int]) -> Iterator[None]:
        """Within the block these samples are read; raises ReadTimeout after `seconds` for each."""
        at = self._at
        if at is None:
            yield
            return
        slots = self._slots
        slots[at + 2 : at + SLOT] = [self.seconds * len(indices), *wanted[:3], indices[0], len(indices)]
        slots[at + _SINCE] = time.monotonic()
        try:
            yield
        finally:
            slots[at + _SINCE] = 0.0

    @contextmanager
    def reading_each(self, wanted: ReadRequest, indices: list[int]) -> Iterator[list[int]]:
        """Within the block these samples are read one after another, as the list that it gives is iterated.

        Each may take `seconds`; `at` is the one that is being read.
        """
        with self.reading(wanted, indices[:1]):
            yield indices if self._at is None else _Noted(indices, self._slots, self._at)

    @property
    def at(self) -> int | None:
        """The sample whose read began last; None in a process in which the limit is not enforced."""
        return None if self._at is None else int(self._slots[self._at + _SAMPLE])

    def _tick(self, *_: object) -> None:
        assert self._at is not None
        since, allowed = self._slots[self._at + 1 : self._at + 3]
        if since and time.monotonic() - since > allowed:
            raise ReadTimeout(f"reading took more than {allowed:g} s")

    def hung(self) -> HungRead | None:
        """A read that its process's alarm did not end, if there is one."""
        now = time.monotonic()
        for at in range(0, len(self._slots), SLOT):
            pid, since, allowed, epoch, step, shard, index, many = self._slots[at : at + SLOT]
            if since and now - since > allowed * _OVER + 1:
                return HungRead(int(pid), int(epoch), int(step), int(shard), int(index) if many == 1 else None)
        return None

    def clear(self) -> None:
        """Forget what ended processes were reading."""
        self._slots[:] = [0.0] * len(self._slots)


def arm_loader(process: int) -> None:
    """Begin to enforce the limit of the loader's dataset, if it has one, in this loader process."""
    told: Any = get_worker_info()
    screen = told and told.dataset.dataset.screen  # of Samples, in TimedReads
    if screen is not None and screen.limit is not None:
        screen.limit.arm(process)


def end_process(pid: int) -> None:
    """Kill a loader process and wait for its end."""
    try:
        os.kill(pid, signal.SIGKILL)
        for _ in range(20):
            os.kill(pid, 0)
            time.sleep(0.01)
    except (ProcessLookupError, RuntimeError):  # in a main thread, torch raises when a loader process dies
        return

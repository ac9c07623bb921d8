"""Finds the workers that hang, among all those that wait for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dp_ray.monitor.messages import Beat, WorkerReady, beat_interval

SILENT_BEATS = 10


@dataclass
class _Seen:
    worker: WorkerReady
    heard: float
    moved: float
    step: int | None = None
    stack: str = ""
    waits_for: str = ""


@dataclass(frozen=True)
class Hang:
    """Workers that have been in one step for too long; the other workers wait for them, or hang in the same way."""

    workers: tuple[WorkerReady, ...]
    step: int
    seconds: float
    stack: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that hang."""
        return tuple(worker.world.rank for worker in self.workers)

    def __str__(self) -> str:
        who = ", ".join(str(worker.world) for worker in self.workers)
        has = "has" if len(self.workers) == 1 else "have"
        at = f"; it stands at\n{self.stack.rstrip()}" if self.stack else "; it does not answer: stopped, or cut off"
        return f"{who} {has} been in step {self.step} for {self.seconds:.0f} s{at}"


class Watchdog:
    """Takes in the beats of one attempt's workers; `limit` is the seconds allowed for one step, None: no limit."""

    def __init__(self, limit: float | None, workers: Sequence[WorkerReady]) -> None:
        self._limit = limit
        self._interval = beat_interval(len(workers))
        now = time.monotonic()
        self._seen = {worker.world.rank: _Seen(worker, now, now) for worker in workers}
        self._found = False

    def start(self, rank: int, step: int) -> None:
        """Note that a worker is about to run its first step, since it may hang before its next beat."""
        if rank in self._seen:
            now = time.monotonic()
            seen = self._seen[rank]
            seen.heard, seen.moved, seen.step = now, now, step

    def take(self, beat: Beat) -> None:
        """Take in a worker's beat."""
        now = time.monotonic()
        seen = self._seen.get(beat.rank)
        if seen is None:
            return
        seen.heard, seen.moved, seen.step = now, now - beat.seconds, beat.step
        seen.stack, seen.waits_for = beat.stack, beat.waits_for

    def hang(self) -> Hang | None:
        """The workers that hang, None if none do; reported once.

        It waits four more beat intervals after the limit, so that it has heard from all workers.
        """
        if self._limit is None or self._found:
            return None
        now, patience = time.monotonic(), self._limit + 4 * self._interval
        at_it = [seen for seen in self._seen.values() if seen.step is not None]
        late = [seen for seen in at_it if now - seen.moved > self._limit]
        if not any(now - seen.moved > patience for seen in late):
            return None
        blamed = self._blame(late, now)
        if not blamed:
            return None
        self._found = True
        step = min(seen.step or 0 for seen in blamed)
        workers = tuple(seen.worker for seen in blamed)
        return Hang(workers, step, now - min(seen.moved for seen in blamed), blamed[0].stack)

    def _blame(self, late: list[_Seen], now: float) -> list[_Seen]:
        """The late workers to blame.

        These are the silent ones; else those in the earliest step that wait for no other worker. Else all in that
        step, if all workers are late; otherwise none, because some are only slow.
        """
        silent = [seen for seen in late if now - seen.heard > SILENT_BEATS * self._interval]
        if silent:
            for seen in silent:
                seen.stack = ""
            return silent
        last = min(seen.step or 0 for seen in late)
        behind = [seen for seen in late if seen.step == last]
        hung = [seen for seen in behind if seen.stack and not seen.waits_for]
        all_late = len(late) == sum(seen.step is not None for seen in self._seen.values())
        return hung or (behind if all_late else [])

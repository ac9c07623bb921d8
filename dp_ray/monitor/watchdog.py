"""Find the workers that hang, among all those that wait for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dp_ray.messages import Beat, WorkerReady, beat_interval

SILENT_BEATS = 10


@dataclass
class _WorkerState:
    worker: WorkerReady
    heard: float  # when the last beat came
    moved: float  # when its step began
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
        at = (
            f"; its stack is\n{self.stack.rstrip()}"
            if self.stack
            else "; it does not answer: its process is stopped, or its node is cut off"
        )
        return f"{who} {has} been in step {self.step} for {self.seconds:.0f} s{at}"


class Watchdog:
    """A watchdog of one attempt's workers; `limit` is the seconds allowed for one step, None: no limit."""

    def __init__(self, limit: float | None, workers: Sequence[WorkerReady]) -> None:
        self._limit = limit
        self._interval = beat_interval(len(workers))
        now = time.monotonic()
        self._states = {worker.world.rank: _WorkerState(worker, now, now) for worker in workers}
        self._is_reported = False

    def start(self, rank: int, step: int) -> None:
        """Note that a worker is about to run its first step, since it may hang before its next beat."""
        if rank in self._states:
            now = time.monotonic()
            state = self._states[rank]
            state.heard, state.moved, state.step = now, now, step

    def take(self, beat: Beat) -> None:
        """Take in a worker's beat."""
        now = time.monotonic()
        state = self._states.get(beat.rank)
        if state is None:
            return
        state.heard, state.moved, state.step = now, now - beat.seconds, beat.step
        state.stack, state.waits_for = beat.stack, beat.waits_for

    def hang(self) -> Hang | None:
        """Return the workers that hang, None if none do; once.

        It waits four more beat intervals after the limit, so that it has heard from all workers.
        """
        if self._limit is None or self._is_reported:
            return None
        now, patience = time.monotonic(), self._limit + 4 * self._interval
        late = [one for one in self._states.values() if one.step is not None and now - one.moved > self._limit]
        if not any(now - state.moved > patience for state in late):
            return None
        blamed = self._blame(late, now)
        if not blamed:
            return None
        self._is_reported = True
        step = min(state.step or 0 for state in blamed)
        workers = tuple(state.worker for state in blamed)
        return Hang(workers, step, now - min(state.moved for state in blamed), blamed[0].stack)

    def _blame(self, late: list[_WorkerState], now: float) -> list[_WorkerState]:
        """Return the late workers to blame.

        These are the silent ones; else those in the earliest step that wait for no other worker. Else all in that
        step, if all workers are late; otherwise none, because some are only slow.
        """
        silent = [state for state in late if now - state.heard > SILENT_BEATS * self._interval]
        if silent:
            for state in silent:
                state.stack = ""  # of an earlier beat: it does not show where the worker is now
            return silent
        last = min(state.step or 0 for state in late)
        behind = [state for state in late if state.step == last]
        hung = [state for state in behind if state.stack and not state.waits_for]
        all_late = len(late) == sum(state.step is not None for state in self._states.values())
        return hung or (behind if all_late else [])

"""Finds the workers that hang, among all those that wait for them.

Says what a run waits for, while its workers do not come.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dp_ray.job.job import Job
from dp_ray.monitor.attempts import Attempts
from dp_ray.monitor.console import Progressed
from dp_ray.monitor.messages import Beat, WorkerReady, beat_interval

SILENT_BEATS = 10


@dataclass
class _WorkerState:
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
        at = (
            f"; its stack is\n{self.stack.rstrip()}"
            if self.stack
            else "; it does not answer: its process is stopped, or its node is cut off"
        )
        return f"{who} {has} been in step {self.step} for {self.seconds:.0f} s{at}"


class Watchdog:
    """Takes in the beats of one attempt's workers; `limit` is the seconds allowed for one step, None: no limit."""

    def __init__(self, limit: float | None, workers: Sequence[WorkerReady]) -> None:
        self._limit = limit
        self._interval = beat_interval(len(workers))
        now = time.monotonic()
        self._states = {worker.world.rank: _WorkerState(worker, now, now) for worker in workers}
        self._found = False

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
        """The workers that hang, None if none do; reported once.

        It waits four more beat intervals after the limit, so that it has heard from all workers.
        """
        if self._limit is None or self._found:
            return None
        now, patience = time.monotonic(), self._limit + 4 * self._interval
        at_it = [state for state in self._states.values() if state.step is not None]
        late = [state for state in at_it if now - state.moved > self._limit]
        if not any(now - state.moved > patience for state in late):
            return None
        blamed = self._blame(late, now)
        if not blamed:
            return None
        self._found = True
        step = min(state.step or 0 for state in blamed)
        workers = tuple(state.worker for state in blamed)
        return Hang(workers, step, now - min(state.moved for state in blamed), blamed[0].stack)

    def _blame(self, late: list[_WorkerState], now: float) -> list[_WorkerState]:
        """The late workers to blame.

        These are the silent ones; else those in the earliest step that wait for no other worker. Else all in that
        step, if all workers are late; otherwise none, because some are only slow.
        """
        silent = [state for state in late if now - state.heard > SILENT_BEATS * self._interval]
        if silent:
            for state in silent:
                state.stack = ""
            return silent
        last = min(state.step or 0 for state in late)
        behind = [state for state in late if state.step == last]
        hung = [state for state in behind if state.stack and not state.waits_for]
        all_late = len(late) == sum(state.step is not None for state in self._states.values())
        return hung or (behind if all_late else [])


SAY_AFTER = (10.0, 60.0, 300.0)  # seconds of a wait; from then on every REPEAT_SECONDS
REPEAT_SECONDS = 600.0


class LongWaits:
    """Counts the seconds of each wait for workers, and says a line of a long one."""

    def __init__(self, job: Job, attempts: Attempts, progress: Progressed, say: Callable[[str], None]) -> None:
        least, most = job.min_workers, job.max_workers
        self._workers = f"{most}" if least == most else f"{least} to {most}"
        self._attempts = attempts
        self._progress = progress
        self._say = say
        self._since: float | None = None
        self._lines = 0

    def look(self, cluster: Callable[[], str]) -> None:
        """Say a line if the wait has become that long; `cluster` says what the workers need, and what is free.

        Another thread than the one that feeds the monitor may call it: that one may itself wait for Ray.
        """
        now = time.monotonic()
        if not self._attempts.is_awaited or self._since is None:
            self._since, self._lines = now if self._attempts.is_awaited else None, 0
            return
        if now - self._since >= self._due():
            self._lines += 1
            ready = f"{self._attempts.num_ready} of {self._workers} are ready{cluster()}"
            so_far = f"{now - self._since:.0f} s so far"
            self._say(f"waiting for workers, {so_far}: {ready}; now: {self._progress.phase}")

    def _due(self) -> float:
        """The seconds of a wait after which the next line comes."""
        more = self._lines - len(SAY_AFTER)
        return SAY_AFTER[self._lines] if more < 0 else SAY_AFTER[-1] + (more + 1) * REPEAT_SECONDS

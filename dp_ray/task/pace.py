"""How often a training saves checkpoints: as the job sets, by default as often as costs 1 % of its time."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dp_ray.job_parts import Checkpoint

SHARE = 0.01  # of the training's time may go into checkpoints
LATEST = 300.0  # seconds after the last checkpoint, the next one is due at any cost
EXPECTED = 0.005, 200e6  # the first checkpoint's cost: fixed seconds, and bytes a second


class Pace:
    """Decides when a checkpoint is due by the clock, from the cost of earlier ones: the loop's wait and the write.

    Each checkpoint writes a piece of the history too, so the next one waits until the run is 1 % longer.
    """

    def __init__(self, when: Checkpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_auto = when.every_seconds == "auto" and when.every_steps is None
        self._seconds = LATEST if when.every_seconds == "auto" else when.every_seconds
        self._began = self._saved_at = clock()
        self._saves = 0
        self._in_loop = 0.0
        self._expected = 0.0

    def expect(self, num_bytes: int) -> None:
        """Estimate the first checkpoint's cost from the state's size, before one is measured."""
        fixed, bytes_per_second = EXPECTED
        self._expected = fixed + num_bytes / bytes_per_second

    def is_due(self, written: float, is_writing: bool) -> bool:
        """Whether to save now.

        `written` is the seconds spent on writes in the background so far; `is_writing` says that one is under way.
        """
        now = self._clock()
        since = now - self._saved_at
        if self._seconds is not None and since >= self._seconds:
            return True
        if not self.is_auto or is_writing:
            return False
        spent, share = self._in_loop + written, SHARE * (now - self._began)
        return since >= share and spent + self._next(spent) <= share

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the loop waits for a checkpoint."""
        began = self._clock()
        yield
        self._saved_at = self._clock()
        self._in_loop += self._saved_at - began
        self._saves += 1

    def _next(self, spent: float) -> float:
        """The expected cost of the next checkpoint in seconds: the mean so far, or the estimate before the first."""
        return spent / self._saves if self._saves else self._expected

"""How often a training keeps its state: as the job says, by default as often as is nearly free."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dp_ray.job_parts import Checkpoint

SHARE = 0.01  # of the training's time, for checkpoints
LATEST = 300.0  # seconds after the last one, whatever it costs
EXPECTED = 0.005, 200e6  # seconds, and bytes a second, that the first one is expected to take


class Pace:
    """When a checkpoint is due by the clock, from what earlier ones cost: the loop's own time, and the writing.

    Each leaves a piece of the history too, so there is no next one before the run is a hundredth longer.
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
        """The state is so large: what its first checkpoint may cost, before one was measured."""
        fixed, bytes_per_second = EXPECTED
        self._expected = fixed + num_bytes / bytes_per_second

    def is_due(self, written: float, is_writing: bool) -> bool:
        """Whether to save now; `written` seconds went into writing in the background, where one is written now."""
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
        """Measure what the loop waits for a checkpoint."""
        began = self._clock()
        yield
        self._saved_at = self._clock()
        self._in_loop += self._saved_at - began
        self._saves += 1

    def _next(self, spent: float) -> float:
        """What one more is expected to cost: as those so far."""
        return spent / self._saves if self._saves else self._expected

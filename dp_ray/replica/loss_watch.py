"""Ends a training at a loss that is NaN or infinite, for `stop_on_nan`: all workers after the same step."""

import math

import torch

from dp_ray.errors import ModelError
from dp_ray.replica.stop_vote import Lagged, StopVote
from dp_ray.text import replay_command


class NotFinite(ModelError):
    """The loss of a step is NaN or infinite; every attempt would find it again."""


class LossWatch:
    """Looks at the sum of each step's losses over all workers, which is the same on each of them.

    On a GPU it is read as many steps later as a stop request, so that no step waits for the GPU. `run_dir` is the
    run's directory, for the message.
    """

    def __init__(self, run_dir: str) -> None:
        self._sums = Lagged(StopVote.LAG)
        self._run_dir = run_dir
        self._read = 0  # steps whose sums were read
        self._first: int | None = None  # the first step of this attempt
        self._found: tuple[int, float] | None = None

    def take(self, step: int, total: torch.Tensor | float) -> None:
        """Take in the sum of a step's losses."""
        self._first = step if self._first is None else self._first
        found = self._sums.take(total)
        if found is not None:
            self._note(found)
            self._read += 1

    @property
    def has_found(self) -> bool:
        """Whether a loss that was read is not finite; the same on all workers after the same step."""
        return self._found is not None

    def is_finite(self) -> bool:
        """Whether all losses so far are finite; this waits for the device."""
        return self._found is None and all(map(math.isfinite, self._sums.ahead()))

    def check(self) -> None:
        """Raise NotFinite, on all workers after the same step, if a loss that was read is not finite."""
        if self._found is not None:
            step, total = self._found
            raise NotFinite(
                f"step {step}: the loss is {total}, and stop_on_nan is true; look at its rows: "
                f"{replay_command(self._run_dir, step)}"
            )

    def check_all(self) -> None:
        """The same for all steps so far; every rank calls this after its last step."""
        for total in self._sums.ahead():
            self._note(total)
            self._read += 1
        self.check()

    def _note(self, total: float) -> None:
        if self._found is None and not math.isfinite(total):
            self._found = (self._first or 0) + self._read, total

"""The running values of a training, beside its model and what changes with its weights."""

import dataclasses
from typing import Any

import torch

from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.sums.votes import Totals
from dp_ray.engine.trainer import Update
from dp_ray.system.threads import waiting


@dataclasses.dataclass
class TrainState:
    """The running values of a training: `step` steps are done; `measured` holds the last evaluation.

    `at_end` has what was measured since only because the training ended. One that goes on does so as if it had not:
    schedules and early stopping go by `measured`.
    """

    step: int = 0
    # Sum and weight since the epoch's start.
    epoch_loss: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    measured: dict[str, float] = dataclasses.field(default_factory=dict)
    _unread: list[torch.Tensor] = dataclasses.field(default_factory=list, init=False, repr=False)
    best: float | None = None
    best_step: int | None = None
    best_by: list[str] = dataclasses.field(default_factory=list)  # the metric and the mode that `best` refers to
    stopping: dict[str, Any] = dataclasses.field(default_factory=dict)  # what early stopping counts; empty without it
    at_end: dict[str, float] = dataclasses.field(default_factory=dict)
    # Of the last step, until all is done that follows it; in memory alone, as the next one.
    unfinished: Update | None = dataclasses.field(default=None, init=False, repr=False)
    # Until then: the step's end, or what follows it, has begun, and cannot be done again.
    is_torn: bool = dataclasses.field(default=False, init=False, repr=False)

    def count(self, update: Update) -> None:
        """Count the next step, which has ended, without waiting for the device; what follows it is left to do."""
        self.step += 1
        self._unread.append(update.sums)
        if len(self._unread) >= 256:
            self._read()
        self.unfinished, self.is_torn = update, False

    def end_epoch(self) -> float:
        """Return the epoch's mean loss and begin the next epoch."""
        self.is_torn = True
        self._read()
        (total, weight), self.epoch_loss = self.epoch_loss, [0.0, 0.0]
        return total / weight if weight else float("nan")

    @property
    def progress(self) -> int:
        """How much is finished: two for each step, and the second one with all that follows the step."""
        return 2 * self.step - (self.unfinished is not None)

    @property
    def finished(self) -> int:
        """The steps after which nothing is left to do: no row of a later one is written."""
        return self.progress // 2

    def to_json(self) -> dict[str, Any]:
        """Return the values as a checkpoint holds them."""
        self._read()
        values = {name.name: getattr(self, name.name) for name in dataclasses.fields(self) if name.init}
        for name in ("stopping", "at_end"):
            if not values[name]:
                del values[name]  # earlier versions do not know it
        return values

    def _read(self) -> None:
        with waiting(ON_GPU):
            unread = Totals.losses(self._unread)
        for total, weight in unread:
            self.epoch_loss = [self.epoch_loss[0] + total, self.epoch_loss[1] + weight]
        self._unread = []

"""Stop a training early, once its metric has not improved for a number of evaluations."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from dp_ray.engine.world import broadcast
from dp_ray.job import keys
from dp_ray.job.job import Job
from dp_ray.messages import StoppedEarly
from dp_ray.tasks.train_state import TrainState


class Stopping(Protocol):
    """What ends a training before its last step."""

    @property
    def has_stopped(self) -> bool:
        """Whether the training ends here."""

    def take(self, measured: dict[str, float]) -> bool:
        """Take in what was measured after a step; return whether the training stops. Every rank calls this."""

    def stopped(self) -> StoppedEarly:
        """Return why the training has stopped."""


@dataclass(frozen=True)
class Patience:
    """The step after which a training stops early. The counts are in the training's state, so a resume keeps them.

    All workers decide by rank 0's numbers, and so stop after the same step.
    """

    wanted: keys.EarlyStopping
    train_state: TrainState

    @staticmethod
    def of(job: Job, train_state: TrainState) -> "Patience | None":
        """Return the job's, or None; counts of another metric, or of an earlier `early_stopping`, start at 0."""
        wanted = job.early_stopping
        by = [] if wanted is None else [wanted.column, wanted.mode, wanted.min_delta]
        if wanted is None:
            train_state.stopping = {}
            return None
        if train_state.stopping.get("by") != by:
            train_state.stopping = {"by": by, "best": None, "times": 0}
        return Patience(wanted, train_state)

    @property
    def has_stopped(self) -> bool:
        """Whether the training ends here, as the metric has not improved for too long."""
        return bool(self.train_state.stopping["times"] >= self.wanted.patience)

    def take(self, measured: dict[str, float]) -> bool:
        """Count the measurements after a step; return whether the training stops. Every rank calls this."""
        if self.wanted.column not in measured:
            return False
        value = float(json.loads(broadcast(json.dumps(measured[self.wanted.column]))))
        counts = self.train_state.stopping
        best = counts["best"]
        gain = 0.0 if best is None else best - value if self.wanted.mode == "min" else value - best
        if value == value and (best is None or gain > self.wanted.min_delta):  # NaN never improves
            counts |= {"best": value, "times": 0}
        else:
            counts["times"] += 1
        return self.has_stopped

    def stopped(self) -> StoppedEarly:
        """Return why the training has stopped."""
        counts: dict[str, Any] = self.train_state.stopping
        column, mode, min_delta = counts["by"]
        return StoppedEarly(self.train_state.step, column, mode, min_delta, counts["best"], counts["times"])

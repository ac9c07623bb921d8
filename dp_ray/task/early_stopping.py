"""Early stopping: count how often a metric was measured without an improvement."""

import json
from typing import Any

from dp_ray.job import Job
from dp_ray.replica.world import broadcast
from dp_ray.rundir.checkpoint import TrainState
from dp_ray.task.notices import StoppedEarly


class EarlyStopping:
    """Says after which step a training stops early. What it counts is in the training's state, so a resume keeps it.

    All workers decide by rank 0's numbers, and so stop after the same step.
    """

    def __init__(self, job: Job, train_state: TrainState, total_steps: int) -> None:
        self._wanted = job.early_stopping
        self._train_state = train_state
        self._total_steps = total_steps
        by = [] if self._wanted is None else [self._wanted.column, self._wanted.mode, self._wanted.min_delta]
        if self._wanted is None:
            train_state.stopping = {}
        elif train_state.stopping.get("by") != by:
            train_state.stopping = {"by": by, "best": None, "times": 0}

    @property
    def has_stopped(self) -> bool:
        """Whether the training ends here, as the metric has not improved for too long."""
        return self._wanted is not None and self._train_state.stopping["times"] >= self._wanted.patience

    @property
    def has_stopped_early(self) -> bool:
        """Whether the training ends here although it has more steps."""
        return self.has_stopped and self._train_state.step < self._total_steps

    @property
    def next_step(self) -> int:
        """The step to run next, counted from 0; the number of all steps if there is none."""
        return self._total_steps if self.has_stopped else self._train_state.step

    def take(self, measured: dict[str, float]) -> bool:
        """Take in what was measured after a step; return whether the training stops. Every rank calls this."""
        if self._wanted is None or self._wanted.column not in measured:
            return False
        value = float(json.loads(broadcast(json.dumps(measured[self._wanted.column]))))
        counts = self._train_state.stopping
        if self._is_better(value, counts["best"]):
            counts |= {"best": value, "times": 0}
        else:
            counts["times"] += 1
        return self.has_stopped

    def stopped(self) -> StoppedEarly:
        """Why the training has stopped."""
        counts: dict[str, Any] = self._train_state.stopping
        column, mode, min_delta = counts["by"]
        return StoppedEarly(self._train_state.step, column, mode, min_delta, counts["best"], counts["times"])

    def _is_better(self, value: float, best: float | None) -> bool:
        """Whether a value improves on the best one by `min_delta`; NaN never does."""
        assert self._wanted is not None
        if value != value or best is None:
            return value == value
        gain = best - value if self._wanted.mode == "min" else value - best
        return gain > self._wanted.min_delta

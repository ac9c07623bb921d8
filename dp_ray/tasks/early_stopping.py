"""End a training before its last step: since its metric does not improve, or is good enough, or its loop says so."""

import math

from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.sums.votes import Totals
from dp_ray.engine.trainer import Update
from dp_ray.job.job import Job
from dp_ray.messages import StoppedEarly
from dp_ray.system.threads import waiting
from dp_ray.tasks.train_state import TrainState


class Stopping:
    """The step after which a training ends early, as the job's `early_stopping` says, or for a `reason` of its loop.

    What it counts is in the training's state, so a resume keeps it; counts of another metric, or of an earlier
    `early_stopping`, start at 0. All workers have the same numbers, and so stop after the same step.
    """

    def __init__(self, job: Job, train_state: TrainState) -> None:
        self._wanted = wanted = job.early_stopping
        self._state, before = train_state, train_state.stopping
        self.reason = ""  # of the loop, from the step on after which it ends
        if wanted is not None:
            by = [wanted.column, wanted.mode, wanted.min_delta]
            counts = {"by": by, "best": None, "times": 0} if before.get("by") != by else before
        else:
            counts = {}
        # There is a reason already if a driver was killed after its workers had stopped.
        train_state.stopping = counts | ({"reason": before["reason"]} if "reason" in before else {})

    @property
    def has_stopped(self) -> bool:
        """Whether the training ends here: its loop said so, or the metric is low enough, or improves no more."""
        counts, wanted = self._state.stopping, self._wanted
        is_late = wanted is not None and wanted.patience is not None and counts["times"] >= wanted.patience
        return "reason" in counts or is_late or self._is_below

    @property
    def _is_below(self) -> bool:
        below = None if self._wanted is None else self._wanted.below
        return below is not None and self._state.stopping.get("low", math.inf) < below

    def take(self, measured: dict[str, float], update: Update) -> bool:
        """Take in a step and what was measured after it; return whether the training stops. Every rank calls this."""
        counts, wanted = self._state.stopping, self._wanted
        if self.reason:
            counts["reason"] = self.reason
        if wanted is not None and wanted.every == "step":
            with waiting(ON_GPU):
                ((total, weight),) = Totals.losses([update.sums])  # of all workers, the same on each
            measured = {"loss": total / weight} if weight else {}
        if wanted is not None and wanted.column in measured:
            value = measured[wanted.column]
            if wanted.below is not None and value < wanted.below:
                counts["low"] = value
            best = counts["best"]
            gain = 0.0 if best is None else best - value if wanted.mode == "min" else value - best
            if value == value and (best is None or gain > wanted.min_delta):  # NaN never improves
                counts |= {"best": value, "times": 0}
            else:
                counts["times"] += 1
        return self.has_stopped

    def stopped(self) -> StoppedEarly:
        """Return why the training has stopped."""
        counts = self._state.stopping
        if "reason" in counts:
            return StoppedEarly(self._state.step, "", "", 0.0, None, 0, counts["reason"])
        column, mode, min_delta = counts["by"]
        if self._is_below:
            assert self._wanted is not None
            low, below = counts["low"], self._wanted.below
            return StoppedEarly(self._state.step, column, mode, min_delta, low, counts["times"], below=below)
        return StoppedEarly(self._state.step, column, mode, min_delta, counts["best"], counts["times"])

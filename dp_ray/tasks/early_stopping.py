"""End a training before its last step: since its metric has not improved for a while, or since its loop says so."""

import json

from dp_ray.engine.world import broadcast
from dp_ray.job.job import Job
from dp_ray.messages import StoppedEarly
from dp_ray.tasks.train_state import TrainState


class Stopping:
    """The step after which a training ends early, as the job's `early_stopping` says, or for a `reason` of its loop.

    What it counts is in the training's state, so a resume keeps it; counts of another metric, or of an earlier
    `early_stopping`, start at 0. All workers decide by rank 0's numbers, and so stop after the same step.
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
        """Whether the training ends here, as its loop said, or as the metric has not improved for too long."""
        counts, wanted = self._state.stopping, self._wanted
        return "reason" in counts or (wanted is not None and counts["times"] >= wanted.patience)

    def take(self, measured: dict[str, float]) -> bool:
        """Take in what was measured after a step; return whether the training stops. Every rank calls this."""
        counts, wanted = self._state.stopping, self._wanted
        if self.reason:
            counts["reason"] = self.reason
        if wanted is not None and wanted.column in measured:
            value = float(json.loads(broadcast(json.dumps(measured[wanted.column]))))
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
        return StoppedEarly(self._state.step, column, mode, min_delta, counts["best"], counts["times"])

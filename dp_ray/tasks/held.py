"""What a worker's process holds of its job while its group changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dp_ray.engine.loads.loading import seeded_dataset
from dp_ray.engine.trainer import Update
from dp_ray.job.keys import Target
from dp_ray.rundir.history import HISTORY, FinishedStep, end_of_pieces
from dp_ray.tasks.train_state import TrainState

if TYPE_CHECKING:
    from dp_ray.engine.placement import Placement
    from dp_ray.job.job import Job
    from dp_ray.storage import Storage

ROWS = 4096  # of finished steps, before the first look at which of them are on the storage


@dataclass(eq=False)
class Held:
    """What a process keeps of its job from one view to the next; `state` is a training's, None if it has none.

    `has_weights` says that the model has those that a prediction or an evaluation runs.
    `rows` are the finished steps that no piece of the history may hold yet: rank 0 may die, and another worker
    writes them. `most_rows` is their number at which to look which of them are there by now. `finished` is the
    progress of the state that it held last, whether it holds it still or not; `why` is why it does not.
    `of_objects` names the datasets that are objects of the job, or made of some. `facts` are those of the run
    (`preflight.py`).
    """

    datasets: dict[str, Any] = field(default_factory=dict)
    of_objects: set[str] = field(default_factory=set)
    placement: "Placement | None" = None
    has_weights: bool = False
    state: dict[str, Any] | None = None
    running: TrainState = field(default_factory=TrainState)
    rows: list[FinishedStep] = field(default_factory=list)
    most_rows: int = ROWS
    finished: int = -1
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def dataset(self, job: "Job", key: str) -> Any:
        """Return the dataset of `key`, built once."""
        if key not in self.datasets:
            self.datasets[key] = seeded_dataset(job, key)
            if not isinstance(job.dataset, Target) or job.dataset.holds_objects:
                self.of_objects.add(key)
        return self.datasets[key]

    def lets_go(self) -> bool:
        """Return whether the next view takes the job's objects anew, as they were sent: no model of them is held.

        They may be trained by now, or count what they did. Then no dataset of such objects is held either.
        """
        if self.placement is not None:
            return False
        for key in self.of_objects:
            del self.datasets[key]
        self.of_objects.clear()
        return True

    @property
    def progress(self) -> int:
        """The progress of the state that this process holds; -1 without one."""
        return -1 if self.state is None else self.running.progress

    def forget(self, why: str = "") -> None:
        """Hold neither state nor model: the next view reads a checkpoint, or begins with new weights."""
        self.state = self.placement = None
        self.has_weights = False
        self.running, self.why = TrainState(), why

    def begin(self, step: int) -> None:
        """Drop the rows of steps that run again, since a checkpoint was read after all."""
        self.rows[:] = [row for row in self.rows if row.number < step]

    def look(self, run: "Storage") -> None:
        """Drop the rows that pieces of the history hold by now.

        A piece with a later step may be removed again: with the worker that has finished it, the step may be lost.
        """
        end = end_of_pieces(run.child(HISTORY), self.rows[-1].number + 1 if self.rows else 0)
        self.rows[:] = [row for row in self.rows if row.number >= end]
        self.most_rows = max(ROWS, 2 * len(self.rows))

    def to_send(self) -> dict[str, Any]:
        """Return the state as `pack` takes it."""
        unfinished = self.running.unfinished
        updates = [row.update for row in self.rows] + ([] if unfinished is None else [unfinished])
        return {
            "state": self.state,
            "running": self.running.to_json(),
            "is_unfinished": unfinished is not None,
            "steps": [[number, *rest] for number, _, *rest in self.rows],
            "rates": [(update.learning_rate, update.is_sum) for update in updates],
            "sums": torch.stack([update.sums for update in updates]) if updates else None,
            "norms": torch.stack([update.gradient_norm.detach() for update in updates]) if updates else None,
        }

    def take(self, sent: dict[str, Any]) -> None:
        """Hold the state that another worker has sent."""
        rates = enumerate(sent["rates"])
        updates = [Update(sent["sums"][at], rate, sent["norms"][at], False, is_sum) for at, (rate, is_sum) in rates]
        self.state, self.running = sent["state"], TrainState(**sent["running"])
        self.running.unfinished = updates.pop() if sent["is_unfinished"] else None
        steps = zip(sent["steps"], updates, strict=True)
        self.rows = [FinishedStep(number, update, *rest) for (number, *rest), update in steps]


def most_finished(progress: Sequence[int]) -> int | None:
    """Return the first rank of those that have finished most, None if none has a state."""
    most = max(progress)
    return None if most < 0 else list(progress).index(most)

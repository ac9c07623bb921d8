"""What a worker's process holds of its job while its group changes: begin at `Held`.

Workers that survive the loss of another one form a new group, a view, and their task is called again with what each
holds: datasets, the placed model, and a training's state in memory. `levelled` has all go on from one state: that of
a worker which has finished most. Nothing is read from a checkpoint then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dp_ray.engine.loading import seeded_dataset
from dp_ray.engine.trainer import Update
from dp_ray.engine.update import OptimizerStep
from dp_ray.engine.votes import StopRequested
from dp_ray.engine.world import broadcast, everyone, gathered, has_peers, own_rank
from dp_ray.errors import ModelError, WorkerError
from dp_ray.job.plan import split_of, with_schedule
from dp_ray.rundir.checkpoint import CHECKPOINTS, pack, steps_of, unpack
from dp_ray.rundir.history import HISTORY, end_of_pieces
from dp_ray.system.threads import waiting
from dp_ray.tasks.checkpoints import Training, TrainState
from dp_ray.telemetry.times import FinishedStep

if TYPE_CHECKING:
    from dp_ray.engine.placement import Placement
    from dp_ray.job.job import Job
    from dp_ray.storage import Storage
    from dp_ray.tasks.setup import Context

ROWS = 4096  # of finished steps, before the first look at which of them are on the storage


@dataclass(eq=False)
class Held:
    """What a process keeps of its job from one view to the next; `state` is a training's, None if it has none.

    `rows` are the finished steps that no piece of the history may hold yet: rank 0 may die, and another worker
    writes them. `most_rows` is their number at which to look which of them are there by now.
    """

    datasets: dict[str, Any] = field(default_factory=dict)
    placement: "Placement | None" = None
    state: dict[str, Any] | None = None
    running: TrainState = field(default_factory=TrainState)
    rows: list[FinishedStep] = field(default_factory=list)
    most_rows: int = ROWS

    def dataset(self, job: "Job", key: str) -> Any:
        """Return the dataset of `key`, built once."""
        if key not in self.datasets:
            self.datasets[key] = seeded_dataset(job, key)
        return self.datasets[key]

    @property
    def progress(self) -> int:
        """How much this process has finished: two for each step, and its second one with all that follows the step.

        -1 if it has no state.
        """
        return -1 if self.state is None else 2 * self.running.step - (self.running.unfinished is not None)

    def keep(self, training: Training) -> None:
        """Hold the state of a training whose group ends; what a step in flight has changed is undone.

        If a step cannot be undone, neither state nor model is held.
        """
        placement, running = self.placement, training.state
        self.forget()
        trainer = training.trainer
        assert isinstance(trainer.optimizer_step, OptimizerStep)
        if running.is_torn:
            return
        if (unfinished := running.unfinished) is not None:
            step, update, measured, ended, data_wait = unfinished
            running.unfinished = step, update._replace(stops=False), measured, ended, data_wait
        with suppress(ModelError):
            trainer.state.drop()
            trainer.optimizer_step.drop_gradients()
            self.state = trainer.state_dict()
            self.placement, self.running = placement, running

    def forget(self) -> None:
        """Hold neither state nor model: the next view reads a checkpoint, or begins with new weights."""
        self.state = self.placement = None
        self.running = TrainState()

    def begin(self, step: int) -> None:
        """Drop the rows of steps that run again, since a checkpoint was read after all."""
        self.rows[:] = [row for row in self.rows if row[0] < step]

    def look(self, run: "Storage") -> None:
        """Drop the rows that pieces of the history hold by now."""
        end = end_of_pieces(run.child(HISTORY))
        self.rows[:] = [row for row in self.rows if row[0] >= end]
        self.most_rows = max(ROWS, 2 * len(self.rows))

    def to_send(self) -> dict[str, Any]:
        """Return the state as `pack` takes it."""
        steps = [*self.rows, *([] if self.running.unfinished is None else [self.running.unfinished])]
        updates = [update for _, update, *_ in steps]
        return {
            "state": self.state,
            "running": self.running.to_json(),
            "is_unfinished": self.running.unfinished is not None,
            "steps": [[step, update.learning_rate, *rest] for step, update, *rest in steps],
            "sums": torch.stack([update.sums for update in updates]) if updates else None,
            "norms": torch.stack([update.gradient_norm.detach() for update in updates]) if updates else None,
        }

    def take(self, sent: dict[str, Any]) -> None:
        """Hold the state that another worker has sent."""
        steps: list[FinishedStep] = [
            (step, Update(sent["sums"][at], rate, sent["norms"][at], False), *rest)
            for at, (step, rate, *rest) in enumerate(sent["steps"])
        ]
        self.state, self.running = sent["state"], TrainState(**sent["running"])
        self.running.unfinished = steps.pop() if sent["is_unfinished"] else None
        self.rows = steps


@contextmanager
def holding(training: Training) -> Iterator[None]:
    """Hold the training's state where the block ends since its group does."""
    try:
        yield
    except (StopRequested, RuntimeError, WorkerError):
        if training.context.held is not None:
            training.context.held.keep(training)
        raise


def prepare(context: "Context") -> None:
    """Hold what a worker needs that is to join others, while they go on without it: datasets and model."""
    job = context.job
    dataset = context.dataset(job, job.dataset_key)
    if job.task == "train":
        if job.eval is not None:
            context.dataset(job.over_eval(), "eval.dataset")
        job = with_schedule(job, split_of(job, len(dataset)))
    replace(context, job=job).place()


def newest(progress: Sequence[int]) -> int | None:
    """Return the first rank of those that have finished most, None if none has a state."""
    most = max(progress)
    return None if most < 0 else list(progress).index(most)


def levelled(training: Training) -> Training | None:
    """Return the training at the state of the worker that has finished most; None if none has a state.

    Every rank calls this, at the begin of a view. If the best weights so far are in no checkpoint, since the worker
    that was to write them is gone, all forget what they hold, and raise WorkerError: in another view an earlier
    checkpoint leads to those weights again.
    """
    held = training.context.held
    if held is None:
        return None
    told = gathered(held.progress)
    source = newest(told)
    if source is None:
        return None
    if min(told) < told[source]:
        sent = shared(held.to_send() if own_rank() == source else None, source)
        if held.progress < told[source]:
            held.take(sent)
    best = held.running.best_step
    is_there = best is None or best in steps_of(training.context.run.child(CHECKPOINTS))
    if not broadcast("there" if is_there else ""):
        held.forget()
        raise WorkerError("the best weights so far were to be kept by a worker that is lost")
    assert held.state is not None
    training.trainer.load_state_dict(held.state)
    held.state = None  # the trainer has it now
    return replace(training, state=held.running)


def shared(value: Any, source: int) -> Any:
    """Return the value of the rank `source` on every rank; every rank calls this. It is as `pack` takes it."""
    if not has_peers():
        return value
    group, is_source = everyone(), own_rank() == source
    plain, tensors = pack(value) if is_source else (None, {})
    with waiting(f"the state of rank {source}"):
        told = [(plain, [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])]
        dist.broadcast_object_list(told, src=source, group=group)
        plain, listed = told[0]
        for name, shape, dtype in listed:
            tensors[name] = tensors[name].detach().contiguous() if is_source else torch.empty(shape, dtype=dtype)
            if tensors[name].numel():
                dist.broadcast(tensors[name].view(-1).view(torch.uint8), src=source, group=group)
    return value if is_source else unpack(plain, tensors)

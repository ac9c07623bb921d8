"""The state of a training on one worker, and its step: the whole batch's gradient, then the update."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.job import Job
from dp_ray.plan.seeds import derive_seed
from dp_ray.plan.split import Shard, Split
from dp_ray.replica.batch_gradient import BatchGradient
from dp_ray.replica.buffers import make_room
from dp_ray.replica.flops import Flops
from dp_ray.replica.loss_watch import LossWatch
from dp_ray.replica.model import synchronise
from dp_ray.replica.optimizer import Schedule, runs_users_code
from dp_ray.replica.optimizer_step import OptimizerStep, load_part
from dp_ray.replica.out_of_memory import ShardSize, advised, gpu_room
from dp_ray.replica.quarantine import Real, as_planned
from dp_ray.replica.read_requests import Indices
from dp_ray.replica.rng import seed_all
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.sharded import Sharded
from dp_ray.replica.sharded_average import average_of
from dp_ray.replica.sharded_state import whole_tensors
from dp_ray.replica.sparse import make_gradients_dense
from dp_ray.replica.stats import MISSING, VOTES, Stats
from dp_ray.replica.step import Metrics, OnShard, Step
from dp_ray.replica.step_clock import Part, SilentClock, StepClock
from dp_ray.replica.stop_vote import StopVote
from dp_ray.replica.world import World, is_gpu

WRITTEN = "written"  # what forwards write and the model's own state lacks, in a checkpoint


class Update(NamedTuple):
    """The results of a step on the whole batch; tensors are still on the device.

    `sums` are float64 [2 * names + 2]: sum and weight of the loss and of each metric; then the votes to stop, and the
    number of samples that were set aside. `learning_rate` is that of the first parameter group. `gradient_norm` is
    the norm of the whole batch's gradient before clipping. `stops` tells the worker to stop because one of the
    workers asked for it; all workers get it after the same step.
    """

    sums: torch.Tensor
    learning_rate: float
    gradient_norm: torch.Tensor
    stops: bool

    @property
    def totals(self) -> torch.Tensor:
        """The sums and weights of the loss and each metric, float64 [2 * names]."""
        return self.sums[:VOTES]


class Trainer:
    """The training state on one worker, the same on all workers, and the step that changes it.

    `while_waiting` is called once a step, on CPUs, while the gradients are summed over the workers.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        called: nn.Module,
        step: Step,
        measures: Metrics,
        world: World,
        clock: StepClock | None = None,
        sharded: Sharded | None = None,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> None:
        self.model = model
        self.sharded = sharded
        self._clock = clock or SilentClock()
        self.real: Real = as_planned
        self._job = job
        self._world = world
        if job.bitwise:
            make_gradients_dense(model)  # the fixed tree adds only dense ones
        self.called = called
        self.optimizer_step = OptimizerStep(job, model, world.device, sharded)
        self.average = average_of(job, model, sharded, self.optimizer_step.aligned)
        if not model.training:  # a loaded model may be in eval mode; if only parts are, the user wants them so
            model.train()
        loss = ShardLoss(called, step, measures, job, world.device)
        self._gradient = BatchGradient(
            job, model, loss, self.optimizer_step, world, self._clock, sharded, while_waiting
        )
        self.measure_names = list(measures.functions)
        self._stop_vote = StopVote()
        self._seeds_update = bool(job.hooks.given) or any(map(runs_users_code, (job.optimizer, job.scheduler)))
        self.watch: LossWatch | None = None

    @property
    def flops(self) -> Flops | None:
        """The operations of a row, if the job asks for them, this is rank 0 and it has run a step."""
        return self._gradient.flops

    @property
    def schedule(self) -> Schedule:
        """The job's learning-rate schedule."""
        return self.optimizer_step.schedule

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, of the first parameter group."""
        return self.optimizer_step.learning_rate

    def state_dict(self) -> dict[str, Any]:
        """The state that later steps depend on; its tensors are the live ones, not copies."""
        state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        written = self._gradient.buffers.state()
        return {**state, WRITTEN: written} if written else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raises ModelError if it belongs to another model or optimizer."""
        written, buffers = whole_tensors(state.get(WRITTEN, {})), self._gradient.buffers
        buffers.make(written)
        make_room(self.model, state["model"])
        for name, part in self._parts().items():
            if name == "ema" and name not in state:
                continue  # another run's checkpoint: the average starts from its weights
            if self.sharded is None:
                load_part(name, part, state.get(name))
            elif name == "model":
                self.sharded.load_weights(state[name], "the checkpoint")
            elif name == "ema":
                part.load_state_dict(state[name])
            else:
                load_part(name, part, self.sharded.rows_of(part, state.get(name)))
        buffers.load(written)

    def _parts(self) -> dict[str, Any]:
        average = {} if self.average is None else {"ema": self.average}
        return {"model": self.model, **self.optimizer_step.parts, **average}

    def synchronise(self) -> None:
        """Give every rank rank 0's weights; every rank calls this, once they are loaded."""
        synchronise(self.model)
        if self.average is not None:
            self.average.begin()

    def close(self) -> None:
        """Stop the threads of the reduction, and let the model be freed."""
        self._gradient.close()

    def step(
        self,
        split: Split,
        step: int,
        shards: Sequence[Shard],
        batches: Iterator[tuple[Indices, Any]],
        on_shard: OnShard,
        wants_stop: bool = False,
    ) -> Update:
        """Train on one global batch, of which this worker runs `shards`, maybe none; every rank calls this.

        `batches` gives the next shards' sample indices and batches. `on_shard` gets each shard with its batch and
        output. `wants_stop` asks all workers to stop. Raises ModelError, naming step and shard, for user errors.
        """
        stats = Stats(split.shards, 1 + len(self.measure_names), self._world)
        if wants_stop:
            stats.vote()
        with advised(self._job, f"step {step}", _size_of(split, shards), lambda: self._that_fit(split)):
            self._gradient.compute(split, step, shards, batches, on_shard, stats, self.real)
        self._clock.enter(Part.UPDATE)
        with advised(self._job, f"step {step}", None):
            update = self._update(split, step, stats)
        self._clock.enter(Part.OTHER)
        return update

    def _that_fit(self, split: Split) -> int | None:
        is_whole = self.sharded is None
        return _shards_that_fit(self._job, self._world, split, self._gradient.running) if is_whole else None

    def sums_of(
        self, split: Split, step: int, shards: Sequence[Shard], batches: Iterator[tuple[Indices, Any]]
    ) -> list[float]:
        """The sum and weight of a step's loss, and then of each metric: the step without its update."""
        stats = Stats(split.shards, 1 + len(self.measure_names), self._world)
        with advised(self._job, f"step {step}", _size_of(split, shards)):
            self._gradient.compute(split, step, shards, batches, lambda *_: None, stats, self.real)
        self.optimizer_step.skip()
        sums: list[float] = stats.numbers.sum(0).tolist()
        return sums[:VOTES]

    def _update(self, split: Split, step: int, stats: Stats) -> Update:
        """Update the parameters from their gradients."""
        if self._seeds_update:  # what runs until the next read may draw: the same numbers on all workers
            seed_all(derive_seed(self._job.seed, "update", step // split.steps, step), self._world.device)
        sums, rate = stats.numbers.sum(0), self.optimizer_step.learning_rate
        known: Any = sums if is_gpu(self._world.device) else sums.tolist()  # without waiting for a GPU
        if self.watch is not None:
            self.watch.take(step, known[0])
        start, stop = split.batch(step)
        if self._job.may_lose_rows and _has_no_rows(self._job, self.real(split.whole(step)), known[MISSING]):
            norm = self.optimizer_step.skip()
        else:
            norm = self.optimizer_step.apply(known[1], stop - start, step)
        if self.average is not None and not self.optimizer_step.has_skipped:
            self.average.update()
        return Update(sums, rate, norm, self._stop_vote.stops(known[VOTES]))


def _has_no_rows(job: Job, whole: Shard, missing: torch.Tensor | float) -> bool:
    """Whether a batch has lost all of its rows; a step waits for the device only if that many may be."""
    is_possible = job.on_error is not None and whole.rows <= job.on_error.quarantine
    return whole.rows == 0 or (is_possible and int(missing) == whole.stop - whole.start)


def _size_of(split: Split, shards: Sequence[Shard]) -> ShardSize:
    return ShardSize(shards[0].rows if shards else 0, split.largest_batch, split.shards)


def _shards_that_fit(job: Job, world: World, split: Split, running: tuple[Any, int] | None) -> int | None:
    """After an out-of-memory error: an estimate of the fewest shards that fit; None if there is none."""
    room = gpu_room(world)
    if running is None or room is None:
        return None
    from dp_ray.replica.memory_of_job import shards_that_fit  # its imports take a second

    return shards_that_fit(job, split, world.world_size, *running, room)

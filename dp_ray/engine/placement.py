"""Where a job's model is: whole on each worker (`Placement`), or a part of it on each (`ShardedPlacement`, `fsdp`).

Begin at `place`, which builds the model. A placement makes what depends on where the model is: the sum of gradients,
the optimizer's step, the average of the weights, and the forwards of an evaluation or a prediction.

Workers that hold parts of a model cannot gather its parameters without each other. So they run it in rounds: in each,
all run one shard. A worker with fewer shards with rows than another runs a dummy batch in the other rounds: its own
first batch, or another worker's. Its loss counts nothing.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dp_ray.engine.average import Average
from dp_ray.engine.devices import input_device
from dp_ray.engine.forward.carried import Carried
from dp_ray.engine.forward.model import BatchNormOfShard, build_model, compiled
from dp_ray.engine.forward.recompute import recompute_blocks
from dp_ray.engine.forward.replica import Forwards
from dp_ray.engine.forward.state import State
from dp_ray.engine.forward.weights import load_weights, make_room, unwrapped
from dp_ray.engine.sharded.reduce import CollectiveForwards, ShardedReduction, TreeShardedReduction
from dp_ray.engine.sharded.state import (
    BlockParameters,
    Sharded,
    ShardedParts,
    StateOfParts,
    rows_like,
    whole_tensors,
)
from dp_ray.engine.sums.reduce import DdpReduction, Reduction, Trained
from dp_ray.engine.sums.tree_sum import ShardSums
from dp_ray.engine.update import OptimizerStep, Updates, declared_step, load_part
from dp_ray.engine.world import World, everyone
from dp_ray.errors import JobError
from dp_ray.job.job import Job


@dataclass(frozen=True)
class Placement:
    """A model that each worker holds whole; `called` is the module to call. The world's device is that of inputs.

    `say` takes lines for the user. With `outlives_group` it goes on among other workers if its own are lost, in the
    midst of a step too.
    """

    job: Job
    model: nn.Module
    called: nn.Module
    world: World
    say: Callable[[str], None] = field(default=lambda text: None, kw_only=True)
    outlives_group: bool = field(default=False, kw_only=True)

    is_sharded = False  # whether each worker holds a part

    @property
    def sharers(self) -> World | None:
        """The workers that share the reading and writing of the state; None: a worker takes all of it."""
        return self.world if self.is_sharded else None

    @property
    def why_not_alone(self) -> str:
        """Why a worker cannot run a shard by itself; "" if it can."""
        if self.job.sync_batchnorm and self.world.world_size > 1:
            return "with sync_batchnorm no worker can run a shard by itself"
        return "with strategy: fsdp no worker can run a shard by itself" if self.is_sharded else ""

    def parts(self) -> BlockParameters | None:
        """Return the parameters of which each worker holds a part, for a training's state; None if there are none."""
        return None

    def forwards(self) -> Forwards:
        """Return the forwards of an evaluation, a prediction or a training's passes."""
        return Forwards()

    def watch_attributes(self, state: State) -> None:
        """Have rank 0 look in its first forwards for attributes in which one leaves something for the next."""
        # A single shard goes from batch to batch, as in plain torch. A compiled module has no attributes of its own.
        if self.world.rank == 0 and self.job.num_shards > 1 and not self.job.compile:
            state.carried = Carried({"": self.model, **state.beside}, self.say)

    def sums(self, parameters: list[nn.Parameter]) -> ShardSums | None:
        """Return the sums of a worker's shards by the fixed tree, if the job is bitwise."""
        return ShardSums(parameters, self.job.num_shards) if self.job.bitwise else None

    def reduction(self, trained: Trained, finds_unused: bool | str, num_stats: int) -> Reduction:
        """Return how a pass's gradients are summed over the workers, beside `num_stats` numbers."""
        if self.world.world_size == 1:
            return Reduction(trained)
        return DdpReduction(trained, self.world, finds_unused, num_stats, self.say)

    def optimizer_step(self) -> OptimizerStep:
        """Return the step of the job's optimizer; raises JobError for one that cannot train this model."""
        return declared_step(self.job, self.model, self.world.device)

    def average(self, optimizer_step: OptimizerStep | Updates) -> Average | None:
        """Return the average of the weights, if the job keeps one."""
        return None if self.job.ema is None else Average(self.job, self.model, self.world)

    def load_weights(self, weights: Mapping[str, Any], where: str, is_strict: bool = True, advice: str = "") -> str:
        """Load weights into the model; return in words the prefix that was stripped from their names.

        If not `is_strict`, the text also lists what was loaded and what not. Raises ModelError, which names missing,
        unexpected and mis-sized tensors and ends with the advice if that helps, or if nothing fits.
        """
        weights, stripped = unwrapped(self.model.state_dict().keys(), weights)
        if stripped:
            where += f", without {stripped!r} before all names,"
        loaded = self._load(weights, where, is_strict, advice)
        return f"; without {stripped!r} before all names{loaded}" if stripped else loaded

    def _load(self, weights: Mapping[str, Any], where: str, is_strict: bool, advice: str) -> str:
        make_room(self.model, weights)
        return load_weights(self.model, weights, where, is_strict, advice)

    def load_state(self, name: str, part: Any, state: Any) -> None:
        """Load a part of a training's state; raises ModelError if it belongs to another model or optimizer."""
        load_part(name, part, state)


@dataclass(frozen=True)
class ShardedPlacement(Placement):
    """A model of which each worker holds a part."""

    sharded: Sharded

    is_sharded = True

    def parts(self) -> BlockParameters | None:
        """Return the parameters of which each worker holds a part, for a training's state."""
        return BlockParameters(self.sharded, self.job.compile)

    def forwards(self) -> Forwards:
        """Return the forwards of an evaluation, a prediction or a training's passes, each with a dummy batch."""
        return CollectiveForwards(self.sharded, self.world)

    def sums(self, parameters: list[nn.Parameter]) -> ShardSums | None:
        """Return the sums by the fixed tree of what each worker holds whole, if the job is bitwise."""
        return super().sums(list(self.sharded.replicated.values()))

    def reduction(self, trained: Trained, finds_unused: bool | str, num_stats: int) -> Reduction:
        """Return how a pass's gradients are summed over the workers, in rounds."""
        if trained.sums is None:
            return ShardedReduction(trained, self.sharded, finds_unused)
        return TreeShardedReduction(trained, self.sharded, finds_unused, self.job.may_lose_rows)

    def optimizer_step(self) -> OptimizerStep:
        """Return the step of the job's optimizer; raises JobError for one that cannot train this model."""
        return declared_step(self.job, self.model, self.world.device, ShardedParts(self.sharded, self.job.bitwise))

    def average(self, optimizer_step: OptimizerStep | Updates) -> Average | None:
        """Return the average of the weights, if the job keeps one: of this worker's part of them."""
        assert isinstance(optimizer_step, OptimizerStep) and optimizer_step.parts is not None
        parts = optimizer_step.parts.parts
        return None if self.job.ema is None else Average(self.job, self.model, self.world, parts)

    def _load(self, weights: Mapping[str, Any], where: str, is_strict: bool, advice: str) -> str:
        """Load this worker's rows of the weights; returns and raises what a whole model's does."""
        own = self.model.state_dict()
        rows = {name: rows_like(own.get(name), value, self.world) for name, value in weights.items()}
        return super()._load(rows, where, is_strict, advice)

    def load_state(self, name: str, part: Any, state: Any) -> None:
        """Load what this worker holds of a part of a training's state, which is stored."""
        if name == "model":
            self.load_weights(state, "the checkpoint")
            return
        takes_rows = isinstance(part, StateOfParts | Average)
        load_part(name, part, state if takes_rows else whole_tensors(state))


def place(job: Job, world: World, say: Callable[[str], None]) -> Placement:
    """Build the job's model, sharded over the workers if the job says so. Every rank calls this.

    A single worker holds it whole, unless `fsdp.mixed_precision` changes the numbers. `say` gets lines for the user.
    BatchNorm layers become SyncBatchNorm if the job asks for it and has several workers. Raises JobError on CPUs,
    where SyncBatchNorm does not run, and if the code of a bitwise job's model has cuDNN choose kernels by their
    speed.
    """
    say = functools.cache(say)  # a training and its evaluations say the same
    if shards_over(job, world):
        from dp_ray.engine.sharded.build import build_sharded  # here: its imports take seconds

        if job.flops:
            say("flops: not counted: with strategy: fsdp no worker can run a shard alone")
        sharded = build_sharded(job, world, say)
        world = replace(world, device=input_device(job, sharded.model, world.devices))
        called = compiled(sharded.model, job)
        placed: Placement = ShardedPlacement(job, sharded.model, called, world, sharded, say=say)
    else:
        placed = place_whole(job, world, say)
    if job.bitwise and torch.backends.cudnn.benchmark:
        raise JobError(
            "bitwise: the model's code sets torch.backends.cudnn.benchmark, with which cuDNN takes the kernel "
            "that is fastest at the time; leave that out, or set bitwise: false"
        )
    return placed


OF_SHARDS = (
    "the model's SyncBatchNorm layers take their statistics from a shard, as BatchNorm does; to take them over the "
    "workers set sync_batchnorm: true"
)


def place_whole(job: Job, world: World, say: Callable[[str], None] = lambda text: None) -> Placement:
    """Build the job's model whole on this worker; raises what `place` raises."""
    model = recompute_blocks(job, build_model(job, world.devices), world.devices)
    if job.sync_batchnorm and world.world_size > 1:
        if world.device.type == "cpu":
            raise JobError("sync_batchnorm: torch's SyncBatchNorm runs on GPUs only")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = BatchNormOfWorkers
    if world.world_size > 1 and any(isinstance(module, BatchNormOfShard) for module in model.modules()):
        say(OF_SHARDS)
    world = replace(world, device=input_device(job, model, world.devices))
    return Placement(job, model, compiled(model, job), world, say=say)


class BatchNormOfWorkers(nn.SyncBatchNorm):
    """A SyncBatchNorm over dp_ray's workers. It looks their group up, since a group cannot be copied."""

    process_group = property(lambda self: everyone(), lambda self, _: None)


def shards_over(job: Job, world: World) -> bool:
    """Return whether torch's FSDP runs the model: on several workers, or if it computes in other dtypes."""
    return job.is_sharded and (world.world_size > 1 or job.fsdp.mixed_precision is not None)

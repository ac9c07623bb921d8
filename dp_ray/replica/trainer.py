"""One training step: forward and backward of this worker's shards, the whole batch's gradient, the update."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.job import Job
from dp_ray.plan.seeds import derive_seed
from dp_ray.plan.split import Shard, Split, num_filled
from dp_ray.replica.buffers import Buffers
from dp_ray.replica.data import Indices
from dp_ray.replica.optimizer import Schedule
from dp_ray.replica.optimizer_step import OptimizerStep, load_part
from dp_ray.replica.out_of_memory import advised
from dp_ray.replica.reducer import ShardSums
from dp_ray.replica.reduction import DdpReduction, Reduction, check_one_type
from dp_ray.replica.rng import ForwardSeeds, seed_all
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.sparse import make_gradients_dense, sparse_parameters
from dp_ray.replica.step import Metrics, Step, StepOutput
from dp_ray.replica.stop_vote import StopVote
from dp_ray.replica.user_code import at, raising
from dp_ray.replica.world import World
from dp_ray.system.waiting import waiting

OnShard = Callable[[Shard, Any, StepOutput], None]


class Update(NamedTuple):
    """The results of a step on the whole batch; tensors are still on the device.

    `totals` are the sums and weights of the loss and each metric, float64 [2 * names]. `learning_rate` is that of
    the first parameter group. `gradient_norm` is the norm of the whole batch's gradient before clipping. `stops`
    tells the worker to stop because one of the workers asked for it; all workers get it after the same step.
    """

    totals: torch.Tensor
    learning_rate: float
    gradient_norm: torch.Tensor
    stops: bool


class Trainer:
    """The training state on one worker, the same on all workers, and the step that changes it."""

    def __init__(
        self, job: Job, model: nn.Module, called: nn.Module, step: Step, measures: Metrics, world: World
    ) -> None:
        self.model = model
        self._job = job
        self._world = world
        if job.bitwise:
            make_gradients_dense(model)  # the fixed tree adds only dense ones
        self._optimizer_step = OptimizerStep(job, model, world.device)
        if not model.training:  # a loaded model may be in eval mode; if only parts are, the user wants them so
            model.train()
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._sparse = sparse_parameters(model)
        self._buffers = Buffers(model)
        self._seeds = ForwardSeeds(job.seed, model, world.device)
        self._loss = ShardLoss(called, step, measures, job, world.device)
        self.measure_names = list(measures.functions)
        self._stop_vote = StopVote(world.device)
        self._reduction: Reduction | None = None

    @property
    def schedule(self) -> Schedule:
        """The job's learning-rate schedule."""
        return self._optimizer_step.schedule

    @property
    def parameter_names(self) -> list[str]:
        """The names of the trainable parameters, in the order of the optimizer's groups."""
        names = {id(one): name for name, one in self.model.named_parameters()}
        return [names[id(one)] for group in self._optimizer_step.optimizer.param_groups for one in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """The state that later steps depend on; its tensors are the live ones, not copies."""
        return {name: None if part is None else part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raises ModelError if it belongs to another model or optimizer."""
        for name, part in self._parts().items():
            load_part(name, part, state.get(name))

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, **self._optimizer_step.parts}

    def close(self) -> None:
        if self._reduction is not None:
            self._reduction.close()

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
        with advised(self._job, f"step {step}", shards[0].rows if shards else 0):
            stats = self._gradients(split, step, shards, batches, on_shard, wants_stop)
        with advised(self._job, f"step {step}", None):
            return self._update(split, step, stats)

    def _gradients(
        self,
        split: Split,
        step: int,
        shards: Sequence[Shard],
        batches: Iterator[tuple[Indices, Any]],
        on_shard: OnShard,
        wants_stop: bool,
    ) -> torch.Tensor:
        """Set the parameters' gradients to the whole batch's; returns the sums and weights of all shards."""
        start, stop = split.batch(step)
        rows = stop - start
        pending = [next(batches)[1] for _ in shards[:1]]
        if self._reduction is None:
            self._reduction = self._reduced(shards[:1], pending)
        self._reduction.begin([shard.shard for shard in shards], num_filled(rows, split.shards))
        self._buffers.begin(len(shards))
        stats = self._stats(split.shards, wants_stop)
        for number, shard in enumerate(shards):
            batch = pending.pop() if pending else next(batches)[1]
            if number:
                self._buffers.restore()
            self._shard(shard, batch, rows, stats, number == len(shards) - 1, on_shard)
        if not shards:
            self._last_backward(self._reduction, self._reduction.replica(None, 0), stats, f"step {step}")
        self._reduction.check(step)
        self._buffers.finish()
        self._reduction.finish()
        return stats

    def _update(self, split: Split, step: int, stats: torch.Tensor) -> Update:
        """Update the parameters from their gradients."""
        start, stop = split.batch(step)
        # An optimizer may draw random numbers: they must be the same on all workers.
        seed_all(derive_seed(self._job.seed, "update", step // split.steps, step), self._world.device)
        totals, rate = stats[:-1].sum(0), self._optimizer_step.learning_rate
        norm = self._optimizer_step.apply(totals[1], stop - start, step)
        return Update(totals, rate, norm, self._stop_vote.stops(stats[-1, 0]))

    def _stats(self, shards: int, wants_stop: bool) -> torch.Tensor:
        """A row of sums and weights for each shard, still zero; the last row counts the workers that ask to stop."""
        columns = 2 + 2 * len(self.measure_names)
        stats = torch.zeros(shards + 1, columns, dtype=torch.float64, device=self._world.device)
        if wants_stop:
            stats[-1] = 1.0
        return stats

    def _reduced(self, shards: Sequence[Shard], batches: Sequence[Any]) -> Reduction:
        """The reduction for the job; with `find_unused_parameters: auto`, the first shards show if DDP must look."""
        parameters = list(self._parameters.values())
        sums = ShardSums(parameters, self._job.num_shards) if self._job.bitwise else None
        if self._world.world_size == 1:
            return Reduction(self._loss, sums, self._sparse)
        check_one_type(parameters)
        unused = self._job.find_unused_parameters
        if unused == "auto":
            unused = self._finds_unused(shards, batches)
        return DdpReduction(self._loss, sums, self._world, self._parameters, self._sparse, bool(unused))

    def _finds_unused(self, shards: Sequence[Shard], batches: Sequence[Any]) -> bool:
        """Whether any worker's first shard leaves a parameter without a gradient; this trial changes no state."""
        found = torch.zeros(1, device=self._world.device)
        self._buffers.begin(2)
        for shard, batch in zip(shards, batches, strict=True):
            _backward(self._forward(self._loss, shard, batch), _place(shard))
            sparse = {id(one) for one in self._sparse}
            found += any(one.grad is None for one in self._parameters.values() if id(one) not in sparse)
        self._buffers.restore()
        self._optimizer_step.optimizer.zero_grad()
        with waiting("the other workers' first shards"):
            dist.all_reduce(found, dist.ReduceOp.MAX)
            return bool(found.item())

    def _shard(
        self, shard: Shard, batch: Any, rows: int, stats: torch.Tensor, is_last: bool, on_shard: OnShard
    ) -> None:
        """Forward and backward of a shard; the reduction begins in the last one's backward."""
        reduction = self._reduction
        assert reduction is not None
        with reduction.shard(is_last):
            loss = self._forward(reduction.replica, shard, batch)
            assert self._loss.row is not None
            stats[shard.shard] = self._loss.row
            on_shard(shard, batch, self._loss.step_output)
            if shard.shard == 0:
                self._buffers.keep()
            if is_last:
                reduction.before_last()
                self._last_backward(reduction, loss / rows, stats, _place(shard))
            else:
                _backward(self._optimizer_step.scaled(loss / rows), _place(shard))
        reduction.after(shard.shard, is_last)

    def _forward(self, replica: nn.Module, shard: Shard, batch: Any) -> torch.Tensor:
        self._seeds.begin(shard)
        with at(_place(shard)):
            loss: torch.Tensor = replica(batch, shard.rows)
        return loss

    def _last_backward(self, reduction: Reduction, loss: torch.Tensor, stats: torch.Tensor, where: str) -> None:
        """The step's last backward; `stats` and buffers are sent at the same time."""
        work = reduction.exchange(stats)
        self._buffers.share()
        with reduction.backward():
            _backward(self._optimizer_step.scaled(loss), where)
            if work is not None:
                work.wait()


def _place(shard: Shard) -> str:
    return f"step {shard.step}, shard {shard.shard}"


def _backward(loss: torch.Tensor, where: str) -> None:
    with raising(f"{where}: backward"):
        loss.backward()  # type: ignore[no-untyped-call]

"""The gradient of a whole batch: forward and backward of this worker's shards, reduced over all workers."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.job import Job
from dp_ray.plan.split import Shard, Split, num_filled
from dp_ray.replica.buffers import Buffers
from dp_ray.replica.flops import Flops, counted_flops
from dp_ray.replica.freed_memory import remove_hooks
from dp_ray.replica.optimizer_step import OptimizerStep
from dp_ray.replica.out_of_memory import shapes_told
from dp_ray.replica.quarantine import Real, as_planned
from dp_ray.replica.read_requests import Indices
from dp_ray.replica.reducer import ShardSums
from dp_ray.replica.reduction import DdpReduction, Reduction, Work, check_one_type, for_trial
from dp_ray.replica.rng import ForwardSeeds
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.sharded import Sharded
from dp_ray.replica.sharded_reduction import ShardedReduction
from dp_ray.replica.sharded_tree import TreeShardedReduction
from dp_ray.replica.sparse import sparse_parameters
from dp_ray.replica.stand_in import StandIns
from dp_ray.replica.stats import Stats
from dp_ray.replica.step import OnShard
from dp_ray.replica.step_clock import Part, StepClock
from dp_ray.replica.user_code import at, loaded, place, raising
from dp_ray.replica.world import World
from dp_ray.system.waiting import waiting
from dp_ray.tensors.nested import copied


class BatchGradient:
    """Computes the gradient of the summed loss of a batch, divided by the batch's rows, on every worker.

    `optimizer_step` scales the loss, if the job has a loss scaler. The reduction is built in the first step.
    `while_waiting` is called once a step, on CPUs, while the gradients are summed over the workers.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        loss: ShardLoss,
        optimizer_step: OptimizerStep,
        world: World,
        clock: StepClock,
        sharded: Sharded | None = None,
        while_waiting: Callable[[], object] = lambda: None,
    ) -> None:
        self._job = job
        self._while_waiting = while_waiting
        self._clock = clock
        self._world = world
        self._optimizer_step = optimizer_step
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._sparse = sparse_parameters(model)
        self.buffers = Buffers(model, job.compile, () if sharded is None else sharded.blocks)
        self._seeds = ForwardSeeds(job.seed, model, world.device)
        self._loss = loss
        self._reduction: Reduction | None = None
        self._step = 0
        self._sharded = sharded
        self._stand_ins = StandIns(world)
        self.flops: Flops | None = None
        self.running: tuple[Any, int] | None = None  # the shard that runs, or that an error has ended: batch, rows

    def close(self) -> None:
        """Stop the reduction's threads, and let the model be freed."""
        remove_hooks(self._parameters.values())
        if self._reduction is not None:
            self._reduction.close()

    def compute(
        self,
        split: Split,
        step: int,
        shards: Sequence[Shard],
        batches: Iterator[tuple[Indices, Any]],
        on_shard: OnShard,
        stats: Stats,
        real: Real = as_planned,
    ) -> None:
        """Set the gradients of step `step`, of which this worker runs `shards`; every rank calls this.

        Sums `stats` over the workers; by then each shard with rows is in them, and the number of samples set aside.
        `real` gives a shard without those.
        """
        self._step = step
        start, stop = split.batch(step)
        # Losses are divided by these rows first. The true divisor is the weight of the whole batch, which is known
        # only once `stats` is summed; then `weigh_gradients` corrects it. Of most losses the weight is the rows.
        rows = stop - start
        if self._sharded is not None:
            batches = self._stand_ins.look(shards, batches, real)
        pending = [loaded(batches, place(shard))[1] for shard in shards[:1]]
        shards = [real(shard) for shard in shards]
        filled = [shard for shard in shards if shard.rows]
        if missing := sum(len(shard.missing) for shard in shards):
            stats.set_aside(missing)
        if self._reduction is None:
            if filled and filled[0] is shards[0] and self._counts_flops:
                self.flops = self._counted(shards[0], pending[0])
            self._reduction = self._build_reduction(shards[:1], pending, stats)
        self._reduction.begin([shard.shard for shard in filled], num_filled(rows, split.shards))
        stand_ins = 0 if self._sharded is None else self._stand_ins.missing(split, step, len(filled))
        self.buffers.begin(len(filled))
        if shards and shards[0].shard == 0 and not shards[0].rows:
            self.buffers.keep()  # without shard 0, the step leaves the buffers as they are
        for shard in shards:
            batch = pending.pop() if pending else loaded(batches, place(shard))[1]
            if not shard.rows:
                continue
            if shard is not filled[0]:
                self.buffers.restore()
            self._shard(shard, batch, rows, stats, shard is filled[-1] and not stand_ins, on_shard)
        self._rest(stats, f"step {step}", stand_ins, has_rows=bool(filled))
        self.buffers.finish()
        self._reduction.finish()
        self._clock.enter(Part.OTHER)

    @property
    def _counts_flops(self) -> bool:
        """Whether this worker counts operations: it runs a shard alone, which a sharded model does not allow."""
        return self._job.flops and self._world.rank == 0 and self._sharded is None

    def _rest(self, stats: Stats, where: str, stand_ins: int, has_rows: bool) -> None:
        """What this worker runs after its own shards, because the others wait for it."""
        assert self._reduction is not None
        self._stand_in(stats, where, stand_ins)
        if self._sharded is not None and self._stand_ins.found is None:
            self._without_rows(stats)
        elif not has_rows and self._world.world_size > 1 and not stand_ins:
            self._clock.enter(Part.BACKWARD)
            self._last_backward(self._reduction, self._reduction.replica(None, 0), stats, where)

    def _build_reduction(self, shards: Sequence[Shard], batches: Sequence[Any], stats: Stats) -> Reduction:
        """The reduction for the job; with `find_unused_parameters: auto`, the first shards show if DDP must look."""
        if self._sharded is not None:
            given = self._loss, self._sharded, self._job.find_unused_parameters
            if not self._job.bitwise:
                return ShardedReduction(*given)
            return TreeShardedReduction(*given, self._job.num_shards, self._job.may_lose_rows)
        parameters = list(self._parameters.values())
        sums = ShardSums(parameters, self._job.num_shards) if self._job.bitwise else None
        if self._world.world_size == 1:
            return Reduction(self._loss, sums, self._sparse)
        check_one_type(parameters)
        unused = self._job.find_unused_parameters
        if unused == "auto":
            unused = self._finds_unused(shards, batches)
        return DdpReduction(
            self._loss,
            sums,
            self._world,
            self._parameters,
            self._sparse,
            bool(unused),
            stats.numbers.numel(),
            functools.partial(self._clock.enter, Part.EXCHANGE),
        )

    def _send(self, reduction: Reduction, stats: Stats) -> Work:
        """Start to sum the stats over the workers, unless they go with the gradients, and to share the buffers."""
        work = reduction.exchange(stats.numbers)
        self.buffers.share()
        return work

    def _counted(self, shard: Shard, batch: Any) -> Flops:
        """The operations of a row of a shard, counted in a trial that changes no state."""
        self.buffers.begin(2)
        counted = functools.partial(self._try, self._loss, shard, batch)
        flops = counted_flops(counted, shard.rows, self._job, self._world.device)
        self.buffers.restore()
        self._optimizer_step.drop_gradients()
        return flops

    def _try(self, replica: nn.Module, shard: Shard, batch: Any) -> None:
        """Forward and backward of a shard on this worker alone, with a copy of the batch: a model may write it."""
        _backward(self._forward(replica, shard, copied(batch)), place(shard), batch)

    def _finds_unused(self, shards: Sequence[Shard], batches: Sequence[Any]) -> bool:
        """Whether any worker's first shard leaves a parameter without a gradient; this trial changes no state."""
        found = torch.zeros(1, device=self._world.device)
        self.buffers.begin(2)
        with for_trial(self._loss, self._sparse, self._job.compile) as replica:
            for shard, batch in zip(shards, batches, strict=True):
                if not shard.rows:
                    found += 1  # it cannot show that all parameters are used
                    continue
                self._try(replica, shard, batch)
                sparse = {id(one) for one in self._sparse}
                found += any(one.grad is None for one in self._parameters.values() if id(one) not in sparse)
        self.buffers.restore()
        self._optimizer_step.drop_gradients()
        with waiting("the other workers' first shards"):
            dist.all_reduce(found, dist.ReduceOp.MAX)
            return bool(found.item())

    def _shard(self, shard: Shard, batch: Any, rows: int, stats: Stats, is_last: bool, on_shard: OnShard) -> None:
        """Forward and backward of a shard; the reduction begins in the last one's backward."""
        reduction = self._reduction
        assert reduction is not None
        self.running = batch, shard.rows
        with reduction.shard(is_last):
            loss = self._forward(reduction.replica, shard, batch)
            found = self._loss.found
            assert found.row is not None
            stats.put(shard.shard, found.row)
            on_shard(shard, batch, found.step_output)
            if shard.shard == 0:
                self.buffers.keep()
            self._clock.enter(Part.BACKWARD)
            if is_last:
                reduction.before_last()
                self._last_backward(reduction, loss / rows, stats, place(shard), batch)
            else:
                _backward(self._optimizer_step.scaled(loss / rows), place(shard), batch)
        reduction.after(shard.shard, is_last)
        self.running = None
        if not is_last:
            self._clock.enter(Part.OTHER)

    def _stand_in(self, stats: Stats, where: str, count: int) -> None:
        """Run the last `count` rounds of a step, in which this worker has no rows."""
        for left in reversed(range(count)):
            self._round_without_rows(stats, where, is_last=left == 0)

    def _round_without_rows(self, stats: Stats, where: str, is_last: bool) -> None:
        """Forward and backward of a round in which this worker has no rows, with a loss of zero."""
        reduction = self._reduction
        assert reduction is not None and self._stand_ins.found is not None
        batch, rows = self._stand_ins.found
        self._clock.enter(Part.FORWARD)
        with reduction.shard(is_last), reduction.standing_in():
            loss = reduction.replica(copied(batch), rows) * 0.0
            if is_last:
                self._last_backward(reduction, loss, stats, where)
            else:
                _backward(self._optimizer_step.scaled(loss), where)

    def _without_rows(self, stats: Stats) -> None:
        """The end of a step whose samples were all set aside: no worker runs the model."""
        assert self._reduction is not None
        if (work := self._send(self._reduction, stats)) is not None:
            work.wait()

    def _forward(self, replica: nn.Module, shard: Shard, batch: Any) -> torch.Tensor:
        self._clock.enter(Part.FORWARD)
        self._seeds.begin(shard)
        with at(place(shard)), self.buffers.forward():
            loss: torch.Tensor = replica(batch, shard.rows)
        self._clock.enter(Part.OTHER)
        return loss

    def _last_backward(
        self, reduction: Reduction, loss: torch.Tensor, stats: Stats, where: str, batch: Any = None
    ) -> None:
        """The step's last backward; `stats` and buffers are sent with the gradients, beside them, or after it."""
        reduction.carry(stats.numbers)
        work = None if reduction.waits_later else self._send(reduction, stats)
        with reduction.backward():
            _backward(self._optimizer_step.scaled(loss), where, batch)
        reduction.check(self._step)
        if reduction.waits_later:
            work = self._send(reduction, stats)
            self._while_waiting()
        with reduction.backward():
            for parameters in reduction.summed():
                self._optimizer_step.take_norms(parameters)
            if work is not None:
                work.wait()
        reduction.unload()


def _backward(loss: torch.Tensor, where: str, batch: Any = None) -> None:
    with raising(f"{where}: backward", lambda error: "" if batch is None else shapes_told(error, batch)):
        loss.backward()  # type: ignore[no-untyped-call]

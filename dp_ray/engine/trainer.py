"""A training on one worker. `Trainer.step` is the page to begin reading at: one global batch, then the update.

`BatchGradient.compute` runs this worker's shards, forward and backward, and sums their gradients over all workers.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.engine.buffers import Buffers, make_room
from dp_ray.engine.clock import Flops, Part, SilentClock, StepClock, counted_flops
from dp_ray.engine.model import ShardSize, advised, batch_hint, synchronise
from dp_ray.engine.optimizer import runs_users_code
from dp_ray.engine.random import ForwardSeeds, seed_all
from dp_ray.engine.reduce import (
    DdpReduction,
    Reduction,
    ShardLoss,
    ShardSums,
    Work,
    for_trial,
    make_gradients_dense,
    sparse_parameters,
)
from dp_ray.engine.sharded.reduce import ShardedReduction, TreeShardedReduction
from dp_ray.engine.sharded.rounds import DummyBatches, ShardFilter
from dp_ray.engine.sharded.state import Sharded, whole_tensors
from dp_ray.engine.step import Metrics, OnShard, Step
from dp_ray.engine.update import OptimizerStep, average_of, load_part
from dp_ray.engine.user_code import locating, location, reraise_as
from dp_ray.engine.votes import MISSING, VOTES, LossWatch, Stats, StopVote
from dp_ray.engine.world import World, is_gpu
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.samples import Indices
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard, Split, num_filled
from dp_ray.system.threads import waiting
from dp_ray.tensors.tree import copied

WRITTEN = "written"  # the key, in a checkpoint, of what forwards write and the model's own state lacks


class Update(NamedTuple):
    """The results of a step on the whole batch; tensors are still on the device.

    `sums` are float64 [2 * names + 2]: sum and weight of the loss and of each metric; then the votes to stop, and the
    number of samples that were set aside. `learning_rate` is that of the first parameter group. `gradient_norm` is
    the norm of the whole batch's gradient before clipping. `stops` asks the worker to stop because one of the workers
    asked for it; all workers get it after the same step.
    """

    sums: torch.Tensor
    learning_rate: float
    gradient_norm: torch.Tensor
    stops: bool


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
        self.without_set_aside: ShardFilter = lambda shard: shard
        self._job = job
        self._world = world
        if job.bitwise:
            make_gradients_dense(model)  # the fixed tree adds only dense ones
        self.called = called
        self.optimizer_step = OptimizerStep(job, model, world.device, sharded)
        self.schedule = self.optimizer_step.schedule
        self.average = average_of(job, model, sharded, self.optimizer_step.aligned)
        if not model.training:  # a loaded model may be in eval mode; if only parts are, the user wants them so
            model.train()
        loss = ShardLoss(called, step, measures, job, world.device)
        self.gradient = BatchGradient(
            job, model, loss, self.optimizer_step, world, self._clock, sharded, while_waiting
        )
        self.measure_names = list(measures.functions)
        self._stop_vote = StopVote()
        self._seeds_update = bool(job.hooks.given) or any(map(runs_users_code, (job.optimizer, job.scheduler)))
        self.watch: LossWatch | None = None

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
            stats.vote()  # before the gradients: the vote rides on their all-reduce
        # Only after an out-of-memory error is it computed how many shards would fit.
        shards_that_fit = functools.partial(self._shards_that_fit, split)
        with advised(self._job, f"step {step}", _size_of(split, shards), shards_that_fit):
            self.gradient.compute(split, step, shards, batches, on_shard, stats)
        self._clock.enter(Part.UPDATE)
        with advised(self._job, f"step {step}", None):
            update = self._update(split, step, stats)
        self._clock.enter(Part.OTHER)
        return update

    def _update(self, split: Split, step: int, stats: Stats) -> Update:
        """Update the parameters from their gradients, which are the same on all workers, and so are all decisions."""
        if self._seeds_update:  # what runs until the next read may draw: the same numbers on all workers
            seed_all(derive_seed(self._job.seed, "update", step // split.steps, step), self._world.device)
        sums, rate = stats.numbers.sum(0), self.optimizer_step.learning_rate
        known: Any = sums if is_gpu(self._world.device) else sums.tolist()  # without waiting for a GPU
        if self.watch is not None:
            self.watch.take(step, known[0])
        start, stop = split.batch(step)
        is_empty = False
        if self._job.may_lose_rows:
            whole, on_error = self.without_set_aside(split.whole(step)), self._job.on_error
            # To read the number of missing samples waits for the device: only if the quarantine has room for so many.
            may_be_empty = on_error is not None and whole.rows <= on_error.quarantine
            is_empty = whole.rows == 0 or (may_be_empty and int(known[MISSING]) == whole.stop - whole.start)
        norm = self.optimizer_step.skip() if is_empty else self.optimizer_step.apply(known[1], stop - start, step)
        # An update that fp16 skipped is none: the average takes in no weights twice.
        if self.average is not None and not self.optimizer_step.has_skipped:
            self.average.update()
        return Update(sums, rate, norm, self._stop_vote.stops(known[VOTES]))

    def _shards_that_fit(self, split: Split) -> int | None:
        """Estimate, after an out-of-memory error, the fewest shards that fit; None where there is no estimate."""
        world, running = self._world, self.gradient.running
        is_on_one_gpu = world.device.type == "cuda" and len(world.devices) == 1
        if self.sharded is not None or running is None or not is_on_one_gpu:
            return None
        from dp_ray.engine.memory import shards_that_fit  # its imports take a second

        # What torch keeps for itself is this worker's to use too.
        room = int(torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device))
        return shards_that_fit(self._job, split, world.world_size, *running, room)

    def sums_of(
        self, split: Split, step: int, shards: Sequence[Shard], batches: Iterator[tuple[Indices, Any]]
    ) -> list[float]:
        """Run a step without its update; return the sum and weight of its loss, and then of each metric."""
        stats = Stats(split.shards, 1 + len(self.measure_names), self._world)
        with advised(self._job, f"step {step}", _size_of(split, shards)):
            self.gradient.compute(split, step, shards, batches, lambda *_: None, stats)
        self.optimizer_step.skip()
        sums: list[float] = stats.numbers.sum(0).tolist()
        return sums[:VOTES]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on; its tensors are the live ones, not copies."""
        state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        written = self.gradient.buffers.state()
        return {**state, WRITTEN: written} if written else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raises ModelError if it belongs to another model or optimizer."""
        written, buffers = whole_tensors(state.get(WRITTEN, {})), self.gradient.buffers
        # The buffers that forwards had made must be there before the weights are loaded, and their values after it.
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
        """Return what has a state, by its key in a checkpoint; the model comes first, since the average needs it."""
        average = {} if self.average is None else {"ema": self.average}
        return {"model": self.model, **self.optimizer_step.parts, **average}

    def synchronise(self) -> None:
        """Give every rank rank 0's weights; every rank calls this, once they are loaded."""
        synchronise(self.model)
        if self.average is not None:
            self.average.begin()

    def close(self) -> None:
        """Stop the threads of the reduction, and let the model be freed."""
        self.gradient.close()


def _size_of(split: Split, shards: Sequence[Shard]) -> ShardSize:
    return ShardSize(shards[0].stop - shards[0].start if shards else 0, split.largest_batch, split.shards)


class BatchGradient:
    """Computes the gradient of the summed loss of a batch, divided by the batch's rows, on every worker.

    `optimizer_step` scales the loss, if the job has a loss scaler. The reduction is built in the first step, whose
    batches tell what DDP must expect. `while_waiting` is called once a step, on CPUs, while gradients are summed.
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
        self._dummies = DummyBatches(world)
        self.flops: Flops | None = None  # of a row, on rank 0, from the first step on, if the job asks for them
        self.running: tuple[Any, int] | None = None  # the shard that runs, or that an error has ended: batch, rows

    def compute(
        self,
        split: Split,
        step: int,
        shards: Sequence[Shard],
        batches: Iterator[tuple[Indices, Any]],
        on_shard: OnShard,
        stats: Stats,
    ) -> None:
        """Set the gradients of step `step`, of which this worker runs `shards`; every rank calls this.

        Sums `stats` over the workers; by then each shard with rows is in them, and the number of samples set aside.
        """
        self._step = step
        start, stop = split.batch(step)
        # Losses are divided by these rows first. The true divisor is the weight of the whole batch, which is known
        # only once `stats` is summed; then `OptimizerStep.apply` corrects it. Of most losses the weight is the rows.
        rows = stop - start
        if self._sharded is not None:
            batches = self._dummies.agree(shards, batches, lambda shard: shard)
        # What is set aside of all shards of a step is known once its first shard is loaded.
        pending = [next(batches)[1] for _ in shards[:1]]
        filled = [shard for shard in shards if shard.rows]
        num_missing = sum(len(shard.missing) for shard in shards)
        if num_missing:
            stats.set_aside(num_missing)
        if self._reduction is None:
            if filled and filled[0] is shards[0]:
                self._count_flops(shards[0], pending[0])
            self._reduction = self._build_reduction(shards[:1], pending, stats)
        self._reduction.begin([shard.shard for shard in filled], num_filled(rows, split.shards))
        dummy_rounds = 0 if self._sharded is None else self._dummies.rounds_without_rows(split, step, len(filled))
        self.buffers.begin(len(filled))
        if shards and shards[0].shard == 0 and not shards[0].rows:
            self.buffers.keep()  # without shard 0, the step leaves the buffers as they are
        for shard in shards:
            # A shard without rows has a batch too, which must be taken for the next shard to get its own.
            batch = pending.pop() if pending else next(batches)[1]
            if shard.rows:
                if shard is not filled[0]:
                    self.buffers.restore()
                is_last = shard is filled[-1] and not dummy_rounds
                self._run_shard(self._reduction, shard, batch, rows, stats, is_last, on_shard)
        self._run_with_others(self._reduction, stats, dummy_rounds, has_rows=bool(filled))
        self.buffers.finish()
        self._reduction.finish()
        self._clock.enter(Part.OTHER)

    def _run_shard(
        self,
        reduction: Reduction,
        shard: Shard,
        batch: Any,
        rows: int,
        stats: Stats,
        is_last: bool,
        on_shard: OnShard,
    ) -> None:
        """Run forward and backward of a shard; the reduction begins in the last one's backward."""
        self.running = batch, shard.rows
        with reduction.shard(is_last):
            loss = self._forward(reduction.replica, shard, batch)
            result = self._loss.result
            assert result.row is not None
            stats.put(shard.shard, result.row)
            on_shard(shard, batch, result.step_output)
            if shard.shard == 0:
                self.buffers.keep()
            self._clock.enter(Part.BACKWARD)
            if is_last:
                self._last_backward(reduction, loss / rows, stats, location(shard), batch)
            else:
                _backward(self._optimizer_step.scaled(loss / rows), location(shard), batch)
        reduction.after(shard.shard, is_last)
        self.running = None
        if not is_last:
            self._clock.enter(Part.OTHER)

    def _forward(self, replica: nn.Module, shard: Shard, batch: Any) -> torch.Tensor:
        self._clock.enter(Part.FORWARD)
        self._seeds.begin(shard)
        with locating(location(shard)), self.buffers.forward():
            loss: torch.Tensor = replica(batch, shard.rows)
        self._clock.enter(Part.OTHER)
        return loss

    def _last_backward(
        self, reduction: Reduction, loss: torch.Tensor, stats: Stats, where: str, batch: Any = None
    ) -> None:
        """Run the step's last backward; `stats` and buffers go with the gradients, beside them, or after it."""
        reduction.before_last(stats.numbers)
        # Where the backward itself waits for the other workers, what is sent later would wait for it.
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

    def _send(self, reduction: Reduction, stats: Stats) -> Work:
        """Start to sum the stats over the workers, unless they go with the gradients, and to share the buffers."""
        work = reduction.exchange(stats.numbers)
        self.buffers.share()
        return work

    def _run_with_others(self, reduction: Reduction, stats: Stats, dummy_rounds: int, has_rows: bool) -> None:
        """Run, after this worker's own shards, what the other workers wait for."""
        where = f"step {self._step}"
        for left in reversed(range(dummy_rounds)):  # of a sharded model, whose workers gather its parts in rounds
            assert isinstance(reduction, ShardedReduction) and self._dummies.batch is not None
            batch, rows = self._dummies.batch
            self._clock.enter(Part.FORWARD)
            with reduction.shard(left == 0), reduction.dummy_round():
                loss = reduction.replica(copied(batch), rows) * 0.0
                if left == 0:
                    self._last_backward(reduction, loss, stats, where)
                else:
                    _backward(self._optimizer_step.scaled(loss), where)
        if self._sharded is not None and self._dummies.batch is None:
            # All samples of the step are set aside, so no worker runs the model; but the votes are summed.
            work = self._send(reduction, stats)
            if work is not None:
                work.wait()
        elif not has_rows and self._world.world_size > 1 and not dummy_rounds:
            self._clock.enter(Part.BACKWARD)
            self._last_backward(reduction, reduction.replica(None, 0), stats, where)

    def _build_reduction(self, shards: Sequence[Shard], batches: Sequence[Any], stats: Stats) -> Reduction:
        """Build the job's reduction; with `find_unused_parameters: auto`, the first shards show if DDP must look."""
        job = self._job
        if self._sharded is not None:
            looks = job.find_unused_parameters
            if not job.bitwise:
                return ShardedReduction(self._loss, self._sharded, looks)
            return TreeShardedReduction(self._loss, self._sharded, looks, job.num_shards, job.may_lose_rows)
        parameters = list(self._parameters.values())
        sums = ShardSums(parameters, job.num_shards) if job.bitwise else None
        if self._world.world_size == 1:
            return Reduction(self._loss, sums, self._sparse)
        types = {one.device.type for one in parameters}
        if len(types) > 1:
            raise JobError(
                f"devices: must be of one type if there are several workers, got {' and '.join(sorted(types))}"
            )
        unused = job.find_unused_parameters
        return DdpReduction(
            self._loss,
            sums,
            self._world,
            self._parameters,
            self._sparse,
            self._leave_unused(shards, batches) if unused == "auto" else bool(unused),
            stats.numbers.numel(),
            functools.partial(self._clock.enter, Part.EXCHANGE),
        )

    def _leave_unused(self, shards: Sequence[Shard], batches: Sequence[Any]) -> bool:
        """Return whether any worker's first shard leaves a parameter without a gradient, by a trial."""
        unused = torch.zeros(1, device=self._world.device)
        self.buffers.begin(2)
        with for_trial(self._loss, self._sparse, self._job.compile) as replica:
            for shard, batch in zip(shards, batches, strict=True):
                if not shard.rows:
                    unused += 1  # it cannot show that all parameters are used
                    continue
                self._try(replica, shard, batch)
                sparse = {id(one) for one in self._sparse}
                unused += any(one.grad is None for one in self._parameters.values() if id(one) not in sparse)
        self.buffers.restore()
        self._optimizer_step.drop_gradients()
        with waiting("the other workers' first shards"):
            dist.all_reduce(unused, dist.ReduceOp.MAX)
            return bool(unused.item())

    def _count_flops(self, shard: Shard, batch: Any) -> None:
        """Count the operations of a row of a shard in a trial, if the job asks for them; rank 0 does."""
        # Of a sharded model, no worker can run a shard alone.
        if not self._job.flops or self._world.rank != 0 or self._sharded is not None:
            return
        self.buffers.begin(2)
        trial = functools.partial(self._try, self._loss, shard, batch)
        self.flops = counted_flops(trial, shard.rows, self._job, self._world.device)
        self.buffers.restore()
        self._optimizer_step.drop_gradients()

    def _try(self, replica: nn.Module, shard: Shard, batch: Any) -> None:
        """Run forward and backward of a shard on this worker alone, with a copy of the batch: a model may write it.

        The caller restores the buffers and drops the gradients, so that the trial changes no state.
        """
        _backward(self._forward(replica, shard, copied(batch)), location(shard), batch)

    def close(self) -> None:
        """Stop the reduction's threads, and let the model be freed."""
        # A hook on a gradient may hold the model, as a method of it does, and torch keeps these hooks where the
        # garbage collector does not look: the model would never be freed.
        for parameter in self._parameters.values():
            (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).clear()
        if self._reduction is not None:
            self._reduction.close()


def _backward(loss: torch.Tensor, where: str, batch: Any = None) -> None:
    with reraise_as(f"{where}: backward", lambda error: "" if batch is None else batch_hint(error, batch)):
        loss.backward()  # type: ignore[no-untyped-call]

"""A training on one worker: begin at `Trainer.step`, which is a page: load, forward, backward, exchange, update.

Four nouns: a run has steps, a step has shards, and an update ends it. A `Pass` goes over a step's shards, and is the
unit in which gradients are summed over the workers. A step of `Trainer` is one pass and one update.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from dp_ray.engine.alignment import must_align
from dp_ray.engine.buffers import Buffers, make_room
from dp_ray.engine.clock import Flops, Part, SilentClock, StepClock, counted_flops
from dp_ray.engine.gradient_hooks import check_sums_once
from dp_ray.engine.loading import LoadedShard, LoadedStep, OverlappedRead
from dp_ray.engine.model import ShardSize, batch_hint, raise_advised, synchronise
from dp_ray.engine.optimizer import EVALUATED, runs_users_code
from dp_ray.engine.placement import DummyBatch, Placement
from dp_ray.engine.random import ForwardSeeds, seed_all
from dp_ray.engine.reduce import (
    NOTHING,
    Reduction,
    ShardLoss,
    Trained,
    for_trial,
    make_gradients_dense,
    sparse_parameters,
)
from dp_ray.engine.sharded.state import whole_tensors
from dp_ray.engine.step import Metrics, OnShard, Step, StepOutput
from dp_ray.engine.update import OptimizerStep
from dp_ray.engine.user_code import locating, location, raise_as, raise_located, reraise_as
from dp_ray.engine.votes import MISSING, VOTES, Lagged, LossWatch, Stats
from dp_ray.engine.whole_batch import BatchLoss, ShardOutput, detached, shard_loss
from dp_ray.engine.world import everyone, is_gpu
from dp_ray.errors import JobError, ModelError
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

    `ahead` reads a batch, on CPUs, while the gradients are summed over the workers. `watch` is for `stop_on_nan`.
    """

    def __init__(
        self,
        placement: Placement,
        step: Step,
        measures: Metrics,
        split: Split,
        clock: StepClock | None = None,
        ahead: OverlappedRead | None = None,
        watch: LossWatch | None = None,
    ) -> None:
        job, model, world = placement.job, placement.model, placement.world
        self.placement = placement
        self.model, self.called = model, placement.called
        self.watch = watch
        self._job = job
        self._split = split
        self._clock = clock or SilentClock()
        if job.bitwise:
            make_gradients_dense(model)  # the fixed tree adds only dense ones
        self.optimizer_step = placement.optimizer_step()
        self.schedule = self.optimizer_step.schedule
        self.average = placement.average(self.optimizer_step)
        if not model.training:  # a loaded model may be in eval mode; if only parts are, the user wants them so
            model.train()
        loss = shard_loss(placement.called, step, measures, job, world.device, placement.row_trial())
        check_sums_once({"": model, **loss.beside})
        self.over_batch = loss.over_batch if isinstance(loss, BatchLoss) else None
        self.buffers = Buffers(model, job.compile, placement.blocks, loss.beside, must_align(job, world.device))
        self.gradient = Pass(placement, loss, self.optimizer_step, split, self.buffers, self._clock, ahead)
        self.measure_names = list(measures.functions)
        self._stats = Stats(split.shards, 1 + len(self.measure_names), world)
        self._may_lose_rows = job.may_lose_rows
        self._is_over_batch = job.loss_over_batch
        self._votes = Lagged() if is_gpu(world.device) else None
        self._seeds_update = bool(job.hooks.given) or any(map(runs_users_code, (job.optimizer, job.scheduler)))

    def step(self, step: int, steps: Iterator[LoadedStep], on_shard: OnShard, wants_stop: bool = False) -> Update:
        """Train on the global batch of `step`, of which `steps` gives this worker's shards; every rank calls this.

        `on_shard` gets each shard with its batch and output. `wants_stop` asks all workers to stop. Raises
        ModelError, which names step and shard, for user errors.
        """
        clock, stats, has_sums = self._clock, self._stats, False
        stats.begin()
        if wants_stop:
            stats.vote()  # before the gradients: the vote rides on their all-reduce
        try:
            loaded = next(steps)
            if self._may_lose_rows:
                stats.set_aside(sum(len(shard.missing) for shard in loaded.shards))
            for shard in self.gradient.over(loaded, stats):
                clock.enter(Part.FORWARD)
                loss = shard.forward()
                if shard.shard is not None:
                    on_shard(shard.shard, shard.batch, shard.output)
                clock.enter(Part.BACKWARD)
                shard.backward(loss)
                del loss, shard  # before the next batch is loaded
            has_sums = True  # the pass has waited for the exchange at its end
            clock.enter(Part.UPDATE)
            return self._update(loaded, stats.total())
        except (RuntimeError, ModelError) as error:
            # The memory of an update does not depend on the rows. How many shards fit takes a while to estimate.
            size = None if has_sums else self._size_of(step)
            raise_advised(error, self._job, f"step {step}", size, self._shards_that_fit)

    def _update(self, loaded: LoadedStep, sums: torch.Tensor) -> Update:
        """Update the parameters from their gradients, which are the same on all workers, and so are all decisions."""
        split, step, rate = self._split, loaded.step, self.optimizer_step.learning_rate
        # What runs until the next read may draw: the same numbers on all workers.
        if self._seeds_update or self.optimizer_step.hooks.hooked:
            seed_all(derive_seed(self._job.seed, "update", step // split.steps, step), self.placement.world.device)
        known: Any = sums if self._votes is not None else sums.tolist()  # without waiting for a GPU
        if self.watch is not None:
            self.watch.take(step, known[0])
        whole, is_empty = loaded.whole, False
        if self._may_lose_rows:
            on_error = self._job.on_error
            # To read the number of missing samples waits for the device: only if the quarantine has room for so many.
            may_be_empty = on_error is not None and whole.rows <= on_error.quarantine
            is_empty = whole.rows == 0 or (may_be_empty and int(known[MISSING]) == whole.stop - whole.start)
        if is_empty:
            norm = self.optimizer_step.skip()
        else:
            # A loss over the batch is divided by no rows: its gradient is that of the whole.
            rows = whole.stop - whole.start
            norm = self.optimizer_step.apply(rows if self._is_over_batch else known[1], rows, step)
        # An update that fp16 skipped is none: the average takes in no weights twice.
        if self.average is not None and not self.optimizer_step.has_skipped:
            self.average.update()
        votes = known[VOTES] if self._votes is None else self._votes.take(known[VOTES])
        return Update(sums, rate, norm, bool(votes))

    def _size_of(self, step: int) -> ShardSize:
        world, split = self.placement.world, self._split
        shards = split.worker(world.world_size, world.rank, step)
        return ShardSize(shards[0].rows if shards else 0, split.largest_batch, split.shards)

    def _shards_that_fit(self) -> int | None:
        """Estimate, after an out-of-memory error, the fewest shards that fit; None where there is no estimate."""
        world, running = self.placement.world, self.gradient.running
        is_on_one_gpu = world.device.type == "cuda" and len(world.devices) == 1
        if self.placement.is_sharded or running is None or not is_on_one_gpu:
            return None
        from dp_ray.engine.memory import shards_that_fit  # its imports take a second

        # What torch keeps for itself is this worker's to use too.
        room = int(torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device))
        return shards_that_fit(self._job, self._split, world.world_size, *running, room)

    def sums_of(self, loaded: LoadedStep) -> list[float]:
        """Run a step without its update; return the sum and weight of its loss, and then of each metric."""
        self._stats.begin()
        try:
            for shard in self.gradient.over(loaded, self._stats):
                shard.backward(shard.forward())
        except (RuntimeError, ModelError) as error:
            raise_advised(error, self._job, f"step {loaded.step}", self._size_of(loaded.step))
        self.optimizer_step.skip()
        sums: list[float] = self._stats.total().tolist()
        return sums[:VOTES]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on; its tensors are the live ones, not copies."""
        state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        written, evaluated = self.buffers.state(), self.optimizer_step.evaluated()
        return {**state, **({WRITTEN: written} if written else {}), **({EVALUATED: evaluated} if evaluated else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raises ModelError if it belongs to another model or optimizer."""
        written = whole_tensors(state.get(WRITTEN, {}))
        # The buffers that forwards had made must be there before the weights are loaded, and their values after it.
        self.buffers.make(written)
        make_room(self.model, state["model"])
        for name, part in self._parts().items():
            if name == "ema" and name not in state:
                continue  # another run's checkpoint: the average starts from its weights
            self.placement.load_state(name, part, state.get(name))
        self.buffers.load(written)

    def _parts(self) -> dict[str, Any]:
        """Return what has a state, by its key in a checkpoint; the model comes first, since the average needs it."""
        average = {} if self.average is None else {"ema": self.average}
        return {"model": self.model, **self.optimizer_step.parts, **average}

    def synchronise(self) -> None:
        """Give every rank rank 0's weights, and state beside them; every rank calls this, once they are loaded."""
        for module in dict.fromkeys((self.model, *self.buffers.beside.values())):
            synchronise(module)
        if self.average is not None:
            self.average.begin()

    def close(self) -> None:
        """Stop the threads of the reduction, and let the model be freed."""
        self.gradient.close()


class RunningShard:
    """A shard in a pass: `forward`, then `backward` with its loss. `output` has what the step gave.

    `shard` is None where the other workers wait for this one, which has no rows left.
    """

    def __init__(self, of: "Pass", shard: Shard | None, batch: Any, rows: int, is_last: bool) -> None:
        self._pass = of
        self.shard = shard
        self.batch = batch
        self.rows = rows
        self.is_last = is_last
        self.output = StepOutput()
        self._is_nothing = False  # whether its loss has no weight

    def forward(self) -> torch.Tensor:
        """Return the sum of the shard's losses, and take its sums and weights in.

        Of a round without rows, return a zero that reaches what the others wait for. Raises ModelError, which names
        the shard.
        """
        of, shard = self._pass, self.shard
        if shard is None:
            if of.batch_loss is not None:
                of.batch_loss.begin(None)
            zero = of.reduction.replica(copied(self.batch), self.rows)
            self._is_nothing = bool(self.rows) and of.loss.result.is_nothing  # then 0 times its gradient is NaN
            return zero * 0.0 if self.rows else zero
        of.seeds.begin(shard, of.number)
        if of.batch_loss is not None:
            of.batch_loss.begin(shard)
        try:
            if of.buffers.is_early:
                with of.buffers.forward():
                    loss = of.reduction.replica(self.batch, self.rows)
            else:
                loss = of.reduction.replica(self.batch, self.rows)
                of.buffers.check()
        except (Exception, SystemExit) as error:
            raise_located(error, location(shard))
        result = of.loss.result
        assert result.row is not None
        self.output, self._is_nothing = result.step_output, result.is_nothing
        of.stats.put(shard.shard, result.row)
        if shard.shard == 0:
            of.buffers.keep()
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the loss's gradient; in a worker's last shard of the pass, begin the sum over the workers."""
        of = self._pass
        seed = of.optimizer_step.seed(loss, of.rows)
        hooks = of.optimizer_step.hooks
        if RemovableHandle.next_id != hooks.seen:
            hooks.look()
        try:
            with of.reduction.adding_nothing() if self._is_nothing else NOTHING:
                if self.is_last:
                    of.reduction.last_backward(loss, seed, of.stats.numbers)
                else:
                    loss.backward(seed)  # type: ignore[no-untyped-call]
        except (Exception, SystemExit) as error:
            where = f"step {of.step}" if self.shard is None else location(self.shard)
            hint = "" if self.shard is None else batch_hint(error, self.batch)
            raise_as(error, f"{where}: backward", lambda _: hint)


def _lacks_shard_0(loaded: LoadedStep) -> bool:
    """Return whether this worker has shard 0, without rows."""
    return bool(loaded.shards) and loaded.shards[0].shard == 0 and not loaded.shards[0].rows


@dataclass(eq=False)
class Pass:
    """Forward and backward over the shards of a step: the unit in which gradients are summed over the workers.

    After it, the gradients are those of the summed loss of the whole batch, divided by the batch's rows, on every
    worker. A step may have several passes, as of a GAN, each with a loss and an update of its own; a pass that `adds`
    leaves the sums of earlier passes in the gradients, and they are not summed again.

    The reduction is built in the first step, whose batches tell what DDP must expect.
    """

    placement: Placement
    loss: ShardLoss
    optimizer_step: OptimizerStep
    split: Split
    buffers: Buffers
    clock: StepClock
    ahead: OverlappedRead | None = None

    def __post_init__(self) -> None:
        placement, trained, self._world = self.placement, self.optimizer_step.trained, self.placement.world
        self._forwards = placement.forwards() if placement.is_sharded else None
        sparse, sums = sparse_parameters(self.loss.model), placement.sums(list(trained.values()))
        aligns = must_align(placement.job, self._world.device)
        self._trained = Trained(self.loss, trained, sparse, sums, self.buffers, self.clock, self.ahead, aligns)
        self.seeds = ForwardSeeds(placement.job.seed, placement.model, self._world.device)
        self.reduction = Reduction(self._trained)  # until the first step builds the job's
        self._is_prepared = False
        self.batch_loss = self.loss if isinstance(self.loss, BatchLoss) else None
        self.stats = Stats(self.split.shards, 0, self._world)
        self.step = self.number = 0
        self.rows = 0  # of the whole batch
        self.flops: Flops | None = None  # of a row, on rank 0, from the first step on, if the job asks for them
        self.running: tuple[Any, int] | None = None  # the shard that runs, or that an error has ended: batch, rows

    def over(self, loaded: LoadedStep, stats: Stats, adds: bool = False, number: int = 0) -> Iterator[RunningShard]:
        """Yield the shards of the step to run, and then what the other workers wait for; every rank calls this.

        Take all of them: at its end it waits until `stats` and gradients are summed over the workers. `number` tells
        the passes of a step apart, for their random numbers.
        """
        earlier = self._set_apart() if adds else None
        if self._forwards is not None:
            loaded = self._forwards.begin(loaded)
        has_run = False
        if self.batch_loss is not None:
            loaded, has_run = self._run_batch(self.batch_loss, loaded, number)
        if not self._is_prepared:
            loaded = self._prepare(loaded, stats)
        reduction, buffers = self.reduction, self.buffers
        self.step, self.stats, self.number = loaded.step, stats, number
        # Losses are divided by these rows first. The true divisor is the weight of the whole batch, which is known
        # only once `stats` is summed; then `OptimizerStep.apply` corrects it. Of most losses the weight is the rows.
        self.rows = loaded.whole.stop - loaded.whole.start
        filled = [shard.shard for shard in loaded.shards if shard.rows]
        reduction.begin(loaded.step, filled, num_filled(self.rows, self.split.shards))
        dummies: list[DummyBatch] = []
        if self._forwards is not None:
            dummies = self._forwards.dummies(self.split, loaded.step, len(filled))
        if not has_run:  # else its forward has written them
            buffers.begin(len(filled))
        if _lacks_shard_0(loaded):
            buffers.keep()  # without shard 0, the step leaves the buffers as they are
        left = len(filled)
        for shard, _, batch in loaded.loaded:
            if not shard.rows:  # all of its samples are skipped or set aside
                continue
            if left < len(filled):
                buffers.restore()
            left -= 1
            self.running = batch, shard.rows
            with reduction.shard(shard.shard, not left and not dummies):
                yield RunningShard(self, shard, batch, shard.rows, not left and not dummies)
            self.running = None
        # DDP of the others waits for this worker's gradients; FSDP waits for its rounds, which the dummies are.
        if not filled and not dummies and self._world.world_size > 1 and not self.placement.is_sharded:
            dummies = [DummyBatch(None, 0)]
        while dummies:
            batch, rows = dummies.pop()
            with reduction.shard(None, not dummies):
                yield RunningShard(self, None, batch, rows, not dummies)
        for parameters in reduction.summed(stats.numbers):
            self.optimizer_step.take_norms(parameters)
        if buffers.is_early:
            check_sums_once({"": self.placement.model, **buffers.beside})  # a forward may have made one
            if self._world.world_size > 1:
                self.optimizer_step.hooks.check_same()
        buffers.finish()
        if earlier is not None:
            self._add(earlier)

    def _run_batch(self, loss: BatchLoss, loaded: LoadedStep, number: int) -> tuple[LoadedStep, bool]:
        """Run the shards forward, and compute the loss of the whole batch, so that each has its outputs' gradients.

        A worker that runs a single shard keeps its graph, and runs it only here: returns whether it does. Not in the
        first step, which tries that shard once more, nor in the step that tries which outputs have rows, nor where
        shard 0 has no rows, so that buffers stay.
        """
        loaded = loaded._replace(loaded=list(loaded.loaded))
        filled = [one for one in loaded.loaded if one.shard.rows]
        run, dummies = loss.run, []
        if self._forwards is not None:
            run = functools.partial(self._forwards.run, loss.run)
            dummies = self._forwards.dummies(self.split, loaded.step, len(filled))
        tried = next((at for at, one in enumerate(filled) if loss.batches.is_due(one.shard.rows)), None)
        runs_once = self._is_prepared and tried is None and not _lacks_shard_0(loaded)
        is_kept = runs_once and len(filled) + len(dummies) == 1
        self.clock.enter(Part.FORWARD)
        self.buffers.begin(len(filled) if is_kept else 2)
        own: list[ShardOutput] = []
        for one in filled:
            if own:
                self.buffers.restore()
            self.running = one.batch, one.shard.rows
            self.seeds.begin(one.shard, number)
            with locating(location(one.shard)), self.buffers.forward() if self.buffers.is_early else nullcontext():
                output = run(one.batch if is_kept else copied(one.batch))
            if not self.buffers.is_early:
                self.buffers.check()
            own.append(detached(output, one.shard, not is_kept))
            if is_kept:
                loss.keep(output)
            del output  # and its graph
        self.running = None
        if tried is not None:
            own[tried] = self._try_rows(loss, filled[tried], own[tried], number)
        for dummy in dummies:
            output = run(copied(dummy.batch))
            if is_kept:
                loss.keep(output)
        if not is_kept:
            self.buffers.restore()
        with self.buffers.running():
            loss.take(loaded.whole, own, self.optimizer_step.seed, number)
        return loaded, is_kept

    def _try_rows(self, loss: BatchLoss, one: LoadedShard, output: ShardOutput, number: int) -> ShardOutput:
        """Run a shard with one row less; return its output with what that shows."""
        before = self.clock.enter(Part.OTHER)
        self.buffers.restore()
        self.seeds.begin(one.shard, number)

        def run(batch: Any) -> StepOutput:
            with self.buffers.forward() if self.buffers.is_early else nullcontext():
                return loss.run(batch)

        tried = loss.batches.tried(run, loss.batches.one_less(one.batch, one.shard.rows), output)
        self.clock.enter(before)
        return tried

    def _set_apart(self) -> list[torch.Tensor | None]:
        """Take the sums of earlier passes out of the gradients; this pass's may be in the same memory."""
        parameters = self._trained.parameters.values()
        earlier = [None if one.grad is None else one.grad.clone() for one in parameters]
        for one in parameters:
            one.grad = None
        return earlier

    def _add(self, earlier: list[torch.Tensor | None]) -> None:
        for parameter, before in zip(self._trained.parameters.values(), earlier, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def _prepare(self, loaded: LoadedStep, stats: Stats) -> LoadedStep:
        """Build the job's reduction; with `find_unused_parameters: auto`, the first shards show if DDP must look."""
        job, trained, loaded_shards = self.placement.job, self._trained, iter(loaded.loaded)
        first = [next(loaded_shards) for _ in loaded.shards[:1]]
        if self.placement.counts_flops and first and first[0].shard.rows:
            with self._trial():
                run = functools.partial(self._try, trained.loss, first[0])
                self.flops = counted_flops(run, first[0].shard.rows, job, self._world.device)
        unused = job.find_unused_parameters
        is_alone = self._world.world_size == 1
        if not self.placement.is_sharded and not is_alone:
            types = {one.device.type for one in trained.parameters.values()}
            if len(types) > 1:
                raise JobError(
                    f"devices: must be of one type if there are several workers, got {' and '.join(sorted(types))}"
                )
            if unused == "auto":
                unused = self._leave_unused(first)
        self._is_prepared = True
        self.reduction = self.placement.reduction(trained, bool(unused), stats.numbers.numel())
        return loaded._replace(loaded=chain(first, loaded_shards))

    def _leave_unused(self, first: Sequence[LoadedShard]) -> bool:
        """Return whether any worker's first shard leaves a parameter without a gradient, by a trial."""
        unused, trained = torch.zeros(1, device=self._world.device), self._trained
        sparse = {id(one) for one in trained.sparse}
        with self._trial(), for_trial(trained.loss, trained.sparse, self.placement.job.compile) as replica:
            for one in first:
                if not one.shard.rows:
                    unused += 1  # it cannot show that all parameters are used
                    continue
                self._try(replica, one)
                unused += any(one.grad is None for one in trained.parameters.values() if id(one) not in sparse)
        with waiting("the other workers' first shards"):
            dist.all_reduce(unused, dist.ReduceOp.MAX, group=everyone())
            return bool(unused.item())

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Run a shard in the block on this worker alone, without a change of the state."""
        self.buffers.begin(2)
        yield
        self.buffers.restore()
        self.optimizer_step.drop_gradients()

    def _try(self, replica: Callable[[Any, int], torch.Tensor], one: LoadedShard) -> None:
        """Run forward and backward of a shard, with a copy of the batch: a model may write it."""
        where = location(one.shard)
        self.seeds.begin(one.shard)
        if self.batch_loss is not None:
            self.batch_loss.begin(one.shard)
        with locating(where), self.buffers.forward():
            loss = replica(copied(one.batch), one.shard.rows)
        self.optimizer_step.hooks.look()
        with reraise_as(f"{where}: backward", lambda error: batch_hint(error, one.batch)):
            loss.backward()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop the reduction's threads, put the hooks on gradients back, and let the model be freed."""
        self.optimizer_step.hooks.put_back()
        # A hook on a gradient may hold the model, as a method of it does, and torch keeps these hooks where the
        # garbage collector does not look: the model would never be freed.
        for parameter in self._trained.parameters.values():
            (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).clear()
        self.reduction.close()

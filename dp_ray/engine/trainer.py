"""A training on one worker: begin at `Trainer.step`, which is a page: load, forward, backward, exchange, update.

Four nouns: a run has steps, a step has shards, and an update ends it. A `Pass` runs a step's shards, and is the
unit in which gradients are summed over the workers. A step of `Trainer` is one pass and one update.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from dp_ray.engine.alignment import must_align
from dp_ray.engine.clock import Flops, Part, SilentClock, StepClock, counted_flops
from dp_ray.engine.forward_state import ForwardState
from dp_ray.engine.gradient_hooks import check_sums_once
from dp_ray.engine.loading import LoadedShard, LoadedStep, OverlappedRead
from dp_ray.engine.optimizer import EVALUATED, Average, Schedule, runs_users_code
from dp_ray.engine.out_of_memory import ShardSize, batch_hint, raise_advised
from dp_ray.engine.placement import Placement
from dp_ray.engine.random import seed_all
from dp_ray.engine.reduce import Reduction, ShardLoss, Trained, for_trial, make_gradients_dense
from dp_ray.engine.replica import DummyBatch, Replica, Round
from dp_ray.engine.sharded.state import whole_tensors
from dp_ray.engine.step import Compare, Metrics, OnShard, Step
from dp_ray.engine.tree_sum import sparse_parameters
from dp_ray.engine.update import OptimizerStep, PassGradients, ShardedAverage, Updates
from dp_ray.engine.user_code import location, raise_as, reraise_as
from dp_ray.engine.votes import MISSING, VOTES, Lagged, LossWatch, StepSums
from dp_ray.engine.weights import make_room, synchronise
from dp_ray.engine.whole_batch import shard_loss
from dp_ray.engine.world import everyone, is_gpu
from dp_ray.errors import JobError, ModelError
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Split, Work, num_filled
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


class TrainedModel:
    """A model in training on one worker, the same on all workers, and all that changes with its weights.

    `optimizer_step` is the job's, or the updates of a loop of the user's. `watch` is for `stop_on_nan`.
    """

    placement: Placement
    model: nn.Module
    called: nn.Module
    watch: LossWatch | None
    optimizer_step: OptimizerStep | Updates
    schedule: Schedule
    average: Average | ShardedAverage | None
    state: ForwardState
    measured: list[str]  # what each step measures, by name: the loss, and then metrics or what a loop logs
    over_batch: Mapping[str, Compare] | None = None

    @property
    def flops(self) -> Flops | None:
        """The operations of a row, on rank 0, from the first step on, if they are counted."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on; its tensors are the live ones, not copies."""
        state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        written, evaluated = self.state.state(), self.optimizer_step.evaluated()
        return {**state, **({WRITTEN: written} if written else {}), **({EVALUATED: evaluated} if evaluated else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raises ModelError if it belongs to another model or optimizer."""
        written = whole_tensors(state.get(WRITTEN, {}))
        # The buffers that forwards had made must be there before the weights are loaded, and their values after it.
        self.state.make(written)
        make_room(self.model, state["model"])
        for name, part in self._parts().items():
            if name == "ema" and name not in state:
                continue  # another run's checkpoint: the average starts from its weights
            self.placement.load_state(name, part, state.get(name))
        self.state.load(written)

    def _parts(self) -> dict[str, Any]:
        """Return the objects with a state, by their keys in a checkpoint; the model first: the average needs it."""
        average = {} if self.average is None else {"ema": self.average}
        return {"model": self.model, **self.optimizer_step.parts, **average}

    def synchronise(self) -> None:
        """Give every rank rank 0's weights, and state beside them; every rank calls this, once they are loaded."""
        for module in dict.fromkeys((self.model, *self.state.beside.values())):
            synchronise(module)
        if self.average is not None:
            self.average.begin()

    def _new_state(self, beside: Mapping[str, nn.Module]) -> ForwardState:
        """Return the state that forwards write, of the model and of modules beside it."""
        placement, job = self.placement, self.placement.job
        aligns = must_align(job, placement.world.device)
        return ForwardState(self.model, job.compile, placement.blocks, beside, aligns)

    def close(self) -> None:
        """Stop the threads of the reductions, and let the model be freed."""


class Trainer(TrainedModel):
    """The model of a training that its job declares, and the step that changes it: one pass and one update.

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
        self.optimizer_step: OptimizerStep = placement.optimizer_step()
        self.schedule = self.optimizer_step.schedule
        self.average = placement.average(self.optimizer_step)
        if not model.training:  # a loaded model may be in eval mode; if only parts are, the user wants them so
            model.train()
        loss = shard_loss(placement.called, step, measures, job, world.device, placement.row_trial())
        check_sums_once({"": model, **loss.beside})
        self.over_batch = loss.over_batch
        self.state = self._new_state(loss.beside)
        self.gradient = Pass(placement, loss, self.optimizer_step, split, self.state, self._clock, ahead)
        self.measured = ["loss", *measures.functions]
        self._stats = StepSums(split.shards, len(self.measured), world)
        self._may_lose_rows = job.may_lose_rows
        self._is_over_batch = job.loss_over_batch
        self._is_on_gpu = is_gpu(world.device)
        self._votes = Lagged() if world.world_size > 1 else None  # the loop of a worker alone stops without a vote
        self._seeds_update = bool(job.hooks.given) or any(map(runs_users_code, (job.optimizer, job.scheduler)))

    def step(self, step: int, steps: Iterator[LoadedStep], on_shard: OnShard, wants_stop: bool = False) -> Update:
        """Train on the global batch of `step`; `steps` yields this worker's shards of it. Every rank calls this.

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
            self.gradient.run(loaded, stats, on_shard)
            has_sums = True
            clock.enter(Part.UPDATE)
            self.state.is_open = False
            return self._update(loaded, stats.total())
        except (RuntimeError, ModelError) as error:
            # The memory of an update does not depend on the rows. How many shards fit takes a while to estimate.
            size = None if has_sums else self._size_of(step)
            raise_advised(error, self._job, f"step {step}", size, self._shards_that_fit)

    def _update(self, loaded: LoadedStep, sums: torch.Tensor) -> Update:
        """Update the parameters from their gradients; these, and so all decisions, are the same on all workers."""
        split, step, rate = self._split, loaded.step, self.optimizer_step.learning_rate
        # User code up to the next read may draw: the same random numbers on all workers.
        if self._seeds_update or self.optimizer_step.hooks.hooked:
            seed_all(derive_seed(self._job.seed, "update", step // split.steps, step), self.placement.world.device)
        known: Any = sums if self._is_on_gpu else sums.tolist()  # without waiting for a GPU
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
            # A loss over the batch is not divided by rows: its gradient is the whole batch's.
            rows = whole.stop - whole.start
            norm = self.optimizer_step.apply(rows if self._is_over_batch else known[1], rows, step)
        # An update that fp16 skipped is none: the average takes in no weights twice.
        if self.average is not None and not self.optimizer_step.has_skipped:
            self.average.update()
        votes = None if self._votes is None else self._votes.take(known[VOTES])
        return Update(sums, rate, norm, bool(votes))

    @property
    def flops(self) -> Flops | None:
        """The operations of a row, on rank 0, from the first step on, if the job asks for them."""
        return self.gradient.flops

    def _size_of(self, step: int) -> ShardSize:
        world, split = self.placement.world, self._split
        shards = split.worker(world.world_size, world.rank, step)
        return ShardSize(shards[0].rows if shards else 0, split.largest_batch, split.shards)

    def _shards_that_fit(self) -> int | None:
        """Estimate, after an out-of-memory error, the fewest shards that fit; None if there is no estimate."""
        world, running = self.placement.world, self.gradient.replica.running_batch
        is_on_one_gpu = world.device.type == "cuda" and len(world.devices) == 1
        if self.placement.is_sharded or running is None or not is_on_one_gpu:
            return None
        from dp_ray.engine.memory import shards_that_fit  # its imports take a second

        # This worker can use the memory that torch has reserved, too.
        room = int(torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device))
        return shards_that_fit(self._job, self._split, world.world_size, *running, room)

    def sums_of(self, loaded: LoadedStep) -> list[float]:
        """Run a step without its update; return the sum and weight of its loss, and then of each metric."""
        self._stats.begin()
        try:
            self.gradient.run(loaded, self._stats)
        except (RuntimeError, ModelError) as error:
            raise_advised(error, self._job, f"step {loaded.step}", self._size_of(loaded.step))
        self.optimizer_step.skip()
        sums: list[float] = self._stats.total().tolist()
        return sums[:VOTES]

    def close(self) -> None:
        """Stop the threads of the reduction, and let the model be freed."""
        self.gradient.close()


@dataclass(eq=False)
class Pass:
    """Forward and backward over the shards of a step: the unit in which gradients are summed over the workers.

    After it, the gradients are those of the summed loss of the whole batch, divided by the batch's rows, on every
    worker. A step may have several passes, as of a GAN, each with a loss of its own. Gradients that are there
    before it are `set_apart`, and added after it: they are sums over the workers already.

    The reduction is built in the first step: its batches show what DDP must expect.
    """

    placement: Placement
    loss: ShardLoss
    optimizer_step: OptimizerStep | PassGradients
    split: Split
    state: ForwardState
    clock: StepClock
    ahead: OverlappedRead | None = None

    def __post_init__(self) -> None:
        placement, trained, self._world = self.placement, self.optimizer_step.trained, self.placement.world
        job, device = placement.job, self._world.device
        work = Work(self.split, self._world.world_size, self._world.rank)
        forwards = placement.forwards()
        self.replica = Replica(job.seed, placement.model, device, self.state, work, forwards, self.clock)
        sparse, sums = sparse_parameters(self.loss.model), placement.sums(list(trained.values()))
        aligns = must_align(job, device)
        self._trained = Trained(self.loss, trained, sparse, sums, self.state, self.clock, self.ahead, aligns)
        self._reduction: Reduction | None = None
        # DDP of the others waits for the gradients of a worker without rows; FSDP for its rounds, which dummies are.
        is_waited_for = self._world.world_size > 1 and not placement.is_sharded
        self._without_rows = [DummyBatch(None, 0)] if is_waited_for else []
        self.flops: Flops | None = None  # of a row, on rank 0, from the first step on, if the job asks for them

    def run(self, loaded: LoadedStep, stats: StepSums, on_shard: OnShard | None = None, number: int = 0) -> None:
        """Run a step's shards forward and backward; return when gradients and `stats` are summed over the workers.

        Every rank calls this. `on_shard` gets each shard with its batch and output. `number` tells the passes of a
        step apart, for their random numbers. Raises ModelError, which names step and shard, for user errors.
        """
        replica, clock = self.replica, self.clock
        if replica.forwards.are_collective:
            loaded = replica.forwards.begin(loaded)
        # Before the reduction is built, in the first step: for that a shard runs with its outputs' gradients.
        is_built = self._reduction is not None
        loaded, has_run = self.loss.prepare(replica, loaded, self.optimizer_step.seed, number, is_built)
        reduction, loaded = (self._reduction, loaded) if self._reduction is not None else self._built(loaded, stats)
        # Losses are divided by these rows first. The true divisor is the weight of the whole batch, which is known
        # only once `stats` is summed; then `OptimizerStep.apply` corrects it. Most losses have the rows as their
        # weight.
        whole = loaded.whole.stop - loaded.whole.start
        filled = [shard.shard for shard in loaded.shards if shard.rows]
        reduction.begin(loaded.step, filled, num_filled(whole, self.split.shards))
        dummies = replica.dummies(loaded.step, len(filled)) if replica.forwards.are_collective else []
        if not filled and not dummies:
            dummies = self._without_rows
        if not has_run:  # else its forward has written them
            replica.begin(len(filled))
        if len(filled) < len(loaded.shards) and loaded.lacks_shard_0:
            self.state.keep()  # without shard 0, the step leaves the state as it is
        left = len(filled) + len(dummies)
        for turn in replica.rounds(loaded, dummies):
            left -= 1
            # Around the forward too: there DDP decides whether the backward exchanges gradients, as a worker's last.
            with reduction.shard(None if turn.shard is None else turn.shard.shard, not left):
                clock.enter(Part.FORWARD)
                loss = self._forward(reduction, turn, stats, number)
                if turn.shard is not None and on_shard is not None:
                    on_shard(turn.shard, turn.batch, self.loss.result.step_output)
                clock.enter(Part.BACKWARD)
                seed = self.optimizer_step.seed(loss, whole)
                self._backward(reduction, turn, loss, seed, None if left else stats.numbers, loaded.step)
            del loss  # and its graph, before the next batch is read
        replica.running_batch = None
        for parameters in reduction.summed(stats.numbers):
            self.optimizer_step.take_norms(parameters)
        if self.state.finish(number == 0):  # in early steps
            check_sums_once({"": self.placement.model, **self.state.beside})  # a forward may have made one
            if self._world.world_size > 1:
                self.optimizer_step.hooks.check_same()

    def _forward(self, reduction: Reduction, turn: Round, stats: StepSums, number: int) -> torch.Tensor:
        """Return the sum of a shard's losses, and take its sums and weights in.

        In a round without a shard, return a zero whose backward reaches the parameters for which others wait.
        """
        shard, replica = turn.shard, self.replica
        if shard is None:
            zero = replica.run(None, reduction.called, turn.batch, turn.rows)
            return zero * 0.0 if turn.rows else zero
        replica.running_batch = turn.batch, turn.rows
        loss = replica.run(shard, reduction.called, turn.batch, turn.rows, shard.shard, number=number)
        row = self.loss.result.row
        assert row is not None
        stats.put(shard.shard, row)
        if shard.shard == 0:
            self.state.keep()  # every worker goes on from the writes of shard 0
        return loss

    def _backward(
        self,
        reduction: Reduction,
        turn: Round,
        loss: torch.Tensor,
        seed: torch.Tensor,
        stats: torch.Tensor | None,
        step: int,
    ) -> None:
        """Add the loss's gradient; with `stats`, in a worker's last backward, begin the sum over the workers."""
        hooks = self.optimizer_step.hooks
        if RemovableHandle.next_id != hooks.seen:
            hooks.look()
        backward = (
            partial(loss.backward, seed) if stats is None else partial(reduction.last_backward, loss, seed, stats)
        )
        try:
            if turn.rows and self.loss.result.is_nothing:  # of weight 0: 0 times its gradient may be NaN
                with reduction.adding_nothing():
                    backward()
            else:
                backward()
        except (Exception, SystemExit) as error:
            where = f"step {step}" if turn.shard is None else location(turn.shard)
            hint = "" if turn.shard is None else batch_hint(error, turn.batch)
            raise_as(error, f"{where}: backward", lambda _: hint)

    def set_apart(self) -> list[torch.Tensor | None]:
        """Take the sums of earlier passes out of the gradients; this pass's may be in the same memory."""
        parameters = self._trained.parameters.values()
        earlier = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return earlier

    def add(self, earlier: list[torch.Tensor | None]) -> None:
        """Add what was set apart to the gradients."""
        for parameter, before in zip(self._trained.parameters.values(), earlier, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def _built(self, loaded: LoadedStep, stats: StepSums) -> tuple[Reduction, LoadedStep]:
        """Build the job's reduction; with `find_unused_parameters: auto`, the first shards show if DDP must look."""
        job, trained, loaded_shards = self.placement.job, self._trained, iter(loaded.loaded)
        first = [next(loaded_shards) for _ in loaded.shards[:1]]
        if self.placement.counts_flops and first and first[0].shard.rows:
            with self._trial():
                run = partial(self._try, trained.loss, first[0])
                self.flops = counted_flops(run, first[0].shard.rows, job, self._world.device)
        unused = job.find_unused_parameters
        if not self.placement.is_sharded and self._world.world_size > 1:
            types = {parameter.device.type for parameter in trained.parameters.values()}
            if len(types) > 1:
                raise JobError(
                    f"devices: must be of one type if there are several workers, got {' and '.join(sorted(types))}"
                )
            if unused == "auto":
                unused = self._leave_unused(first)
        self._reduction = self.placement.reduction(trained, bool(unused), stats.numbers.numel())
        return self._reduction, loaded._replace(loaded=chain(first, loaded_shards))

    def _leave_unused(self, first: Sequence[LoadedShard]) -> bool:
        """Return whether any worker's first shard leaves a parameter without a gradient, by a trial."""
        unused, trained = torch.zeros(1, device=self._world.device), self._trained
        sparse = {id(parameter) for parameter in trained.sparse}
        with self._trial(), for_trial(trained.loss, trained.sparse, self.placement.job.compile) as called:
            for loaded in first:
                if not loaded.shard.rows:
                    unused += 1  # it cannot show that all parameters are used
                    continue
                self._try(called, loaded)
                unused += any(param.grad is None for param in trained.parameters.values() if id(param) not in sparse)
        with waiting("the other workers' first shards"):
            dist.all_reduce(unused, dist.ReduceOp.MAX, group=everyone())
            return bool(unused.item())

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Run a shard in the block on this worker alone, without a change of the state."""
        self.replica.begin(2)
        yield
        self.replica.restore()
        self.optimizer_step.drop_gradients()

    def _try(self, called: Callable[..., torch.Tensor], loaded: LoadedShard) -> None:
        """Run forward and backward of a shard, with a copy of the batch: a model may write it."""
        shard = loaded.shard
        loss = self.replica.run(shard, called, copied(loaded.batch), shard.rows, shard.shard)
        self.optimizer_step.hooks.look()
        with reraise_as(f"{location(shard)}: backward", lambda error: batch_hint(error, loaded.batch)):
            loss.backward()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop the reduction's threads, put the hooks on gradients back, and let the model be freed."""
        self.optimizer_step.hooks.put_back()
        # A hook on a gradient may hold the model, as a method of it does, and torch keeps these hooks where the
        # garbage collector does not look: the model would never be freed.
        for parameter in self._trained.parameters.values():
            (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).clear()
        if self._reduction is not None:
            self._reduction.close()

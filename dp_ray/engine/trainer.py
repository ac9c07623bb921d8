"""A training on one worker: its model (`Trainer`), and the parts of which `train` in `tasks/train.py` makes a page.

Four nouns: a run has steps, a step has shards, and an update ends it. A `Pass` runs a step's shards, and is the
unit in which gradients are summed over the workers. A `TrainingStep` runs passes and updates: one of each in a
training that its job declares, and as many as a loop of the user's asks for.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dp_ray.engine.alignment import must_align
from dp_ray.engine.audit import StepAudit
from dp_ray.engine.average import EVALUATED, Average
from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.forward.model import begin_to_train, has_own_modes, returning
from dp_ray.engine.forward.replica import DummyBatch, Replica, Round
from dp_ray.engine.forward.state import StepState
from dp_ray.engine.forward.step import Compare, Metrics, OnShard, Step, as_tensor, row_of
from dp_ray.engine.forward.weights import make_room, synchronise
from dp_ray.engine.loads.loading import LoadedShard, LoadedStep, OverlappedRead
from dp_ray.engine.optimizer import Schedule, runs_users_code
from dp_ray.engine.placement import Placement
from dp_ray.engine.random import seed_all
from dp_ray.engine.sharded.state import whole_tensors
from dp_ray.engine.sums.gradient_hooks import check_sums_once
from dp_ray.engine.sums.reduce import NOTHING, Reduction, ShardLoss, Trained
from dp_ray.engine.sums.tree_sum import make_gradients_dense, sparse_parameters
from dp_ray.engine.sums.votes import Lagged, StepSums, Totals
from dp_ray.engine.sums.whole_batch import BatchLoss, shard_loss
from dp_ray.engine.update import Gradients, OptimizerStep, Updates
from dp_ray.engine.user_code import ShardSize, batch_hint, location, raise_advised, raise_as, reraise_as
from dp_ray.engine.world import is_gpu
from dp_ray.errors import JobError, ModelError
from dp_ray.plan.history import of_further
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Split, Work, num_filled

WRITTEN = "written"  # the key, in a checkpoint, of what forwards write and the model's own state lacks


class Update(NamedTuple):
    """The results of a step on the whole batch; tensors are still on the device.

    `sums` are the row of its `Totals`. `learning_rate` is that of the first parameter group. `gradient_norm` is the
    norm of the whole batch's gradient before clipping. `stops` asks the worker to stop because one of the workers
    asked for it; all workers get it after the same step. `is_sum`: see `Totals`.
    """

    sums: torch.Tensor
    learning_rate: float
    gradient_norm: torch.Tensor
    stops: bool
    is_sum: bool = False


class TrainedModel:
    """A model in training on one worker, the same on all workers, and all that changes with its weights.

    `optimizer_step` is the job's, or the updates of a loop of the user's. `step` is the one that runs.
    """

    over_batch: Mapping[str, Compare]  # the functions that see the whole batch
    seeds_updates = False  # whether an update may run code of the user's, which may draw random numbers
    ahead: OverlappedRead | None = None  # reads a batch while the gradients are summed over the workers
    state: StepState
    measured: list[str]  # what each step measures, by name: the loss, and then metrics or what a loop logs

    def __init__(
        self,
        placement: Placement,
        split: Split,
        updates: Updates | None,
        clock: StepClock | None,
    ) -> None:
        job, world, model = placement.job, placement.world, placement.model
        self.placement, self.model, self.called = placement, model, placement.called
        self.split, self.clock = split, clock or StepClock()
        if job.bitwise:
            make_gradients_dense(model)  # the fixed tree adds only dense ones
        begin_to_train(model)
        self.optimizer_step: OptimizerStep | Updates = placement.optimizer_step() if updates is None else updates
        self.schedule: Schedule = self.optimizer_step.schedule
        self.average: Average | None = placement.average(self.optimizer_step)
        self.step: TrainingStep | None = None
        self.passes: dict[Any, Any] = {}  # by what tells one from another
        self.over_batch = {}
        self.may_lose_rows = job.may_lose_rows
        self.is_on_gpu = is_gpu(world.device)
        self.votes = Lagged() if world.world_size > 1 else None  # the loop of a worker alone stops without a vote

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on; its tensors are the live ones, not copies."""
        state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        written, evaluated = self.state.state(), self.optimizer_step.evaluated()
        return {**state, **({WRITTEN: written} if written else {}), **({EVALUATED: evaluated} if evaluated else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; raises ModelError if it belongs to another model or optimizer."""
        written = whole_tensors(state.get(WRITTEN, {}))
        make_room(self.model, state["model"])
        for name, part in self._parts().items():
            if name == "ema" and name not in state:
                continue  # another run's checkpoint: the average starts from its weights
            self.placement.load_state(name, part, state.get(name))
        self.state.load(written)

    def _parts(self) -> dict[str, Any]:
        """Return the objects with a state, by their keys in a checkpoint; the model first: the average needs it."""
        average = {} if self.average is None else {"ema": self.average}
        return {"model": self.model, **self.optimizer_step.stateful, **average}

    def synchronise(self) -> None:
        """Give every rank rank 0's weights, and state beside them; every rank calls this, once they are loaded."""
        for module in dict.fromkeys((self.model, *self.state.beside.values())):
            synchronise(module)
        if self.average is not None:
            self.average.begin()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Give the model to evaluate: with the average of the weights if the job says so, else the optimizer's.

        After the block it has the modes of before, and then the weights of before, to the bit.
        """
        ema = self.placement.job.ema
        average = self.average if ema is not None and ema.evaluate else None
        in_place = self.optimizer_step.evaluating if average is None else average.in_place
        writes = average is not None or has_own_modes(self.called)
        around = self.state.comparing_around() if writes else nullcontext()
        with around, in_place(), returning(self.called):
            yield self.called

    def _new_state(self, beside: Mapping[str, nn.Module]) -> StepState:
        """Return the state that forwards write, of the model and of modules beside it."""
        placement, job = self.placement, self.placement.job
        aligns = must_align(job, placement.world.device)
        check_sums_once({"": self.model, **beside})
        may_drop = placement.outlives_group or job.audit is not None
        state = StepState(self.model, placement.parts(), beside, aligns, may_drop)
        placement.watch_attributes(state)
        return state

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Have an error of the block say, if a step is out of memory, what to change: fewer rows, if a pass runs."""
        try:
            yield
        except (RuntimeError, ModelError) as error:
            step = self.step
            if step is None:
                raise
            raise_advised(error, self.placement.job, f"step {step.number}", step.size)

    def close(self) -> None:
        """Stop the threads of the reductions, and let the model be freed."""
        for a_pass in self.passes.values():
            a_pass.close()


class Trainer(TrainedModel):
    """The model of a training that its job declares: a step is one pass, `gradient`, and one update."""

    optimizer_step: OptimizerStep

    def __init__(
        self,
        placement: Placement,
        step: Step,
        measures: Metrics,
        split: Split,
        clock: StepClock | None = None,
    ) -> None:
        super().__init__(placement, split, None, clock)
        job, world = placement.job, placement.world
        loss = shard_loss(placement.called, step, measures, job, world.device)
        self.over_batch, self.measures = loss.over_batch, measures
        self.state = self._new_state(loss.beside)
        self.ahead = OverlappedRead()
        rates = [of_further(number)[0] for number in range(1, len(self.optimizer_step.optimizers))]
        self.measured = [*measures.names[:1], *rates, *measures.names[1:]]
        self.gradient = self.passes["gradient"] = Pass(self, loss, self.optimizer_step.gradients)
        self.seeds_updates = bool(job.hooks.given) or any(
            runs_users_code(spec) for _, spec in (*job.optimizers, *job.schedulers)
        )


@dataclass(eq=False)
class TrainingStep:
    """A step of a training: passes over a global batch, and updates by their gradients.

    `loaded` has this worker's shards. `on_shard` gets each of the first pass, with its batch and output.
    `wants_stop` asks all workers to stop after the step; `stops` says that one of them has asked. `updated` has the
    learning rate of each update, and the norm of its gradient. `is_empty` says, once a pass has run, that no row is
    left. With an `audit` the first pass is audited, and done again where a worker has computed wrong, once.
    """

    trainer: TrainedModel
    number: int
    loaded: LoadedStep
    on_shard: OnShard | None = None
    wants_stop: bool = False
    audit: StepAudit | None = None
    totals: Totals | None = field(default=None, init=False)  # of the first pass
    num_passes: int = field(default=0, init=False)  # that have begun
    updated: dict[int, tuple[float, torch.Tensor]] = field(default_factory=dict, init=False)
    has_updated: bool = field(default=False, init=False)
    is_empty: bool = field(default=False, init=False)
    stops: bool = field(default=False, init=False)
    weight: Any = field(default=1.0, init=False)  # of the first pass
    running: LoadedStep | None = field(default=None, init=False)  # what a pass goes over

    def backward(self, a_pass: "Pass", loaded: LoadedStep | None = None) -> Totals:
        """Run a pass: forward and backward of the shards, and the sum of their gradients over all workers.

        It goes over the step's shards, or over those of `loaded`. Every rank calls this. Returns the sums and weights
        of what it measures. Those of the first pass decide on all workers alike: whether to stop, and whether there
        is a row to update by.
        """
        trainer, stats, number, is_first = self.trainer, a_pass.stats, self.num_passes, self.totals is None
        self.num_passes, self.running, trainer.step = number + 1, loaded or self.loaded, self
        stats.begin()
        if is_first:
            if self.wants_stop:
                stats.vote()  # before the gradients: the vote rides on their all-reduce
            if trainer.may_lose_rows:
                stats.set_aside(sum(len(shard.missing) for shard in self.loaded.shards))
        a_pass.audit = audit = self.audit if is_first else None
        a_pass.run(self.running, self.on_shard if is_first and loaded is None else None, number)
        if audit is not None and audit.verdict:
            return self._done_again(a_pass, audit)
        self.running = None
        trainer.clock.enter(Part.UPDATE)
        totals = stats.total()
        if is_first:
            self.totals, whole = totals, self.loaded.whole
            # A loss over the batch, or a sum, is not divided by rows: its gradient is the whole batch's.
            self.weight = totals.weight if a_pass.loss.is_of_rows else whole.planned_rows
            if trainer.votes is not None:
                self.stops = bool(trainer.votes.take(totals.votes))
            if trainer.may_lose_rows:
                on_error = trainer.placement.job.on_error
                # To read the number of missing samples waits for the device: only if the quarantine has room for it.
                may_be_empty = on_error is not None and whole.rows <= on_error.quarantine
                self.is_empty = whole.rows == 0 or (may_be_empty and int(totals.missing) == whole.planned_rows)
        return totals

    def _done_again(self, a_pass: "Pass", audit: StepAudit) -> Totals:
        """Undo the first pass, which an audit has found wrong, and run it again; raises what `settle` raises."""
        trainer, auditor = self.trainer, audit.auditor
        audit.settle()
        assert isinstance(trainer.optimizer_step, OptimizerStep)
        trainer.state.drop()
        trainer.optimizer_step.drop_gradients()
        self.num_passes, self.on_shard, self.audit = 0, None, replace(audit)  # its shards are told already
        with auditor.read(self.number, auditor.world.rank) as self.loaded:
            return self.backward(a_pass)

    def update(self, optimizer_step: OptimizerStep, number: int = 0) -> None:
        """Update the parameters by their gradients: the training's update of this `number`. Without rows, do nothing.

        The gradients are those of the first pass, of the sum of its losses divided by the rows of the whole batch.
        """
        trainer = self.trainer
        trainer.state.is_open = False  # from here on the step cannot be dropped
        if trainer.seeds_updates or optimizer_step.gradients.hooks.hooked:
            self.seed()
        if self.is_empty and optimizer_step.may_skip():
            norm = optimizer_step.skip()
        else:
            norm = optimizer_step.apply(self.weight, self.loaded.whole.planned_rows, self.number)
        first, *further = optimizer_step.rates
        self.updated[number] = first, norm
        if further:  # of a declared training; a loop's update has one optimizer
            assert self.totals is not None
            cells = [cell for rate in further for cell in (rate, 1.0)]
            self.totals = self.totals.with_more(as_tensor(cells, trainer.placement.world.device))
        if not optimizer_step.has_skipped:  # as fp16 does where it overflows: the average takes in no weights twice
            self.has_updated = True

    def end(self) -> Update:
        """End the step: the average of the weights takes them in. Return its results."""
        trainer = self.trainer
        if trainer.average is not None and self.has_updated:
            trainer.average.update()
        trainer.step = None
        assert self.totals is not None
        return Update(self.totals.row, *self.updated[0], self.stops, self.totals.is_sum)

    def seed(self) -> None:
        """Seed what code of the user's draws until the next pass: the same on all workers, whatever they have run."""
        trainer, passes = self.trainer, self.num_passes
        key = (self.number // trainer.split.steps, self.number, *((passes,) if passes != 1 else ()))
        seed_all(derive_seed(trainer.placement.job.seed, "update", *key), trainer.placement.world.device)

    @property
    def size(self) -> ShardSize | None:
        """How the rows of the pass that runs are cut; None between passes, whose memory does not depend on them."""
        running = self.running
        if running is None:
            return None
        key = "batch_size" if running is self.loaded else "batch"
        of_shard, of_batch = running.shards[0].rows if running.shards else 0, running.whole.planned_rows
        return ShardSize(of_shard, of_batch, self.trainer.split.shards, key)


class Pass:
    """Forward and backward over the shards of a step: the unit in which gradients are summed over the workers.

    After it, the gradients are those of the summed loss of the whole batch, on every worker, divided by the batch's
    rows unless the loss is that sum. A step may have several passes, as of a GAN, each with a loss of its own.
    `stats` has the sums and weights of what the loss measures. `rows` says, by the paths of the outputs for a loss
    over the batch, which have rows, as far as that is known. An `audit` has a leaf of the step run again.
    """

    audit: StepAudit | None = None

    def __init__(self, model: TrainedModel, loss: ShardLoss, gradients: Gradients) -> None:
        self.placement, self.loss, self.gradients = model.placement, loss, gradients
        self.state, self.clock, self._split = model.state, model.clock, model.split
        self.rows: Mapping[str, bool] = {}
        placement, trained, self._world = self.placement, gradients.trained, self.placement.world
        job, world = placement.job, self._world
        work = Work(self._split, world.world_size, world.rank)
        place = job.seed, placement.model, world.device, self.state, work, placement.forwards(), self.clock
        self.replica = Replica(*place, after=loss)
        sparse, sums = sparse_parameters(loss.model), placement.sums(list(trained.values()))
        aligns = must_align(job, world.device)
        self._trained = Trained(loss, trained, sparse, sums, self.state, self.clock, model.ahead, aligns)
        self.stats = StepSums(self._split.shards, len(loss.measures.names), world, loss.measures.is_sum)

    def run(self, loaded: LoadedStep, on_shard: OnShard | None = None, number: int = 0) -> None:
        """Run a step's shards forward and backward; return when gradients and `stats` are summed over the workers.

        Every rank calls this. `on_shard` gets each shard with its batch and output. `number` tells the passes of a
        step apart, for their random numbers. Raises ModelError, which names step and shard, for user errors.
        """
        replica, clock, stats, audit = self.replica, self.clock, self.stats, self.audit
        if replica.forwards.are_collective:
            loaded = replica.forwards.begin(loaded)
        has_forward = False  # whether the pass's only forward has run
        if isinstance(self.loss, BatchLoss):
            loaded, has_forward = self.loss.prepare(replica, loaded, self.gradients.of_loss, number, self.rows)
        reduction = self._reduction
        # Losses are divided by these first. The true divisor is the weight of the whole batch, which is known only
        # once `stats` is summed; then `Gradients.weigh` corrects it. Most losses have the rows as their weight.
        whole_rows = loaded.whole.planned_rows
        divisor = whole_rows if self.loss.is_of_rows else 1
        filled = [shard.shard for shard in loaded.shards if shard.rows]
        # DDP of the others waits for the gradients of a worker without rows; FSDP for its rounds, which dummies are.
        dummies = [DummyBatch(None, 0)] if not filled and self._world.world_size > 1 else []
        if replica.forwards.are_collective:
            dummies = replica.dummies(loaded.step, len(filled))
        left = len(filled) + len(dummies)
        # By the rows of the whole batch, which all workers know: so they plan the same exchange.
        reduction.begin(loaded.step, filled, num_filled(whole_rows, self._split.shards), left)
        num_runs = len(filled)
        if audit is not None:
            audit.begin(self, reduction, divisor)
            num_runs += 2  # any worker may be asked to run another shard after its own
        if not has_forward:  # else it has written the state
            replica.begin(num_runs, len(filled) < len(loaded.shards) and loaded.lacks_shard_0)
        for turn in replica.rounds(loaded, dummies):
            left -= 1
            clock.enter(Part.FORWARD)
            if audit is not None:
                audit.before(turn.shard, turn.batch)
            loss = self._forward(reduction, turn, number)
            if audit is not None:
                audit.after(turn.shard)
            if turn.shard is not None and on_shard is not None:
                on_shard(turn.shard, turn.batch, self.loss.result.step_output)
            clock.enter(Part.BACKWARD)
            gradient = self.gradients.of_loss(loss, divisor)
            self._backward(reduction, turn, loss, gradient, None if left else stats.numbers, loaded.step)
            del loss  # and its graph, before the next batch is read
        # On every worker to its end, where it waits for the last sums: `stats` is whole only then.
        reduction.finish(stats.numbers)
        if audit is not None:
            audit.compare(loaded.again)
        # After the sums: the broadcast of buffers, for which this waits, goes on while they come.
        if self.state.finish(number == 0):  # in early steps
            check_sums_once({"": self.placement.model, **self.state.beside})  # a forward may have made one
            if self._world.world_size > 1:
                self.gradients.hooks.check_same()

    def _forward(self, reduction: Reduction, turn: Round, number: int) -> torch.Tensor:
        """Return the sum of a shard's losses, and take its sums and weights in.

        In a round without a shard, return a zero whose backward reaches the parameters for which others wait.
        """
        shard, replica = turn.shard, self.replica
        if shard is None:
            zero = replica.run(None, reduction.called, turn.batch, turn.rows)
            return zero * 0.0 if turn.rows else zero
        args = turn.batch, turn.rows, shard.shard
        loss = replica.run(shard, reduction.called, *args, number=number, keeps=True)
        row = self.loss.result.row
        assert row is not None
        measures = self.loss.measures
        if measures.mixture is not None:
            by_source = measures.by_source(measures.mixture, shard, self.loss.result.step_output)
            row = [*row, *row_of(by_source, self._world.device)]
        self.stats.put(shard.shard, row)
        return loss

    def _backward(
        self,
        reduction: Reduction,
        turn: Round,
        loss: torch.Tensor,
        gradient: torch.Tensor,
        stats: torch.Tensor | None,
        step: int,
    ) -> None:
        """Add the loss's gradient; with `stats`, in a worker's last backward, begin the sum over the workers."""
        hooks = self.gradients.hooks
        if RemovableHandle.next_id != hooks.seen:
            hooks.look()
        # A dummy batch, or a loss of weight 0: 0 times its gradient may be NaN.
        adds_nothing = turn.rows and (turn.shard is None or self.loss.result.is_nothing)
        try:
            with reduction.adding_nothing() if adds_nothing else NOTHING:
                reduction.backward(None if turn.shard is None else turn.shard.shard, loss, gradient, stats)
        except (Exception, SystemExit) as error:
            where = f"step {step}" if turn.shard is None else location(turn.shard)
            hint = "" if turn.shard is None else batch_hint(error, turn.batch)
            raise_as(error, f"{where}: backward", lambda _: hint)

    @cached_property
    def _reduction(self) -> Reduction:
        """The job's reduction; made in the first step, when the state to train is there."""
        job, types = self.placement.job, {each.device.type for each in self._trained.parameters.values()}
        if not self.placement.is_sharded and self._world.world_size > 1 and len(types) > 1:
            raise JobError(
                f"devices: must be of one type if there are several workers, got {' and '.join(sorted(types))}"
            )
        return self.placement.reduction(self._trained, job.find_unused_parameters, self.stats.numbers.numel())

    @contextmanager
    def again(
        self,
        loaded: LoadedShard,
        number: int = 0,
        around: AbstractContextManager[object] | None = None,
        in_step: bool = False,
    ) -> Iterator[torch.Tensor]:
        """Run a shard's forward beside the reduction, on this worker alone; the block runs its loss's backward.

        The forward runs in `around`. In the block, gradients are the shard's alone. After it gradients, state, and
        what requires a gradient are as before; `in_step`, after the step's shards, the state is as before the step.
        Raises ModelError, which names step and shard, for user errors.
        """
        shard, parameters = loaded.shard, list(self.placement.model.parameters())
        before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

        def forward(batch: Any) -> torch.Tensor:
            with around or NOTHING:
                loss: torch.Tensor = self.loss(batch, shard.rows, shard.shard)
                return loss

        try:
            with self.replica.again(loaded, forward, number, in_step) as loss:
                self.gradients.hooks.look()
                with reraise_as(f"{location(shard)}: backward", lambda error: batch_hint(error, loaded.batch)):
                    yield loss
        finally:
            for parameter, requires_grad, gradient in before:
                parameter.requires_grad_(requires_grad)  # a forward may have frozen it
                parameter.grad = gradient

    def close(self) -> None:
        """Stop the reduction's threads, put the hooks on gradients back, and let the model be freed."""
        self.gradients.hooks.put_back()
        # A hook on a gradient may hold the model, as a method of it does, and torch keeps these hooks where the
        # garbage collector does not look: the model would never be freed.
        for parameter in self._trained.parameters.values():
            (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).clear()
        if (exchange := getattr(vars(self).get("_reduction"), "exchange", None)) is not None:
            exchange.close()

"""A training whose loop is the user's: `Loop` is what the job's key `loop` is called with, on every worker.

Begin at `train_by_loop`, then `Loop.steps`. A step's passes are the engine's (`engine.trainer.Pass`), with buckets of
their own; what stands around the steps is a declared training's (`tasks.train.training_steps`).

Workers must run the same passes in the same order. One that does not would have its gradients summed with others'; so
before each pass all compare what they are about to run (`SameCalls`).
"""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.gradient_hooks import InEachBackward, check_sums_once
from dp_ray.engine.loading import LoadedShard, LoadedStep
from dp_ray.engine.model import autocast
from dp_ray.engine.optimizer import scale_by
from dp_ray.engine.placement import Placement
from dp_ray.engine.random import seed_all
from dp_ray.engine.reduce import ShardLoss, make_gradients_dense, numbers_of
from dp_ray.engine.replica import Replica
from dp_ray.engine.step import Metrics, Step, StepOutput
from dp_ray.engine.trainer import Pass, TrainedModel, Update
from dp_ray.engine.update import GivenOptimizerStep, PassGradients, Updates
from dp_ray.engine.user_code import raise_as
from dp_ray.engine.votes import VOTES, Lagged, LossWatch, StepSums
from dp_ray.engine.whole_batch import BatchLoss, ShardOutput, WholeBatches, merge
from dp_ray.engine.world import World, all_gather, everyone, gathered, has_peers, is_gpu, new_group
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import COLUMNS, Job
from dp_ray.job.plan import checkpoints_of
from dp_ray.job.targets import bound
from dp_ray.messages import StoppedEarly
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard, Work, worker_pieces
from dp_ray.rundir.checkpoint import pack
from dp_ray.system.threads import waiting
from dp_ray.tasks.checkpoints import TrainState
from dp_ray.tasks.early_stopping import Patience
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import PlacedTraining, TrainingStep, begun_training, place_training, training_steps
from dp_ray.tensors.files import is_dense
from dp_ray.tensors.flat import as_bytes
from dp_ray.tensors.scatter import cut, num_rows
from dp_ray.text import listed

OF_EACH = re.compile(r"eval_.*|(learning_rate|gradient_norm)_\d+")  # columns of evaluations and optimizers
OfRows = Callable[[Any], Any]  # of a shard's batch


def train_by_loop(context: Context) -> None:
    """Have the job's `loop` train from the newest checkpoint, or from the start, to the end."""
    loop = Loop(place_training(context))
    with loop._watched():
        try:
            bound("loop", context.job.loop)(loop)
        except BaseException as error:
            loop._throw(error)
            if error is loop._error or not isinstance(error, Exception | SystemExit):
                raise  # no mistake of the function's
            raise_as(error, "loop")
        loop._end()


class Loop:
    """A training on one worker, as its loop sees it; the job's function calls its methods alike on all workers.

    `model` is the job's, on `device`. `num_steps` is the number of all steps. What the model, the optimizers and the
    states hold is that of the newest checkpoint once `steps` gives the first step.
    """

    def __init__(self, placed: PlacedTraining) -> None:
        self._placed = placed
        self._updates: list[LoopUpdate] = []
        self._states: dict[str, Any] = {}
        self._running: Iterator[LoopStep] | None = None
        self._is_through = False
        self._error: BaseException | None = None  # of what stands around the steps
        self._failed: BaseException | None = None  # of a pass or an update
        self._step: LoopStep | None = None  # the one whose body runs
        self._reason = ""  # why the loop is to end after this step
        self._is_summing = self._is_gathering = self._is_updating = False
        self.model: Any = placed.placement.model
        self.device = placed.context.world.device
        self.num_steps = placed.split.total_steps

    def optimizer(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> "LoopUpdate":
        """Return the update by an optimizer of some of the model's parameters; each update steps the `scheduler`.

        Both are kept in checkpoints, by the order of these calls. Raises JobError for tensors that are none of the
        model's.
        """
        self._check_not_begun("run.optimizer")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise JobError(
                "run.optimizer: a ReduceLROnPlateau watches a metric, and the scheduler is stepped at each update; "
                "set the rate in the loop: group['lr'] of optimizer.param_groups"
            )
        placement = self._placed.placement
        given = GivenOptimizerStep(placement.job, placement.model, self.device, optimizer, scheduler)
        update = LoopUpdate(self, given, len(self._updates))
        self._updates.append(update)
        return update

    def state(self, name: str, value: Any) -> Any:
        """Return the value, which each checkpoint keeps; it is filled from the newest one before the first step.

        It has a `state_dict`, or is a dict or list of plain values and tensors. It must be the same on all workers.
        """
        self._check_not_begun("run.state")
        if name in self._states:
            raise JobError(f"run.state: there are two states of the name {name!r}")
        kept = (
            value if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else PlainState(name, value)
        )
        try:
            pack(kept.state_dict())
        except ModelError as error:
            raise JobError(f"run.state({name!r}): cannot be kept: {error}") from None
        self._states[name] = kept
        return value

    def steps(self) -> Iterator["LoopStep"]:
        """Yield the steps that are left, each with this worker's shards of a global batch."""
        if self._running is not None:
            raise JobError("run.steps: has been called before, and a loop goes over the steps once")
        self._running = self._steps()
        return self._running

    def stop(self, reason: str) -> None:
        """End the training after this step, as one that has stopped early; the run says why."""
        self._reason = str(reason) or "the loop has stopped it"

    def _steps(self) -> Iterator["LoopStep"]:
        try:
            with begun_training(self._placed, self._trained) as (training, evaluation):
                stopping = StopOfLoop(self, training.context.job, training.state)
                trained = training.trainer
                assert isinstance(trained, LoopModel)
                for number, step in enumerate(training_steps(training, evaluation, stopping=stopping)):
                    self._step = LoopStep(self, trained, step)
                    yield self._step
                    if self._failed is not None:
                        raise self._failed
                    keeps = bool(self._states) and self._keeps_after(step.number)
                    if (self._reason or keeps) and step.number + 1 < self.num_steps:
                        stops = "run.stop" if self._reason else "no run.stop"
                        trained.calls.check(f"step {step.number}: {stops}")
                    step.update = self._step._end(is_first=number == 0)
                    if keeps:
                        check_same(self._states, step.number)
                    self._step = None
            self._is_through = True
        except GeneratorExit:  # closed by the loop: it ends early
            raise
        except BaseException as error:
            self._error = error  # a loop that catches it has not ended well
            raise

    @contextmanager
    def _calling(self, step: "LoopStep") -> Iterator[None]:
        """Run what all workers call alike in the block; after an error of one of them none goes on."""
        if self._failed is not None:
            raise self._failed
        if self._is_summing or self._is_gathering:
            raise ModelError("the function of a pass calls the step or an update; call these in the loop's body")
        if self._step is not step:
            raise ModelError(f"step {step.number} has ended, and is called again; call the step that the loop is in")
        try:
            yield
        except BaseException as error:
            self._failed = error
            raise

    def _keeps_after(self, step: int) -> bool:
        """Return whether each run of the job keeps its state after a step, whatever the clock says."""
        periods = checkpoints_of(self._placed.context.job).due.periods(self._placed.split)
        return step + 1 == self.num_steps or any((step + 1) % period == 0 for period in periods)

    def _trained(self, placed: PlacedTraining, step: Step, measures: Metrics, times: Any) -> TrainedModel:
        updates = Updates([update._given for update in self._updates], self._states)
        watch = LossWatch(str(placed.context.run)) if placed.context.job.stop_on_nan else None
        return LoopModel(placed, updates, times.clock, watch)

    def _throw(self, error: BaseException) -> None:
        """Have what stands around the steps end as after an error of the body's."""
        running: Any = self._running
        if running is not None and not self._is_through and self._error is None:
            try:
                running.throw(error)
            except BaseException as found:
                if found is not error and found.__cause__ is not error:  # as a generator raises a StopIteration
                    raise
            self._error = None  # it is the body's own

    def _end(self) -> None:
        """Check that the steps are through, once the job's function has returned."""
        if self._error is None and self._failed is not None:
            self._throw(self._failed)
            raise self._failed
        if self._error is not None:
            raise self._error
        if self._running is not None and self._reason and not self._is_through:
            with suppress(StopIteration):  # the loop has left the step that it stops after
                next(self._running)
        if self._step is not None:
            self._step._model.calls.check("the end of the loop")
        if not self._is_through:
            number = 0 if self._step is None else self._step.number
            error = ModelError(
                f"loop: it ended in step {number}, and {self.num_steps - number} of {self.num_steps} steps are left; "
                "go over all of run.steps(), or call run.stop(reason) to end after a step"
            )
            self._throw(error)
            raise error

    def _check_not_begun(self, what: str) -> None:
        if self._running is not None:
            raise JobError(
                f"{what}: is called after run.steps(); call it before the loop, so that checkpoints keep it"
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Refuse, in the block, updates and gradients of the model's that the run does not know of."""
        parameters = list(self.model.parameters())
        of_model = {id(one) for one in parameters}

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            held = (one for group in optimizer.param_groups for one in group["params"])
            if not self._is_updating and any(id(one) in of_model for one in held):
                raise ModelError(
                    f"{type(optimizer).__qualname__}.step() was called by itself, so that the run knows nothing of "
                    "it; write update = run.optimizer(optimizer) before the loop, and update.step() in it"
                )

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(before_step).remove)
            for one in parameters:
                if one.requires_grad:
                    handle: Any = one.register_post_accumulate_grad_hook(InEachBackward(_check_summed, self))
                    stack.callback(handle.remove)
            yield


def _check_summed(loop: Loop, _: torch.Tensor) -> None:
    """Raise ModelError for a gradient that comes to a parameter outside a pass."""
    if not loop._is_summing:
        raise ModelError(
            "a backward of the loop's own gave the model a gradient, which is this worker's alone; write "
            "step.backward(loss, of), which sums it over the shards and the workers"
        )


class LoopUpdate:
    """The update of some parameters by an optimizer: `run.optimizer` returns it."""

    def __init__(self, loop: Loop, given: GivenOptimizerStep, number: int) -> None:
        self._loop, self._given, self._number = loop, given, number

    @property
    def rate(self) -> float:
        """The learning rate of the optimizer's first group."""
        return self._given.learning_rate

    def step(self, clip: float | None = None, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters by their gradients, clipped to the norm `clip`, and drop these gradients.

        An optimizer that computes the loss several times in an update, like LBFGS, gets a `closure`, which calls
        `step.backward` and returns the loss; gradients are dropped before each call, and all calls have the random
        numbers of the first.
        """
        loop, given = self._loop, self._given
        step = loop._step
        if step is None:
            raise ModelError("update.step: is called outside a step of run.steps()")
        if closure is not None and clip is not None:
            raise ModelError("update.step: clip is not possible with a closure, whose gradients the optimizer takes")
        step._model.clock.enter(Part.UPDATE)
        rate, loop._is_updating = given.learning_rate, True
        try:
            with loop._calling(step):
                if closure is None:
                    norm = given.step(clip, step.number)
                else:
                    norm = given.step_with(self._again(closure, step), step.number)
        finally:
            loop._is_updating = False
        step._updated[self._number] = rate, norm

    def _again(self, closure: Callable[[], Any], step: "LoopStep") -> Callable[[], Any]:
        first = step._passes

        def called() -> Any:
            self._given.drop_gradients()
            step._passes, self._loop._is_updating = first, False
            try:
                with torch.enable_grad():
                    return closure()
            finally:
                self._loop._is_updating = True

        return called


class LoopStep:
    """A step of a loop: a global batch, of which this worker has some shards."""

    def __init__(self, loop: Loop, model: "LoopModel", step: TrainingStep) -> None:
        self._loop, self._model, self._of = loop, model, step
        self.number = step.number
        self.epoch = step.number // loop._placed.split.steps
        loaded = next(step.loaded)
        # Each pass goes over them. An error of reading names the shard.
        self._loaded = loaded._replace(loaded=list(loaded.loaded))
        self._passes = 0  # so many have begun
        self._sums: torch.Tensor | None = None  # of the first pass
        self._first: Any = None  # the same, or its numbers where they are known
        self._updated: dict[int, tuple[float, torch.Tensor]] = {}  # rate and norm, by the update's number
        self._logged: dict[str, Any] = {}
        self._seed()

    @property
    def rows(self) -> int:
        """The number of rows of the global batch, on all workers."""
        return self._loaded.whole.rows

    def log(self, **numbers: Any) -> None:
        """Add numbers to the step's row of the history: numbers or scalar tensors, the same names in each step."""
        taken = [name for name in numbers if name in COLUMNS or OF_EACH.fullmatch(name)]
        if taken:
            raise ModelError(f"step.log: {listed(taken)} is a column that each history has; give it another name")
        for name, value in numbers.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ModelError(f"step.log: {name} is a tensor of size {list(value.shape)}; log one number")
            if not isinstance(value, torch.Tensor | int | float):
                raise ModelError(f"step.log: {name} is a {type(value).__qualname__}; log one number")
            # A copy: the loop may change a tensor later in the step.
            self._logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def backward(
        self,
        loss: OfRows,
        of: nn.Module | Sequence[nn.Module],
        over: Callable[[Any, Any], Any] | None = None,
        batch: Any = None,
    ) -> torch.Tensor:
        """Add the gradient of the mean loss of the whole batch to the parameters of `of`; return that mean.

        `loss` gets a shard's batch, and returns one number for each row or (sum, weight). With `over` it returns
        {"outputs": ..., "target": ...}, and `over` gets those of the whole batch and returns one number. All
        parameters that are not of `of` are constant meanwhile. `batch` is a tree of tensors, the same on all workers,
        in place of the step's batch. Every worker calls this, with the same arguments.
        """
        with self._loop._calling(self):
            return self._backward(loss, of, over, batch)

    def _backward(self, loss: OfRows, of: Any, over: Any, batch: Any) -> torch.Tensor:
        model, loop = self._model, self._loop
        modules = [of] if isinstance(of, nn.Module) else list(of)
        trained = model.trained_of(modules)
        number, self._passes = self._passes, self._passes + 1
        label = f"pass {number}: step.backward({_name_of(loss)}, {listed(model.names_of(modules))})"
        model.calls.check(f"step {self.number}, {label}")
        a_pass = model.pass_for(loss, over, modules, trained)
        loaded = self._loaded if batch is None else model.cut(self._loaded, batch)
        stats = a_pass.stats
        stats.begin()
        is_first = self._sums is None
        if is_first:
            if self._of.wants_stop:
                stats.vote()  # it rides on the sums of the step's first pass
            stats.set_aside(sum(len(shard.missing) for shard in self._loaded.shards))
        loop._is_summing = True
        try:
            with model.only(trained):
                a_pass.run(loaded, loss, over, self._of.on_shard if is_first and batch is None else None, number)
        finally:
            loop._is_summing = False
        sums = stats.total()
        known: Any = sums if is_gpu(loop.device) else sums.tolist()
        if is_first:
            self._sums, self._first = sums, known
            if model.watch is not None:
                model.watch.take(self.number, known[0])
        a_pass.finish(known, loaded.whole.stop - loaded.whole.start, self.number)
        self._seed()
        return (sums[0] / sums[1]).detach()

    @torch.no_grad()
    def gather(self, function: OfRows, batch: Any = None) -> Any:
        """Return what a function gives of each shard, merged in order: the whole batch's, the same on all workers.

        It runs without gradients, but those that it enables itself. `batch` is that of `backward`. Returns None if
        all rows of the step were set aside.
        """
        model = self._model
        with self._loop._calling(self):
            number, self._passes = self._passes, self._passes + 1
            model.calls.check(f"step {self.number}, pass {number}: step.gather({_name_of(function)})")
            loaded = self._loaded if batch is None else model.cut(self._loaded, batch)
            self._loop._is_gathering = True
            found = model.gather(function, loaded, number)
            self._loop._is_gathering = False  # after an error no call goes on
            self._seed()
        return found

    def _seed(self) -> None:
        """Seed what the body draws until the next pass: the same on all workers, whatever shards they have run."""
        key = (self.epoch, self.number, *((self._passes,) if self._passes else ()))
        seed_all(derive_seed(self._model.placement.job.seed, "update", *key), self._loop.device)

    def _end(self, is_first: bool) -> Update:
        """Return what the step has come to; raises ModelError if it left gradients, or logged other names."""
        model, device = self._model, self._loop.device
        left = [name for name, one in model.model.named_parameters() if one.grad is not None]
        if left:
            raise ModelError(
                f"step {self.number}: the gradient of {listed(left)} is left at the step's end; update it "
                "(update.step()), or drop it (zero_grad()); to accumulate over more rows, set a larger batch_size, "
                "and shards"
            )
        if self._updated and model.average is not None:
            model.average.update()
        model.calls.read()
        rates = {number: update.rate for number, update in enumerate(self._loop._updates)}
        rates |= {number: rate for number, (rate, _) in self._updated.items()}
        numbers: dict[str, Any] = dict(self._logged)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        for number in range(1, len(self._loop._updates)):
            numbers[f"learning_rate_{number}"] = rates[number]
            numbers[f"gradient_norm_{number}"] = self._updated[number][1] if number in self._updated else zero
        if is_first:
            model.measured[1:] = numbers
        elif numbers.keys() == set(model.measured[1:]):
            numbers = {name: numbers[name] for name in model.measured[1:]}
        else:
            raise ModelError(
                f"step {self.number}: step.log has the names {listed(numbers)}, and in the first step it had "
                f"{listed(model.measured[1:])}; log the same in each step"
            )
        sums = torch.zeros(4, dtype=torch.float64, device=device) if self._sums is None else self._sums
        logged = [_scalar(number, device) for value in numbers.values() for number in (value, 1.0)]
        if logged:
            sums = torch.cat([sums[:2], torch.stack(logged), sums[2:]])
        norm = self._updated[0][1] if 0 in self._updated else zero
        votes = None if self._first is None else model.votes_of(self._first[VOTES])
        return Update(sums, rates.get(0, float("nan")), norm, bool(votes))


class LoopModel(TrainedModel):
    """The model of a loop, its updates and passes."""

    def __init__(self, placed: PlacedTraining, updates: Updates, clock: StepClock, watch: LossWatch | None) -> None:
        placement, world, job = placed.placement, placed.context.world, placed.context.job
        self.placement, self.model, self.called, self.watch = placement, placement.model, placement.called, watch
        self._split, self.clock = placed.split, clock
        if job.bitwise:
            make_gradients_dense(self.model)  # the fixed tree adds only dense ones
        self.optimizer_step, self.schedule = updates, updates.schedule
        self.average = placement.average(updates)
        if not self.model.training:
            self.model.train()
        check_sums_once({"": self.model})
        self.state = self._new_state({})
        self.measured = ["loss"]  # and what the first step logs
        self.calls = SameCalls(world)
        self._votes = Lagged() if world.world_size > 1 else None
        self._passes: dict[Any, LoopPass] = {}
        self._names = {id(module): name or "model" for name, module in self.model.named_modules()}
        self._replica: Replica | None = None
        self.constant: dict[str, nn.Parameter] = {}  # what would have gradients but for the pass that runs

    def names_of(self, modules: Sequence[nn.Module]) -> list[str]:
        """Return the names of parts of the model."""
        return [self._names.get(id(module), type(module).__qualname__) for module in modules]

    def trained_of(self, modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
        """Return the parameters that a pass trains, by name; raises ModelError if modules are not the model's."""
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            got = listed(dict.fromkeys(type(module).__qualname__ for module in modules)) or "no part"
            raise ModelError(f"step.backward: of is a part of run.model, or a list of parts, and got {got}")
        names = {id(one): name for name, one in self.model.named_parameters()}
        own = [one for module in modules for one in module.parameters()]
        if any(id(one) not in names for one in own):
            raise ModelError(f"step.backward: {listed(self.names_of(modules))} is no part of run.model")
        return {names[id(one)]: one for one in own if one.requires_grad}

    @contextmanager
    def only(self, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Have all other parameters need no gradient while the block runs."""
        ids = set(map(id, trained.values()))
        named = self.model.named_parameters()
        self.constant = {name: one for name, one in named if one.requires_grad and id(one) not in ids}
        for one in self.constant.values():
            one.requires_grad_(False)
        try:
            yield
        finally:
            for one in self.constant.values():
                one.requires_grad_(True)

    def pass_for(
        self, loss: OfRows, over: Any, modules: Sequence[nn.Module], trained: dict[str, nn.Parameter]
    ) -> "LoopPass":
        """Return the pass of a place in the code and what it trains; it is made once."""
        key = (_code_of(loss), _code_of(over) if over is not None else None, tuple(map(id, trained.values())))
        if key not in self._passes:
            self._passes[key] = LoopPass(self, modules, trained, over is not None, self._split)
        return self._passes[key]

    def cut(self, loaded: LoadedStep, batch: Any) -> LoadedStep:
        """Return a step whose shards are those of a batch of the loop's own."""
        job, world = self.placement.job, self.placement.world
        rows = num_rows(batch, job.batch_dim)
        if not rows:
            raise ModelError(
                f"step {loaded.step}: batch has no rows; give a tree of tensors with a row for each sample"
            )
        pieces = worker_pieces(rows, self._split.shards, world.world_size, world.rank)
        shards = [Shard(loaded.step, shard, start, stop, loaded.whole.epoch) for shard, start, stop in pieces]
        read = [
            LoadedShard(one, np.asarray(one.positions), cut(batch, one.start, one.stop, job.batch_dim))
            for one in shards
        ]
        return LoadedStep(loaded.step, shards, read, Shard(loaded.step, -1, 0, rows, loaded.whole.epoch))

    def gather(self, function: OfRows, loaded: LoadedStep, number: int) -> Any:
        """Call a function on this worker's shards; return the merged outputs of all workers."""
        placement, world = self.placement, self.placement.world
        job = placement.job
        if self._replica is None:
            work = Work(self._split, world.world_size, world.rank)
            self._replica = Replica(
                job.seed, self.model, world.device, self.state, work, placement.forwards(), self.clock
            )
        replica, own = self._replica, []
        filled = [one for one in loaded.loaded if one.shard.rows]
        replica.begin(len(filled))
        for one in filled:
            with autocast(job.precision, world.device):
                outputs = replica.run(one.shard, function, one.batch, number=number)
            own.append(ShardOutput(one.shard, outputs, None))
            if one.shard.shard == 0:
                self.state.keep()
        if loaded.lacks_shard_0:
            self.state.keep()
        self.state.share()
        self.state.finish(ends_step=number == 0)
        merged = merge(own, world.device, WholeBatches(job))
        return None if merged is None else merged.outputs

    def votes_of(self, votes: Any) -> float | None:
        """Return how many workers want to stop, as far as it is known; None for a worker alone."""
        return None if self._votes is None else self._votes.take(votes)

    def close(self) -> None:
        """Stop the threads of the reductions, and let the model be freed."""
        for one in self._passes.values():
            one.close()


class LoopPass:
    """A pass of a loop: what it trains, and the sums of its gradients. `stats` has the sums of its loss."""

    def __init__(
        self,
        model: LoopModel,
        modules: Sequence[nn.Module],
        trained: dict[str, nn.Parameter],
        is_over_batch: bool,
        split: Any,
    ) -> None:
        placement: Placement = model.placement
        job, world = placement.job, placement.world
        self._model, self._label = model, listed(model.names_of(modules))
        self._may_lose_rows, self._is_over_batch = job.may_lose_rows, is_over_batch
        self._loss: OfRows | None = None
        self._over: Callable[[Any, Any], Any] | None = None
        called = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        if is_over_batch:
            batches = WholeBatches(job, placement.row_trial())
            of_batch = {"loss": lambda outputs, target: self._over(outputs, target)}  # type: ignore[misc]
            loss: ShardLoss = BatchLoss(called, self._outputs, Metrics({}), job, world.device, batches, of_batch)
        else:
            loss = ShardLoss(called, self._shard, Metrics({}), job, world.device)
        self._gradients = PassGradients(trained)
        self._pass = Pass(placement, loss, self._gradients, split, model.state, model.clock)
        self.stats = StepSums(split.shards, 1, world)
        self._earlier: list[torch.Tensor | None] | None = None

    def _shard(self, _: nn.Module, batch: Any) -> Any:
        assert self._loss is not None
        value = self._loss(batch)
        total = value[0] if isinstance(value, tuple | list) and value else value
        if isinstance(total, torch.Tensor) and not total.requires_grad:
            self._refuse(batch)
        return value

    def _refuse(self, batch: Any) -> NoReturn:
        """Raise ModelError for a loss that trains nothing of its pass; it names what the loss does depend on."""
        assert self._loss is not None
        constant = self._model.constant
        for one in constant.values():
            one.requires_grad_(True)
        value = self._loss(batch)
        total = value[0] if isinstance(value, tuple | list) else value
        found: Sequence[Any] = [None] * len(constant)
        if total.requires_grad and constant:
            found = torch.autograd.grad(total.sum(), list(constant.values()), allow_unused=True)
        reached = [name.partition(".")[0] for name, one in zip(constant, found, strict=True) if one is not None]
        but = f", but on those of {listed(dict.fromkeys(reached))}" if reached else ""
        raise ModelError(
            f"the loss does not depend on any parameter of {self._label}{but}; name in `of` what it trains"
        )

    def _outputs(self, _: nn.Module, batch: Any) -> StepOutput:
        assert self._loss is not None
        returned = self._loss(batch)
        if not isinstance(returned, Mapping) or "outputs" not in returned:
            raise ModelError('with over, the loss function returns {"outputs": ..., "target": ...}')
        return StepOutput(None, returned["outputs"], returned.get("target"))

    def run(self, loaded: LoadedStep, loss: OfRows, over: Any, on_shard: Any, number: int) -> None:
        """Run the shards forward and backward; every rank calls this."""
        self._loss, self._over = loss, over
        has_any = any(one.grad is not None for one in self._gradients.trained.values())
        self._earlier = self._pass.set_apart() if has_any else None
        if not self._gradients.trained:
            raise ModelError(f"step {loaded.step}: {self._label} has no parameter that requires a gradient")
        self._pass.run(loaded, self.stats, on_shard, number)

    def finish(self, sums: Any, rows: int, step: int) -> None:
        """Make the gradients those of the mean, call hooks on them, and add what was there before."""
        gradients = [one.grad for one in self._gradients.trained.values() if one.grad is not None]
        weight = sums[1]
        if not self._is_over_batch:
            if isinstance(weight, torch.Tensor):
                factor: Any = torch.where(weight > 0, rows / weight, 0.0)
            else:
                factor = None if weight == rows else rows / weight if weight > 0 else 0.0
            if factor is not None and gradients:
                scale_by(list(map(numbers_of, gradients)), factor)
        if has_peers():
            self._leave_buckets()
        if self._may_lose_rows and float(weight) == 0:  # nothing was trained on: an update would only decay
            self._gradients.drop_gradients()
        if self._gradients.hooks.hooked and self._gradients.hooks.are_any():
            self._gradients.hooks.run(step)
        if self._earlier is not None:
            self._pass.add(self._earlier)
            self._earlier = None

    def _leave_buckets(self) -> None:
        """Give the gradients memory of their own: the loop may hold them while this pass runs again."""
        held = [one for one in self._gradients.trained.values() if one.grad is not None and not one.grad.is_sparse]
        if held:
            own = torch._foreach_mul([one.grad for one in held], 1.0)  # type: ignore[misc]
            for one, gradient in zip(held, own, strict=True):
                one.grad = gradient

    def close(self) -> None:
        """Stop the threads of the reduction."""
        self._pass.close()


class SameCalls:
    """Compares what the workers are about to run, so that none sums its gradients with those of another pass.

    On a GPU the comparison runs while the pass is launched, and is read before the next one and at the step's end: so
    the host waits for no other, and nothing is kept of a step whose calls are not known to be the same.
    """

    def __init__(self, world: World) -> None:
        self._size, self._reads_later = world.world_size, is_gpu(world.device)
        self._group: Any = None
        if has_peers():
            self._group = new_group("gloo") if self._reads_later else everyone()
        self._begun: tuple[Any, torch.Tensor, int, str] | None = None

    def check(self, call: str) -> None:
        """Raise ModelError, on all workers, unless all make this call. Every rank calls this."""
        if self._group is None:
            return
        self.read()
        digest = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "little")
        theirs = torch.empty(self._size, dtype=torch.int64)
        work = all_gather(theirs, torch.tensor([digest]), group=self._group, async_op=True)
        self._begun = work, theirs, digest, call
        if not self._reads_later:
            self.read()

    def read(self) -> None:
        """Raise what `check` raises, for its last call."""
        if self._begun is None:
            return
        (work, theirs, digest, call), self._begun = self._begun, None
        with waiting("the other workers' calls"):
            work.wait()
        if (theirs == digest).all():
            return
        calls = gathered(call)
        raise ModelError(
            "loop: the workers make other calls: "
            + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            + "; each worker must call the same in the same order, so decide by what all have alike"
        )


class PlainState:
    """A dict or list of the loop's own, which a checkpoint keeps and fills in place."""

    def __init__(self, name: str, value: Any) -> None:
        if not isinstance(value, dict | list):
            raise JobError(
                f"run.state({name!r}): is a {type(value).__qualname__}; give an object with state_dict and "
                "load_state_dict, or a dict or list of plain values and tensors"
            )
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return {"value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fill the value in place."""
        _filled(self._value, state["value"], set())


def _filled(old: Any, new: Any, filled: set[int]) -> Any:
    """Return a value that was kept, in the loop's own object if it has the same kind: other names may stand for it.

    `filled` are the objects that hold one already: a list may hold an object several times.
    """
    if isinstance(old, torch.Tensor):
        memory = old.untyped_storage()._cdata if old.layout is torch.strided else id(old)
        fits = isinstance(new, torch.Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)
        if not fits or not is_dense(old) or memory in filled:
            return new
        filled.add(memory)
        with torch.no_grad():
            return old.copy_(new)
    if type(old) is not type(new) or not isinstance(old, dict | list) or id(old) in filled:
        return new
    filled.add(id(old))
    if isinstance(old, dict):
        now = {key: _filled(old.get(key), value, filled) for key, value in new.items()}
        old.clear()
        old.update(now)
    else:
        pairs = zip_longest(old[: len(new)], new)
        old[:] = [_filled(before, value, filled) for before, value in pairs]
    return old


def check_same(states: Mapping[str, Any], step: int) -> None:
    """Raise ModelError, on all workers, unless the states are the same on all. Every rank calls this."""
    if not has_peers():
        return
    digests: list[dict[str, str]] = gathered({name: _digest(state.state_dict()) for name, state in states.items()})
    for name in states:
        others = [rank for rank, theirs in enumerate(digests) if theirs[name] != digests[0][name]]
        if others:
            raise ModelError(
                f"step {step}: run.state({name!r}) is another one on rank {others[0]} than on rank 0, and a "
                "checkpoint keeps one for all; fill it with what all workers have alike, as step.gather and "
                "step.backward return"
            )


def _digest(state: Any) -> str:
    plain, tensors = pack(state)
    found = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        found.update(as_bytes(tensors[name]).cpu().numpy().tobytes())
    return found.hexdigest()


class StopOfLoop:
    """The step after which a loop ends early: as `run.stop` says, or as the job's `early_stopping` does."""

    def __init__(self, loop: Loop, job: Job, state: TrainState) -> None:
        reason = state.stopping.get("reason")
        self._loop, self._state, self._inner = loop, state, Patience.of(job, state)
        if reason:  # of a driver that was killed after its workers had stopped
            state.stopping["reason"] = reason

    @property
    def has_stopped(self) -> bool:
        """Whether the training ends here."""
        return bool(self._state.stopping.get("reason")) or (self._inner is not None and self._inner.has_stopped)

    def take(self, measured: dict[str, float]) -> bool:
        """Take in what was measured after a step; return whether the training stops. Every rank calls this."""
        if self._loop._reason:
            self._state.stopping["reason"] = self._loop._reason
        inner = self._inner is not None and self._inner.take(measured)
        return inner or self.has_stopped

    def stopped(self) -> StoppedEarly:
        """Return why the training has stopped."""
        reason = self._state.stopping.get("reason")
        if reason:
            return StoppedEarly(self._state.step, "", "", 0.0, None, 0, reason)
        assert self._inner is not None
        return self._inner.stopped()


def _scalar(number: Any, device: torch.device) -> torch.Tensor:
    """Return a number as float64 on the device; no copy that the host would wait for is made of a plain one."""
    if isinstance(number, torch.Tensor):
        return number.detach().to(device, torch.float64).reshape(())
    return torch.full((), number, dtype=torch.float64, device=device)


def _code_of(function: Any) -> Any:
    """Return what tells a function's place in the code: a loop makes it anew in each step."""
    while hasattr(function, "func"):  # a partial
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return id(type(function)) if code is None else id(code)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__)).replace(".<locals>", "")

"""A training whose loop is the user's: `Loop` is what the job's key `loop` is called with, on every worker.

Begin at `train_by_loop`, then `Loop.steps`. A step's passes are those of `engine.loop_model`; what stands around the
steps is a declared training's (`tasks.train.TrainingRun`).
"""

import hashlib
import inspect
import json
import operator
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dp_ray.engine.clock import StepClock
from dp_ray.engine.forward.step import Metrics, Step
from dp_ray.engine.loads.loading import LoadedStep
from dp_ray.engine.loop_model import LoopModel, LoopPass, OfRows, name_of
from dp_ray.engine.optimizer import Schedule
from dp_ray.engine.sums.gradient_hooks import InEachBackward
from dp_ray.engine.sums.whole_batch import MergedBatch
from dp_ray.engine.trainer import TrainingStep, Update
from dp_ray.engine.update import LoopOptimizerStep, Updates
from dp_ray.engine.user_code import raise_as
from dp_ray.engine.world import gathered, has_peers
from dp_ray.errors import JobError, ModelError
from dp_ray.job.plan import checkpoints_of
from dp_ray.job.samples import mixture_of
from dp_ray.job.targets import bound
from dp_ray.plan.history import ROWS_OF, is_of_further, is_taken
from dp_ray.rundir.checkpoint import pack
from dp_ray.tasks.checkpoints import Training
from dp_ray.tasks.early_stopping import Stopping
from dp_ray.tasks.preflight import Facts, decided, of_pass
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import PlacedTraining, begun_training, place_training
from dp_ray.tasks.train_state import TrainState
from dp_ray.tensors.files import is_dense
from dp_ray.tensors.flat import as_bytes
from dp_ray.text import a_kind, listed


def train_by_loop(context: Context) -> None:
    """Have the job's `loop` train from the newest checkpoint, or from the start, to the end."""
    call_loop(Loop(place_training(context)))


def call_loop(loop: "Loop") -> None:
    """Call the job's function with its loop, and see that it goes over all of the steps."""
    of_function: BaseException | None = None
    with loop._watched():
        try:
            with loop._around:
                try:
                    returned = bound("loop", loop._placed.context.job.loop)(loop)
                    if inspect.isgenerator(returned) or inspect.iscoroutine(returned):
                        kind = "yield" if inspect.isgenerator(returned) else "async"
                        returned.close()
                        says = f"{returned.__qualname__} has {kind}, so a call does not run it; leave that out"
                        raise JobError(f"loop: {says}")
                except BaseException as error:
                    of_function = error
                    raise
                loop._end()
        except (Exception, SystemExit) as error:
            if error is not of_function or error is loop._error:
                raise  # no mistake of the function's
            raise_as(error, "loop", _hint)


def _hint(error: BaseException) -> str:
    """Return a hint for what code written for a plain loop meets: a step gives no batch, and a loss has no graph."""
    text = str(error)
    if isinstance(error, TypeError) and LoopStep.__name__ in text:
        return "; the step has no batch for the loop: step.backward(loss, of) calls loss with each shard's batch"
    if isinstance(error, RuntimeError) and "does not require grad and does not have a grad_fn" in text:
        return (
            "; step.backward(loss, of) runs the backward itself, and returns the mean loss without a graph: leave "
            ".backward() out"
        )
    return ""


class Loop:
    """A training on one worker, as its loop sees it; the job's function calls its methods alike on all workers.

    `model` is the job's, on `device`. `num_steps` is the number of all steps. What the model, the optimizers and the
    states hold is that of the newest checkpoint once `steps` gives the first step.

    >>> import dp_ray, torch
    >>> rows = torch.utils.data.TensorDataset(torch.arange(6.0)[:, None], torch.arange(6.0)[:, None])
    >>> def train(run):
    ...     update = run.optimizer(torch.optim.SGD(run.model.parameters(), lr=0.01))
    ...     for step in run.steps():
    ...         # One number for each row of the shard.
    ...         step.backward(lambda batch: (run.model(batch[0]) - batch[1]).square().mean(1), of=run.model)
    ...         update.step(clip=1.0)
    >>> job = {"task": "train", "model": torch.nn.Linear(1, 1), "dataset": rows, "batch_size": 2, "loop": train}
    >>> dp_ray.run(**job, workers=0, quiet=True).status
    'done'
    """

    _kind: type[LoopModel] = LoopModel

    def __init__(self, placed: PlacedTraining) -> None:
        self._placed = placed
        self._updates: list[LoopUpdate] = []
        self._states: dict[str, Any] = {}
        self._running: Iterator[LoopStep] | None = None
        self._around = ExitStack()  # what stands around the steps, once they have begun
        self._is_through = False
        self._error: BaseException | None = None  # of what stands around the steps
        self._failed: BaseException | None = None  # of a pass or an update
        self._step: LoopStep | None = None  # the one whose body runs
        self._reason = ""  # why the loop is to end after this step
        self._does = ""  # "pass", "gather", "update" or its "closure" while one runs
        self._facts: dict[LoopPass, Facts] = {}
        self._has_trained = False  # whether a pass has run, or an update by gradients of the loop's own
        self._reached = TrainState()  # how far the training is, once it has begun
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
                "keep it by run.state('plateau', plateau), and step it by run.evaluated['eval_loss'] in the loop"
            )
        if any(update._given.optimizers[0] is optimizer for update in self._updates):
            raise JobError("run.optimizer: was called for this optimizer before; use the update that it returned")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(f"run.optimizer: takes a torch.optim.Optimizer, got {a_kind(optimizer)}")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise JobError(
                f"run.optimizer: the {type(scheduler).__qualname__} is of another optimizer, so it would change the "
                f"rate of that one; make it of this {type(optimizer).__qualname__}"
            )
        spec = None if scheduler is None else lambda _: scheduler
        schedule = Schedule([("scheduler", spec)], [optimizer])
        update = LoopUpdate(self, LoopOptimizerStep(self.model, optimizer, schedule), len(self._updates))
        self._updates.append(update)
        return update

    def state(self, name: str, value: Any) -> Any:
        """Return the value, which each checkpoint keeps; it is filled from the newest one before the first step.

        It has a `state_dict`, or is a dict or list of plain values and tensors. It must be the same on all workers.
        """
        self._check_not_begun("run.state")
        if name in self._states:
            raise JobError(f"run.state: there are two states of the name {name!r}")
        try:
            has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
            kept = value if has_state else PlainState(name, value)
            pack(kept.state_dict())
        except ModelError as error:
            raise JobError(f"run.state({name!r}): cannot be kept: {error}") from None
        self._states[name] = kept
        return value

    @property
    def evaluated(self) -> dict[str, float]:
        """What `eval` has measured last, by its names in the history; empty before the first time.

        A run that goes on has it as before, once `steps` gives a step. It is the same on all workers.
        """
        # What was measured since a shorter training ended, a longer one would not have measured.
        at_end = self._reached.at_end if self._is_through else {}
        return {**self._reached.measured, **at_end}

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
            trained, steps = self._around.enter_context(self._begun())
            for step in steps:
                self._step = LoopStep(self, trained, step)
                yield self._step
                if self._failed is not None:
                    raise self._failed
                # Each run of the job keeps its state after such a step, whatever the clock says.
                periods = checkpoints_of(self._placed.context.job).due.periods(self._placed.split)
                is_last = step.number + 1 == self.num_steps
                is_kept = is_last or any((step.number + 1) % period == 0 for period in periods)
                keeps = bool(self._states) and is_kept
                stops = bool(self._reason) and not is_last
                if stops or keeps or self._placed.context.job.eval is not None:
                    # Before what all workers do together: they compare the states, or evaluate.
                    trained.calls.check(f"step {step.number}: its end, with {'' if stops else 'no '}run.stop")
                trained.end(step, self._step._logged)
                if keeps:
                    check_same(self._states, step.number)
                self._step = None
            self._around.close()  # before what the function does after its steps
            self._is_through = True
        except GeneratorExit:  # closed by the loop: it ends early
            raise
        except BaseException as error:
            self._error = error  # a loop that catches it has not ended well
            raise

    @contextmanager
    def _begun(self) -> Iterator[tuple[LoopModel, Iterator[TrainingStep]]]:
        """Give what the steps train, at the state where the training begins or goes on, and the steps."""
        with begun_training(self._placed, self._model_of) as run:
            self._reached = run.training.state
            self._has_trained |= self._reached.step > 0  # in an earlier attempt, as far as is known
            with closing(run.steps(StopOfLoop(self, run.training))) as steps:  # an error's traceback may hold them
                yield run.trainer, steps

    @contextmanager
    def _calling(self, step: "LoopStep") -> Iterator[None]:
        """Run what all workers call alike in the block; after an error of one of them none goes on."""
        if self._failed is not None:
            raise self._failed
        if self._does in ("pass", "gather"):
            raise ModelError("the function of a pass calls the step or an update; call these in the loop's body")
        if self._step is not step:
            raise ModelError(f"step {step.number} has ended, and is called again; call the step that the loop is in")
        try:
            yield
        except BaseException as error:
            self._failed = error
            raise

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Note what runs in the block."""
        before, self._does = self._does, what
        try:
            yield
        finally:
            self._does = before

    def _model_of(self, placed: PlacedTraining, step: Step, measures: Metrics, clock: StepClock) -> LoopModel:
        updates = Updates([update._given for update in self._updates], self._states)
        return self._kind(placed.placement, placed.split, updates, clock)

    def _end(self) -> None:
        """Check that the steps are through, once the job's function has returned."""
        if (error := self._error or self._failed) is not None:
            raise error
        if self._running is not None and self._reason and not self._is_through:
            with suppress(StopIteration):  # the loop has left the step that it stops after
                next(self._running)
        if self._step is not None:
            self._step._model.calls.check("the end of the loop")
        if not self._is_through:
            number = 0 if self._step is None else self._step.number
            raise ModelError(
                f"loop: it ended in step {number}, and {self.num_steps - number} of {self.num_steps} steps are left; "
                "go over all of run.steps(), or call run.stop(reason) to end after a step"
            )

    def _check_not_begun(self, what: str) -> None:
        if self._running is not None:
            raise JobError(
                f"{what}: is called after run.steps(); call it before the loop, so that checkpoints keep it"
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Refuse, in the block, updates and gradients of the model's that the run does not know of."""
        parameters = list(self.model.parameters())
        of_model = {id(parameter) for parameter in parameters}

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            is_of_model = any(id(parameter) in of_model for parameter in held)
            # In the body of a step a pass may have given others a gradient, which is this worker's alone.
            may_be_apart = self._step is not None and any(isinstance(each, nn.Parameter) for each in held)
            if (is_of_model and self._does != "update") or (may_be_apart and not self._does):
                raise ModelError(
                    f"{type(optimizer).__qualname__}.step() was called by itself, so that the run knows nothing of "
                    "it; have all that it trains be a part of the model, write update = run.optimizer(optimizer) "
                    "before the loop, and update.step() in it"
                )

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(before_step).remove)
            for parameter in parameters:
                if parameter.is_floating_point() or parameter.is_complex():
                    trains = parameter.requires_grad
                    parameter.requires_grad_()  # the loop may unfreeze it later
                    handle: Any = parameter.register_post_accumulate_grad_hook(InEachBackward(_check_summed, self))
                    parameter.requires_grad_(trains)
                    stack.callback(handle.remove)
            yield


def _check_summed(loop: Loop, _: torch.Tensor) -> None:
    """Raise ModelError for a gradient that comes to a parameter outside a pass."""
    if loop._does != "pass":
        raise ModelError(
            "a backward of the loop's own gave the model a gradient, which is this worker's alone; write "
            "step.backward(loss, of), which sums it over the shards and the workers"
        )


class LoopUpdate:
    """The update of some parameters by an optimizer: `run.optimizer` returns it."""

    def __init__(self, loop: Loop, given: LoopOptimizerStep, number: int) -> None:
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
        if clip is not None and not clip > 0:
            raise ModelError(f"update.step: clip is the largest norm of the gradient, above 0; got {clip}")
        if closure is not None and clip is not None:
            raise ModelError("update.step: clip is not possible with a closure, whose gradients the optimizer takes")
        with loop._doing("update"), loop._calling(step):
            if closure is None:
                given.clip = clip
                loop._has_trained |= not given.may_skip()
                step._of.update(given, self._number)
            else:
                norm = given.apply_with(self._again(closure, step), step.number)
                step._of.updated[self._number], step._of.has_updated = (given.rates[0], norm), True

    def _again(self, closure: Callable[[], Any], step: "LoopStep") -> Callable[[], Any]:
        first = step._of.num_passes

        def called() -> Any:
            self._given.drop_gradients()
            step._of.num_passes = first
            with self._loop._doing("closure"), torch.enable_grad():
                loss = closure()
            if loss is None:
                raise ModelError("update.step: the closure returned None; return what step.backward returns")
            return loss

        return called


class LoopStep:
    """A step of a loop: a global batch, of which this worker has some shards."""

    def __init__(self, loop: Loop, model: LoopModel, step: TrainingStep) -> None:
        self._loop, self._model, self._of = loop, model, step
        self.number = step.number
        self.epoch = step.number // model.split.steps
        # Each pass goes over them. An error of reading names the shard.
        step.loaded = step.loaded._replace(loaded=list(step.loaded.loaded))
        self._logged: dict[str, Any] = {}
        step.seed()

    @property
    def rows(self) -> int:
        """The number of rows of the global batch, on all workers."""
        return self._of.loaded.whole.rows

    def log(self, **numbers: Any) -> None:
        """Add numbers to the step's row of the history: numbers or scalar tensors, the same names in each step."""
        mixture = mixture_of(self._loop._placed.dataset)
        of_sources = {f"{ROWS_OF}{source}" for source in (() if mixture is None else mixture.names)}
        taken = [name for name in numbers if is_taken(name) or is_of_further(name) or name in of_sources]
        if taken:
            raise ModelError(f"step.log: {listed(taken)} is a column that each history has; give it another name")
        for name, given in numbers.items():
            value = given.item() if isinstance(given, np.generic) else given
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ModelError(f"step.log: {name} is a tensor of size {list(value.shape)}; log one number")
            if not isinstance(value, torch.Tensor | int | float) or getattr(value, "is_complex", bool)():
                raise ModelError(f"step.log: {name} is {a_kind(value)}; log one number")
            # A copy: the loop may change a tensor later in the step.
            self._logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def backward(
        self,
        loss: OfRows,
        of: nn.Module | Sequence[nn.Module],
        over: Callable[[Any, Any], Any] | None = None,
        batch: Any = None,
        reduction: str = "mean",
        keep: dict[Any, Any] | None = None,
    ) -> torch.Tensor:
        """Add the gradient of the mean loss of the whole batch to the parameters of `of`; return that mean.

        `loss` gets a shard's batch, and returns one number for each row or (sum, weight). With `over` it returns
        {"outputs": ..., "target": ...}, and `over` gets those of the whole batch and returns one number. All
        parameters that are not of `of` are constant meanwhile. `batch` is a tree of tensors, the same on all workers,
        in place of the step's batch. With `reduction` "sum", `loss` returns a sum over the shard's rows, and the loss
        of the batch is the sum, not the mean. With `keep` the function returns {"loss": ..., "outputs": {name: ...}},
        and `keep`, a dict, gets these outputs: merged in order, detached, the same on all workers. Every worker calls
        this, with the same arguments.
        """
        with self._loop._calling(self):
            return self._backward(loss, of, over, batch, reduction, keep)

    def _backward(self, loss: OfRows, of: Any, over: Any, batch: Any, reduction: str, keep: Any) -> torch.Tensor:
        model, step, is_sum = self._model, self._of, reduction == "sum"
        if not is_sum and reduction != "mean":
            raise ModelError(f"step.backward: reduction is 'mean' or 'sum', got {reduction!r}")
        if is_sum and over is not None:
            raise ModelError(
                "step.backward: reduction='sum' is of a loss of each shard; `over` sees the whole batch, and the "
                "gradient is that of the one number that it returns, a sum or a mean; leave one of them out"
            )
        for name, function in (("loss", loss), ("over", over or loss)):
            if not callable(function):
                raise ModelError(f"step.backward: {name} is a function, got {a_kind(function)}")
        if not isinstance(keep, dict | None):
            raise ModelError(
                f"step.backward: keep is a dict, which gets the outputs of the whole batch, like hidden of hidden = "
                f"run.state('hidden', {{}}); got {a_kind(keep)}"
            )
        modules = [of] if isinstance(of, nn.Module) else list(of)
        trained = model.trained_of(modules)
        names = listed(model.names_of(modules)) + (", reduction='sum'" if is_sum else "")
        names += "" if keep is None else ", keep"
        label = f"pass {step.num_passes}: step.backward({name_of(loss)}, {names})"
        model.calls.check(f"step {self.number}, {label}")
        a_pass = model.pass_for(loss, over, is_sum, modules, trained)
        a_pass.function, a_pass.over, a_pass.keeps = loss, over, keep is not None
        own = None if batch is None else model.cut(step.loaded, batch)
        if over is not None and a_pass not in self._loop._facts:
            self._ask(a_pass, trained, own or step.loaded)
        self._loop._has_trained = True
        with self._loop._doing("pass"), model.only(trained), torch.enable_grad():
            totals = step.backward(a_pass, own)
        a_pass.finish(totals, own or step.loaded, own is None and step.is_empty)
        if keep is not None:
            where = f"step {self.number}: step.backward({name_of(loss)}, keep)"
            keep.update(_whole(model.merged(a_pass.kept, where), where))
            a_pass.kept = ()
        step.seed()
        return totals.batch_loss

    def _ask(self, a_pass: LoopPass, trained: dict[str, nn.Parameter], loaded: LoadedStep) -> None:
        """Ask what a pass over the batch must know, at its first occurrence."""
        loop, first = self._loop, next((part for part in loaded.loaded if part.shard.rows), None)
        self._of.running, self._model.step = loaded, self._of  # an error of memory says what to change
        with loop._doing("gather"), self._model.only(trained):
            facts = decided(first, lambda part: of_pass(a_pass, part))
        self._of.running = None
        if facts is not None:
            loop._facts[a_pass], a_pass.rows = facts, facts.rows
            for text in facts.says:
                loop._placed.placement.say(text)

    @torch.no_grad()
    def gather(self, function: OfRows, batch: Any = None) -> Any:
        """Return what a function gives of each shard, merged in order: the whole batch's, the same on all workers.

        It runs without gradients, but those that it enables itself. `batch` is that of `backward`. Raises ModelError
        if all rows of the step were set aside.
        """
        model, step = self._model, self._of
        with self._loop._calling(self):
            number, step.num_passes = step.num_passes, step.num_passes + 1
            model.calls.check(f"step {self.number}, pass {number}: step.gather({name_of(function)})")
            loaded = step.loaded if batch is None else model.cut(step.loaded, batch)
            with self._loop._doing("gather"):
                found = model.gather(function, loaded, number)
            step.seed()
            return _whole(found, f"step {self.number}: step.gather({name_of(function)})")


def _whole(found: MergedBatch | None, where: str) -> Any:
    """Return the outputs of a whole batch; raises ModelError if it has no rows."""
    if found is None:
        raise ModelError(
            f"{where} has nothing to return, since all rows of the step were set aside; mend the dataset, or set a "
            "larger batch_size"
        )
    return found.outputs


Path: TypeAlias = tuple[Any, ...]  # the keys and places on the way to a part of a state
FILLED = (dict, OrderedDict, defaultdict, Counter, list)  # what takes other items in place


class PlainState:
    """A dict or list of the loop's own, which a checkpoint keeps and fills in place.

    What stands several times is kept once, with the paths of the others, and stands there again. What stood elsewhere
    when this was made is filled where it stands now. A Counter, a named tuple and the like are kept where the value
    had one when this was made: there one of its kind gets the items.
    """

    def __init__(self, name: str, value: Any) -> None:
        if not isinstance(value, dict | list):
            raise JobError(
                f"run.state({name!r}): is {a_kind(value)}; give an object with state_dict and "
                "load_state_dict, or a dict or list of plain values and tensors"
            )
        self._at, self._value = (name,), value
        self._begun: dict[Path, Any] = {}  # the parts when this was made; references to tensors, which may go
        _kept(value, self._at, self._begun, {}, [], is_begin=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the value; raises ModelError, with its path, for what could not be filled."""
        same, now = list[tuple[Path, Path]](), dict[int, Path]()
        value = _kept(self._value, self._at, self._begun, now, same)
        firsts = {id(part): path for path in reversed(self._begun) if _is_filled(part := self._at_begin(path))}
        moved = [(now[part], path) for part, path in firsts.items() if now.get(part, path) != path]
        return {"value": value, **({"same": same} if same else {}), **({"moved": moved} if moved else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fill the value in place."""
        moved = {now: self._at_begin(path) for now, path in state.get("moved", ())}
        made = {path: part for path, part in moved.items() if _is_filled(part)}
        filled = set(map(_place_of, made.values()))
        _filled(self._value, state["value"], self._at, dict(state.get("same", ())), made, filled)

    def _at_begin(self, path: Path) -> Any:
        """Return the part that was there when this was made; None for a tensor that is gone."""
        part = self._begun.get(path)
        return part() if isinstance(part, weakref.ref) else part


def _is_filled(part: Any) -> bool:
    return isinstance(part, dict | list | torch.Tensor)


def _place_of(part: Any) -> int:
    """Return what tells a part that is filled in place from others: of a tensor its memory, which views share."""
    is_strided = isinstance(part, torch.Tensor) and part.layout is torch.strided
    return part.untyped_storage()._cdata if is_strided else id(part)


def _kept(
    value: Any, path: Path, begun: dict[Path, Any], first: dict[int, Path], same: list[Any], is_begin: bool = False
) -> Any:
    """Return a part of a state as it is kept: `same` gets each path where a part stands again, with its `first` one.

    `begun` are the parts at the begin, when it gets them.
    """
    kind, is_inner = type(value), isinstance(value, dict | list | tuple)
    before = first.setdefault(id(value), path) if is_inner or isinstance(value, torch.Tensor) else path
    if before != path:
        if isinstance(value, tuple) and path[: len(before)] == before:
            raise ModelError(f"the state's {_shown(path)!r} is the tuple that holds it")
        same.append((path, before))
        return None
    own = kind not in (dict, list, tuple) if is_inner else isinstance(value, np.floating) and kind is not np.float64
    if is_begin and (not own or kind in FILLED or hasattr(value, "_make") or not is_inner):
        begun[path] = weakref.ref(value) if isinstance(value, torch.Tensor) else value
    if own and type(begun.get(path)) is not kind:
        raise ModelError(
            f"the state's {_shown(path)!r} is a {kind.__qualname__}, and only a dict, list or tuple comes back as it "
            "is, or a Counter, defaultdict, OrderedDict, named tuple or number of numpy that was there when "
            "run.state was called"
        )
    if isinstance(value, dict):
        return {key: _kept(item, (*path, key), begun, first, same, is_begin) for key, item in value.items()}
    if is_inner:
        items = [_kept(item, (*path, at), begun, first, same, is_begin) for at, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _shown(path: Path) -> str:
    return ".".join(map(str, path))


def _filled(
    old: Any, new: Any, path: Path, same: Mapping[Path, Path], made: dict[Path, Any], filled: set[int]
) -> Any:
    """Return a part that was kept, in the loop's own object if it has the same kind: other names may stand for it.

    `filled` are the objects that hold one already, or are for another path; `made` are all parts so far by their
    paths, and at first the objects that are for these.
    """
    if path in same:
        return made[same[path]]
    if path in made:
        old = made[path]
        filled.discard(_place_of(old))
    if isinstance(new, torch.Tensor):
        made[path] = _tensor_filled(old, new, filled)
    elif isinstance(new, tuple):
        before: Any = old if isinstance(old, tuple) else ()
        parts = enumerate(zip_longest(before[: len(new)], new))
        items = tuple(_filled(was, item, (*path, at), same, made, filled) for at, (was, item) in parts)
        is_old = len(items) == len(before) and all(map(operator.is_, items, before))
        made[path] = before if is_old else before._make(items) if hasattr(before, "_make") else items
    elif isinstance(new, dict | list):
        is_own = isinstance(old, type(new)) and _place_of(old) not in filled
        into = made[path] = old if is_own else type(new)()
        filled.add(_place_of(into))
        if isinstance(new, dict):
            earlier = dict(into)
            into.clear()
            for key, item in new.items():
                into[key] = _filled(earlier.get(key), item, (*path, key), same, made, filled)
        else:
            pairs = enumerate(zip_longest(into[: len(new)], new))
            into[:] = [_filled(was, item, (*path, at), same, made, filled) for at, (was, item) in pairs]
    else:
        return type(old)(new) if isinstance(old, np.floating) and isinstance(new, float) else new
    return made[path]


def _tensor_filled(old: Any, new: torch.Tensor, filled: set[int]) -> torch.Tensor:
    """Return the loop's own tensor with the new one's elements, or the new one, if it does not fit or is filled."""
    if not isinstance(old, torch.Tensor) or (old.shape, old.dtype) != (new.shape, new.dtype) or not is_dense(old):
        return new
    if _place_of(old) in filled:
        return new
    filled.add(_place_of(old))
    with torch.no_grad():
        return old.copy_(new)


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


class StopOfLoop(Stopping):
    """The step after which a loop ends early; it is an error if none of its steps has trained anything by then."""

    def __init__(self, loop: Loop, training: Training) -> None:
        super().__init__(training.context.job, training.state)
        self._loop = loop

    def take(self, measured: dict[str, float], update: Update) -> bool:
        """Take in a step and what was measured after it; return whether the training stops. Every rank calls this."""
        self.reason = self._loop._reason
        stops = super().take(measured, update)
        if (stops or self._state.step == self._loop.num_steps) and not self._loop._has_trained:
            raise ModelError(
                f"loop: none of its {self._state.step} steps has trained anything; call step.backward(loss, of), and "
                "update.step() of an update = run.optimizer(optimizer)"
            )
        return stops

"""Update the parameters from the whole batch's gradient: unscale, weigh, hooks, clip, step: `OptimizerStep.apply`."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dp_ray.engine.forward.buffers import copy_all
from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.optimizer import (
    HALVES,
    Schedule,
    build_optimizers,
    load_optimizer,
    parameters_of,
    scale_by,
    switches,
    total_norm,
)
from dp_ray.engine.sharded.state import ShardedParts, StateOfParts, check_updates_parts, one_thread, updating_apart
from dp_ray.engine.sums.gradient_hooks import ParameterHooks
from dp_ray.engine.sums.reduce import REQUIRES_GRAD, numbers_of
from dp_ray.engine.sums.tree_sum import sparse_parameters
from dp_ray.engine.user_code import raise_as, reraise_as, shards_hint
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.targets import resolve
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import is_sharded, local
from dp_ray.text import listed

PARAMETERS, GRADIENT = operator.itemgetter("params"), operator.attrgetter("grad")
IS_THERE: Callable[[Any], bool] = functools.partial(operator.is_not, None)


def declared_step(
    job: Job, model: nn.Module, device: torch.device, parts: ShardedParts | None = None
) -> "OptimizerStep":
    """Return the update of a training that its job declares; raises JobError for what cannot train this model."""
    # The update of a part must be the part of the update, on one worker too, which holds the whole.
    is_exact = job.bitwise and job.is_sharded
    updates_parts = is_exact or parts is not None
    for key, spec in job.optimizers if updates_parts else ():
        check_updates_parts(key, resolve(key, spec) if isinstance(spec, Target) else None, is_exact)
    optimizers = build_optimizers(job.optimizers, model, {} if parts is None else parts.flats)
    for (key, _), optimizer in zip(job.optimizers if updates_parts else (), optimizers, strict=False):
        check_updates_parts(key, type(optimizer), is_exact)  # what functions of the user's give
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # The scaler checks the reduced gradients, so all ranks skip the same steps.
    scaler = torch.amp.GradScaler(device.type) if job.precision == "fp16" else None
    schedule = Schedule(job.schedulers, optimizers)
    step = OptimizerStep(model, optimizers, schedule, trained, scaler, job.grad_clip, parts)
    if is_exact:
        step.updating = one_thread
    elif parts is not None:
        step.updating = updating_apart
    return step


class Optimizers:
    """Optimizers of a model, whose parameters are `named`."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], named: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        self.optimizers, self._named = optimizers, named

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of the first parameter group of each optimizer."""
        return [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first optimizer's first parameter group; NaN without an optimizer."""
        return float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else float("nan")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the weights to evaluate into the model while the block runs: a schedule-free optimizer trains others.

        Then restore the weights to the bit: to switch there and back would round.
        """
        switching: list[Any] = [*filter(switches, self.optimizers)]
        weights = [local(parameter.detach()) for parameter in parameters_of(switching)]
        before = [weight.clone() for weight in weights]
        with torch.no_grad(), reraise_as("optimizer.eval", shards_hint):
            for optimizer in switching:
                optimizer.eval()
        try:
            yield
        finally:
            with torch.no_grad(), reraise_as("optimizer.train", shards_hint):
                for optimizer in switching:
                    optimizer.train()
            copy_all(weights, before)

    def evaluated(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights to evaluate, by name; none if they are the trained ones."""
        held = parameters_of([*filter(switches, self.optimizers)])
        if not held:
            return {}
        with self.evaluating():
            copies = {id(parameter): parameter.detach().clone() for parameter in held}
        return {name: copies[id(parameter)] for name, parameter in self._named if id(parameter) in copies}


class Gradients:
    """The gradients that a pass gives the parameters `trained`, by name, and what becomes of them at its end.

    Weighed are those of `held`: what an optimizer gets for its parameters, by default all. The others are `left_out`.
    They are computed in vain: no hook sees them, and the update drops them, or they would grow from step to step.
    If they `are_alike`, dense, on one device and of one dtype, no step has to check each. `hooked` are the parameters
    whose hooks are called, by default all.
    """

    def __init__(
        self,
        trained: dict[str, nn.Parameter],
        held: Sequence[nn.Parameter] | None = None,
        left_out: Sequence[nn.Parameter] = (),
        scaler: torch.amp.GradScaler | None = None,
        are_alike: bool = False,
        hooked: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.trained, self.left_out, self.are_alike = trained, left_out, are_alike
        self.held = list(trained.values()) if held is None else held
        self.hooks = ParameterHooks(trained if hooked is None else hooked)
        self._scaler = scaler
        # Of the factors by which gradients on a GPU are weighed.
        self._rows: dict[int, torch.Tensor] = {}  # numbers of rows, on the GPU
        is_wide = any(parameter.dtype.itemsize > 4 for parameter in (*self.held, *left_out))
        self._wide = torch.float64 if is_wide else torch.float32

    def of_loss(self, loss: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the gradient with which a backward of `loss` begins: 1 / rows, scaled for fp16."""
        if self._scaler is None:
            return loss.new_full((), 1.0 / rows)
        return self._scaler.scale(loss.new_ones(())) / rows

    def weigh(
        self, weight: torch.Tensor | float, rows: int, step: int, clips: bool = False
    ) -> tuple[list[Any], torch.Tensor | float | None]:
        """Make gradients of sum / `rows` those of sum / `weight`, and call the hooks on them.

        Return their numbers, and the factor that they lack still: who `clips` multiplies by both in one pass.
        """
        factor = self._factor(weight, rows) if isinstance(weight, torch.Tensor) or weight != rows else None
        if self.hooks.hooked and self.hooks.are_any():
            for parameter in self.left_out:
                parameter.grad = None  # no hook sees one that is scaled still, and of which nothing comes
            if factor is not None:
                scale_by(list(map(numbers_of, filter(IS_THERE, map(GRADIENT, self.held)))), factor)
                factor = None
            self.hooks.run(step)
        gradients: list[Any] = [*filter(IS_THERE, map(GRADIENT, self.held))]
        if not self.are_alike:
            gradients = list(map(numbers_of, gradients))
        if factor is not None and not clips:
            scale_by(gradients, factor)
            factor = None
        return gradients, factor

    def _factor(self, weight: torch.Tensor | float, rows: int) -> torch.Tensor | float:
        """Return the factor from gradients of sum / rows to those of sum / weight; 0 for no weight.

        A weight that is a tensor is on a GPU; to read it would wait for the GPU.
        """
        if not isinstance(weight, torch.Tensor):
            return 0.0 if weight <= 0 else rows / weight
        if rows not in self._rows:
            self._rows[rows] = torch.full_like(weight, rows)
        factor = torch.empty((), dtype=self._wide, device=weight.device)
        return torch.div(self._rows[rows], weight, out=factor).masked_fill_(weight <= 0, 0.0)


class OptimizerStep(Optimizers):
    """The update of a model by optimizers together: they have one norm, one clip, one fp16 scaler and one schedule.

    `gradients` are those of the parameters `trained`, by name, of which the optimizers may hold only some. One that
    is frozen on the way has no gradient from there on; one that thaws is an error. Norm and clipping, to the norm
    `clip`, are over what the optimizers hold. Of a sharded model they update this worker's `parts`.

    The scaler takes this for an optimizer, with `param_groups` and a `step`: it skips the update of all or of none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        trained: dict[str, nn.Parameter],
        scaler: torch.amp.GradScaler | None = None,
        clip: float | None = None,
        parts: ShardedParts | None = None,
    ) -> None:
        super().__init__(optimizers, list(model.named_parameters(remove_duplicate=False)))
        self.schedule, self.scaler, self.clip, self.parts = schedule, scaler, clip, parts
        self.updating: Callable[[Any], AbstractContextManager[object]] = nullcontext  # around an optimizer's step
        self.has_skipped = False  # whether the last step has left the parameters as they were
        self.rates = [0.0]  # the first learning rate of each optimizer in the last step
        self._frozen = {
            name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        held = parameters_of(optimizers)
        self._num_held, ids = len(held), set(map(id, held))
        pairs = [(parameter, self._updated(parameter)) for parameter in trained.values()]
        updated = [mine for _, mine in pairs if id(mine) in ids]
        left_out = [parameter for parameter, mine in pairs if id(mine) not in ids]
        kinds = {(mine.device, mine.dtype) for _, mine in pairs}
        is_plain = not any(is_sharded(mine) or mine.dtype in HALVES for _, mine in pairs)
        are_alike = is_plain and len(kinds) == 1 and not sparse_parameters(model)
        hooked = trained if parts is None else {}  # `check_shardable` refuses them in a sharded model
        self.gradients = Gradients(trained, updated, left_out, scaler, are_alike, hooked)

    def _updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what an optimizer gets for a parameter."""
        return parameter if self.parts is None else self.parts.flats.get(id(parameter), parameter)

    @property
    def _names(self) -> dict[int, str]:
        """The first name of each parameter, by the id of what an optimizer gets for it."""
        return {id(self._updated(parameter)): name for name, parameter in reversed(self._named)}

    @property
    def names(self) -> list[str]:
        """The names of the parameters that the optimizers update, in the order of their groups."""
        names = self._names
        return [names[id(parameter)] for parameter in parameters_of(self.optimizers)]

    @property
    def says_left_out(self) -> str | None:
        """A line for the user that names the parameters which no optimizer was given; None if they have all."""
        left_out, trained, names = self.gradients.left_out, self.gradients.trained, self._names
        if not left_out:
            return None
        return (
            f"optimizer: {len(left_out)} of the {len(trained)} parameters that require a gradient are not given to "
            f"it, so they are not trained: {listed([names[id(self._updated(parameter))] for parameter in left_out])}"
        )

    @property
    def stateful(self) -> dict[str, Any]:
        """The objects with a state, by their names in a checkpoint; None for one that the job does not have."""
        found: dict[str, Any] = {}
        for number, optimizer in enumerate(self.optimizers):
            end = f" {number}" if number else ""
            found["optimizer" + end] = optimizer if self.parts is None else StateOfParts(self.parts, optimizer)
            found["scheduler" + end] = self.schedule.schedulers[number]
        return {**found, "scaler": self.scaler}

    def apply(self, weight: torch.Tensor | float, rows: int, step: int) -> torch.Tensor:
        """Update the parameters and return the gradient's norm before clipping.

        The gradients must be those of (sum of losses) / `rows`. `weight` is the weight of the losses of the whole
        batch, which has `rows` rows. `step` names the step in errors.
        """
        self._begin(step)
        gradients, factor = self.gradients.weigh(weight, rows, step, clips=self.clip is not None)
        norm: torch.Tensor
        if self.parts is not None and gradients:
            norm = self.parts.total_norm(
                gradients, [param for param in self.gradients.held if param.grad is not None]
            )
        elif self.gradients.are_alike and gradients:  # as `total_norm`, in fewer calls
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        else:
            norm = total_norm(gradients)
        if self.clip is not None:  # weigh what is not weighed yet and clip, in one pass
            if isinstance(factor, torch.Tensor):
                factor = factor.to(norm.device, norm.dtype)
            norm = norm if factor is None else norm * factor
            clip = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            scale_by(gradients, clip if factor is None else clip * factor)
        try:
            if self.scaler is None:
                self.step()
            else:
                self.has_skipped = True  # unless the scaler calls `step`
                with waiting(ON_GPU):  # the scaler reads if the gradients are finite
                    self.scaler.step(self)  # type: ignore[arg-type]
                self.scaler.update()
        except (Exception, SystemExit) as error:
            raise_as(error, f"step {step}: optimizer", shards_hint)
        if self.schedule.per_step and not self.has_skipped:
            self.schedule.step(f"step {step}: scheduler")
        self.drop_gradients()
        return norm

    def rehearse(self) -> None:
        """Update the parameters by the gradients as they are, without other workers, to make the state."""
        if self.parts is not None:
            self.parts.take()
        with reraise_as("optimizer", shards_hint):
            self.step()
        self.drop_gradients()

    def may_skip(self) -> bool:
        """Return whether a step without rows is no update."""
        return True

    def skip(self) -> torch.Tensor:
        """Change nothing in a step without rows, and return the norm of its gradient, which is 0."""
        self.drop_gradients()
        self.has_skipped, self.rates = True, self.learning_rates
        return torch.zeros((), device=self.gradients.held[0].device)

    def _begin(self, step: int) -> None:
        """Take what is to be updated and its gradients, unscaled, as the loop or a forward has left them."""
        if self._frozen and any(map(REQUIRES_GRAD, self._frozen.values())):
            thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
            raise ModelError(
                f"step {step}: {listed(thawed)} requires a gradient now, and did not when the model was built, so "
                "nothing would train it; let it require one there and freeze it until then (ddp), or train by a loop "
                "of your own, whose optimizer may hold frozen parameters (docs/loops.md)"
            )
        self.rates, num_held = [], 0
        for optimizer in self.optimizers:
            self.rates.append(float(optimizer.param_groups[0]["lr"]))
            num_held += sum(map(len, map(PARAMETERS, optimizer.param_groups)))
        if num_held != self._num_held:
            raise ModelError(
                f"step {step}: an optimizer has other parameters than where it was made; give it all of them there, "
                "and freeze those that are to be trained later (parameter.requires_grad_(False))"
            )
        if self.parts is not None:
            self.parts.take()
        if self.scaler is not None:
            self.scaler.unscale_(self)  # type: ignore[arg-type]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The tensors whose gradients are to be unscaled. The scaler asks for them once a step, on every rank."""
        parameters: list[Any] = parameters_of(self.optimizers)
        if self.parts is not None:
            parameters = self.parts.to_unscale(map(numbers_of, filter(IS_THERE, map(GRADIENT, parameters))))
        return [{"params": parameters}]

    def step(self) -> None:
        """Run the optimizers; the scaler calls it if all gradients are finite."""
        self.has_skipped = False
        for optimizer in self.optimizers:
            with self.updating(optimizer):
                optimizer.step()

    def drop_gradients(self) -> None:
        """Drop all gradients, also of parameters that no optimizer updates, and give the updated parts back."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for parameter in self.gradients.left_out:
            parameter.grad = None
        if self.parts is not None:
            self.parts.give()


class LoopOptimizerStep(OptimizerStep):
    """The update by an optimizer of a loop of the user's: of what it holds, by gradients that passes have weighed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        names = {
            id(parameter): name for name, parameter in reversed([*model.named_parameters(remove_duplicate=False)])
        }
        held = parameters_of([optimizer])
        if other := [parameter for parameter in held if id(parameter) not in names]:
            raise JobError(
                f"run.optimizer: {type(optimizer).__qualname__} holds a tensor of size {list(other[0].shape)} that "
                "is none of the model's parameters, so it would be neither summed over the workers nor kept; make "
                "it a part of the model"
            )
        super().__init__(model, [optimizer], schedule, {names[id(parameter)]: parameter for parameter in held})
        self._frozen = {}  # a pass trains what thaws, and this updates it

    def apply(self, weight: torch.Tensor | float, rows: int, step: int) -> torch.Tensor:
        """Update the parameters by the gradients as they are; return their norm before clipping."""
        return super().apply(1.0, 1, step)

    def apply_with(self, closure: Callable[[], Any], step: int) -> torch.Tensor:
        """Update the parameters by an optimizer that calls for the loss; return the last gradient's norm."""
        self.rates, self.has_skipped = self.learning_rates, False
        with reraise_as(f"step {step}: optimizer", shards_hint):
            self.optimizers[0].step(closure)
        norm = total_norm(self.gradients.weigh(1.0, 1, step)[0])
        if self.schedule.per_step:
            self.schedule.step(f"step {step}: scheduler")
        self.drop_gradients()
        return norm

    def may_skip(self) -> bool:
        """Return whether a step without rows is no update: if no pass over a batch of its own has run."""
        return all(parameter.grad is None for parameter in self.gradients.held)


class Updates(Optimizers):
    """The updates of a loop of the user's: their optimizers and schedulers, kept by their order.

    `states` are the loop's own, by name, which are kept beside them.
    """

    says_left_out = None

    def __init__(self, each: Sequence[LoopOptimizerStep], states: Mapping[str, Any]) -> None:
        super().__init__([update.optimizers[0] for update in each], each[0]._named if each else ())
        self.each, self._states = each, states
        self.schedule = Schedule((), ())

    @property
    def names(self) -> list[list[str]]:
        """The names of the parameters that each optimizer updates."""
        return [update.names for update in self.each]

    @property
    def stateful(self) -> dict[str, Any]:
        """The objects with a state, by their names in a checkpoint."""
        found: dict[str, Any] = {}
        for number, update in enumerate(self.each):
            of_update = update.stateful
            found |= {f"{what} {number}": of_update[what] for what in ("optimizer", "scheduler")}
        return found | {f"state {name}": state for name, state in self._states.items()}


def load_part(name: str, part: Any, state: Any) -> None:
    """Load a part's state_dict; raises ModelError if it belongs to another model or optimizer."""
    if (part is None) != (state is None):
        raise ModelError(f"the checkpoint has {'no' if part is not None else 'a'} {name}, unlike this job")
    try:
        if isinstance(part, torch.optim.Optimizer):
            load_optimizer(part, state)
        elif part is not None:
            part.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the checkpoint's {name} does not fit this job's: {error}") from None

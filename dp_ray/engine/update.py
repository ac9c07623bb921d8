"""Update the parameters from the whole batch's gradient: unscale, weigh, hooks, clip, step: `OptimizerStep.apply`.

`ShardedAverage` is the moving average of a sharded model's weights: each worker averages its own part of them.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from dp_ray.engine.buffers import copy_all
from dp_ray.engine.gradient_hooks import ParameterHooks
from dp_ray.engine.host_copy import ON_GPU
from dp_ray.engine.optimizer import (
    HALVES,
    INNER,
    Schedule,
    averaged_model,
    build_optimizer,
    load_optimizer,
    norms_of,
    scale_by,
    switches,
    take_in,
    total_norm,
    weights_of_average,
)
from dp_ray.engine.reduce import REQUIRES_GRAD, numbers_of
from dp_ray.engine.sharded.state import (
    ELEMENTWISE,
    AlignedParts,
    Sharded,
    load_rows,
    one_thread,
    sharded_as,
    whole_tensors,
)
from dp_ray.engine.tree_sum import sparse_parameters
from dp_ray.engine.user_code import raise_as, reraise_as, shards_hint
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import is_sharded, local
from dp_ray.text import listed

PARAMETERS = operator.itemgetter("params")


class OptimizerStep:
    """A job's optimizer, scheduler and fp16 scaler, and their step, on a model that each worker holds whole.

    Norm and clipping are over the parameters that the optimizer updates. `left_out` are the parameters that require a
    gradient and that it does not hold: their gradients are dropped in each step, or they would grow from step to
    step. One that is frozen on the way has no gradient from there on; one that thaws is an error.
    """

    _frozen: Mapping[str, nn.Parameter] = MappingProxyType({})  # those that require no gradient at the start

    def __init__(self, job: Job, model: nn.Module, device: torch.device, aligned: AlignedParts | None = None) -> None:
        self.aligned = aligned
        self.optimizer, self.trained, scheduler = self._built(job, model)
        # The update of a part must be the part of the update.
        self._is_exact = job.bitwise and job.is_sharded
        if self._is_exact and type(self.optimizer) not in ELEMENTWISE:
            names = listed([kind.__name__ for kind in ELEMENTWISE])
            raise JobError(
                f"optimizer: {type(self.optimizer).__qualname__} may use all of a parameter to update a part of it, "
                "so with strategy: fsdp it cannot be bitwise; "
                f"take one of torch.optim's {names}, or leave bitwise out"
            )
        self._switches = switches(self.optimizer)
        self.schedule = Schedule(scheduler, self.optimizer)
        # The scaler checks the reduced gradients, so all ranks skip the same steps.
        self.scaler = torch.amp.GradScaler(device.type) if job.precision == "fp16" else None
        self._unscaled = UnscaledStep(self.optimizer)
        self._grad_clip = job.grad_clip
        self.has_skipped = False  # whether the last step has left the parameters as they were
        self.rate = 0.0  # the learning rate of the last step
        self._all_named = list(model.named_parameters(remove_duplicate=False))
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        instead = {} if aligned is None else aligned.flats
        self._of_model = [(parameter, instead.get(id(parameter), parameter)) for parameter in self.trained.values()]
        self.hooks = ParameterHooks(self.trained)
        self._parameters: list[nn.Parameter] = []
        self.left_out: list[nn.Parameter] = []
        self._num_held = 0
        self._find_left_out()
        # If all are dense, on one device and of one dtype, no step has to check each gradient.
        trained = [mine for _, mine in self._of_model]  # all of them: the groups may grow
        kinds = {(parameter.device, parameter.dtype) for parameter in trained}
        self._is_plain = not any(map(is_sharded, trained)) and not sparse_parameters(model)
        self._is_alike = self._is_plain and len(kinds) == 1 and not any(dtype in HALVES for _, dtype in kinds)
        self._is_bare = self.scaler is None and not job.is_sharded  # an update is only `optimizer.step()`
        self._factor = MeanFactor(dtype for _, dtype in kinds)
        self._knows_early = self.scaler is None
        self._known: dict[int, torch.Tensor] = {}  # norms of gradients, by the parameter's id, before `apply`
        self._has_weighed = False

    def _built(self, job: Job, model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter], Any]:
        """Return the optimizer, by name the parameters that a training with it trains, and what its scheduler is."""
        named = dict(model.named_parameters())
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        optimizer = build_optimizer(job.optimizer, model) if self.aligned is None else self.aligned.optimizer
        return optimizer, trained, job.scheduler

    def _find_left_out(self) -> None:
        """Find the parameters that the optimizer does not update; its groups may have grown."""
        self._num_held = sum(map(len, map(PARAMETERS, self.optimizer.param_groups)))
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self._parameters = [mine for _, mine in self._of_model if id(mine) in held]
        self.left_out = [parameter for parameter, mine in self._of_model if id(mine) not in held]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the weights to evaluate into the model while the block runs: a schedule-free optimizer trains others.

        Then restore the weights to the bit: to switch there and back would round.
        """
        if not self._switches:
            yield
            return
        weights = [local(parameter.detach()) for parameter in self._parameters]
        before = [weight.clone() for weight in weights]
        optimizer: Any = self.optimizer
        with torch.no_grad(), reraise_as("optimizer.eval", shards_hint):
            optimizer.eval()
        try:
            yield
        finally:
            with torch.no_grad(), reraise_as("optimizer.train", shards_hint):
                optimizer.train()
            copy_all(weights, before)

    def evaluated(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights to evaluate, by name; none if they are the trained ones."""
        if not self._switches:
            return {}
        with self.evaluating():
            copies = {id(parameter): parameter.detach().clone() for parameter in self._parameters}
        return {name: copies[id(parameter)] for name, parameter in self._all_named if id(parameter) in copies}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def names(self) -> list[str]:
        """The names of the parameters that the optimizer updates, in the order of its groups."""
        return [self._names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def says_left_out(self) -> str | None:
        """A line for the user that names the parameters which the optimizer was not given; None if it has all."""
        if not self.left_out:
            return None
        names = listed([self._names[id(parameter)] for parameter in self.left_out])
        return (
            f"optimizer: {len(self.left_out)} of the {len(self._of_model)} parameters that require a gradient are "
            f"not given to it, so they are not trained: {names}"
        )

    @property
    def parts(self) -> dict[str, Any]:
        """The objects with a state, by their names in a checkpoint; None for one that the job does not have."""
        return {"optimizer": self.optimizer, "scheduler": self.schedule.scheduler, "scaler": self.scaler}

    def seed(self, loss: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the gradient with which a backward of `loss` begins: 1 / rows, scaled for fp16."""
        if self.scaler is None:
            return loss.new_full((), 1.0 / rows)
        return self.scaler.scale(loss.new_ones(())) / rows

    def take_norms(self, parameters: Sequence[torch.Tensor]) -> None:
        """Compute the norms of gradients that will not change before `apply`, unless it must weigh or unscale them.

        Called while this worker waits for the others' gradients. Does nothing if the last step rescaled its
        gradients: the next one will too; nor if there are hooks, which may change any gradient.
        """
        if self._knows_early and not self._has_weighed and not self.hooks.hooked:
            gradients = [numbers_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
            if gradients and len(gradients) == len(parameters):
                self._known.update(zip(map(id, parameters), norms_of(gradients), strict=True))

    def apply(self, weight: torch.Tensor | float, rows: int, step: int) -> torch.Tensor:
        """Update the parameters and return the gradient's norm before clipping.

        The gradients must be those of (sum of losses) / `rows`. `weight` is the weight of the losses of the whole
        batch, which has `rows` rows. `step` names the step in errors.
        """
        if self._frozen and any(map(REQUIRES_GRAD, self._frozen.values())):
            thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
            raise ModelError(
                f"step {step}: {listed(thawed)} requires a gradient now, and did not when the model was built, so "
                "nothing would train it; let it require one there and freeze it until then (ddp), or train by a loop "
                "of your own, whose optimizer may hold frozen parameters (docs/loops.md)"
            )
        groups = self.optimizer.param_groups
        self.rate = float(groups[0]["lr"])
        if sum(map(len, map(PARAMETERS, groups))) != self._num_held:
            self._find_left_out()
        if self.scaler is not None:
            self.scaler.unscale_(self._unscaled)  # type: ignore[arg-type]
        gradients = self._numbers()
        factor = self._factor(weight, rows)
        is_hooked = bool(self.hooks.hooked) and self.hooks.are_any()
        self._has_weighed = factor is not None and (self._grad_clip is None or is_hooked)
        if factor is not None and self._has_weighed:
            scale_by(gradients, factor)
            self._known.clear()
        if is_hooked:
            self._run_hooks(factor, step)
            gradients, factor = self._numbers(), None
        norm = self._norm(gradients)
        if self._grad_clip is not None:
            if isinstance(factor, torch.Tensor):
                factor = factor.to(norm.device, norm.dtype)
            norm = norm if factor is None else norm * factor
            clip = (self._grad_clip / (norm + 1e-6)).clamp(max=1.0)
            # One pass over the gradients for both.
            scale_by(gradients, clip if factor is None else clip * factor)
        try:
            if self._is_bare:
                self.optimizer.step()
            self.has_skipped = not self._is_bare and self._update()
        except (Exception, SystemExit) as error:
            raise_as(error, f"step {step}: optimizer", shards_hint)
        if self.schedule.per_step and not self.has_skipped:
            with reraise_as(f"step {step}: scheduler"):
                self.schedule.scheduler.step()
        self.drop_gradients()
        return norm

    def _numbers(self) -> list[Any]:
        """Return the numbers of the gradients, as they are now."""
        gradients: list[Any] = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return gradients if self._is_plain else list(map(numbers_of, gradients))

    def _run_hooks(self, factor: torch.Tensor | float | None, step: int) -> None:
        """Call the hooks, once the gradients of `left_out` are without scale and weighed too."""
        hooked = [parameter for parameter in self.left_out if self.hooks.are_on(parameter)]
        apart = [numbers_of(parameter.grad) for parameter in hooked if parameter.grad is not None]
        for gradient in apart if self.scaler is not None else ():
            gradient.div_(self.scaler.scale(gradient.new_ones((), dtype=torch.float32)))  # type: ignore[union-attr]
        if apart and factor is not None:
            scale_by(apart, factor)
        self.hooks.run(step)

    def _norm(self, gradients: list[Any]) -> torch.Tensor:
        """Return the norm of all gradients together, before clipping."""
        if self._known:
            known = [self._known.get(id(parameter)) for parameter in self._parameters if parameter.grad is not None]
            return total_norm(gradients, known)
        if not self._is_alike or not gradients:
            return total_norm(gradients)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # as `total_norm`
        return norm

    def rehearse(self) -> None:
        """Update the parameters by the gradients as they are, without other workers, to make the state."""
        with reraise_as("optimizer", shards_hint), self._updating():
            self.optimizer.step()
        self.drop_gradients()

    def _updating(self) -> AbstractContextManager[object]:
        """Return the context of an update."""
        return one_thread(self._parameters[0]) if self._is_exact else nullcontext()

    def drop_gradients(self) -> None:
        """Drop all gradients, also of parameters that the optimizer never updates."""
        self._known.clear()
        self.optimizer.zero_grad()
        for param in self.left_out:
            param.grad = None

    def may_skip(self) -> bool:
        """Return whether a step without rows is no update."""
        return True

    def skip(self) -> torch.Tensor:
        """Change nothing in a step without rows, and return the norm of its gradient, which is 0."""
        self.drop_gradients()
        self.has_skipped, self.rate = True, self.learning_rate
        return torch.zeros((), device=self._parameters[0].device)

    def _update(self) -> bool:
        """Update the parameters; True if the scaler skipped the update because fp16 overflowed."""
        with self._updating():
            if self.scaler is None:
                self.optimizer.step()
                return False
            self._unscaled.has_run = False
            with waiting(ON_GPU):  # the scaler reads if the gradients are finite
                self.scaler.step(self._unscaled)  # type: ignore[arg-type]
            self.scaler.update()
            return not self._unscaled.has_run


class MeanFactor:
    """The factor from gradients of sum / rows to those of sum / weight, for gradients of these dtypes."""

    def __init__(self, dtypes: Iterable[torch.dtype]) -> None:
        is_wide = any(dtype.itemsize > torch.float32.itemsize for dtype in dtypes)
        self._dtype = torch.float64 if is_wide else torch.float32
        self._rows: dict[int, torch.Tensor] = {}  # numbers of rows, on the GPU

    def __call__(self, weight: torch.Tensor | float, rows: int) -> torch.Tensor | float | None:
        """Return the factor; None for 1, and 0 for no weight.

        A weight that is a tensor is on a GPU; to read it would wait for the GPU.
        """
        if not isinstance(weight, torch.Tensor):
            return None if weight == rows else 0.0 if weight <= 0 else rows / weight
        if rows not in self._rows:
            self._rows[rows] = torch.full_like(weight, rows)
        factor = torch.empty((), dtype=self._dtype, device=weight.device)
        return torch.div(self._rows[rows], weight, out=factor).masked_fill_(weight <= 0, 0.0)


class ShardedOptimizerStep(OptimizerStep):
    """The same on a sharded model. With `bitwise` the optimizer gets parts of whole vectors (`aligned`)."""

    def __init__(self, job: Job, sharded: Sharded, device: torch.device) -> None:
        super().__init__(job, sharded.model, device, AlignedParts(job, sharded) if job.bitwise else None)
        if self.aligned is None:
            for kind, reason in UNSHARDED.items():
                if isinstance(self.optimizer, kind):
                    raise JobError(f"optimizer: {kind.__name__} {reason}; take another one, like torch.optim:AdamW")
        self._sharded = sharded
        self.hooks = ParameterHooks({})  # `check_shardable` refuses them
        self._unscaled = UnscaledParts(self.optimizer, sharded)
        self._knows_early = False  # a norm takes a collective

    @property
    def names(self) -> list[str]:
        """The names of the parameters that the optimizer updates, in the order of its groups."""
        if self.aligned is None:
            return super().names
        return [self._names[id(parameter)] for parameter in self.aligned.originals()]

    @property
    def parts(self) -> dict[str, Any]:
        """The objects with a state, by their names in a checkpoint; None for one that the job does not have."""
        return super().parts if self.aligned is None else {**super().parts, "optimizer": self.aligned}

    def apply(self, weight: torch.Tensor | float, rows: int, step: int) -> torch.Tensor:
        """Update the parts of the parameters, and return the whole gradient's norm before clipping."""
        if self.aligned is not None:
            self.aligned.take()
        return super().apply(weight, rows, step)

    def _norm(self, gradients: list[Any]) -> torch.Tensor:
        if not gradients:
            return super()._norm(gradients)
        parameters = [parameter for parameter in self._parameters if parameter.grad is not None]
        if self.aligned is None:
            return self._sharded.total_norm(gradients, parameters)
        return self.aligned.total_norm(gradients, parameters, gradients[0].device)

    def rehearse(self) -> None:
        """Update the parameters by the gradients as they are, without other workers, to make the state."""
        if self.aligned is not None:
            self.aligned.take()
        super().rehearse()

    def _updating(self) -> AbstractContextManager[object]:
        return super()._updating() if self._is_exact else updating_apart(self.optimizer)

    def drop_gradients(self) -> None:
        """Drop all gradients, and give the updated parts back."""
        super().drop_gradients()
        if self.aligned is not None:
            self.aligned.give()


class GivenOptimizerStep(OptimizerStep):
    """The step of an optimizer that a loop of the user's has made for some of the model's parameters.

    It trains these alone, and leaves all other gradients. `clip` is the norm to clip to in its next update.
    """

    clip: float | None = None

    def __init__(
        self, job: Job, model: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer, scheduler: Any
    ) -> None:
        self._given = optimizer, scheduler
        super().__init__(job, model, device)

    def _built(self, job: Job, model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter], Any]:
        optimizer, scheduler = self._given
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(f"run.optimizer: takes a torch.optim.Optimizer, got a {type(optimizer).__qualname__}")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise JobError(
                f"run.optimizer: the {type(scheduler).__qualname__} is of another optimizer, so it would change the "
                f"rate of that one; make it of this {type(optimizer).__qualname__}"
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return optimizer, _held(optimizer, names), None if scheduler is None else lambda _: scheduler

    def _find_left_out(self) -> None:
        """Find what the optimizer holds: the loop may give it a further group."""
        self.trained = _held(self.optimizer, self._names)
        self._of_model = [(parameter, parameter) for parameter in self.trained.values()]
        super()._find_left_out()

    def grow(self, names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer the groups that the loop had added by the time of a checkpoint.

        `groups` are those of its state there, and `names` those of all their parameters, in order.
        """
        by_name, at = dict(self._all_named), len(self.names)
        for group in groups[len(self.optimizer.param_groups) :] if names[:at] == self.names else ():
            added, at = names[at : at + len(group["params"])], at + len(group["params"])
            self.optimizer.add_param_group({"params": [by_name[name] for name in added if name in by_name]})
        self._find_left_out()

    def may_skip(self) -> bool:
        """Return whether a step without rows is no update: no pass over a batch of the loop's own has run either."""
        return all(parameter.grad is None for parameter in self.trained.values())

    def apply(self, weight: torch.Tensor | float, rows: int, step: int) -> torch.Tensor:
        """Update the parameters and return the gradient's norm before clipping; the passes have weighed it."""
        self._grad_clip = self.clip
        return super().apply(1.0, 1, step)

    def step_with(self, closure: Callable[[], Any], step: int) -> torch.Tensor:
        """Update the parameters by an optimizer that calls for the loss; return the last gradient's norm."""
        self.rate = self.learning_rate
        with reraise_as(f"step {step}: optimizer", shards_hint):
            self.optimizer.step(closure)
        norm = self._norm(self._numbers())
        if self.schedule.per_step:
            with reraise_as(f"step {step}: scheduler"):
                self.schedule.scheduler.step()
        self.drop_gradients()
        return norm


def _held(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, nn.Parameter]:
    """Return by name what an optimizer holds; raises JobError for what is not the model's."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in held:
        if id(parameter) not in names:
            raise JobError(
                f"run.optimizer: {type(optimizer).__qualname__} holds a tensor of size "
                f"{list(parameter.shape)} that is none of the model's parameters, so it would be neither summed over "
                "the workers nor kept; make it a part of the model"
            )
    return {names[id(parameter)]: parameter for parameter in held}


class Updates:
    """The updates of a loop of the user's: their optimizers and schedulers, kept by their order.

    `states` are the loop's own, by name, which are kept beside them.
    """

    aligned = None
    says_left_out = None

    def __init__(self, each: Sequence[GivenOptimizerStep], states: Mapping[str, Any]) -> None:
        self.each, self._states = each, states
        self.schedule = Schedule(None, None)

    @property
    def names(self) -> list[list[str]]:
        """The names of the parameters that each optimizer updates."""
        return [update.names for update in self.each]

    def grow(self, names: Sequence[Sequence[str]], state: Mapping[str, Any]) -> None:
        """Give the optimizers the groups that the loop had added by the time of a checkpoint with this state."""
        for number, (update, its_names) in enumerate(zip(self.each, names, strict=False)):
            update.grow(its_names, state[f"optimizer {number}"]["param_groups"])

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first optimizer's first group; NaN without an optimizer."""
        return self.each[0].learning_rate if self.each else float("nan")

    @property
    def parts(self) -> dict[str, Any]:
        """The objects with a state, by their names in a checkpoint."""
        parts: dict[str, Any] = {}
        for number, update in enumerate(self.each):
            parts[f"optimizer {number}"] = update.optimizer
            parts[f"scheduler {number}"] = update.schedule.scheduler
        return parts | {f"state {name}": state for name, state in self._states.items()}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have in the model what the optimizers evaluate while the block runs."""
        with ExitStack() as stack:
            for update in self.each:
                stack.enter_context(update.evaluating())
            yield

    def evaluated(self) -> dict[str, torch.Tensor]:
        """Return copies of what `evaluating` has in the model, by name; none if that is what is trained."""
        return {name: tensor for update in self.each for name, tensor in update.evaluated().items()}


class PassGradients:
    """What a pass of a loop of the user's trains: the gradients stay as they are summed, for the loop's updates."""

    def __init__(self, trained: dict[str, nn.Parameter]) -> None:
        self.trained = trained
        self.hooks = ParameterHooks(trained)
        self._factor = MeanFactor(parameter.dtype for parameter in trained.values())

    def seed(self, loss: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the gradient with which a backward of `loss` begins: that of loss / rows."""
        return loss.new_full((), 1.0 / rows)

    def take_norms(self, parameters: Sequence[torch.Tensor]) -> None:
        """Do nothing: the loop may change a gradient before its norm is taken."""

    def weigh(self, weight: torch.Tensor | float, rows: int, step: int) -> None:
        """Make gradients of sum / `rows` those of sum / `weight`, and call the hooks on them."""
        factor = self._factor(weight, rows)
        gradients = [numbers_of(parameter.grad) for parameter in self.trained.values() if parameter.grad is not None]
        if factor is not None and gradients:
            scale_by(gradients, factor)
        if self.hooks.hooked and self.hooks.are_any():
            self.hooks.run(step)

    def drop_gradients(self) -> None:
        """Drop the gradients of what the pass trains."""
        for parameter in self.trained.values():
            parameter.grad = None


SHAPED = "keeps state of another shape than its parameters, of which strategy: fsdp cannot give each worker a part"
UNSHARDED = {
    torch.optim.Adafactor: SHAPED,
    torch.optim.Rprop: "writes where gradients changed their sign, which torch cannot do in shards (strategy: fsdp)",
}


@dataclass(eq=False)
class UnscaledStep:
    """The optimizer as the fp16 scaler sees it; `has_run` is False if an update was skipped."""

    optimizer: torch.optim.Optimizer
    has_run: bool = field(default=False, init=False)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The tensors whose gradients are to be unscaled. The scaler asks for them once a step, on every rank."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Update the parameters; the scaler calls it if all gradients are finite."""
        self.has_run = True
        self.optimizer.step()


@dataclass(eq=False)
class UnscaledParts(UnscaledStep):
    """A sharded model's optimizer, with this worker's parts of the gradients.

    The scaler itself takes no sharded gradients beside whole ones, and would ask the other workers on the device of
    the gradients, where an offloaded model has no collectives. So it gets plain tensors, and one gradient more. It is
    infinite on all workers if any of them has a gradient that is not finite: so all skip the same updates.
    """

    sharded: Sharded

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Stand-ins whose gradients are the parts, and one that tells of all workers."""
        whole = [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
        parts = [numbers_of(gradient) for gradient in whole if gradient is not None]
        gradients = [part for part in parts if part.numel()]
        holders = []
        for gradient in [*gradients, self.sharded.infinite_if_any(gradients)]:
            holder = gradient.detach()  # in the same memory
            holder.grad = gradient
            holders.append(holder)
        return [{"params": holders}]


@contextmanager
def updating_apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In the block, have an optimizer update sharded parameters and others apart if a group has both.

    An operation on a list of tensors takes sharded ones or others, but not both. One of torch's own optimizers takes
    such a group for two, with the same values. Any other, which may keep values of its own in a group, updates one
    parameter of it at a time.
    """
    mixed = [group for group in optimizer.param_groups if len({is_sharded(param) for param in group["params"]}) == 2]
    if mixed and type(optimizer).__module__.startswith("torch.optim"):
        groups = optimizer.param_groups
        optimizer.param_groups = [
            {**group, "params": params}
            for group in groups
            for kind in (True, False)
            if (params := [param for param in group["params"] if is_sharded(param) is kind])
        ]
        try:
            yield
        finally:
            optimizer.param_groups = groups
        return
    before: list[dict[str, Any]] = [
        {key: group[key] for key in ("foreach", "fused") if key in group} for group in mixed
    ]
    try:
        for group, keys in zip(mixed, before, strict=True):
            group.update(dict.fromkeys(keys, False))
        yield
    finally:
        for group, keys in zip(mixed, before, strict=True):
            group.update(keys)


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


class ShardedAverage:
    """The average of this worker's part of each parameter; evaluations run the model with the average in its place.

    With `aligned`, the parts begin and end where vectors do, so that their average has the bits of whole parameters.
    """

    def __init__(self, job: Job, sharded: Sharded, aligned: AlignedParts | None) -> None:
        self._world = sharded.world
        self._model = sharded.model
        self._parameters, self._buffers = list(self._model.parameters()), list(self._model.buffers())
        self._aligned = {} if aligned is None else {id(part.parameter): part for part in aligned.parts}
        self._averaged = averaged_model(job, _Parts(self._live(), self._buffers))

    def called(self, called: nn.Module) -> nn.Module:
        """Return the module that evaluations call: the model itself."""
        return called

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average in the model's place while the block runs."""
        weights, averages = self._of_model(), self._of_average()
        before = [weight.clone() for weight in weights]
        copy_all(weights, averages)
        try:
            yield
        finally:
            copy_all(weights, before)

    def begin(self) -> None:
        """Start from the model's weights, unless a checkpoint has given the average already."""
        if not self._averaged.n_averaged:
            copy_all(self._of_average(), self._of_model())

    def update(self) -> None:
        """Take in the weights after an update of the optimizer; the first ones are the average's start."""
        with one_thread(self._parameters[0]) if self._aligned else nullcontext():
            take_in(self._averaged, self._live(), self._buffers)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average, sharded as the model is, by the names of the model's own tensors."""
        tensors: list[Any] = [*self._parameters, *self._buffers]
        averages = {
            id(tensor): sharded_as(tensor, mine) if is_sharded(tensor) else mine
            for tensor, mine in zip(tensors, self._of_average(), strict=True)
        }
        state = self._model.state_dict(keep_vars=True)
        return {
            key: averages.get(id(value), value) for key, value in state.items() if isinstance(value, torch.Tensor)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the average of a whole model has, with sharded tensors."""
        tensors = {INNER + key: tensor for key, tensor in self.tensors().items()}
        return {"n_averaged": self._averaged.n_averaged, **tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this worker's rows of a state whose tensors are stored, by way of the model."""
        weights = self._of_model()
        before = [weight.clone() for weight in weights]
        load_rows(self._model, weights_of_average(state), "the checkpoint's ema", self._world)
        copy_all(self._of_average(), weights)
        copy_all(weights, before)
        self._averaged.n_averaged.copy_(whole_tensors(state["n_averaged"]))

    def _live(self) -> list[torch.Tensor]:
        """Return the tensors to average: of each parameter the part that the optimizer updates."""
        parts = [self._aligned.get(id(parameter)) for parameter in self._parameters]
        return [
            local(parameter.detach()) if part is None else part.flat.detach()
            for parameter, part in zip(self._parameters, parts, strict=True)
        ]

    def _of_model(self) -> list[torch.Tensor]:
        return [*(local(parameter.detach()) for parameter in self._parameters), *self._buffers]

    def _of_average(self) -> list[torch.Tensor]:
        """Return the average of each parameter's part, in the part's shape, and the buffers beside it."""
        averages = []
        for parameter, average in zip(self._parameters, self._averaged.module.parameters(), strict=True):
            part = self._aligned.get(id(parameter))
            flat = average.detach()
            averages.append(flat if part is None else part.inner(flat).view(local(parameter).shape))
        return [*averages, *self._averaged.module.buffers()]


class _Parts(nn.Module):
    """This worker's parts of the parameters, and the buffers, in the same memory."""

    def __init__(self, parameters: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(parameter, requires_grad=False) for parameter in parameters)
        for number, buffer in enumerate(buffers):
            self.register_buffer(f"buffer_{number}", buffer)

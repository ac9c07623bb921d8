"""Build the optimizer and the scheduler of a training; the norm of its gradients; the moving average of its weights.

The average is exponential, kept beside the weights, with torch's `swa_utils`.
"""

import copy
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from dp_ray.engine.buffers import copy_all, same_buffers
from dp_ray.engine.model import compiled
from dp_ray.engine.user_code import reraise_as
from dp_ray.engine.weights import check_has_shape, tensors_of
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Optimizer, Scheduler, Target
from dp_ray.job.targets import bind, check_gives, resolve
from dp_ray.plan.costs import num_scheduled, too_short
from dp_ray.plan.split import Split
from dp_ray.tensors.files import is_dense, is_sharded, laid_out, overlaps
from dp_ray.text import did_you_mean, listed


def build_optimizer(
    spec: Any, model: nn.Module, instead: Mapping[int, nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of the model's trainable parameters, in the job's parameter groups.

    `instead` maps a parameter's id to the tensor that the optimizer gets in its place. Raises JobError if there is
    nothing to train or the job gives no usable optimizer. Raises ModelError if a parameter has no shape yet or is an
    expanded tensor.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        raise JobError("model: has no parameter that requires a gradient, there is nothing to train")
    for name, parameter in named.items():
        check_has_shape(name, parameter)
        if overlaps(parameter):
            raise ModelError(f"{name} is an expanded tensor, whose elements no optimizer can update: clone() it")
    _check_unbuilt(spec)
    named = {name: (instead or {}).get(id(parameter), parameter) for name, parameter in named.items()}
    if isinstance(spec, Optimizer):
        optimizer = bind("optimizer", spec, leading=1)(_groups(spec, named))
    else:
        optimizer = _call("optimizer", spec, list(named.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"optimizer: must give a torch.optim.Optimizer, got {type(optimizer).__qualname__}")
    _check_kind(type(optimizer))
    # No worker would sum the gradient of another parameter.
    allowed = {id(parameter) for parameter in named.values()}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if id(parameter) not in allowed:
            raise JobError(
                f"optimizer: holds a parameter of size {list(parameter.shape)} that is none of the parameters it was "
                "given; it may take some or all of those, and no others"
            )
    if isinstance(spec, Optimizer) and type(optimizer).__module__.startswith("torch.optim."):
        for number, own in enumerate(spec.groups):  # torch's would keep other args, and never read them
            for name in own.args.keys() - optimizer.defaults.keys():
                raise JobError(
                    f"optimizer.groups.{number}.args: {spec.label} takes no {name!r}, but "
                    f"{listed(optimizer.defaults)}{did_you_mean(name, optimizer.defaults)}"
                )
    if switches(optimizer):
        with reraise_as("optimizer.train"):
            optimizer.train()  # type: ignore[attr-defined]
    for group in optimizer.param_groups:  # a scheduler writes into them; the next attempt begins with the job's own
        group |= {name: value.detach().clone() for name, value in group.items() if isinstance(value, torch.Tensor)}
    return optimizer


def _groups(spec: Optimizer, named: dict[str, nn.Parameter]) -> list[Any]:
    if not spec.groups:
        return list(named.values())
    members: list[list[nn.Parameter]] = [[] for _ in spec.groups]
    rest: list[nn.Parameter] = []
    for name, parameter in named.items():
        matching = [mine for group, mine in zip(spec.groups, members, strict=True) if re.search(group.match, name)]
        (matching[0] if matching else rest).append(parameter)
    for group, mine in zip(spec.groups, members, strict=True):
        if not mine:
            raise JobError(
                f"optimizer.groups: {group.match!r} matches no trainable parameter that is left; there are "
                f"{listed(named)}"
            )
    groups = [{"params": mine, **group.args} for group, mine in zip(spec.groups, members, strict=True)]
    return [*groups, {"params": rest}] if rest else groups


def check_optimizer(spec: Any) -> None:
    """Check the key `optimizer` as far as is known without building it; raises JobError."""
    _check_unbuilt(spec)
    if isinstance(spec, Target):
        _check_kind(resolve("optimizer", spec))
        bind("optimizer", spec, leading=1)


def check_scheduler(spec: Any) -> None:
    """Check the key `scheduler` as far as is known without building it; raises JobError."""
    if isinstance(spec, list | tuple):
        raise JobError("scheduler: is a list; give one, or a function of the optimizer with torch's SequentialLR")
    if isinstance(spec, Target):
        bind("scheduler", spec, leading=1)


def _check_unbuilt(spec: Any) -> None:
    """Raise JobError for an optimizer that is made already, for other parameters than the workers'."""
    if isinstance(spec, torch.optim.Optimizer):
        raise JobError(
            "optimizer: belongs to the parameters it was made with, which are not those of the workers; "
            "give a function of the parameters, like functools.partial(torch.optim.AdamW, lr=0.001)"
        )
    if isinstance(spec, list | tuple):
        raise JobError(
            f"optimizer: is a {type(spec).__qualname__} of {len(spec)}, and a job has one; give parts of the model "
            "args of their own in optimizer.groups, like [{match: head, args: {lr: 0.01}}]; several optimizers, "
            "as of a GAN, need a loop of your own (docs/loops.md)"
        )


def switches(optimizer: Any) -> bool:
    """Return whether an optimizer evaluates other weights than it trains, as a schedule-free one does."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


SAMS = ("first_step", "second_step")  # what optimizers like SAM have: each needs a backward of its own


def _check_kind(kind: Any) -> None:
    """Raise JobError if a class is not an optimizer, or needs the loss again within a step, as LBFGS and SAM do."""
    check_gives("optimizer", kind, torch.optim.Optimizer, "torch.optim.Optimizer")
    if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer):
        return
    # The closure may have any name; the first parameter is the optimizer itself.
    _, *takes = inspect.signature(kind.step).parameters.values()
    needs_closure = any(
        param.default is param.empty and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
        for param in takes
    )
    if needs_closure or all(hasattr(kind, name) for name in SAMS):
        how = "by a closure" if needs_closure else f"in its {' and '.join(SAMS)}"
        raise JobError(
            f"optimizer: {kind.__qualname__} computes the loss several times in a step, {how}; "
            "take an optimizer whose step() needs none"
        )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state_dict so that each tensor keeps its saved dtype and gets the strides of its parameter.

    torch alone casts each tensor to the parameter's dtype and leaves its strides. A `fused` kernel reads a
    parameter and its state together, so with other strides it would pair wrong elements.
    """
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in (state.get("state") or {}).items():
        loaded = optimizer.state.get(parameters[number]) if isinstance(number, int) else None
        if loaded is None or not isinstance(saved, dict):
            continue
        parameter = parameters[number]
        for name, value in saved.items():
            if isinstance(value, torch.Tensor) and isinstance(loaded.get(name), torch.Tensor):
                moved = value.to(loaded[name].device)
                is_whole = not is_sharded(value) and value.layout is torch.strided
                is_like = is_whole and value.shape == parameter.shape and is_dense(parameter)
                loaded[name] = laid_out(moved, parameter.stride()) if is_like else moved


class Schedule:
    """The job's scheduler, or none, stepped as the job says."""

    def __init__(self, spec: Any, optimizer: Any) -> None:
        self._spec = spec
        self._optimizer = optimizer
        self._per = spec.per if isinstance(spec, Scheduler) else "step"
        self.metric = (spec.metric if isinstance(spec, Scheduler) else None) or "loss"
        self.scheduler: Any = self._build()
        self.per_step = self.scheduler is not None and self._per == "step"
        if self.scheduler is not None and not hasattr(self.scheduler, "step"):
            raise JobError(
                f"scheduler: must give an object with a step() method, got {type(self.scheduler).__qualname__}"
            )
        if self.watches and self._per != "epoch":
            raise JobError("scheduler.per: a ReduceLROnPlateau watches a metric of each epoch; set per: epoch")

    def _build(self) -> Any:
        if isinstance(self._spec, Scheduler):
            return bind("scheduler", self._spec, leading=1)(self._optimizer)
        return None if self._spec is None else _call("scheduler", self._spec, self._optimizer)

    @property
    def watches(self) -> bool:
        """Whether the scheduler needs a metric, as ReduceLROnPlateau does."""
        return isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)

    @property
    def lengths(self) -> str:
        """The schedulers that may depend on the training's length, with their own: `CosineAnnealingLR: T_max 30`."""
        return ", ".join(_scheduler_lengths(self.scheduler))

    def check_lasts(self, split: Split, done: int) -> None:
        """Raise JobError if the scheduler, a OneCycleLR, ends before the training, of which `done` steps are done."""
        if not isinstance(self.scheduler, lr_scheduler.OneCycleLR):
            return
        left = self.scheduler.total_steps - self.scheduler.last_epoch
        needed = num_scheduled(split, self._per, done)
        if left < needed:
            raise JobError(too_short(left, needed, self._per))

    def begin_anew(self) -> bool:
        """Build the scheduler again, and step it as often as the present one was: for another length of the training.

        The learning rate is then that of a training which had this length from its start. Returns False if the
        scheduler is not torch's and does not say how often it was stepped.
        """
        if not isinstance(self.scheduler, LRScheduler):
            return False
        done = self.scheduler.last_epoch
        for group in self._optimizer.param_groups:
            group["lr"] = copy.deepcopy(group["initial_lr"])
        self.scheduler = self._build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch asks for a step of the optimizer between two of the scheduler
            for _ in range(done):
                self.scheduler.step()
        return True

    def after_epoch(self, measured: dict[str, float]) -> None:
        """Step the scheduler if the job steps it once an epoch.

        `measured` holds the epoch's mean loss and the results of the last evaluation. Raises JobError if the
        scheduler's metric is not among them.
        """
        if self.scheduler is None or self._per != "epoch":
            return
        if not self.watches:
            self.scheduler.step()
        elif self.metric not in measured:
            raise JobError(
                f"scheduler.metric: {self.metric} was not measured by the end of the epoch; "
                "set eval to evaluate in each epoch"
            )
        else:
            self.scheduler.step(measured[self.metric])


LENGTHS = ("T_max", "total_steps", "total_iters")  # attributes of torch's schedulers


def _scheduler_lengths(scheduler: Any) -> Iterator[str]:
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _scheduler_lengths(inner)
    own = ", ".join(f"{name} {getattr(scheduler, name)}" for name in LENGTHS if hasattr(scheduler, name))
    if own or isinstance(scheduler, lr_scheduler.LambdaLR):
        yield type(scheduler).__name__ + (f": {own}" if own else "")


def warmed_up(optimizer: torch.optim.Optimizer, shape: str, warmup: float, total_steps: int) -> LRScheduler:
    """Build the short form of the job's `scheduler`: of `total_steps` updates, a share or a number are the warm-up.

    Update k of W has (k + 1) / (W + 1) of the optimizer's learning rate; the shape begins with all of it.
    """
    rises = warmup if isinstance(warmup, int) else round(warmup * total_steps)
    left = max(1, total_steps - rises)
    if shape == "cosine":
        rest: LRScheduler = lr_scheduler.CosineAnnealingLR(optimizer, left)
    elif shape == "linear":
        rest = lr_scheduler.LinearLR(optimizer, 1.0, 0.0, left)
    else:
        rest = lr_scheduler.ConstantLR(optimizer, 1.0, 0)
    if rises == 0:
        return rest
    rise = lr_scheduler.LinearLR(optimizer, 1 / (rises + 1), 1.0, rises)
    return lr_scheduler.SequentialLR(optimizer, [rise, rest], [rises])


def _call(key: str, function: Any, first: Any) -> Any:
    with reraise_as(key, kind=JobError):
        return function(first)


def runs_users_code(spec: Any) -> bool:
    """Return whether an optimizer or a scheduler may run code that is not torch's: it may draw random numbers."""
    if spec is None or not isinstance(spec, Target):
        return spec is not None
    named = isinstance(spec.target, str)
    module = spec.target.partition(":")[0] if named else getattr(spec.target, "__module__", "")
    return (module.split(".")[:2] != ["torch", "optim"] and module != __name__) or not all(
        map(_is_plain, spec.args.values())
    )


def _is_plain(value: Any) -> bool:
    """Return whether an argument is a number, a text or a list of such, and no function."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


HALVES = (torch.float16, torch.bfloat16)


def total_norm(gradients: Sequence[torch.Tensor], known: Sequence[torch.Tensor | None] = ()) -> torch.Tensor:
    """Return the norm of all gradients together, computed in fp32 or wider; of some the norm may be `known`."""
    if not gradients:
        return torch.tensor(0.0)
    if not known:
        return norm_of_norms(norms_of(gradients), gradients)
    others = iter(norms_of([gradient for gradient, norm in zip(gradients, known, strict=True) if norm is None]))
    return norm_of_norms([next(others) if norm is None else norm for norm in known], gradients)


def norms_of(gradients: Sequence[torch.Tensor], order: float = 2.0) -> list[torch.Tensor]:
    """Return the norm of each gradient, computed in fp32 or wider, by one operation for all of a dtype and device."""
    norms: dict[int, torch.Tensor] = {}
    for numbers in _by_kind(gradients):
        here = [gradients[number] for number in numbers]
        wide = torch.float32 if here[0].dtype in HALVES else None
        norms.update(zip(numbers, torch._foreach_norm(here, order, wide), strict=True))
    return [norms[number] for number in range(len(gradients))]


def norm_of_norms(norms: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients together, from the norm of each."""
    whole: torch.Tensor
    here = [norm.to(gradients[0].device) for norm in norms]
    if any(gradient.dtype in HALVES for gradient in gradients):
        whole = torch.linalg.vector_norm(torch.stack([gradient.double() for gradient in here])).float()
    else:
        ordered = [here[number] for numbers in _by_kind(gradients) for number in numbers]
        whole = torch.linalg.vector_norm(torch.stack(ordered))
    return whole


def _by_kind(gradients: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the gradients by device and dtype, in the order in which torch's `get_total_norm` adds their norms."""
    if len({(gradient.device, gradient.dtype) for gradient in gradients}) <= 1:
        return [list(range(len(gradients)))] if gradients else []
    empty = [torch.empty(0, dtype=gradient.dtype, device=gradient.device) for gradient in gradients]
    grouped = _group_tensors_by_device_and_dtype([empty], with_indices=True)  # type: ignore[list-item]
    return [numbers for _, numbers in grouped.values()]


def scale_by(gradients: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply the gradients, in place, by a number, or by a scalar tensor without waiting for its device."""
    if not isinstance(factor, torch.Tensor):
        torch._foreach_mul_(list(gradients), factor)
        return
    for device, dtype in {(gradient.device, gradient.dtype) for gradient in gradients}:
        here = [gradient for gradient in gradients if (gradient.device, gradient.dtype) == (device, dtype)]
        torch._foreach_mul_(here, factor.to(device, torch.promote_types(dtype, torch.float32)))


INNER = "module."  # before the names of the model's tensors in the average's state


class Average:
    """The average of a model that this worker holds whole, as a second model."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._model = model
        self._averaged = averaged_model(job, model)
        self._called = compiled(self._averaged.module, job)

    def called(self, called: nn.Module) -> nn.Module:
        """Return the module that evaluations call: the average's own."""
        return self._called

    def in_place(self) -> AbstractContextManager[None]:
        """Return an empty context: nothing takes the model's place."""
        return nullcontext()

    def begin(self) -> None:
        """Start from the model's weights, unless a checkpoint has given the average already."""
        same_buffers(self._model, self._averaged.module)
        if not self._averaged.n_averaged:
            copy_all(_tensors(self._averaged.module), _tensors(self._model))
        else:  # a checkpoint has not all of them
            copy_all(list(self._averaged.module.buffers()), list(self._model.buffers()))

    def update(self) -> None:
        """Take in the weights after an update of the optimizer; the first ones are the average's start."""
        buffers, mine = list(self._model.buffers()), list(self._averaged.module.buffers())
        if [tensor.shape for tensor in mine] != [tensor.shape for tensor in buffers]:
            same_buffers(self._model, self._averaged.module)
        take_in(self._averaged, [parameter.detach() for parameter in self._model.parameters()], buffers)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average, by the names of the model's own tensors."""
        return tensors_of(self._averaged.module)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of updates that it has taken in; its tensors are the live ones."""
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, once the model's own state is loaded."""
        same_buffers(self._model, self._averaged.module)
        self._averaged.load_state_dict(state)


def averaged_model(job: Job, module: nn.Module) -> AveragedModel:
    """Copy a module, for its parameters to become their moving average; the buffers stay the module's own.

    Raises JobError if it cannot be copied.
    """
    assert job.ema is not None
    with reraise_as("ema: copying the model", kind=JobError):
        mean = get_ema_multi_avg_fn(job.ema.decay)  # type: ignore[no-untyped-call]
        averaged = AveragedModel(module, multi_avg_fn=mean)
    averaged.requires_grad_(False)
    return averaged


def take_in(averaged: AveragedModel, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    """Do the same as `AveragedModel.update_parameters`, which would wait for a GPU in each step."""
    assert averaged.multi_avg_fn is not None
    mine = [parameter.detach() for parameter in averaged.module.parameters()]
    if not averaged.n_averaged:
        copy_all(mine, list(parameters))
    else:
        for device, dtype in dict.fromkeys((tensor.device, tensor.dtype) for tensor in mine):
            pairs = zip(mine, parameters, strict=True)
            here = [pair for pair in pairs if (pair[0].device, pair[0].dtype) == (device, dtype)]
            averaged.multi_avg_fn([tensor for tensor, _ in here], [tensor for _, tensor in here], averaged.n_averaged)
    copy_all(list(averaged.module.buffers()), list(buffers))
    averaged.n_averaged += 1


EVALUATED = "evaluated"  # the key, in a checkpoint, of weights that an optimizer evaluates and does not train


def evaluated_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights in a training's state as its evaluations see them."""
    return {**state["model"], **state.get(EVALUATED, {})}


def weights_of_average(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights in the average's state, as the bare module's `load_state_dict` takes them."""
    return {name.removeprefix(INNER): value for name, value in state.items() if name.startswith(INNER)}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*(parameter.detach() for parameter in module.parameters()), *module.buffers()]

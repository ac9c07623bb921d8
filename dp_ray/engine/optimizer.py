"""Build the optimizer and the schedule of a training; the norm of its gradients."""

import copy
import inspect
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._pytree import tree_leaves

from dp_ray.engine.forward.weights import check_has_shape
from dp_ray.engine.user_code import reraise_as
from dp_ray.errors import JobError, ModelError
from dp_ray.job.keys import Optimizer, Scheduler, Target
from dp_ray.job.targets import bind, check_gives, resolve
from dp_ray.plan.costs import num_scheduled, too_short
from dp_ray.plan.split import Split
from dp_ray.tensors.files import is_dense, is_sharded, laid_out, overlaps
from dp_ray.text import did_you_mean, listed


def build_optimizers(
    specs: Sequence[tuple[str, Any]], model: nn.Module, instead: Mapping[int, nn.Parameter] | None = None
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the model's trainable parameters, in the job's parameter groups.

    `specs` are the job's, with their keys. `instead` maps a parameter's id to the tensor that an optimizer gets in
    its place. Raises JobError if there is nothing to train, or if the job gives no usable optimizers. Raises
    ModelError if a parameter has no shape yet or is an expanded tensor.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise JobError("model: has no parameter that requires a gradient, there is nothing to train")
    for name, parameter in trained.items():
        check_has_shape(name, parameter)
        if overlaps(parameter):
            raise ModelError(f"{name} is an expanded tensor, whose elements no optimizer can update: clone() it")
    for key, spec in specs:
        check_optimizer(key, spec)
    named = {name: (instead or {}).get(id(parameter), parameter) for name, parameter in trained.items()}
    *several, rest = _parted([getattr(spec, "match", None) for _, spec in specs], named)
    if rest:
        raise JobError(
            f"optimizer: no match finds {listed(rest)}, so nothing would train them; leave match out of the last "
            "optimizer, which then gets the rest, or freeze them (parameter.requires_grad_(False))"
        )
    for (key, spec), mine in zip(specs, several, strict=True):
        if not mine:
            match = getattr(spec, "match", None)
            finds = "all belong to those before it" if match is None else f"{match!r} matches none that is left"
            raise JobError(f"{key}: gets no trainable parameter: {finds}; there are {listed(named)}")
    return [_built(key, spec, mine) for (key, spec), mine in zip(specs, several, strict=True)]


def _built(key: str, spec: Any, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of these parameters, ready to train them."""
    _check_sizes(key, spec, named)
    if isinstance(spec, Optimizer):
        optimizer = bind(key, spec, leading=1)(_groups(key, spec, named))
    else:
        optimizer = _call(key, spec, list(named.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"{key}: must give a torch.optim.Optimizer, got {type(optimizer).__qualname__}")
    _check_kind(key, type(optimizer))
    _check_groups(key, spec, optimizer, set(map(id, named.values())))
    if switches(optimizer):
        with reraise_as(f"{key}.train"):
            optimizer.train()  # type: ignore[attr-defined]
    for group in optimizer.param_groups:  # a scheduler writes into them; the next attempt begins with the job's own
        group |= {name: value.detach().clone() for name, value in group.items() if isinstance(value, torch.Tensor)}
    return optimizer


def _check_sizes(key: str, spec: Any, named: dict[str, nn.Parameter]) -> None:
    """Raise JobError if torch's Muon is given what is no matrix; its own error has no names."""
    if not isinstance(spec, Optimizer) or resolve(key, spec) is not torch.optim.Muon:
        return
    others = [f"{name} {list(parameter.shape)}" for name, parameter in named.items() if parameter.ndim != 2]
    if others:
        match = "match" if key == "optimizer" else f"{key}.match"
        advice = "" if match != "match" else "make optimizer a list, [{match: ..., target: ...}, {target: ...}]; "
        raise JobError(
            f"{key}: Muon takes matrices alone, which are not: {listed(others)}; {advice}let {match} find matrices "
            "alone, and give the rest to another optimizer"
        )


def _check_groups(key: str, spec: Any, optimizer: torch.optim.Optimizer, allowed: set[int]) -> None:
    """Raise JobError if groups hold other parameters than those allowed, by their ids, or args that torch ignores."""
    for parameter in parameters_of([optimizer]):
        if id(parameter) not in allowed:  # no worker would sum its gradient
            raise JobError(
                f"{key}: holds a parameter of size {list(parameter.shape)} that is none of the parameters it was "
                "given; it may take some or all of those, and no others"
            )
    if isinstance(spec, Optimizer) and type(optimizer).__module__.startswith("torch.optim."):
        for number, own in enumerate(spec.groups):  # torch's would keep other args, and never read them
            for name in own.args.keys() - optimizer.defaults.keys():
                raise JobError(
                    f"{key}.groups.{number}.args: {spec.label} takes no {name!r}, but "
                    f"{listed(optimizer.defaults)}{did_you_mean(name, optimizer.defaults)}"
                )


def _parted(matches: Sequence[str | None], named: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Return the parameters that each pattern is the first to find, and last those of none; None finds all."""
    found: list[dict[str, nn.Parameter]] = [{} for _ in (*matches, "the rest")]
    for name, parameter in named.items():
        finds = (at for at, match in enumerate(matches) if match is None or re.search(match, name))
        found[next(finds, -1)][name] = parameter
    return found


def _groups(key: str, spec: Optimizer, named: dict[str, nn.Parameter]) -> list[Any]:
    if not spec.groups:
        return list(named.values())
    *members, rest = _parted([group.match for group in spec.groups], named)
    for group, mine in zip(spec.groups, members, strict=True):
        if not mine:
            raise JobError(
                f"{key}.groups: {group.match!r} matches no trainable parameter that is left; there are "
                f"{listed(named)}"
            )
    groups = [{"params": [*mine.values()], **group.args} for group, mine in zip(spec.groups, members, strict=True)]
    return [*groups, {"params": [*rest.values()]}] if rest else groups


def check_optimizer(key: str, spec: Any) -> None:
    """Check an optimizer of the job as far as is known without building it; raises JobError."""
    if isinstance(spec, torch.optim.Optimizer):
        raise JobError(
            f"{key}: belongs to the parameters it was made with, which are not those of the workers; "
            "give a function of the parameters, like functools.partial(torch.optim.AdamW, lr=0.001)"
        )
    if isinstance(spec, Target):
        _check_kind(key, resolve(key, spec))
        bind(key, spec, leading=1)


def check_scheduler(key: str, spec: Any) -> None:
    """Check a scheduler of the job as far as is known without building it; raises JobError."""
    if isinstance(spec, list | tuple):
        raise JobError(
            f"{key}: is a list; give one, which each optimizer gets for itself, or a function of the optimizer with "
            "torch's SequentialLR"
        )
    if isinstance(spec, Target):
        bind(key, spec, leading=1)


def switches(optimizer: Any) -> bool:
    """Return whether an optimizer evaluates other weights than it trains, as a schedule-free one does."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


SAMS = ("first_step", "second_step")  # what optimizers like SAM have: each needs a backward of its own


def _check_kind(key: str, kind: Any) -> None:
    """Raise JobError if a class is not an optimizer, or needs the loss again within a step, as LBFGS and SAM do."""
    check_gives(key, kind, torch.optim.Optimizer, "torch.optim.Optimizer")
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
            f"{key}: {kind.__qualname__} computes the loss several times in a step, {how}; "
            "take an optimizer whose step() needs none"
        )


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Return what optimizers update, in the order of their groups."""
    return [param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]]


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state_dict so that each tensor keeps its saved dtype and gets the strides of its parameter.

    torch alone casts each tensor to the parameter's dtype and leaves its strides. A `fused` kernel reads a
    parameter and its state together, so with other strides it would pair wrong elements.
    """
    optimizer.load_state_dict(state)
    parameters = parameters_of([optimizer])
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
    """The job's schedulers, one of each optimizer, stepped as the job says; None for an optimizer without one.

    `specs` are the job's, one for each optimizer, with their keys.
    """

    def __init__(self, specs: Sequence[tuple[str, Any]], optimizers: Sequence[Any]) -> None:
        self._specs, self._optimizers = specs, optimizers
        self._pers = [spec.per if isinstance(spec, Scheduler) else "step" for _, spec in specs]
        self.schedulers = list(map(self._build, range(len(optimizers))))
        pairs = zip(self._pers, self.schedulers, strict=True)
        self.per_step = any(per == "step" for per, scheduler in pairs if scheduler is not None)
        for (key, _), per, scheduler in zip(specs, self._pers, self.schedulers, strict=True):
            if scheduler is not None and not hasattr(scheduler, "step"):
                raise JobError(f"{key}: must give an object with a step() method, got {type(scheduler).__qualname__}")
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) and per != "epoch":
                raise JobError(f"{key}.per: a ReduceLROnPlateau watches a metric of each epoch; set per: epoch")

    def _build(self, number: int) -> Any:
        key, spec = self._specs[number]
        if isinstance(spec, Scheduler):
            return bind(key, spec, leading=1)(self._optimizers[number])
        return None if spec is None else _call(key, spec, self._optimizers[number])

    @property
    def watched(self) -> dict[str, str]:
        """The metrics that schedulers need, as a ReduceLROnPlateau does, by the keys of the job that name them."""
        return {
            f"{key}.metric": (spec.metric if isinstance(spec, Scheduler) else None) or "loss"
            for (key, spec), scheduler in zip(self._specs, self.schedulers, strict=True)
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        }

    def check_lasts(self, split: Split, done: int) -> None:
        """Raise JobError if a scheduler, a OneCycleLR, ends before the training, of which `done` steps are done."""
        for (key, _), per, scheduler in zip(self._specs, self._pers, self.schedulers, strict=True):
            if isinstance(scheduler, lr_scheduler.OneCycleLR):
                left = scheduler.total_steps - scheduler.last_epoch
                needed = num_scheduled(split, per, done)
                if left < needed:
                    raise JobError(f"{key}: {too_short(left, needed, per)}")

    def begin_anew(self, keys: Collection[str]) -> bool:
        """Build schedulers again, for another length of the training, and step each as often as the present one.

        They are those of these keys. The learning rate is then that of a training which had this length from its
        start. Returns False if there is none, or if one is not torch's and does not say how often it was stepped.
        """
        numbers = [number for number, (key, _) in enumerate(self._specs) if key in keys]
        if not numbers or not all(isinstance(self.schedulers[number], LRScheduler) for number in numbers):
            return False
        for number in numbers:
            done = self.schedulers[number].last_epoch
            for group in self._optimizers[number].param_groups:
                group["lr"] = copy.deepcopy(group["initial_lr"])
            self.schedulers[number] = self._build(number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch asks for a step of the optimizer between two of the scheduler
                for _ in range(done):
                    self.schedulers[number].step()
        return True

    def step(self, where: str) -> None:
        """Step the schedulers after an update; `where` begins an error's text."""
        with reraise_as(where):
            for per, scheduler in zip(self._pers, self.schedulers, strict=True):
                if scheduler is not None and per == "step":
                    scheduler.step()

    def after_epoch(self, measured: dict[str, float]) -> None:
        """Step the schedulers that the job steps once an epoch.

        `measured` holds the epoch's mean loss and the results of the last evaluation. Raises JobError if a
        scheduler's metric is not among them.
        """
        watched = self.watched
        for key, metric in watched.items():
            if metric not in measured:
                raise JobError(
                    f"{key}: {metric} was not measured by the end of the epoch; set eval to evaluate in each epoch"
                )
        for (key, _), per, scheduler in zip(self._specs, self._pers, self.schedulers, strict=True):
            if scheduler is not None and per == "epoch":
                name = watched.get(f"{key}.metric")
                scheduler.step(*([] if name is None else [measured[name]]))


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
    is_known = module.split(".")[:2] == ["torch", "optim"] or module == __name__
    return not is_known or any(map(callable, tree_leaves(dict(spec.args))))


HALVES = (torch.float16, torch.bfloat16)


def total_norm(gradients: Sequence[torch.Tensor], norms: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """Return the norm of all gradients together, computed in fp32 or wider, from the `norms` of each if given."""
    if not gradients:
        return torch.tensor(0.0)
    norms = [norm.to(gradients[0].device) for norm in (norms_of(gradients) if norms is None else norms)]
    whole: torch.Tensor
    if any(gradient.dtype in HALVES for gradient in gradients):
        whole = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms])).float()
    else:
        ordered = [norms[number] for numbers in _by_kind(gradients) for number in numbers]
        whole = torch.linalg.vector_norm(torch.stack(ordered))
    return whole


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each gradient, computed in fp32 or wider, by one operation for all of a dtype and device."""
    norms: dict[int, torch.Tensor] = {}
    for numbers in _by_kind(gradients):
        here = [gradients[number] for number in numbers]
        wide = torch.float32 if here[0].dtype in HALVES else None
        norms.update(zip(numbers, torch._foreach_norm(here, 2.0, wide), strict=True))
    return [norms[number] for number in range(len(gradients))]


def _by_kind(gradients: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the gradients by device and dtype, in the order in which torch's `get_total_norm` adds their norms."""
    if len({(gradient.device, gradient.dtype) for gradient in gradients}) <= 1:
        return [list(range(len(gradients)))] if gradients else []
    empty = [torch.empty(0, dtype=gradient.dtype, device=gradient.device) for gradient in gradients]
    grouped = _group_tensors_by_device_and_dtype([empty], with_indices=True)  # type: ignore[list-item]
    return [numbers for _, numbers in grouped.values()]


def scale_by(gradients: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply the gradients, in place, by a number, or by a scalar tensor without waiting for its device."""
    for numbers in _by_kind(gradients):
        here = [gradients[number] for number in numbers]
        device, dtype = here[0].device, torch.promote_types(here[0].dtype, torch.float32)
        torch._foreach_mul_(here, factor.to(device, dtype) if isinstance(factor, torch.Tensor) else factor)

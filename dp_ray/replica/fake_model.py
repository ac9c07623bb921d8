"""A job's model of fake tensors: they have devices, sizes and types, but no memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.job_target import Target
from dp_ray.replica.as_if_real import CannotDefer
from dp_ray.replica.deferred import record
from dp_ray.replica.devices import as_module, blocks_of, building_on, has_own, move_inputs, with_devices
from dp_ray.replica.rng import seed_all
from dp_ray.replica.targets import build, resolve

CPU = torch.device("cpu")


def fake_devices(count: int) -> list[torch.device]:
    """Devices for fake tensors, which tell a worker's devices apart on a machine without them."""
    return [CPU] if count == 1 else [torch.device("cpu", number) for number in range(count)]


def fake_model(job: Job, devices: Sequence[torch.device], mode: FakeTensorMode) -> nn.Module:
    """The job's model, never in memory: of fake tensors on `devices`, as `build_model` places it.

    Raises JobError, which names the model and the reason, if its constructor needs numbers of its tensors.
    """
    if len(devices) > 1 and job.device_map is None:
        return _placed_by_itself(job, devices, mode)
    model = _on_meta(job)
    where = {"": devices[0]}
    if job.device_map is not None:
        where |= {block.name: devices[block.device] for block in blocks_of(job, model, len(devices))}
    made: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        device = next(where[one] for one in _above(name) if one in where)
        if job.device_map is not None and (name in where or has_own(module)):
            move_inputs(module, device)
        with mode:
            _fill(module, device, made)
    return model


def _on_meta(job: Job) -> nn.Module:
    if not isinstance(job.model, Target):
        return as_module(job.model)
    resolve("model", job.model)
    seed_all(job.seed)
    try:
        with building_on([CPU]):
            made, _ = record(lambda: build("model", with_devices(job.model, [CPU])), exact=False)
            return as_module(made)
    except CannotDefer as error:
        raise _cannot_be_built(job.model, error) from None


def _placed_by_itself(job: Job, devices: Sequence[torch.device], mode: FakeTensorMode) -> nn.Module:
    """A model that moves its parts to devices while it is built."""
    assert isinstance(job.model, Target)
    resolve("model", job.model)
    try:
        with mode, building_on(devices), _replacing():
            return as_module(build("model", with_devices(job.model, devices)))
    except JobError as error:
        raise _cannot_be_built(job.model, error) from None


@contextmanager
def _replacing() -> Iterator[None]:
    """While the block runs: `module.to(...)` puts new tensors in the place of fake ones, which cannot change."""

    def apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        made: dict[int, torch.Tensor] = {}
        for one in module.modules():
            _replace(one, function, made)
        return module

    before = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _cannot_be_built(model: Target, error: Exception) -> JobError:
    reason = str(error).splitlines()[0]
    return JobError(f"model: {model.label} cannot be built without memory, so its memory is not planned: {reason}")


def _fill(module: nn.Module, device: torch.device, made: dict[int, torch.Tensor]) -> None:
    """Put fake tensors on a device in the place of a module's own."""

    def fresh(one: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=device)

    _replace(module, fresh, made)


def _replace(module: nn.Module, new: Callable[[torch.Tensor], torch.Tensor], made: dict[int, torch.Tensor]) -> None:
    """Put what `new` gives in the place of a module's own tensors; `made` holds those that were seen before."""
    for held in (module._parameters, module._buffers):
        for name, one in held.items():
            if one is None:
                continue
            if id(one) not in made:
                with torch.no_grad():
                    fresh = new(one)
                made[id(one)] = nn.Parameter(fresh, one.requires_grad) if isinstance(one, nn.Parameter) else fresh
            held[name] = made[id(one)]  # type: ignore[assignment]


def _above(name: str) -> list[str]:
    """A module's name, and the names of those that hold it, the root last."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]

"""A worker's devices: which it takes, and how a model is placed over several of them.

Over several devices of one worker, either the model places its parts itself (`devices()` names them while it is
built) and moves the activations between them in `forward`. Or the job sets `device_map`: each device gets
consecutive blocks, about the same number of bytes on each. Forward hooks then move each block's inputs to its device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from dp_ray.engine.world import text_of
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import gpu_number, runs_anywhere
from dp_ray.plan.costs import PlacedBlock
from dp_ray.plan.split import balance
from dp_ray.tensors.files import moved
from dp_ray.tensors.tree import map_leaves
from dp_ray.text import counted, listed

_devices: ContextVar[tuple[torch.device, ...]] = ContextVar("devices", default=(torch.device("cpu"),))


def devices() -> list[torch.device]:
    """Return the devices of this worker, for a model to place its parts on while it is built; [cpu] elsewhere.

    >>> import dp_ray
    >>> dp_ray.devices()
    [device(type='cpu')]
    """
    return list(_devices.get())


@contextmanager
def building_on(own: Sequence[torch.device]) -> Iterator[None]:
    """Make `devices()` return `own` while the block runs."""
    token = _devices.set(tuple(own))
    try:
        yield
    finally:
        _devices.reset(token)


def num_gpus() -> int:
    """Return how many GPUs torch finds on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_machine(key: str, names: Sequence[str]) -> None:
    """Raise JobError, which names the key, if one of these devices is a GPU that this machine does not have."""
    for name in names:
        number = gpu_number(name)
        count = num_gpus()
        if number is not None and number >= count:
            known = f": {listed(f'cuda:{gpu}' for gpu in range(count))}" if count else ""
            raise JobError(f"{key}: {name} is named, and {gpus_found()}{known}; {runs_anywhere()}")


def gpus_found() -> str:
    """Return a clause for errors: `torch finds 1 GPU on this machine`."""
    count, why = num_gpus(), ""
    if not count and not (torch.version.cuda or torch.version.hip):
        why = " (this torch is built without CUDA)"
    elif not count:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # CUDA's own, as of a driver that is too old
            why = f" ({text_of(error).splitlines()[0]})"
    return f"torch finds {counted(count, 'GPU') if count else 'no GPU'} on this machine{why}"


def devices_here(job: Job) -> tuple[torch.device, ...]:
    """Return the devices that the job names, else as many GPUs as it asks for; auto takes one, or the CPU.

    Raises JobError if this machine lacks a GPU that the job asks for.
    """
    check_machine("input_device", [job.input_device] if job.input_device else [])
    if job.devices:
        check_machine("devices", job.devices)
        return tuple(torch.device(name) for name in job.devices)
    count, wanted = num_gpus(), job.gpus_per_worker
    if wanted not in ("auto", 0) and count < job.num_devices:
        raise JobError(
            f"gpus_per_worker: {wanted:g} is asked for, and {gpus_found()}; {runs_anywhere(job.num_devices)}"
        )
    if wanted == 0 or count == 0:
        return (torch.device("cpu"),)
    return tuple(torch.device("cuda", number) for number in range(job.num_devices))


def input_device(job: Job, model: nn.Module, own: Sequence[torch.device]) -> torch.device:
    """Return the device of the inputs: the job's `input_device`, else that of the model's first parameter.

    A GPU that `devices` names too is the one of `own` in its place; without `devices`, `cuda:i` is the i-th.
    """
    name = job.input_device
    if name is None:
        first = next(model.parameters(), None)
        return own[0] if first is None or len(own) == 1 else first.device
    number = gpu_number(name)
    if number is not None and job.devices is not None:
        number = job.devices.index(name) if name in job.devices else None
    if number is None or number >= len(own) or own[number].type != "cuda":
        return torch.device(name)
    return own[number]


def blocks_of(job: Job, model: nn.Module, devices: Sequence[str]) -> list[PlacedBlock]:
    """Return the blocks of a model, each placed on one of the devices.

    Raises JobError if a named block does not exist or is part of another one. Raises JobError if there are fewer
    blocks than devices, or if two devices would share a parameter.
    """
    named = job.device_map if isinstance(job.device_map, list) else None
    if named is None and not isinstance(model, nn.Sequential):
        raise JobError(
            f"device_map: auto places the blocks of a torch.nn.Sequential; the model is a "
            f"{type(model).__qualname__}: name its blocks, in the order in which they run, as device_map: [...]"
        )
    names = named or [name for name, _ in model.named_children()]
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise JobError(f"device_map: the model has no module {name!r}; it has {listed(list(modules)[1:])}")
        if any(name != other and name.startswith(f"{other}.") for other in names):
            raise JobError(f"device_map: {name!r} is a part of another block")
    if len(names) < len(devices):
        raise JobError(
            f"device_map: {len(names)} blocks ({listed(names)}) cannot be placed on {len(devices)} devices"
        )
    blocks = [modules[name] for name in names]
    sizes = [sum(tensor.nbytes for tensor in [*block.parameters(), *block.buffers()]) for block in blocks]
    own = [device for device, part in zip(devices, balance(sizes, len(devices)), strict=True) for _ in part]
    placed = [PlacedBlock(*block) for block in zip(names, sizes, own, strict=True)]
    _check_shared(model, placed, devices[0])
    return placed


def _check_shared(model: nn.Module, blocks: Sequence[PlacedBlock], first: str) -> None:
    """Raise JobError if modules on different devices share a parameter, which can be on one device only."""
    seen: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        here = next((block.device for block in blocks if f"{name}.".startswith(f"{block.name}.")), first)
        other, there = seen.setdefault(id(parameter), (name, here))
        if here != there:
            raise JobError(
                f"device_map: {other} and {name} are the same parameter, which cannot be on {there} and on {here}; "
                "name blocks that hold both"
            )


def spread(job: Job, model: nn.Module, own: Sequence[torch.device]) -> nn.Module:
    """Move the model's blocks to their devices, in place, with hooks that move their inputs.

    Parameters and buffers outside the blocks go to the first device. Raises JobError for a TorchScript module,
    which takes no hooks, and whatever `blocks_of` raises.
    """
    device_of = {block.name: torch.device(block.device) for block in blocks_of(job, model, list(map(str, own)))}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.jit.ScriptModule):
            raise JobError(
                f"device_map: {name or 'the model'} is a TorchScript module, which takes no hooks to move its inputs"
            )
        if name in device_of:
            module.to(device_of[name])
            move_inputs(module, device_of[name])
        elif not any(name.startswith(f"{block}.") for block in device_of):
            if not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                continue
            module._apply(lambda tensor: tensor.to(own[0]), recurse=False)
            move_inputs(module, own[0])
    return model


def move_inputs(module: nn.Module, device: torch.device) -> None:
    """Let a module move its inputs to its device."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # the usual case, made fast
            return (moved(args[0], device),), kwargs
        return tuple(map_leaves(lambda leaf: moved(leaf, device), values) for values in (args, kwargs))

    module.register_forward_pre_hook(hook, with_kwargs=True)


MIXED = ("on the same device", "is not on the expected device")  # torch's words, which name both devices


def mixed_devices(model: nn.Module, error: BaseException) -> str:
    """Return a hint on an error caused by tensors on two devices, with the module; "" for any other error."""
    if not any(words in str(error) for words in MIXED):
        return ""
    # The innermost module whose forward raised the error.
    names = {id(module): name.removeprefix("_orig_mod.") for name, module in model.named_modules()}
    where, trace = "", error.__traceback__
    while trace is not None:
        where = names.get(id(trace.tb_frame.f_locals.get("self")), where)
        trace = trace.tb_next
    name = f"module {where!r}" if where else "the model's own forward"
    return f"; {name} got tensors on two devices: move them in forward, as in x.to(device)"

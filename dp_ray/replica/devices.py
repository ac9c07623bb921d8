"""A model over several devices of one worker: the devices, the placement of its blocks, errors of mixed devices.

Either the model places its parts itself and moves the activations between them in `forward`. Or the job sets
`device_map: auto`: each device gets consecutive blocks, about the same number of bytes on each. Forward hooks
then move each block's inputs to the block's device.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.job_keys import gpu_number
from dp_ray.job_target import Target
from dp_ray.plan.partition import balance
from dp_ray.plan.plan import PlacedBlock
from dp_ray.replica.targets import build, resolve
from dp_ray.tensors.nested import map_leaves
from dp_ray.tensors.raw import moved
from dp_ray.text import listed

_devices: ContextVar[tuple[torch.device, ...]] = ContextVar("devices", default=(torch.device("cpu"),))


def devices() -> list[torch.device]:
    """The devices of this worker, for a model to place its parts on while it is built; [cpu] elsewhere."""
    return list(_devices.get())


@contextmanager
def building_on(given: Sequence[torch.device]) -> Iterator[None]:
    """Make `devices()` return `given` while the block runs."""
    token = _devices.set(tuple(given))
    try:
        yield
    finally:
        _devices.reset(token)


def with_devices(model: Any, given: Sequence[torch.device]) -> Any:
    """The model's target, with an argument `devices` added if its constructor takes one and the job sets none."""
    if not isinstance(model, Target) or "devices" in model.args:
        return model
    try:
        takes = inspect.signature(resolve("model", model)).parameters
    except (TypeError, ValueError):
        return model
    return model.model_copy(update={"args": {**model.args, "devices": list(given)}}) if "devices" in takes else model


def input_device(job: Job, model: nn.Module, given: Sequence[torch.device]) -> torch.device:
    """The device of the inputs: the job's `input_device`, else that of the model's first parameter.

    A GPU that `devices` names too is the one of `given` in its place; without `devices`, `cuda:i` is the i-th.
    """
    if (name := job.input_device) is None:
        first = next(model.parameters(), None)
        return given[0] if first is None or len(given) == 1 else first.device
    number = gpu_number(name)
    if number is not None and job.devices is not None:
        number = job.devices.index(name) if name in job.devices else None
    is_own = number is not None and number < len(given) and given[number].type == "cuda"
    return given[number] if is_own and number is not None else torch.device(name)


class Block(NamedTuple):
    """A block of a model over several devices: its name, its bytes (parameters and buffers), its device's number."""

    name: str
    bytes: int
    device: int


def blocks_of(job: Job, model: nn.Module, count: int) -> list[Block]:
    """The blocks of a model, each placed on one of `count` devices.

    Raises JobError if a named block does not exist or is part of another one. Raises JobError if there are fewer
    blocks than devices, or if two devices would share a parameter.
    """
    names = job.blocks or _parts_of(model)
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise JobError(f"blocks: the model has no module {name!r}; it has {listed(list(modules)[1:])}")
        if any(name != other and name.startswith(f"{other}.") for other in names):
            raise JobError(f"blocks: {name!r} is a part of another block")
    if len(names) < count:
        raise JobError(f"device_map: {len(names)} blocks ({listed(names)}) cannot be placed on {count} devices")
    sizes = [_bytes_of(modules[name]) for name in names]
    places = [place for place, part in enumerate(balance(sizes, count)) for _ in part]
    found = [Block(*one) for one in zip(names, sizes, places, strict=True)]
    _check_shared(model, found)
    return found


def _built_on(device: str, job: Job, count: int) -> Any:
    given = [torch.device(device)] * count
    with building_on(given), given[0]:
        return build("model", with_devices(job.model, given))


def plan_blocks(job: Job) -> tuple[PlacedBlock, ...]:
    """Which block of the job's model goes to which device of a worker.

    The model is built on torch's meta device, which takes no memory, or on the CPU if that fails. Raises JobError.
    """
    names = job.devices or [f"cuda:{number}" for number in range(job.num_devices)]
    try:
        model = _built_on("meta", job, len(names))
    except JobError:  # a constructor that reads its weights from a file, or computes with them, needs real memory
        model = _built_on("cpu", job, len(names))
    found = blocks_of(job, as_module(model), len(names))
    return tuple(PlacedBlock(block.name, block.bytes, names[block.device]) for block in found)


def as_module(model: object) -> nn.Module:
    """What the key `model` gave; raises JobError unless it is a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise JobError(f"model: must give a torch.nn.Module, got {type(model).__qualname__}")
    return model


def _parts_of(model: nn.Module) -> list[str]:
    if not isinstance(model, nn.Sequential):
        raise JobError(
            f"device_map: auto places the blocks of a torch.nn.Sequential; the model is a "
            f"{type(model).__qualname__}: name its blocks, in the order in which they run, as blocks: [...]"
        )
    return [name for name, _ in model.named_children()]


def _bytes_of(module: nn.Module) -> int:
    return sum(one.nbytes for one in [*module.parameters(), *module.buffers()])


def _check_shared(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Raise JobError if modules on different devices share a parameter, which can be on one device only."""
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        here = next((block.device for block in blocks if f"{name}.".startswith(f"{block.name}.")), 0)
        other, there = seen.setdefault(id(parameter), (name, here))
        if here != there:
            raise JobError(
                f"device_map: {other} and {name} are the same parameter, which cannot be on device {there} and on "
                f"device {here}; name blocks that hold both"
            )


def spread(job: Job, model: nn.Module, given: Sequence[torch.device]) -> nn.Module:
    """Move the model's blocks to their devices, in place, with hooks that move their inputs.

    Parameters and buffers outside the blocks go to the first device. Raises JobError for a TorchScript module,
    which takes no hooks, and whatever `blocks_of` raises.
    """
    blocks = blocks_of(job, model, len(given))
    place_of = {block.name: given[block.device] for block in blocks}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.jit.ScriptModule):
            raise JobError(
                f"device_map: {name or 'the model'} is a TorchScript module, which takes no hooks to move its inputs"
            )
        if name in place_of:
            module.to(place_of[name])
            move_inputs(module, place_of[name])
        elif not any(name.startswith(f"{block}.") for block in place_of) and has_own(module):
            for own in [*module._parameters.values(), *module._buffers.values()]:
                if own is not None:
                    own.data = own.data.to(given[0])
            move_inputs(module, given[0])
    return model


def has_own(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers of its own."""
    return any(one is not None for one in [*module._parameters.values(), *module._buffers.values()])


def move_inputs(module: nn.Module, device: torch.device) -> None:
    """Let a module move what it gets to its device."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # the usual case, made fast
            return (moved(args[0], device),), kwargs
        return tuple(map_leaves(lambda leaf: moved(leaf, device), one) for one in (args, kwargs))

    module.register_forward_pre_hook(hook, with_kwargs=True)


_MIXED = (
    re.compile(r"at least two devices, (?P<one>[\w:]+)[^,]*(?:,| and) (?P<two>[\w:]+)"),
    re.compile(r"on device (?P<two>[\w:]+) is not on the expected device (?P<one>[\w:]+)"),
    re.compile(r"is on (?P<one>[\w:]+),? (?:but|different from).* (?P<two>(?:cpu|cuda|meta|xpu|mps)[\w:]*)"),
)


def mixed_devices(model: nn.Module, error: BaseException) -> str:
    """A hint on an error caused by tensors on two devices: the devices and the module; "" for any other error."""
    found = next((match for pattern in _MIXED if (match := pattern.search(str(error)))), None)
    if found is None:
        return ""
    where = _innermost(model, error)
    name = f"module {where!r}" if where else "the model's own forward"
    one, two = found["one"].rstrip(":"), found["two"].rstrip(":")
    return f"; {name} got tensors on two devices, {one} and {two}: move them in forward, as in x.to(device)"


def _innermost(model: nn.Module, error: BaseException) -> str:
    """The name of the innermost module whose forward raised the error; "" for the model itself."""
    names = {id(module): name.removeprefix("_orig_mod.") for name, module in model.named_modules()}
    where, trace = "", error.__traceback__
    while trace is not None:
        where = names.get(id(trace.tb_frame.f_locals.get("self")), where)
        trace = trace.tb_next
    return where

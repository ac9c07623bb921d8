"""The model of one worker: built from its target, moved to its device, with the weights of rank 0.

Over several devices of one worker, either the model places its parts itself and moves the activations between them in
`forward`. Or the job sets `device_map: auto`: each device gets consecutive blocks, about the same number of bytes on
each. Forward hooks then move each block's inputs to the block's device.

At the end of the module: what to change in a job whose device has no memory left, and how a worker frees memory.
"""

import gc
import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from dp_ray.engine.buffers import NONE, EvalState
from dp_ray.engine.random import seed_all
from dp_ray.engine.user_code import describe_input
from dp_ray.engine.world import Cause, broadcast, everyone, failed_collective, gathered, is_rank_0, text_of
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target, gpu_number, runs_anywhere
from dp_ray.job.targets import build, check_gives, resolve
from dp_ray.plan.costs import PlacedBlock
from dp_ray.plan.split import balance, chunk_sizes
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import is_sharded, moved, overlaps
from dp_ray.tensors.flat import as_bytes, from_bytes
from dp_ray.tensors.tree import map_leaves
from dp_ray.text import counted, listed


def build_model(job: Job, devices: Sequence[torch.device]) -> nn.Module:
    """Build the job's module on `devices`, initialised from the job's seed alone: the same on every worker.

    With several devices, the model places its parts itself, or `device_map` places them. Raises JobError if the
    model cannot be built, is not a torch.nn.Module or cannot be moved to the devices.
    """
    if isinstance(job.model, Target):
        resolve("model", job.model)  # before seeding: a module may draw random numbers, but on its first import only
    seed_all(job.seed, next((one for one in devices if one.type == "cuda"), devices[0]))
    with building_on(devices):
        model = as_module(build("model", with_devices(job.model, devices)))
    if len(devices) > 1 and job.device_map is None and not isinstance(job.model, Target):
        raise JobError(
            f"model: an object that is made already cannot place its parts on {len(devices)} devices; "
            "give a target, or set device_map: auto"
        )
    _give_each_element_memory(model)
    follow_shards(model)
    try:
        if len(devices) == 1:
            return model.to(devices[0])
        return model if job.device_map is None else spread(job, model, devices)
    except (RuntimeError, AssertionError) as error:
        names = ", ".join(map(str, devices))
        hint = f"; {advice(job, None)}" if is_out_of_memory(error) else ""
        raise JobError(f"devices: the model cannot be moved to {names}: {text_of(error)}{hint}") from error


class BatchNormOfShard(_BatchNorm):
    """A SyncBatchNorm of the user's: its statistics are those of a shard, as a BatchNorm's, on CPUs too."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Take inputs of any number of dimensions, as SyncBatchNorm does."""


def check_model(spec: Any) -> None:
    """Raise JobError if it is known, without building the model, that it is not a torch.nn.Module."""
    if isinstance(spec, Target):
        named = resolve("model", spec)
        if isinstance(named, nn.Module):
            kind = type(named).__qualname__
            raise JobError(
                f"model: {spec.target} is a {kind} that is made already; name its class, or a function that makes it"
            )
        check_gives("model", named, nn.Module, "torch.nn.Module")
    elif not isinstance(spec, nn.Module):
        raise JobError(f"model: must be a torch.nn.Module, got a {type(spec).__qualname__}")


def as_module(model: object) -> nn.Module:
    """Return the object that the key `model` gives; raises JobError unless it is a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise JobError(f"model: must give a torch.nn.Module, got {type(model).__qualname__}")
    return model


def follow_shards(model: nn.Module) -> None:
    """Have the model's SyncBatchNorm layers take the statistics of a shard, in place."""
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = BatchNormOfShard  # type: ignore[assignment]


def _give_each_element_memory(model: nn.Module) -> None:
    """Copy expanded buffers and frozen parameters: rank 0's values could not be written to them."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and overlaps(buffer):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
        for parameter in module._parameters.values():
            if (
                parameter is not None
                and not is_lazy(parameter)
                and not parameter.requires_grad
                and overlaps(parameter)
            ):
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def compiled(model: nn.Module, job: Job) -> nn.Module:
    """Return the module to call: the model, its compiled version, or `Scripted`; the parameters stay the model's.

    In a sharded model, each block is compiled already. Raises JobError for `compile` with a TorchScript module.
    """
    if isinstance(model, torch.jit.ScriptModule):
        if job.compile:
            raise JobError(
                "compile: the model is a TorchScript module, which torch.compile does not take; leave it out"
            )
        return Scripted(model, is_exact=job.bitwise or job.task != "train")
    if not job.compile or any(is_sharded(one) for one in model.parameters()):
        return model
    # A kernel for dynamic shapes depends on the shapes that a worker saw before. One kernel a shape does not.
    called: nn.Module = torch.compile(model, dynamic=False if job.bitwise else None)  # type: ignore[assignment]
    return called


class Scripted(nn.Module):
    """A TorchScript module inside a Python module, since a TorchScript module takes no hooks.

    With `is_exact` it runs op by op. TorchScript rewrites a graph after its first runs, so otherwise its outputs
    would depend on how often this worker has called it.
    """

    def __init__(self, scripted: nn.Module, is_exact: bool) -> None:
        super().__init__()
        self.scripted = scripted
        self._is_exact = is_exact

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the TorchScript module, without its optimizations if it must be exact."""
        with torch.jit.optimized_execution(not self._is_exact):  # type: ignore[attr-defined]
            return self.scripted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("scripted"), name)


def synchronise(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers; every rank calls this.

    Raises ModelError, on every rank, if their names, sizes, dtypes or order differ between ranks.
    """
    if everyone() is not None:
        _check_alike(model)
        _broadcast_state(model)


def _check_alike(model: nn.Module) -> None:
    """Raise ModelError, on every rank, unless all have the same tensors in the same order, in which they are sent."""
    for name, tensor in _state_of(model):
        check_has_shape(name, tensor)
    mine = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in _state_of(model)]
    digests = gathered(hashlib.sha256("\n".join(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    first = json.loads(broadcast(json.dumps(mine)))
    pairs = itertools.zip_longest(first, mine, fillvalue="nothing")
    difference = next(((there, here) for there, here in pairs if there != here), None)
    for rank, one in enumerate(gathered(difference)):
        if one is not None:
            raise ModelError(
                f"the models of the workers differ: where rank 0 has {one[0]}, rank {rank} has {one[1]}; build the "
                "same modules in the same order everywhere (a set of names has another order in each process)"
            )


def _broadcast_state(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers as bytes: gloo and NCCL do not support every dtype."""
    for name, tensor in _state_of(model):
        if tensor.layout is not torch.strided or tensor.is_quantized or is_sharded(tensor):
            continue  # built from the same seed or file on every worker
        data = tensor.detach()
        raw = as_bytes(data)
        with waiting("rank 0's model"):
            dist.broadcast(raw, src=0, group=everyone())
        if raw.data_ptr() == data.data_ptr() or is_rank_0():
            continue  # the bytes were the tensor's own memory, or rank 0's
        values = from_bytes(raw, data)
        try:
            data.copy_(values)
        except RuntimeError as error:  # an expanded tensor, say: it takes no values, but may have them already
            if not torch.equal(data, values):
                raise ModelError(f"{name} differs on the workers and cannot be set to rank 0's: {error}") from error


def _state_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_has_shape(name: str, tensor: torch.Tensor) -> None:
    """Raise ModelError if a lazy module has not given its tensor a shape yet."""
    if is_lazy(tensor):
        raise ModelError(f"{name} has no shape yet: run a batch through the model where it is made")


@contextmanager
def evaluating(model: nn.Module, beside: Mapping[str, nn.Module] = NONE) -> Iterator[EvalState]:
    """Put the model in eval mode while the block runs; then each module returns to its own mode.

    Undoes what forwards write too, and what modules `beside` the model do: after the block, and inside it by
    `restore` of the state that it gives.
    """
    modes = [(module, module.training) for module in model.modules()]
    state = EvalState(model, beside)
    model.eval()
    try:
        yield state
    finally:
        state.put_back()
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


def autocast(
    precision: str, device: torch.device, enabled: bool = True, keeps: bool = True
) -> AbstractContextManager[Any]:
    """Return the context in which a model runs in the job's precision; its parameters keep their dtype.

    Converted parameters are kept until the outermost such context ends, which may be one that is not `enabled`; not
    those of one that keeps none.
    """
    if precision == "fp32":
        return nullcontext()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype, enabled, None if keeps else False)  # None: as it is now


def call_model(model: nn.Module, inputs: Any, call: str) -> Any:
    """Call the model as the job's `call` says; `auto` unpacks a tuple or list, but not of texts, and nothing else."""
    if type(inputs) is torch.Tensor and call != "kwargs" and call != "args":
        return model(inputs)
    if call == "kwargs":
        return model(**inputs)
    return model(*inputs) if is_unpacked(inputs, call) else model(inputs)


def is_unpacked(inputs: Any, call: str) -> bool:
    """Return whether the model gets what is in a tuple or list as positional arguments."""
    if call != "auto":
        return call == "args"
    return isinstance(inputs, tuple | list) and not are_texts(inputs)


def are_texts(inputs: Any) -> bool:
    """Return whether these are the texts of a shard, as torch's collate makes them: one for each row."""
    is_list = isinstance(inputs, tuple | list) and len(inputs) > 0
    return is_list and all(isinstance(one, str) for one in inputs)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the module's state_dict, without its other values."""
    return {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


def other_sizes(own: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors of a model of which some weights have another size, each with both sizes in words."""
    return {
        name: f"{name} {list(weights[name].shape)} in place of {list(one.shape)}"
        for name, one in own.items()
        if hasattr(weights.get(name), "shape") and not is_lazy(one) and tuple(weights[name].shape) != tuple(one.shape)
    }


WRAPPERS = ("module.", "_orig_mod.")  # before names in what nn.DataParallel, DDP or torch.compile has wrapped


def unwrapped(own: Set[str], weights: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return weights without the WRAPPERS before all their names, and what was stripped.

    `own` are the names of the model, which may begin so too: as little is stripped as fits most of them.
    """
    best, stripped, named, before = weights, "", weights, ""
    while named:
        wrapper = next((one for one in WRAPPERS if all(str(name).startswith(one) for name in named)), None)
        if wrapper is None:
            break
        named, before = {name.removeprefix(wrapper): one for name, one in named.items()}, before + wrapper
        if len(own & named.keys()) > len(own & best.keys()):
            best, stripped = named, before
    return best, stripped


def misfits(missing: Sequence[str], unexpected: Sequence[str], sizes: Mapping[str, str]) -> str:
    """Say how some weights and a model differ: by the names that one of them lacks, and by sizes."""
    kinds = {"missing": missing, "unexpected": unexpected, "of another size": list(sizes.values())}
    return "".join(f"; {kind}: {listed(names)}" for kind, names in kinds.items() if names)


def loaded_of(
    where: str,
    own: Set[str],
    weights: Mapping[str, Any],
    missing: Sequence[str],
    unexpected: Sequence[str],
    sizes: Mapping[str, str],
) -> str:
    """Say how many tensors of a model were loaded with `strict: false`, and which were not.

    Raises ModelError if none was.
    """
    differences = misfits(missing, unexpected, sizes)
    if own and not own - {*missing, *sizes}:
        says = f"the weights of {where} have no tensor that fits this model by name and size"
        raise ModelError(says + differences + _nested(weights))
    return f"; loads {len(own) - len({*missing, *sizes} & own)} of {len(own)} tensors of the model{differences}"


def advice_on(own: Mapping[str, torch.Tensor], weights: Mapping[str, Any], advice: str) -> str:
    """Return what to do about weights that are not those of a model with the tensors `own`.

    That is the advice, to load what fits, if a tensor fits by name and size. Of a checkpoint of the user's own it is
    to save a value alone.
    """
    weights, _ = unwrapped(own.keys(), weights)
    fitting = own.keys() & weights.keys() - other_sizes(own, weights).keys()
    return _nested(weights) or (advice if fitting else "")


def _nested(weights: Mapping[str, Any]) -> str:
    for key, one in weights.items():
        if isinstance(one, Mapping) and one and all(isinstance(inner, torch.Tensor) for inner in one.values()):
            return f"; it holds weights in {key!r}: save that alone, torch.save(found[{key!r}], file)"
    return ""


def load_weights(
    model: nn.Module, weights: Mapping[str, Any], where: str, is_strict: bool = True, advice: str = ""
) -> str:
    """Load weights into the bare module; returns what was loaded and what not, in words, if not `is_strict`.

    Raises ModelError, which names missing, unexpected and mis-sized tensors and ends with the advice, or if nothing
    fits.
    """
    own = tensors_of(model)
    sizes = {} if is_strict else other_sizes(own, weights)
    try:
        keys = model.load_state_dict({key: one for key, one in weights.items() if key not in sizes}, is_strict)
    except (RuntimeError, TypeError, AttributeError) as error:
        advice = advice_on(own, weights, advice if is_strict else "")
        raise ModelError(f"the weights of {where} are not this model's: {str(error).rstrip('.')}{advice}") from None
    if is_strict or keys is None:
        return ""
    missing = [key for key in keys.missing_keys if key not in sizes]
    return loaded_of(where, own.keys(), weights, missing, keys.unexpected_keys, sizes)


def check_all_tensors(model: nn.Module) -> None:
    """Raise ModelError if the module's state_dict has other values than tensors: no weights file could hold them.

    A model is loaded with all values of its state_dict, so such a file could never be loaded.
    """
    for name, one in model.state_dict().items():
        if not isinstance(one, torch.Tensor):
            raise ModelError(
                f"model.{name} is of type {type(one).__qualname__}: a weights file holds tensors only, and could not "
                "be loaded without it; have get_extra_state give a tensor, or keep the value in a buffer"
            )


_devices: ContextVar[tuple[torch.device, ...]] = ContextVar("devices", default=(torch.device("cpu"),))


def devices() -> list[torch.device]:
    """Return the devices of this worker, for a model to place its parts on while it is built; [cpu] elsewhere."""
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
            known = f": {listed(f'cuda:{one}' for one in range(count))}" if count else ""
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


def with_devices(model: Any, own: Sequence[torch.device]) -> Any:
    """Add to the model's target an argument `devices`, if its constructor takes one and the job sets none."""
    if not isinstance(model, Target) or "devices" in model.args:
        return model
    try:
        takes = inspect.signature(resolve("model", model)).parameters
    except (TypeError, ValueError):
        return model
    return model.model_copy(update={"args": {**model.args, "devices": list(own)}}) if "devices" in takes else model


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


class Block(NamedTuple):
    """A block of a model over several devices: its name, its bytes (parameters and buffers), its device's number."""

    name: str
    bytes: int
    device: int


def blocks_of(job: Job, model: nn.Module, count: int) -> list[Block]:
    """Return the blocks of a model, each placed on one of `count` devices.

    Raises JobError if a named block does not exist or is part of another one. Raises JobError if there are fewer
    blocks than devices, or if two devices would share a parameter.
    """
    if not job.blocks and not isinstance(model, nn.Sequential):
        raise JobError(
            f"device_map: auto places the blocks of a torch.nn.Sequential; the model is a "
            f"{type(model).__qualname__}: name its blocks, in the order in which they run, as blocks: [...]"
        )
    names = job.blocks or [name for name, _ in model.named_children()]
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise JobError(f"blocks: the model has no module {name!r}; it has {listed(list(modules)[1:])}")
        if any(name != other and name.startswith(f"{other}.") for other in names):
            raise JobError(f"blocks: {name!r} is a part of another block")
    if len(names) < count:
        raise JobError(f"device_map: {len(names)} blocks ({listed(names)}) cannot be placed on {count} devices")
    blocks = [modules[name] for name in names]
    sizes = [sum(one.nbytes for one in [*block.parameters(), *block.buffers()]) for block in blocks]
    numbers = [number for number, part in enumerate(balance(sizes, count)) for _ in part]
    placed = [Block(name, size, number) for name, size, number in zip(names, sizes, numbers, strict=True)]
    _check_shared(model, placed)
    return placed


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


def plan_blocks(job: Job) -> tuple[PlacedBlock, ...]:
    """Return which block of the job's model goes to which device of a worker.

    The model is built on torch's meta device, which takes no memory, or on the CPU if that fails. Raises JobError.
    """
    names = job.devices or [f"cuda:{number}" for number in range(job.num_devices)]
    try:
        model = _built_on("meta", job, len(names))
    except JobError:  # a constructor that reads its weights from a file, or computes with them, needs real memory
        model = _built_on("cpu", job, len(names))
    blocks = blocks_of(job, as_module(model), len(names))
    return tuple(PlacedBlock(block.name, block.bytes, names[block.device]) for block in blocks)


def _built_on(device: str, job: Job, count: int) -> Any:
    own = [torch.device(device)] * count
    with building_on(own), own[0]:
        return build("model", with_devices(job.model, own))


def spread(job: Job, model: nn.Module, own: Sequence[torch.device]) -> nn.Module:
    """Move the model's blocks to their devices, in place, with hooks that move their inputs.

    Parameters and buffers outside the blocks go to the first device. Raises JobError for a TorchScript module,
    which takes no hooks, and whatever `blocks_of` raises.
    """
    device_of = {block.name: own[block.device] for block in blocks_of(job, model, len(own))}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.jit.ScriptModule):
            raise JobError(
                f"device_map: {name or 'the model'} is a TorchScript module, which takes no hooks to move its inputs"
            )
        if name in device_of:
            module.to(device_of[name])
            move_inputs(module, device_of[name])
        elif not any(name.startswith(f"{block}.") for block in device_of) and has_own(module):
            for tensor in [*module._parameters.values(), *module._buffers.values()]:
                if tensor is not None:
                    tensor.data = tensor.data.to(own[0])
            move_inputs(module, own[0])
    return model


def has_own(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers of its own."""
    return any(one is not None for one in [*module._parameters.values(), *module._buffers.values()])


def move_inputs(module: nn.Module, device: torch.device) -> None:
    """Let a module move its inputs to its device."""

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
    """Return a hint on an error caused by tensors on two devices, with devices and module; "" for any other error."""
    match = next(filter(None, (pattern.search(str(error)) for pattern in _MIXED)), None)
    if match is None:
        return ""
    # The innermost module whose forward raised the error.
    names = {id(module): name.removeprefix("_orig_mod.") for name, module in model.named_modules()}
    where, trace = "", error.__traceback__
    while trace is not None:
        where = names.get(id(trace.tb_frame.f_locals.get("self")), where)
        trace = trace.tb_next
    name = f"module {where!r}" if where else "the model's own forward"
    one, two = match["one"].rstrip(":"), match["two"].rstrip(":")
    return f"; {name} got tensors on two devices, {one} and {two}: move them in forward, as in x.to(device)"


CHANGES = "set one of: "  # in an error of memory that says what to change
# CUDA, its libraries and torch's allocator of a CPU raise plain RuntimeErrors with these texts. cuBLAS has two: where
# there is no memory for its handle, it only says that it is not initialised.
NO_MEMORY = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory|Triton Error \[(CUDA|HIP)\]: out of memory|cudaErrorMemoryAllocation"
    r"|Cuda failure (\d+ )?'out of memory'|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate|CUFFT_ALLOC_FAILED|MIOPEN_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)


class ShardSize(NamedTuple):
    """How a global batch of `batch_rows` rows is cut: into `shards`, of which this worker's largest has `rows` rows.

    `key` is the job's key that sets the size of the batches.
    """

    rows: int
    batch_rows: int
    shards: int
    key: str = "batch_size"


@contextmanager
def advised(job: Job, where: str, size: ShardSize | None) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a ModelError that says what to change.

    `where` is the step. `size` is None if the memory does not depend on the rows. An error that says so already
    passes.
    """
    try:
        yield
    except (RuntimeError, ModelError) as error:
        raise_advised(error, job, where, size)


def raise_advised(
    error: RuntimeError | ModelError,
    job: Job,
    where: str,
    size: ShardSize | None,
    shards_that_fit: Callable[[], int | None] = lambda: None,
) -> NoReturn:
    """Raise what `advised` raises for an error: for the code of each step, where a block costs time.

    `shards_that_fit` estimates the smallest number of shards that would fit; by default, and where it gives None, it
    is twice as many as now.
    """
    if not is_out_of_memory(error) or CHANGES in str(error):
        raise error
    text = str(error) if isinstance(error, ModelError) else f"{where}: {type(error).__name__}: {text_of(error)}"
    more = shards_that_fit() if size is not None and size.rows > 1 else None
    raise ModelError(f"{text.rstrip('.')}; {advice(job, size, more)}") from error


def batch_hint(error: BaseException, batch: Any) -> str:
    """Return a hint on an out-of-memory error, the dtypes and sizes of the shard's batch; "" for other errors."""
    return describe_input(batch) if is_out_of_memory(error) else ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, or one that caused it, says that a device has no memory left."""
    if error is None:
        return False
    has_text = isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None
    collective = failed_collective(error)
    of_nccl = collective is not None and collective.cause is Cause.OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError) or has_text or of_nccl or is_out_of_memory(error.__cause__)


def advice(job: Job, size: ShardSize | None, more: int | None = None) -> str:
    """Return the changes to the job of which any one may be enough; `more` is a number of shards that would fit."""
    changes = []
    if size is not None and size.rows > 1:
        same = "the same gradient but for BatchNorm" if job.task == "train" else "the same outputs"
        shards = more or min(2 * size.shards, size.batch_rows)
        rows = chunk_sizes(size.batch_rows, shards)[0]
        changes.append(f"shards: {shards} instead of {size.shards} (at most {counted(rows, 'row')} each, {same})")
        changes.append(f"a smaller {size.key}")
    if size is not None and job.precision == "fp32":
        changes.append("precision: bf16")
    if size is None and job.task == "train":
        changes.append("an optimizer with less state")
    changes.append("more GPUs for each worker (gpus_per_worker, device_map: auto)")
    has = "" if size is None else f"this worker's shards have {counted(size.rows, 'row')}; "
    return f"{has}{CHANGES}{listed(changes)}"


MAX_COLLECTIONS = 5


def free_memory() -> None:
    """Free what only reference cycles hold, then the GPU memory that torch keeps for itself.

    It takes more than one collection: a cycle may hold objects of C++, and those the next cycle. The second one finds
    the model of a training with FSDP.
    """
    for _ in range(MAX_COLLECTIONS):
        if not gc.collect():
            break
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):  # after an assert in a kernel, which an error on its way tells, each call raises
            torch.cuda.empty_cache()

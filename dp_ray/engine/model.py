"""The model of one worker: built from its target on its devices, compiled, and called in the job's precision."""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from dp_ray.engine.devices import blocks_of, building_on, spread
from dp_ray.engine.out_of_memory import advice, is_out_of_memory
from dp_ray.engine.random import seed_all
from dp_ray.engine.world import text_of
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.targets import bind, build, check_gives, resolve
from dp_ray.plan.costs import PlacedBlock
from dp_ray.tensors.files import is_sharded, overlaps


def build_model(job: Job, devices: Sequence[torch.device]) -> nn.Module:
    """Build the job's module on `devices`, initialised from the job's seed alone: the same on every worker.

    With several devices, the model places its parts itself, or `device_map` places them. Raises JobError if the
    model cannot be built, is not a torch.nn.Module or cannot be moved to the devices.
    """
    if isinstance(job.model, Target):
        resolve("model", job.model)  # before seeding: a module may draw random numbers, but on its first import only
    seed_all(job.seed, next((gpu for gpu in devices if gpu.type == "cuda"), devices[0]))
    model = constructed(job, devices)
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


def constructed(job: Job, devices: Sequence[torch.device]) -> nn.Module:
    """Call the model's target, which may place its parts on `devices`, in the random state of now."""
    with building_on(devices):
        return as_module(build("model", target_with_devices(job.model, devices)))


def target_with_devices(model: Any, own: Sequence[torch.device]) -> Any:
    """Add to the model's target an argument `devices`, if its constructor takes one and the job sets none."""
    if not isinstance(model, Target) or "devices" in model.args:
        return model
    try:
        takes = inspect.signature(resolve("model", model)).parameters
    except (TypeError, ValueError):
        return model
    return model.model_copy(update={"args": {**model.args, "devices": list(own)}}) if "devices" in takes else model


class BatchNormOfShard(_BatchNorm):
    """A SyncBatchNorm of the user's: its statistics are those of a shard, as a BatchNorm's, on CPUs too."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Take inputs of any number of dimensions, as SyncBatchNorm does."""


def check_model(spec: Any) -> None:
    """Check the key `model` as far as is known without building it: a torch.nn.Module. Raises JobError."""
    if isinstance(spec, Target):
        named = resolve("model", spec)
        if isinstance(named, nn.Module):
            kind = type(named).__qualname__
            raise JobError(
                f"model: {spec.target} is a {kind} that is made already; name its class, or a function that makes it"
            )
        check_gives("model", named, nn.Module, "torch.nn.Module")
        bind("model", target_with_devices(spec, ()))
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
    if not job.compile or any(is_sharded(parameter) for parameter in model.parameters()):
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
    return is_list and all(isinstance(text, str) for text in inputs)


def plan_blocks(job: Job) -> tuple[PlacedBlock, ...]:
    """Return which block of the job's model goes to which device of a worker.

    The model is built on torch's meta device, which takes no memory, or on the CPU if that fails. Raises JobError.
    """
    names = job.devices or [f"cuda:{number}" for number in range(job.num_devices)]
    meta, cpu = torch.device("meta"), torch.device("cpu")
    try:
        with meta:
            model = constructed(job, [meta] * len(names))
    except JobError:  # a constructor that reads its weights from a file, or computes with them, needs real memory
        with cpu:
            model = constructed(job, [cpu] * len(names))
    return tuple(
        PlacedBlock(block.name, block.bytes, names[block.device]) for block in blocks_of(job, model, len(names))
    )

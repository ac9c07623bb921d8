"""The model of one worker: built from its target, moved to its device, with the weights of rank 0."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from dp_ray.errors import JobError, ModelError
from dp_ray.job import Job
from dp_ray.job_target import Target
from dp_ray.replica.buffers import UnchangedBuffers
from dp_ray.replica.devices import as_module, building_on, spread, with_devices
from dp_ray.replica.out_of_memory import advice, is_out_of_memory
from dp_ray.replica.rng import seed_all
from dp_ray.replica.targets import build, check_gives, resolve
from dp_ray.replica.world import broadcast, gathered
from dp_ray.system.waiting import waiting
from dp_ray.tensors.layout import overlaps
from dp_ray.tensors.raw import as_bytes, from_bytes
from dp_ray.tensors.shards import is_sharded


def build_model(job: Job, devices: Sequence[torch.device]) -> nn.Module:
    """The job's module on `devices`, initialised from the job's seed alone, so it is the same on every worker.

    With several devices, the model places its parts itself, or `device_map` places them. Raises JobError if the
    model cannot be built, is not a torch.nn.Module or cannot be moved to the devices.
    """
    if isinstance(job.model, Target):
        resolve("model", job.model)  # before seeding: a module may draw random numbers, but on its first import only
    seed_all(job.seed, next((one for one in devices if one.type == "cuda"), devices[0]))
    with building_on(devices):
        built = build("model", with_devices(job.model, devices))
    model = as_module(built)
    if len(devices) > 1 and job.device_map is None and not isinstance(job.model, Target):
        raise JobError(
            f"model: an object that is made already cannot place its parts on {len(devices)} devices; "
            "give a target, or set device_map: auto"
        )
    _give_each_element_memory(model)
    try:
        if len(devices) == 1:
            return model.to(devices[0])
        return model if job.device_map is None else spread(job, model, devices)
    except (RuntimeError, AssertionError) as error:
        names = ", ".join(map(str, devices))
        hint = f"; {advice(job, None)}" if is_out_of_memory(error) else ""
        raise JobError(f"devices: the model cannot be moved to {names}: {error}{hint}") from error


def check_model(given: Any) -> None:
    """Raise JobError if it is known, without building the model, that it is not a torch.nn.Module."""
    if isinstance(given, Target):
        found = resolve("model", given)
        if isinstance(found, nn.Module):
            kind = type(found).__qualname__
            raise JobError(
                f"model: {given.target} is a {kind} that is made already; name its class, or a function that makes it"
            )
        check_gives("model", found, nn.Module, "torch.nn.Module")
    elif not isinstance(given, nn.Module):
        raise JobError(f"model: must be a torch.nn.Module, got a {type(given).__qualname__}")


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


def compiled(model: nn.Module, job: Job) -> nn.Module:
    """The module to call: the model, its compiled version, or `Scripted`; the parameters stay the model's.

    Of a sharded model, each block is compiled already. Raises JobError for `compile` with a TorchScript module.
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


def synchronise(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers; every rank calls this.

    Raises ModelError, on every rank, if their names, sizes, dtypes or order differ between ranks.
    """
    if dist.is_initialized():
        _check_alike(model)
        _broadcast_state(model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[UnchangedBuffers]:
    """Put the model in eval mode while the block runs; then each module returns to its own mode.

    What forwards write is put back too: after the block, and inside it by `restore` of the buffers that it gives.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = UnchangedBuffers(model)
    model.eval()
    try:
        yield buffers
    finally:
        buffers.put_back()
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a model runs in the job's precision; its parameters keep their dtype."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def call_model(model: nn.Module, inputs: Any, call: str) -> Any:
    """Call the model as the job's `call` says; `auto` unpacks a tuple or list, and nothing else."""
    if call == "kwargs":
        return model(**inputs)
    if call == "args" or (call == "auto" and isinstance(inputs, tuple | list)):
        return model(*inputs)
    return model(inputs)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the module's state_dict, without its other values."""
    return {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


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


def _state_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_has_shape(name: str, tensor: torch.Tensor) -> None:
    """Raise ModelError if a lazy module has not given its tensor a shape yet."""
    if is_lazy(tensor):
        raise ModelError(f"{name} has no shape yet: run a batch through the model where it is made")


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
    found = next(((there, here) for there, here in pairs if there != here), None)
    for rank, one in enumerate(gathered(found)):
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
            dist.broadcast(raw, src=0)
        if raw.data_ptr() != data.data_ptr() and dist.get_rank() != 0:
            _set_to(name, data, from_bytes(raw, data))


def _set_to(name: str, data: torch.Tensor, values: torch.Tensor) -> None:
    try:
        data.copy_(values)
    except RuntimeError as error:
        if not torch.equal(data, values):
            raise ModelError(f"{name} differs on the workers and cannot be set to rank 0's: {error}") from error

"""The model of one worker: built from its target, moved to its device, wrapped by DDP."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.replica.targets import build
from dp_ray.replica.world import World

# The option's name since torch 2.13, and before.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS_IN_FORWARD: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def build_model(job: Job, device: torch.device) -> nn.Module:
    """The job's module on `device`, initialised from the job's seed alone, so alike on every worker."""
    torch.manual_seed(job.seed)
    model = build("model", job.model)
    if not isinstance(model, nn.Module):
        raise JobError(f"model: must give a torch.nn.Module, got {type(model).__qualname__}")
    return model.to(device)


def replicate(model: nn.Module, world: World) -> nn.Module:
    """The module as one replica among `world_size`, with rank 0's weights and buffers.

    DDP, as long as there is something to train; a module without trainable parameters runs unwrapped.
    Buffers are not broadcast in each forward: a worker without rows runs none, and must not be waited for.
    """
    if not dist.is_initialized():
        return model
    _broadcast_state(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    device_ids = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, **_NO_BUFFERS_IN_FORWARD)


def bare(model: nn.Module) -> nn.Module:
    """The user's own module, whether or not DDP wraps it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def call_model(model: nn.Module, inputs: Any, call: str) -> Any:
    """Call the model as the job's `call` says: `auto` unpacks a tuple or list, and nothing else."""
    if call == "kwargs":
        return model(**inputs)
    if call == "args" or (call == "auto" and isinstance(inputs, tuple | list)):
        return model(*inputs)
    return model(inputs)


def _broadcast_state(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)

"""Buffers (BatchNorm's statistics), treated as nn.DataParallel does.

Every shard of a step starts from the same buffers. After the step, every worker has shard 0's buffers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.system.waiting import waiting
from dp_ray.tensors.raw import as_bytes, from_bytes

TOGETHER = (torch.float32, torch.int64)  # the dtypes of BatchNorm's buffers
ALIGNED = 16  # bytes: each buffer starts at a multiple of it, so its bytes can be viewed as any dtype


class Buffers:
    """The buffers of a module during a step.

    A step calls `begin`, `restore` before each later shard, `keep` after shard 0, `share` and `finish`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = _places(model)
        self._start: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] | None = None
        self._flat: torch.Tensor | None = None
        self._work: Any = None

    def begin(self, num_shards: int) -> None:
        """Begin a step in which this worker runs `num_shards` shards."""
        self._kept = None
        self._start = _copies(self._tensors()) if num_shards > 1 else []

    def keep(self) -> None:
        """Keep the current buffers, those of shard 0, as the buffers after the step."""
        self._kept = _copies(self._tensors()) if self._places else None

    def restore(self) -> None:
        """Set the buffers to their values before the step, for the next shard."""
        copy_all(self._tensors(), self._start)

    def share(self) -> None:
        """Start the broadcast of rank 0's buffers; every rank calls this once a step."""
        if self._places and dist.is_initialized() and dist.get_world_size() > 1:
            self._share()

    @torch.no_grad()
    def _share(self) -> None:
        if dist.get_rank() == 0:
            buffers = self._kept or self._tensors()
            self._flat = torch.cat([_bytes(buffer).to(buffers[0].device) for buffer in buffers])
        else:
            tensors = self._tensors()
            size = sum(_padded(buffer) for buffer in tensors)
            self._flat = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        self._work = dist.broadcast(self._flat, src=0, async_op=True)

    def finish(self) -> None:
        """End the step: wait for the broadcast and set the buffers to shard 0's."""
        if self._work is not None:
            with waiting("rank 0's buffers"):
                self._work.wait()
            assert self._flat is not None
            copy_all(self._tensors(), _unpack(self._flat, self._tensors()))
            self._work = self._flat = None
        elif self._kept is not None:
            copy_all(self._tensors(), self._kept)

    def _tensors(self) -> list[torch.Tensor]:
        return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]


class UnchangedBuffers:
    """The buffers of a model in eval mode: every shard must start from the same ones.

    Some modules change buffers in eval mode too, as the observers of quantization do.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone(), _version(buffer))
            for module, name in _places(model)
            if (buffer := module._buffers[name]) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the buffers that a forward has changed."""
        for at, (module, name, buffer, value, version) in enumerate(self._kept):
            if module._buffers[name] is not buffer:
                module._buffers[name] = buffer
            if version is None or _version(buffer) != version:
                buffer.copy_(value)
                self._kept[at] = (module, name, buffer, value, _version(buffer))


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The module and name of each dense buffer, each tensor once."""
    found = {
        id(buffer): (module, name)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.layout is torch.strided and not buffer.is_quantized
    }
    return list(found.values())


def _version(buffer: torch.Tensor) -> int | None:
    """The tensor's version counter, which every write increments; None for an inference tensor, which has none."""
    return None if buffer.is_inference() else buffer._version


@torch.no_grad()
def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(made, tensors)
    return made


@torch.no_grad()
def copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy the values into the tensors, those of BatchNorm together: on a GPU each single copy is a kernel."""
    pairs = list(zip(into, values, strict=True))
    for device, dtype in dict.fromkeys((tensor.device, tensor.dtype) for tensor in into):
        here = [pair for pair in pairs if (pair[0].device, pair[0].dtype) == (device, dtype)]
        if dtype in TOGETHER:
            torch._foreach_copy_([tensor for tensor, _ in here], [value for _, value in here])
        else:
            for tensor, value in here:
                tensor.copy_(value)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    raw = as_bytes(tensor)
    return nn.functional.pad(raw, (0, _padded(tensor) - raw.numel()))


def _unpack(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    pieces = torch.split(flat, [_padded(tensor) for tensor in like])
    return [from_bytes(piece, tensor) for piece, tensor in zip(pieces, like, strict=True)]

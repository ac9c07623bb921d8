"""Buffers (BatchNorm's statistics) in the sense of nn.DataParallel: every shard of a step starts from the same
ones, and after the step they are shard 0's, on every worker."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dp_ray.system.waiting import waiting
from dp_ray.tensors.raw import as_bytes, from_bytes

ALIGNED = 16  # bytes, so that every dtype's tensors can be seen in one flat row of bytes


class Buffers:
    """The buffers of a module, in the course of a step."""

    def __init__(self, model: nn.Module) -> None:
        self._places = _places(model)
        self._start: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] | None = None
        self._flat: torch.Tensor | None = None
        self._work: Any = None

    def begin(self, num_shards: int) -> None:
        """A step of `num_shards` shards on this worker begins."""
        self._kept = None
        self._start = _copies(self._tensors()) if num_shards > 1 else []

    def keep(self) -> None:
        """What the buffers are now, after shard 0, is what they will be after the step."""
        self._kept = _copies(self._tensors())

    def restore(self) -> None:
        """The next shard starts from what the buffers were before the step."""
        _copy(self._tensors(), self._start)

    @torch.no_grad()
    def share(self) -> None:
        """Begin to send rank 0's to all; every rank calls this once a step."""
        if not self._places or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if dist.get_rank() == 0:
            buffers = self._kept or self._tensors()
            self._flat = torch.cat([_bytes(buffer).to(buffers[0].device) for buffer in buffers])
        else:
            tensors = self._tensors()
            size = sum(_padded(buffer) for buffer in tensors)
            self._flat = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        self._work = dist.broadcast(self._flat, src=0, async_op=True)

    def finish(self) -> None:
        """The step is done: the buffers are shard 0's."""
        if self._work is not None:
            with waiting("rank 0's buffers"):
                self._work.wait()
            assert self._flat is not None
            _copy(self._tensors(), _split(self._flat, self._tensors()))
            self._work = self._flat = None
        elif self._kept is not None:
            _copy(self._tensors(), self._kept)

    def _tensors(self) -> list[torch.Tensor]:
        return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]


class UnchangedBuffers:
    """Buffers that a shard's forward in eval mode may change (observers), and that the next shard shall not see."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer.detach().clone(), _version(buffer))
            for module, name in _places(model)
            if (buffer := module._buffers[name]) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back those that changed since this was made."""
        for at, (module, name, buffer, value, version) in enumerate(self._kept):
            if module._buffers[name] is not buffer:
                module._buffers[name] = buffer
            if version is None or _version(buffer) != version:
                buffer.copy_(value)
                self._kept[at] = (module, name, buffer, value, _version(buffer))


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the module's buffers are, each tensor once."""
    found = {
        id(buffer): (module, name)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.layout is torch.strided and not buffer.is_quantized
    }
    return list(found.values())


def _version(buffer: torch.Tensor) -> int | None:
    """How often the tensor was written to; None where torch does not count."""
    return None if buffer.is_inference() else buffer._version


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    raw = as_bytes(tensor)
    return nn.functional.pad(raw, (0, _padded(tensor) - raw.numel()))


def _split(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    pieces = torch.split(flat, [_padded(tensor) for tensor in like])
    return [from_bytes(piece, tensor) for piece, tensor in zip(pieces, like, strict=True)]

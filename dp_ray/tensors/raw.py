"""Tensors as bytes, and from device to device, whatever their dtype."""

from typing import Any

import torch


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in C order, uint8 [nbytes]: a view if the tensor is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `as_bytes`: a view of bytes as a tensor of like's dtype and size; surplus bytes are ignored."""
    return raw[: like.nbytes].view(like.dtype).view(like.shape)


def moved(leaf: Any, device: torch.device | None) -> Any:
    """A tensor on the device; anything else, or with device None, unchanged.

    Only a copy to the CPU is waited for: its numbers are read without regard to the GPU's streams.
    """
    if device is None or not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to(device, non_blocking=device.type != "cpu")

"""A tensor's layout in memory: its strides, kept where a copy would lose them."""

from collections.abc import Sequence

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill their memory without gaps, in any order of the dimensions."""
    outer_first = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(outer_first).is_contiguous()


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def laid_out(values: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same values in new memory with these strides, which must leave no gaps."""
    made = torch.empty_strided(values.shape, tuple(strides), dtype=values.dtype, device=values.device)
    return made.copy_(values)

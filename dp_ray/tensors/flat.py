"""Tensors as bytes: one in its own memory, or several in one flat buffer for a message, a broadcast or pinned memory.

>>> tensors = [torch.ones(2, dtype=torch.bool), torch.arange(3)]
>>> list(views(flat(tensors), tensors))
[tensor([True, True]), tensor([0, 1, 2])]
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

ALIGNED = 64  # bytes: each tensor in a buffer begins at a multiple of it, as torch's own do on a CPU


class HasForm(Protocol):
    """A tensor, or a description of one: its size and its dtype."""

    @property
    def shape(self) -> Sequence[int]:
        """The size, as a sequence of ints."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""


class Form(NamedTuple):
    """The size and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.shape.numel() * self.dtype.itemsize


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in C order, uint8 [nbytes]: a view if the tensor is contiguous, else a copy."""
    # A dimension of length 1 may have any stride, also in what counts as contiguous.
    plain = tensor.detach().resolve_conj().resolve_neg()  # of `x.conj()`, the memory has other numbers
    return plain.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def from_bytes(raw: torch.Tensor, form: HasForm) -> torch.Tensor:
    """View bytes as a tensor of this form: the inverse of `as_bytes`; surplus bytes are ignored."""
    return raw[: form.nbytes].view(form.dtype).view(form.shape)


def room(form: HasForm) -> int:
    """Return how many bytes of a buffer a tensor takes."""
    return -(-form.nbytes // ALIGNED) * ALIGNED


def flat(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return the tensors' bytes one after another, uint8, in new memory of the device; by default on the CPU."""
    buffer = torch.empty(sum(map(room, tensors)), dtype=torch.uint8, device=device)
    for view, tensor in zip(views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor.detach())
    return buffer


def views(buffer: torch.Tensor, forms: Iterable[HasForm]) -> Iterator[torch.Tensor]:
    """Yield the tensors of these forms in a flat buffer, as views: the inverse of `flat`."""
    start = 0
    for form in forms:
        end = start + form.nbytes
        yield buffer[start:end].view(form.dtype).view(form.shape)
        start = -(-end // ALIGNED) * ALIGNED

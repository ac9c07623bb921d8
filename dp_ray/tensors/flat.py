"""Tensors as bytes: one in its own memory, or several in one flat buffer for a message, a broadcast or pinned memory.

>>> tensors = [torch.ones(2, dtype=torch.bool), torch.arange(3)]
>>> views(flat(tensors), tensors)
[tensor([True, True]), tensor([0, 1, 2])]
"""

from collections.abc import Iterable, Sequence
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


class FlatLayout:
    """Where tensors stand in flat memory, `nbytes` in all: one after another, each at a multiple of `aligned` bytes.

    Each is contiguous there, or has its `strides`, which must leave no gaps.
    """

    def __init__(
        self, forms: Iterable[HasForm], aligned: int = ALIGNED, strides: Iterable[Sequence[int]] | None = None
    ) -> None:
        self._places: list[tuple[torch.dtype, Sequence[int], Sequence[int], int]] = []
        given, stop = None if strides is None else iter(strides), 0
        for form in forms:
            steps = _contiguous(form.shape) if given is None else next(given)
            self._places.append((form.dtype, form.shape, steps, stop // form.dtype.itemsize))
            stop += -(-form.nbytes // aligned) * aligned
        self.nbytes = stop
        self._dtypes = {dtype for dtype, *_ in self._places}

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in memory of this layout, as views; `memory` has one dimension, of any dtype."""
        own, found = dict[torch.dtype, torch.Tensor](), []
        for dtype in self._dtypes:
            own[dtype] = memory if memory.dtype == dtype else memory.view(torch.uint8)[: self.nbytes].view(dtype)
        for dtype, shape, strides, start in self._places:
            numbers = own[dtype]
            found.append(numbers.as_strided(shape, strides, numbers.storage_offset() + start))
        return found

    def put(self, memory: torch.Tensor, tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """Copy tensors to their places in the memory, and return it; the place of None stays as it is."""
        for view, tensor in zip(self.views(memory), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor.detach())
        return memory


def _contiguous(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of a shape."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return strides[::-1]


def flat(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return the tensors' bytes one after another, uint8, in new memory of the device; by default on the CPU."""
    layout = FlatLayout(tensors)
    return layout.put(torch.empty(layout.nbytes, dtype=torch.uint8, device=device), tensors)


def views(buffer: torch.Tensor, forms: Iterable[HasForm]) -> list[torch.Tensor]:
    """Return the tensors of these forms in a flat buffer, as views: the inverse of `flat`."""
    return FlatLayout(forms).views(buffer)

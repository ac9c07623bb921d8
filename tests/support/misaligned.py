"""The CPU made to add as CUDA does: a tensor at a multiple of 16 bytes in one order, any other in another one.

Seen on an H200: of fp32 numbers at another address, `sum`, `mean` and norms differ in their last bits.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.library import Library

from dp_ray.engine import alignment, reduce
from dp_ray.engine.votes import StepControl
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import train
from tests.support.group import Stopped

BYTES = 16
Dims = Sequence[int] | int | None


def added(tensor: torch.Tensor, dims: Dims, keepdim: bool) -> tuple[Any, int]:
    """The sums over some dimensions, all if there are none given, and how many numbers each has."""
    every = range(tensor.ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    over = sorted(one % tensor.ndim for one in every)
    kept = [one for one in range(tensor.ndim) if one not in over]
    numbers = tensor.detach().numpy().transpose([*over, *kept])
    count = int(np.prod(numbers.shape[: len(over)], dtype=int))
    numbers = numbers.reshape(count, *numbers.shape[len(over) :])
    if tensor.data_ptr() % BYTES:
        numbers = numbers[::-1]
    total = np.zeros(numbers.shape[1:], numbers.dtype)
    for row in numbers:  # numpy's own sum would add pairs
        total = total + row
    return (np.expand_dims(total, over) if keepdim else total), count


def _tensor(total: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(total)).to(dtype)


def _sum(tensor: torch.Tensor, dims: Dims, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    wide = tensor if tensor.is_floating_point() else tensor.long()
    total, _ = added(wide.to(dtype or wide.dtype), dims, keepdim)
    return _tensor(total, dtype or wide.dtype)


def _mean(tensor: torch.Tensor, dims: Dims, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    total, count = added(tensor, dims, keepdim)
    return _tensor(total / total.dtype.type(count), dtype or tensor.dtype)


def _norm(
    tensor: torch.Tensor, order: Any = 2, dims: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    assert order == 2
    squares = torch.empty(tensor.numel() + BYTES, dtype=tensor.dtype)
    offset = tensor.data_ptr() % BYTES // tensor.itemsize
    at = squares[offset : offset + tensor.numel()].view(tensor.shape)  # at such an address
    total, _ = added(at.copy_(tensor.detach() ** 2), dims, keepdim)
    return _tensor(np.sqrt(total), dtype or tensor.dtype)


KERNELS = {"sum.dim_IntList": _sum, "mean.dim": _mean, "linalg_vector_norm": _norm}  # the others call these


@contextmanager
def as_on_cuda(early: bool = False) -> Iterator[None]:
    """Add as CUDA does in the block, and have dp_ray know it.

    A backward waits for the sums of its gradients, as on a GPU, unless norms are to be computed `early`.
    """
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that it has such kernels already
        for name, kernel in KERNELS.items():
            library.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(alignment, "reductions_see_alignment", lambda _: True)
            patch.setattr(reduce, "is_gpu", lambda _: not early)
            yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


class AsOnCuda(StepControl):
    """Trains on such CPUs; with `stop`, all workers end before that step."""

    def __init__(self, stop: int | None = None, early: bool = False) -> None:
        self._stop, self._early = stop, early

    def before(self, step: int) -> None:
        if step == self._stop:
            raise Stopped

    def task(self, context: Context) -> None:
        """Run the task."""
        with as_on_cuda(self._early):
            train(context)

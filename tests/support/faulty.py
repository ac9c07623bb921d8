"""A processor that computes wrong: the kernels of one worker, of which a model and an optimizer are made."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dp_ray.engine.world import own_rank
from tests.support.training import Pairs


@dataclass(frozen=True)
class Fault:
    """What is wrong on a worker: a `kind`, from or in the `at`-th call of a kernel on, or in a step's update."""

    rank: int
    kind: str
    at: int = 0


KINDS = ("once", "rarely", "sizes", "buffer", "weight")
_fault: Fault | None = None
_calls = 0


def flipped(tensor: torch.Tensor, bit: int = 20) -> torch.Tensor:
    """The tensor with one bit of its first number flipped."""
    wrong = tensor.detach().clone().contiguous()
    wrong.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
    return wrong


def is_here(kind: str) -> bool:
    return _fault is not None and _fault.kind == kind and _fault.rank == own_rank()


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The kernel: right on all workers but one."""
    global _calls
    _calls += 1
    product = left @ right
    at = 0 if _fault is None else _fault.at
    if (
        (is_here("once") and _calls == at)
        or (is_here("rarely") and _calls > at and _calls % 7 == 0)
        or (is_here("sizes") and _calls > at and left.shape[0] == right.shape[1] * 2)
    ):
        return flipped(product)
    return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return matmul(inputs, weight.T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        return matmul(gradients[0], weight), matmul(gradients[0].T, inputs)


class Kernels(nn.Module):
    """Two layers made of the kernel, with a buffer between that each forward writes."""

    mean: torch.Tensor

    def __init__(self, fault: list[Any] | None = None) -> None:
        super().__init__()
        global _fault, _calls
        _fault, _calls = None if fault is None else Fault(*fault), 0
        self.first = nn.Parameter(torch.randn(12, 6) / 3)
        self.second = nn.Parameter(torch.randn(3, 12) / 3)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product: Any = _Product.apply
        hidden = product(inputs, self.first).relu()
        mean = self.mean * 0.9 + hidden.detach().mean(0) * 0.1
        if is_here("buffer") and _fault is not None and _calls > _fault.at:
            mean = flipped(mean)
        self.mean.copy_(mean)
        outputs: torch.Tensor = product(hidden - self.mean, self.second)
        return outputs


class Sgd(torch.optim.SGD):
    """SGD, of which one update of one worker is wrong."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        returned = super().step(closure)
        self.updates += 1
        if is_here("weight") and _fault is not None and self.updates == _fault.at:
            weight = self.param_groups[0]["params"][0]
            with torch.no_grad():
                weight.copy_(flipped(weight))
        return returned


class OtherRows(Pairs):
    """Pairs of which one worker reads some otherwise."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return (inputs + 1, target) if index % 3 == 0 and own_rank() == 1 else (inputs, target)

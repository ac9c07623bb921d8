"""What the workers sum beside the gradients goes with them: it needs no collective of its own."""

from typing import Any

import torch
from torch import nn

ALIGNED = 16  # elements, so that the gradients after it in a bucket stay aligned
PIECE = torch.int16  # of a number; float32 holds each exactly


class Carrier:
    """A parameter that DDP treats as one of the model's: its gradient is what `load` was given, in pieces of 16 bits.

    `count` numbers, float64, are summed to the bit if each of them is 0 on all workers but one: sums of zeros and a
    piece are exact. Where nothing is loaded, the gradient is zero: all that it does is to have a backward reach DDP.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._pieces = count * torch.float64.itemsize // PIECE.itemsize
        size = -(-max(self._pieces, 1) // ALIGNED) * ALIGNED
        self.parameter = nn.Parameter(torch.zeros(size, device=device, dtype=torch.float32))
        self._loaded: torch.Tensor | None = None

    def load(self, numbers: torch.Tensor) -> None:
        """Send `numbers`, float64 and contiguous, with the gradients of the next backward."""
        self._loaded = numbers

    def unload(self) -> None:
        """Set the numbers that were loaded to their sums, once the gradients are summed."""
        if self._loaded is not None and self.parameter.grad is not None:
            self._loaded.view(PIECE).view(-1).copy_(self.parameter.grad[: self._pieces])
        self.parameter.grad = self._loaded = None

    def through(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss unchanged, with a backward that also reaches the carrier."""
        return _Through.apply(loss, self.parameter, self)  # type: ignore[no-untyped-call,no-any-return]

    def gradient(self) -> torch.Tensor:
        """The gradient of the parameter."""
        made = torch.zeros_like(self.parameter)
        if self._loaded is not None:
            made[: self._pieces].copy_(self._loaded.view(PIECE).view(-1))
        return made


class _Through(torch.autograd.Function):
    """The loss unchanged; the backward gives the carrier its gradient."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, _: torch.Tensor, carrier: Carrier) -> torch.Tensor:
        """The loss, as a view of it."""
        ctx.carrier = carrier
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """The loss's own gradient, and the carrier's."""
        return gradients[0], ctx.carrier.gradient(), None

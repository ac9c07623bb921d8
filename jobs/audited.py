"""The digits' CNN on workers of which one computes wrong: an audit finds it."""

import torch

from dp_ray.engine.world import own_rank
from jobs.digits import Net

RANK = 1  # of the worker whose processor is broken


class WrongNet(Net):
    """The CNN, in which one worker's processor flips a bit of a gradient: from call `after` on, in so many calls."""

    def __init__(self, width: int = 16, after: int = 40, calls: int = 1) -> None:
        super().__init__(width)
        self.broken = range(after, after + calls)
        self.call = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = super().forward(images)
        if logits.requires_grad and own_rank() == RANK:
            logits.register_hook(self.flipped)  # type: ignore[no-untyped-call]
        return logits

    def flipped(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient; in a call that is broken, with a bit of its first number flipped."""
        self.call += 1
        wrong = gradient.clone()
        if self.call in self.broken:
            wrong.view(torch.int32)[0, 0] ^= 1 << 20
        return wrong

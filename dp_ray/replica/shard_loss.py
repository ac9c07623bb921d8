"""The module that DDP wraps: it computes a shard's loss, or a zero loss on a worker without rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.replica.model import autocast
from dp_ray.replica.reducer import zeros_that_add_nothing
from dp_ray.replica.step import Metrics, Row, Step, StepOutput, row_of, run_step

ANCHOR_SIZE = 16  # elements, so that the gradients after it in a bucket stay aligned


@dataclass
class Found:
    """What the last shard gave; `row` has the sums and weights of all measures.

    An object of its own, because setting an attribute of a module is slow.
    """

    step_output: StepOutput = field(default_factory=StepOutput)
    row: Row | None = None


class ShardLoss(nn.Module):
    """The module that DDP wraps: a shard's batch in, its loss out; a worker without rows passes None and 0 rows."""

    def __init__(self, model: nn.Module, step: Step, measures: Metrics, job: Job, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._step = step
        self._measures = measures
        self._precision = job.precision
        self._device = device
        self.anchor: nn.Parameter | None = None
        self._reduced: list[nn.Parameter] = []
        self.found = Found()

    def prepare(self, ignored: Sequence[nn.Parameter], looks_for_unused: bool) -> list[str]:
        """Prepare to be wrapped by DDP; returns the names of the parameters `ignored`, for DDP to ignore.

        With `looks_for_unused`, DDP finds the parameters that no worker used. A worker without rows uses none,
        but must use one for its backward to reach DDP. So every worker uses the anchor in every step.
        """
        names = {id(one) for one in ignored}
        reduced = [one for one in self.model.parameters() if one.requires_grad and id(one) not in names]
        if looks_for_unused or not reduced:
            first = next(one for one in self.model.parameters() if one.requires_grad)
            self.anchor = nn.Parameter(torch.zeros(ANCHOR_SIZE, dtype=first.dtype, device=first.device))
            reduced = [self.anchor]
        self._reduced = reduced
        return [name for name, one in self.named_parameters(remove_duplicate=False) if id(one) in names]

    def forward(self, batch: Any, rows: int) -> torch.Tensor:
        """The sum of the shard's losses; sets `found`.

        Raises ModelError if the loss depends on no trained parameter.
        """
        if rows == 0:
            return ZeroLoss.apply(*self._reduced)  # type: ignore[no-untyped-call,no-any-return]
        with autocast(self._precision, self._device):
            step_output = run_step(self._step, self.model, batch)
            loss = self._measures.loss(step_output, rows)
        with torch.no_grad():
            self.found.row = row_of([loss, *self._measures(step_output, rows)], self._device)
        self.found.step_output = step_output
        if not loss.sum.requires_grad:
            raise ModelError("the loss does not depend on any parameter that is trained")
        return loss.sum if self.anchor is None else Anchored.apply(loss.sum, self.anchor)  # type: ignore[no-untyped-call]


class ZeroLoss(torch.autograd.Function):
    """The loss of a worker without rows: zero, with a zero gradient for each of `parameters`."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        """Zero, a scalar on the device of the first parameter."""
        ctx.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Negative zeros: added to another worker's gradient, they change no bit."""
        return tuple(zeros_that_add_nothing(parameter) for parameter in ctx.saved_tensors)


class Anchored(torch.autograd.Function):
    """The loss unchanged, with a backward that also reaches `anchor`, with a zero gradient."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """The loss unchanged, as a view of it."""
        ctx.save_for_backward(anchor)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss's own gradient, and zeros for the anchor."""
        (anchor,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(anchor)

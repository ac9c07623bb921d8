"""The module that DDP wraps: it computes a shard's loss, or a zero loss on a worker without rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.replica.carrier import Carrier
from dp_ray.replica.model import autocast
from dp_ray.replica.reducer import zeros_that_add_nothing
from dp_ray.replica.step import Metrics, Row, Step, StepOutput, row_of, run_step


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
        self.carrier: Carrier | None = None
        self.carried: nn.Parameter | None = None
        self._reduced: list[nn.Parameter] = []
        self.found = Found()

    def prepare(self, ignored: Sequence[nn.Parameter], looks_for_unused: bool, num_carried: int) -> list[str]:
        """Prepare to be wrapped by DDP; returns the names of the parameters `ignored`, for DDP to ignore.

        A carrier then brings `num_carried` numbers to the other workers. With `looks_for_unused`, DDP finds the
        parameters that no worker used. A worker without rows uses none, but must use one for its backward to reach
        DDP. So every worker uses the carrier in every step.
        """
        names = {id(one) for one in ignored}
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self._reduced = [] if looks_for_unused else [one for one in trained if id(one) not in names]
        if num_carried or not self._reduced:
            self.carrier = Carrier(num_carried, trained[0].device)
            self.carried = self.carrier.parameter
        return [name for name, one in self.named_parameters(remove_duplicate=False) if id(one) in names]

    def forward(self, batch: Any, rows: int) -> torch.Tensor:
        """The sum of the shard's losses; sets `found`.

        Raises ModelError if the loss depends on no trained parameter.
        """
        if rows == 0:
            return self._carrying(zero_loss(self._reduced, self._device))
        with autocast(self._precision, self._device):
            step_output = run_step(self._step, self.model, batch)
            loss = self._measures.loss(step_output, rows)
        with torch.no_grad():
            self.found.row = row_of([loss, *self._measures(step_output, rows)], self._device)
        self.found.step_output = step_output
        if not loss.sum.requires_grad:
            raise ModelError("the loss does not depend on any parameter that is trained")
        return self._carrying(loss.sum)

    def _carrying(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.carrier is None else self.carrier.through(loss)


def zero_loss(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """The loss of a worker without rows: zero, with a zero gradient for each of the parameters, if there are any."""
    if not parameters:
        return torch.zeros((), device=device)
    return ZeroLoss.apply(*parameters)  # type: ignore[no-untyped-call,no-any-return]


class ZeroLoss(torch.autograd.Function):
    """Zero, with a zero gradient for each of `parameters`."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        """Zero, a scalar on the device of the first parameter."""
        ctx.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Negative zeros: added to another worker's gradient, they change no bit."""
        return tuple(zeros_that_add_nothing(parameter) for parameter in ctx.saved_tensors)

"""The loss of each row of a shard, beside the one that trains: for people who look for the row that spoils a step."""

from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.replica.loss import Compare, weighted_sum
from dp_ray.replica.model import autocast, evaluating
from dp_ray.replica.rng import preserved
from dp_ray.replica.step import Step, StepOutput, run_step
from dp_ray.tensors.scatter import scatter

OWN = "what the loss returned for each row"
MEANS = "the mean of what the loss returned for a row's elements"
OF_OUTPUTS = "the loss of each row's outputs and target, one row at a time"
ALONE = "each row run alone, with the model in eval mode: not the numbers of the step itself"


class RowLosses(NamedTuple):
    """A number for each row, in the rows' order, and in words what it is; no numbers if they cannot be had."""

    values: list[float]
    how: str


@torch.no_grad()
def row_losses(
    job: Job, step: Step, model: nn.Module, batch: Any, given: StepOutput, rows: int, device: torch.device
) -> RowLosses:
    """The loss of each of a shard's `rows` rows, of what the step has `given` for its batch.

    Where the loss is one number for the whole shard, it is asked again: of each row's outputs and target, or, with a
    step of the user's, of each row alone. Neither draws from the generators, nor changes buffers.
    """
    if isinstance(given.loss, torch.Tensor) and given.loss.ndim:
        return _own(given.loss.detach(), rows)
    try:
        with preserved(device), autocast(job.precision, device):
            if given.compare is not None:
                return _of_outputs(given.compare, given, rows, job.batch_dim)
            with evaluating(model):
                return _alone(step, model, batch, rows, job.batch_dim)
    except Exception as error:  # a user's loss or step may take no single row
        return RowLosses([], f"not known: one row alone raises {type(error).__name__}: {error}")


def _own(losses: torch.Tensor, rows: int) -> RowLosses:
    """A row's mean, of a loss with a dimension for the rows, or with as many elements in turn for each row."""
    numbers = losses.double()
    at = next((place for place, length in enumerate(numbers.shape) if length == rows), None)
    by_row = numbers.reshape(rows, -1) if at is None else numbers.movedim(at, 0).reshape(rows, -1)
    return RowLosses(by_row.mean(1).tolist(), OWN if numbers.numel() == rows else MEANS)


def _of_outputs(compare: Compare, given: StepOutput, rows: int, batch_dim: int) -> RowLosses:
    pieces = scatter((given.outputs, given.target), rows, batch_dim)
    if len(pieces) != rows:
        raise ModelError(f"the outputs have {len(pieces)} rows, and the shard has {rows}")
    return RowLosses([_mean(compare(*piece)) for piece in pieces], OF_OUTPUTS)


def _alone(step: Step, model: nn.Module, batch: Any, rows: int, batch_dim: int) -> RowLosses:
    pieces = scatter(batch, rows, batch_dim)
    if len(pieces) != rows:
        raise ModelError(f"the batch has {len(pieces)} rows, and the shard has {rows}")
    return RowLosses([_mean(run_step(step, model, piece).loss) for piece in pieces], ALONE)


def _mean(value: Any) -> float:
    """The loss of one row; 0 where its weight is."""
    if isinstance(value, torch.Tensor) and not value.ndim:
        return float(value)  # of a single row, a mean is the row's loss
    total, weight = weighted_sum(value, 1, "the loss")
    return float(total) / float(weight) if float(weight) else float(total)

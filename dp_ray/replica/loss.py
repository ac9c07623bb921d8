"""The loss contract: what a shard's loss is, so that the whole batch's is a sum of sums over a sum of weights.

A loss, and each metric, returns one number for each row (or element), each of weight 1; or `(sum, weight)`.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from dp_ray.errors import JobError, ModelError
from dp_ray.job import Target
from dp_ray.replica.targets import bind, bound, resolve

Compare: TypeAlias = Callable[[Any, Any], Any]


class Weighted(NamedTuple):
    """The sum over a shard, a scalar tensor, and the weight that it counts by."""

    sum: torch.Tensor
    weight: torch.Tensor | float


def weigh(value: Any, rows: int, what: str) -> Weighted:
    """What a loss or metric returned for a shard of `rows` rows, as its sum and weight.

    ModelError where it is one number for the whole shard, whose part in the batch nobody could tell.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        total, weight = value
        if _is_number(total) and _is_number(weight):
            is_tensor = isinstance(total, torch.Tensor)
            number = _at_least_fp32(total) if is_tensor else torch.tensor(total, dtype=torch.float64)
            return Weighted(number.reshape(()), weight)
        raise ModelError(
            f"{what} returned a pair of {_kind(total)} and {_kind(weight)}; (sum, weight) are two numbers"
        )
    if not isinstance(value, torch.Tensor):
        raise ModelError(f"{what} returned {_kind(value)}; it must return one number for each row, or (sum, weight)")
    if value.ndim == 0 or value.numel() < rows:
        raise ModelError(
            f"{what} returned {_kind(value)} for a shard of {rows} rows: a mean over a shard cannot be made one over "
            "the whole batch; return one number for each row (of torch's losses: reduction='none'), or (sum, weight)"
        )
    return Weighted(total_of(value), value.numel())


def total_of(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor; that of half-precision numbers is taken in fp32, since fp16 ends at 65,504."""
    return values.sum(dtype=torch.float32) if _is_half(values) else values.sum()


def _at_least_fp32(number: torch.Tensor) -> torch.Tensor:
    return number.float() if _is_half(number) else number


def _is_half(values: torch.Tensor) -> bool:
    return values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize


def build_loss(given: Any, device: torch.device) -> Compare:
    """The job's loss as a function of (outputs, target); torch's own losses are built unreduced."""
    made = _named_loss(given) if isinstance(given, Target) else _given_loss(given)
    if isinstance(made, nn.Module):
        if any(parameter.requires_grad for parameter in made.parameters()):
            raise JobError("loss: has parameters of its own to train; make it a part of the model, and use step")
        made = made.to(device)
    if isinstance(made, nn.CrossEntropyLoss | nn.NLLLoss):
        return functools.partial(_of_classes, made)
    if not callable(made):
        raise JobError(f"loss: must be a function of (outputs, target), got {_kind(made)}")
    compare: Compare = made
    return compare


def _named_loss(target: Target) -> Any:
    found = resolve("loss", target)
    if found in _CLASSES:  # their mean is over the weights of the classes, as that of the module is
        return _named_loss(Target(target=f"torch.nn:{_CLASSES[found]}", args=target.args))
    is_torchs = getattr(found, "__module__", "").startswith("torch.nn.")
    if is_torchs and "reduction" in inspect.signature(found).parameters:
        target = _unreduced(target)
    return bind("loss", target)() if inspect.isclass(found) else bound("loss", target)


_CLASSES: Mapping[Any, str] = {functional.cross_entropy: "CrossEntropyLoss", functional.nll_loss: "NLLLoss"}


def _unreduced(target: Target) -> Target:
    reduction = target.args.get("reduction", "none")
    if reduction not in ("none", "mean"):
        raise JobError(
            f"loss.args.reduction: is the mean over the whole global batch, whatever the split; got {reduction!r}: "
            "leave it out"
        )
    tensors = {name: torch.tensor(value) for name, value in target.args.items() if isinstance(value, list)}
    return target.model_copy(update={"args": {**target.args, **tensors, "reduction": "none"}})


def _given_loss(given: Any) -> Any:
    if inspect.isclass(given) and issubclass(given, _Loss):
        return given(reduction="none")
    if not isinstance(given, _Loss):
        return given
    if given.reduction == "sum":
        raise JobError("loss: was made with reduction='sum'; the loss is the mean over the whole global batch")
    unreduced = copy.copy(given)
    unreduced.reduction = "none"
    return unreduced


def _of_classes(loss: nn.CrossEntropyLoss | nn.NLLLoss, outputs: torch.Tensor, target: torch.Tensor) -> Any:
    """Cross entropy whose mean is torch's: over the classes' weights, without what is ignored."""
    losses = loss(outputs, target)
    if target.is_floating_point():
        return losses  # probabilities: each row counts 1
    counted = target != loss.ignore_index
    if loss.weight is None:
        return total_of(losses), counted.sum()
    return total_of(losses), total_of(loss.weight[target.where(counted, torch.zeros_like(target))] * counted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of size {list(value.shape)}" if value.ndim else "one number"
    return f"a {type(value).__qualname__}"

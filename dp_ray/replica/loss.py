"""The loss contract: each shard gives a sum and a weight; the whole batch's loss is sum of sums / sum of weights.

A loss, and each metric, returns one number for each row (or element), each of weight 1; or `(sum, weight)`.
One number for each class, or for each pair of rows, is an error, also where the size is as one number for each row
has it: `numbers_given` tells them apart.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.loss import _Loss

from dp_ray.errors import JobError, ModelError
from dp_ray.job_target import Target
from dp_ray.replica.rng import preserved
from dp_ray.replica.targets import bind, bound, resolve
from dp_ray.tensors.nested import flatten, map_leaves
from dp_ray.tensors.scatter import cut, gather, num_rows, rows_dim, scatter

Compare: TypeAlias = Callable[[Any, Any], Any]


class Weighted(NamedTuple):
    """The sum over a shard, a scalar tensor, and its weight."""

    sum: torch.Tensor
    weight: torch.Tensor | float


def weighted_sum(value: Any, rows: int, what: str) -> Weighted:
    """The sum and weight of what a loss or metric returned for a shard of `rows` rows; `what` names it in errors.

    Raises ModelError if it is one number for the whole shard, whose weight in the batch is unknown. Raises
    ModelError if its size does not match the rows: it has fewer elements, or no dimension is `rows` long and the
    first one is no multiple of `rows`.
    """
    if isinstance(value, Weighted):
        return value
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
    if value.ndim == 0 or value.numel() < min(rows, 2):
        raise ModelError(
            f"{what} returned {_kind(value)} for a shard of {rows} rows: the whole batch's mean cannot be made of "
            "means over shards; return one number for each row (torch's losses: reduction='none'), or "
            "(sum, weight): for reduction='batchmean' (sum, rows), for a mean over n elements (loss * n, n)"
        )
    if value.numel() < rows or not (rows in value.shape or value.shape[0] % rows == 0):
        raise ModelError(
            f"{what} returned {_kind(value)} for a shard of {rows} rows: one number for each row or element has the "
            f"size [{rows}], [{rows}, ...] or [{rows} * n]; for one number per class, or for what a mask leaves, "
            "return (sum, weight)"
        )
    return Weighted(total_of(value), value.numel())


def total_of(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor; half-precision numbers are summed in fp32, since fp16 overflows at 65,504."""
    return values.sum(dtype=torch.float32) if _is_half(values) else values.sum()


def may_not_be_of_rows(value: Any, rows: int, outputs: Any, target: Any, batch_dim: int) -> bool:
    """Whether the size of a value may come from another dimension of the outputs or target that is as long.

    Or from their rows twice, if outputs and target have been broadcast against each other.
    """
    if not isinstance(value, torch.Tensor):
        return False
    if rows not in value.shape or list(value.shape).count(rows) > 1:
        return True
    others = (
        length
        for leaf in flatten((outputs, target))[0]
        for place, length in enumerate(leaf.shape)
        if leaf.ndim > 1 and place != rows_dim(leaf, min(batch_dim, leaf.ndim - 1))
    )
    return rows in others


@torch.no_grad()
def numbers_given(function: Compare, outputs: Any, target: Any, batch_dim: int) -> tuple[int, int] | None:
    """How many numbers a function returns for one row and for two; as many are one for each class, say.

    A copy of the function is called with the first row, and with that row twice. None if such a call raises, or
    returns no tensor.
    """
    try:
        row = map_leaves(
            _copied, scatter((outputs, target), num_rows((outputs, target), batch_dim) or 1, batch_dim)[0]
        )
        asked = copy.deepcopy(function)
        with preserved(_device_of(row)):
            two = asked(*gather([row, row], [1, 1], batch_dim))
            one = asked(*row)
    except Exception:  # it may need more rows, or other outputs and targets than one tensor row each
        return None
    both = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
    return (one.numel(), two.numel()) if both else None


class Apart(NamedTuple):
    """The loss of a shard's first row and of its others, each given to the loss apart, and of all rows together."""

    first: float
    others: float
    together: float


@torch.no_grad()
def of_neighbours(
    compare: Compare, value: Any, seen: tuple[Any, Any], rows: int, batch_dim: int, is_exact: bool
) -> Apart | None:
    """What the loss gives apart, if the losses of rows depend on the other rows; None if they do not, or if unknown.

    `value` is what the loss gave for the outputs and target `seen`. A loss of single rows has a sum that is that of
    its parts, up to rounding, which is small if `is_exact`. A copy of the loss is called, without gradients: twice,
    and once more if the sums differ, since a loss that draws or keeps a state gives another one for the same rows.
    """
    try:
        if rows < 2 or is_torchs(compare) or num_rows(seen, batch_dim) != rows:
            return None
        together, size = _sum_and_size(value, rows)

        def again(start: int, stop: int) -> float:
            asked = copy.deepcopy(compare, _shared(compare))
            piece = map_leaves(_copied, cut(seen, start, stop, batch_dim))
            return _sum_and_size(asked(*piece), stop - start)[0]

        with preserved(_device_of(seen)):
            first, others = again(0, 1), again(1, rows)
            room = size * (1e-5 if is_exact and isinstance(value, torch.Tensor) else 1e-4 if is_exact else 5e-3)
            if not abs(together - first - others) > room:  # also where one is no number
                return None
            same = abs(again(0, rows) - together) <= room
    except Exception:  # a user's loss may take no single row, or the device has no memory for another call
        return None
    return Apart(first, others, together) if same and math.isfinite(first + others + together) else None


def is_torchs(compare: Compare) -> bool:
    """Whether a loss is one of torch's own classes, whose losses are those of single rows."""
    while isinstance(compare, functools.partial):
        inner = [one for one in (compare.func, *compare.args) if isinstance(one, nn.Module)]
        compare = inner[0] if inner else compare.func
    return (type(compare) if isinstance(compare, nn.Module) else compare).__module__.startswith("torch.nn.")


def _sum_and_size(value: Any, rows: int) -> tuple[float, float]:
    """The sum of a loss, and by what its rounding is judged: the size of its numbers, or its weight if larger."""
    weighed = weighted_sum(value, rows, "the loss")
    if isinstance(value, torch.Tensor):
        numbers = value.double()
        return float(numbers.sum()), float(numbers.abs().sum())
    total = float(weighed.sum)
    return total, max(abs(total), float(weighed.weight))


def _shared(compare: Compare) -> dict[int, Any]:
    """What `copy.deepcopy` of a loss leaves as it is: its parameters, which may be those of a large model."""
    modules = [one for one in (compare, getattr(compare, "__self__", None)) if isinstance(one, nn.Module)]
    return {id(one): one for module in modules for one in module.parameters()}


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf.copy()


def _device_of(tree: Any) -> torch.device:
    devices = (leaf.device for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor))
    return next(devices, torch.device("cpu"))


def _at_least_fp32(number: torch.Tensor) -> torch.Tensor:
    return number.float() if _is_half(number) else number


def _is_half(values: torch.Tensor) -> bool:
    return values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize


def build_loss(given: Any, device: torch.device, batch_dim: int = 0) -> Compare:
    """The job's loss as a function of (outputs, target); torch's own losses are built unreduced.

    Raises JobError if it cannot be called, has parameters to train, or asks for a reduction that has no mean over
    the whole global batch.
    """
    made = _named_loss(given, batch_dim) if isinstance(given, Target) else _given_loss(given, batch_dim)
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


def _made(found: Any, target: Target) -> Any:
    """The loss: an object of the class `found`, or the function `found` with the target's args."""
    return bind("loss", target)() if inspect.isclass(found) else bound("loss", target)


def _named_loss(target: Target, batch_dim: int) -> Any:
    found = resolve("loss", target)
    if found in _AS_MODULES:
        return _named_loss(Target(target=f"torch.nn:{_AS_MODULES[found]}", args=target.args), batch_dim)
    is_torchs = getattr(found, "__module__", "").startswith("torch.nn.")
    if not is_torchs or "reduction" not in inspect.signature(found).parameters:
        return _given_loss(_made(found, target), batch_dim)
    for name in {"size_average", "reduce"} & target.args.keys():
        raise JobError(
            f"loss.args.{name}: torch's old name for a reduction; leave it out for the mean over all elements"
        )
    reduction = target.args.get("reduction", "none")
    if reduction not in ("none", "mean") and (found, reduction) != (nn.KLDivLoss, "batchmean"):
        raise JobError(f"loss.args.reduction: {_means(reduction)}")
    target = _unreduced(target)
    made = _made(found, target)
    return functools.partial(_per_row, made, batch_dim) if reduction == "batchmean" else made


# The modules' means divide by the weights of the classes, and batchmean by the rows, so the functions must too.
_AS_MODULES: Mapping[Any, str] = {
    functional.cross_entropy: "CrossEntropyLoss",
    functional.nll_loss: "NLLLoss",
    functional.kl_div: "KLDivLoss",
}


def _means(reduction: Any) -> str:
    return (
        "the loss is the mean over the whole global batch, so that the split does not matter, and reduction cannot "
        f"be {reduction!r}; leave it out for the mean over all elements, or write a function that returns "
        "(sum, rows) for the mean over the rows; both are smaller than the sum, so the learning rate may have to grow"
    )


def _unreduced(target: Target) -> Target:
    tensors = {
        name: _as_weights(torch.tensor(value)) for name, value in target.args.items() if isinstance(value, list)
    }
    return target.model_copy(update={"args": {**target.args, **tensors, "reduction": "none"}})


def _as_weights(numbers: torch.Tensor) -> torch.Tensor:
    """Weights of classes in a dtype that losses accept: integers become floats."""
    return numbers if numbers.is_floating_point() else numbers.to(torch.get_default_dtype())


def _given_loss(given: Any, batch_dim: int) -> Any:
    if inspect.isclass(given) and issubclass(given, _Loss):
        given = given()
    if not isinstance(given, _Loss):
        return given
    if given.reduction == "sum":
        raise JobError(f"loss: was made with reduction='sum'; {_means('sum')}")
    if given.reduction not in ("none", "mean", "batchmean"):
        raise JobError(
            f"loss: was made with reduction={given.reduction!r}, which is not known; write a function that returns "
            "(sum, weight)"
        )
    unreduced = copy.copy(given)
    unreduced.reduction = "none"
    unreduced._buffers = {name: one if one is None else _as_weights(one) for name, one in given._buffers.items()}
    return functools.partial(_per_row, unreduced, batch_dim) if given.reduction == "batchmean" else unreduced


def _per_row(loss: Compare, batch_dim: int, outputs: torch.Tensor, target: torch.Tensor) -> Any:
    """torch's batchmean as (sum, weight): the sum of all elements, and the number of rows."""
    return total_of(loss(outputs, target)), outputs.shape[rows_dim(outputs, batch_dim)]


def _of_classes(
    loss: nn.CrossEntropyLoss | nn.NLLLoss, outputs: torch.Tensor, target: torch.Tensor
) -> torch.Tensor | Weighted:
    """Cross entropy whose mean is torch's: divided by the classes' weights, without the ignored targets."""
    losses: torch.Tensor = loss(outputs, target)
    if target.is_floating_point() or losses.shape != target.shape:
        return losses  # probabilities: each row counts 1; or what a class derived from torch's has made of the losses
    kept = target != loss.ignore_index
    if loss.weight is None:
        return Weighted(total_of(losses), kept.sum())
    return Weighted(total_of(losses), total_of(loss.weight[target.where(kept, torch.zeros_like(target))] * kept))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of size {list(value.shape)}" if value.ndim else "one number"
    return f"a {type(value).__qualname__}"

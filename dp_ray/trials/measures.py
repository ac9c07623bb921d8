"""Find out whether losses and metrics read rows one by one: copies of them are called with rows together and apart.

`check_numbers` is for what returns one number for each row, `of_neighbours` for a loss of single rows, `read_whole`
for a metric of torchmetrics. Whoever calls them says for which rows: `preflight.py`.
"""

import copy
import functools
import math
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.engine.forward.buffers import modules_in, on_copies
from dp_ray.engine.forward.step import Compare, weighted_sum
from dp_ray.engine.random import preserved
from dp_ray.engine.user_code import describe_compared
from dp_ray.errors import ModelError
from dp_ray.tensors.scatter import cut, gather, may_have_lists_of_rows, num_rows, rows_dim
from dp_ray.tensors.tree import copied, flatten

Seen = tuple[Any, Any]  # outputs and target of some rows
SECONDS = 1.0  # for the updates of a copy: a metric may be slow, as one with a network
ROUNDING = 1e-4  # relative, for states and values in fp32; of half-precision outputs more
ROUNDING_OF_HALVES = 2e-2


@torch.no_grad()
def check_numbers(what: str, function: Compare, seen: Seen, rows: int, batch_dim: int, value: Any = None) -> None:
    """Raise ModelError if the `value` that a function gives of a shard's rows is not one number for each row.

    If its size does not show it, a copy of the function is called with one row, and with that row twice; before that
    with all rows, if the value is not known.
    """
    try:
        with preserved(*_devices_of(seen)), on_copies(modules_in("", function)):  # deepcopy copies no closure
            if value is None:
                value = copy.deepcopy(function)(*copied(seen))
            if not _may_not_be_of_rows(value, rows, seen, batch_dim):
                return
            trial = copy.deepcopy(function)  # it may keep a state
            num_rows(seen, batch_dim)  # raises if outputs and targets differ in rows: then nothing is told
            row = copied(cut(seen, 0, 1, batch_dim))
            of_two = trial(*gather([row, row], [1, 1], batch_dim))
            of_one = trial(*row)
    except Exception:  # it may need more rows, or other outputs and targets than one tensor row each
        return
    if not isinstance(of_one, torch.Tensor) or not isinstance(of_two, torch.Tensor):
        return
    says = f"{what} returned a tensor of size {list(value.shape)} for a shard of {rows} rows"
    if 0 < of_one.numel() == of_two.numel():
        raise ModelError(
            f"{says}, and returns as many numbers for one row as for two: so they are not one for each row, but one "
            "for each class, say; return one number for each row, or (sum, weight)"
        )
    if 0 < 4 * of_one.numel() == of_two.numel():
        raise ModelError(
            f"{says}, and returns four times as many numbers for two rows as for one: each output has been compared "
            "with each target; give both the same size, or return one number for each row"
            f"{describe_compared(*seen)}"
        )


def _may_not_be_of_rows(value: Any, rows: int, seen: Seen, batch_dim: int) -> bool:
    """Return whether the size of a value may come from another dimension of the outputs or target that is as long.

    Or from their rows twice, if outputs and target have been broadcast against each other.
    """
    if not isinstance(value, torch.Tensor):
        return False
    if any(may_have_lists_of_rows(batch, rows) for batch in seen):
        return False  # a trial of one row, and of two, cannot be cut from them
    if rows not in value.shape or list(value.shape).count(rows) > 1:
        return True
    others = (
        length
        for leaf in flatten(seen)[0]
        for place, length in enumerate(leaf.shape)
        if leaf.ndim > 1 and place != rows_dim(leaf, min(batch_dim, leaf.ndim - 1))
    )
    return rows in others


class SplitLosses(NamedTuple):
    """The loss of a shard's first row and of its others, each given to the loss apart, and of all rows together."""

    first: float
    others: float
    together: float


@torch.no_grad()
def of_neighbours(
    compare: Compare, value: Any, seen: Seen, rows: int, batch_dim: int, is_exact: bool, is_sum: bool = False
) -> SplitLosses | None:
    """Return the loss of parts of a shard, if the losses of rows depend on the other rows; None if not, or unknown.

    `value` is the loss of the outputs and target `seen`; if it `is_sum`, it may be one number. The sum of a loss of
    single rows is the sum of its parts, up to rounding, which is small if `is_exact`. A copy of the loss is called,
    without gradients: twice, and once more if the sums differ, since a loss that draws or keeps a state gives another
    one for the same rows.
    """
    try:
        if rows < 2 or is_torchs(compare) or any(may_have_lists_of_rows(batch, rows) for batch in seen):
            return None
        if num_rows(seen, batch_dim) != rows:
            return None
        together, size = _sum_and_size(value, rows, is_sum)
        beside = modules_in("", compare)

        def loss_of(start: int, stop: int) -> float:
            # The copies share the loss's parameters, which may be those of a large model.
            shared = {id(parameter): parameter for module in beside.values() for parameter in module.parameters()}
            trial: Compare = copy.deepcopy(compare, dict[int, Any](shared))
            return _sum_and_size(trial(*copied(cut(seen, start, stop, batch_dim))), stop - start, is_sum)[0]

        with preserved(*_devices_of(seen)), on_copies(beside):
            first, others = loss_of(0, 1), loss_of(1, rows)
            room = size * (1e-5 if is_exact and _are_numbers(value) else 1e-4 if is_exact else 5e-3)
            if not abs(together - first - others) > room:  # also if one is NaN
                return None
            same = abs(loss_of(0, rows) - together) <= room
    except Exception:  # a user's loss may take no single row, or the device has no memory for another call
        return None
    return SplitLosses(first, others, together) if same and math.isfinite(first + others + together) else None


def is_torchs(compare: Compare) -> bool:
    """Return whether a loss is one of torch's own classes: they give losses of single rows."""
    while isinstance(compare, functools.partial):
        inner = [module for module in (compare.func, *compare.args) if isinstance(module, nn.Module)]
        compare = inner[0] if inner else compare.func
    return (type(compare) if isinstance(compare, nn.Module) else compare).__module__.startswith("torch.nn.")


def _sum_and_size(value: Any, rows: int, is_sum: bool) -> tuple[float, float]:
    """Return the sum of a loss, and the scale of its rounding: the size of its numbers, or its weight if larger."""
    weighed = weighted_sum(value, rows, "the loss", is_sum=is_sum)
    if _are_numbers(value):
        numbers = value.double()
        return float(numbers.sum()), float(numbers.abs().sum())
    total = float(weighed.sum)
    return total, max(abs(total), float(weighed.weight))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _devices_of(tree: Any) -> Iterable[torch.device]:
    return [leaf.device for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def of_updates(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of torchmetrics whose updates add up, and that hold no other metric.

    Some of these guess, by all numbers of an update, if they are logits: numbers between 0 and 1 alone are taken for
    probabilities. So their values depend on which rows come together. No class says that it guesses.
    """
    return {name: metric for name, metric in metrics.items() if _adds_up(metric)}


def _adds_up(metric: Any) -> bool:
    reductions = getattr(metric, "_reductions", None)
    if not isinstance(reductions, dict) or not isinstance(metric, nn.Module):
        return False
    if any(module is not metric and hasattr(module, "_reductions") for module in metric.modules()):
        return False  # a wrapper, which may draw, or count updates
    names = [getattr(how, "__name__", "") for how in reductions.values()]
    stacked = [how is None and not isinstance(getattr(metric, state), list) for state, how in reductions.items()]
    return "dim_zero_mean" not in names and not any(stacked)


def read_whole(metric: Any, seen: Seen, batch_dim: int) -> str | None:
    """Return how a metric's values of rows at once and one by one differ; None if not, or if that is not known."""
    try:
        return _apart(metric, seen, batch_dim)
    except Exception:  # it may take no single row, or there are too few of them for a value
        return None


def _apart(metric: Any, seen: Seen, batch_dim: int) -> str | None:
    leaves = [leaf for leaf in flatten(seen)[0] if isinstance(leaf, torch.Tensor)]
    devices = [leaf.device for leaf in leaves]
    is_half = any(leaf.is_floating_point() and leaf.dtype.itemsize < torch.float32.itemsize for leaf in leaves)
    room = ROUNDING_OF_HALVES if is_half else ROUNDING
    rows = num_rows(seen, batch_dim) or 1
    with preserved(*devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = _updated(metric, [seen], devices[0])
        single = _updated(metric, [cut(seen, row, row + 1, batch_dim) for row in range(rows)], devices[0])
        if whole is None or single is None:
            return None
        states, others = _state(whole), _state(single)
        differ = [name for name, value in states.items() if not _are_near(value, others[name], room)]
        if not differ:
            return None
        is_told = any(_tells(getattr(whole, name), getattr(single, name), rows) for name in differ)
        at_once, one_by_one = _value(whole), _value(single)
        again = _updated(metric, [seen], devices[0])
        if again is None or not _are_near(at_once, _value(again), 0.0):
            return None  # it draws
    if not is_told and _are_near(at_once, one_by_one, room, least=1.0):
        return None  # a sum whose terms cancel, or a mean of one number for each update
    return f"of {rows} rows it gives {_shown(at_once)} at once, and {_shown(one_by_one)} one by one"


def _updated(metric: Any, updates: list[Any], device: torch.device) -> Any:
    """Return a copy of a metric after some updates; None if they take too long."""
    trial = copy.deepcopy(metric).to(device)
    for module in trial.modules():
        module.distributed_available_fn = lambda: False
    began = time.monotonic()
    for outputs, target in updates:
        trial.update(*copied((outputs, target)))
        if time.monotonic() - began > SECONDS:
            return None
    return trial


def _state(metric: Any) -> dict[str, torch.Tensor]:
    """Return a metric's states by name; one that grows by each update as one vector."""
    states = {}
    for name in metric._reductions:
        value = getattr(metric, name)
        pieces = value if isinstance(value, list) else [value]
        states[name] = torch.cat([torch.as_tensor(piece).reshape(-1).double() for piece in pieces])
    return states


def _tells(at_once: Any, one_by_one: Any, rows: int) -> bool:
    """Return whether states that differ tell enough: numbers kept of each row, or counts, but not of the updates.

    A sum may differ because its terms cancel, all but rounding.
    """
    if isinstance(at_once, list):
        return True
    return not at_once.is_floating_point() and not ((at_once == 1) & (one_by_one == rows)).all()


def _value(metric: Any) -> torch.Tensor:
    """Return a metric's value as one vector."""
    leaves = torch.utils._pytree.tree_leaves(metric.compute())
    return torch.cat([torch.as_tensor(leaf).reshape(-1).double() for leaf in leaves])


def _are_near(here: torch.Tensor, there: torch.Tensor, room: float, least: float = 0.0) -> bool:
    """Return whether two vectors differ by no more than `room` of their largest number, or of `least` if larger."""
    if here.shape != there.shape or not torch.equal(here.isnan(), there.isnan()):
        return False
    if not here.numel():
        return True
    here, there = here.nan_to_num(), there.nan_to_num()
    size = max(float(here.abs().max()), float(there.abs().max()), least)
    return float((here - there).abs().max()) <= room * size


def _shown(value: torch.Tensor) -> str:
    return f"{float(value[0]):.4g}" if value.numel() == 1 else str([round(item, 4) for item in value[:5].tolist()])

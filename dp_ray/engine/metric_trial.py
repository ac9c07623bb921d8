"""Find out, in an evaluation, whether a metric of torchmetrics reads each of its updates as a whole.

Some guess, by all numbers of an update, if these are logits: numbers between 0 and 1 alone are taken for
probabilities. So their values depend on which rows come together, by `shards` and `batch_size`. No class says that it
guesses. So copies of each metric get the same rows at once, and one by one.
"""

import copy
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from dp_ray.engine.random import preserved
from dp_ray.engine.step import StepOutput
from dp_ray.errors import JobError
from dp_ray.tensors.scatter import cut, gather, may_have_lists_of_rows, num_rows, scatter
from dp_ray.tensors.tree import copied, flatten

ROWS = 64  # that a worker tries, of several shards: of a few alone all may be taken for probabilities
SECONDS = 1.0  # for the updates of a copy: a metric may be slow, as one with a network
ROUNDING = 1e-4  # relative, for states and values in fp32; of half-precision outputs more
ROUNDING_OF_HALVES = 2e-2


class MetricTrial:
    """The first rows that a worker evaluates, and the metrics that are to get them at once and one by one."""

    def __init__(self, metrics: Mapping[str, Any], batch_dim: int) -> None:
        self._metrics = {name: metric for name, metric in metrics.items() if _is_of_rows(metric)}
        self._batch_dim = batch_dim
        self._pieces: list[Any] = []
        self._rows: list[int] = []

    def take(self, step_output: StepOutput, rows: int) -> None:
        """Add a shard; once there are enough rows, raise what `check` raises."""
        if not self._metrics:
            return
        seen = step_output.outputs, step_output.target
        kept = min(rows, ROWS - sum(self._rows))
        try:
            is_cut = num_rows(seen, self._batch_dim) == rows and not may_have_lists_of_rows(seen, rows)
            piece = copied(cut(seen, 0, kept, self._batch_dim)) if is_cut else None
        except Exception:  # a user's step may return any form
            piece = None
        if piece is None:
            self._metrics = {}
            return
        self._pieces.append(piece)
        self._rows.append(kept)
        if sum(self._rows) == ROWS:
            self.check()

    def check(self) -> None:
        """Raise JobError for a metric that depends on which of these rows come together; this ends the trial."""
        metrics, self._metrics = self._metrics, {}
        if sum(self._rows) < 2:
            return
        for name, metric in metrics.items():
            try:
                apart = _apart(metric, gather(self._pieces, self._rows, self._batch_dim), self._batch_dim)
            except Exception:  # it may take no single row, or there are too few of them for a value
                continue
            if apart is not None:
                raise JobError(
                    f"metrics.{name}: {type(metric).__qualname__} reads each update as a whole: {apart}. So it would "
                    "depend on shards and batch_size; give it probabilities (a sigmoid or softmax first), or a "
                    "metric over the batch"
                )


def _is_of_rows(metric: Any) -> bool:
    """Return whether the metric is one of torchmetrics whose updates add up, and that holds no other metric."""
    reductions = getattr(metric, "_reductions", None)
    if not isinstance(reductions, dict) or not isinstance(metric, torch.nn.Module):
        return False
    if any(module is not metric and hasattr(module, "_reductions") for module in metric.modules()):
        return False  # a wrapper, which may draw, or count updates
    names = [getattr(how, "__name__", "") for how in reductions.values()]
    stacked = [how is None and not isinstance(getattr(metric, state), list) for state, how in reductions.items()]
    return "dim_zero_mean" not in names and not any(stacked)


def _apart(metric: Any, seen: Any, batch_dim: int) -> str | None:
    """Return how a metric's values of rows at once and one by one differ; None if not, or if it takes too long."""
    leaves = [leaf for leaf in flatten(seen)[0] if isinstance(leaf, torch.Tensor)]
    devices = [leaf.device for leaf in leaves]
    is_half = any(leaf.is_floating_point() and leaf.dtype.itemsize < torch.float32.itemsize for leaf in leaves)
    room = ROUNDING_OF_HALVES if is_half else ROUNDING
    rows = num_rows(seen, batch_dim) or 1
    with preserved(*devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = _updated(metric, [seen], devices[0])
        single = _updated(metric, scatter(seen, rows, batch_dim), devices[0])
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

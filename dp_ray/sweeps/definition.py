"""What a sweep is: its job, what varies, which metric counts; and the job of each trial. It imports no torch."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dp_ray.errors import JobError
from dp_ray.job import Job, that_count
from dp_ray.sweeps.axes import Axis, Choices, Number
from dp_ray.text import did_you_mean

Mode = Literal["min", "max"]
Picked = Mapping[str, Number]  # what a trial has picked of each axis


@dataclass(frozen=True)
class Definition:
    """A sweep: `make` makes its job with any keys set, `axes` are the keys that vary, `count` the trials in all.

    Without a `search`, the trials are all combinations, the last key changing fastest.
    """

    name: str
    make: Callable[[Mapping[str, Any]], Job]
    axes: tuple[Axis, ...]
    count: int
    search: str | None = None
    metric: str | None = None
    mode: Mode = "min"

    def run_name(self, number: int) -> str:
        """The name of a trial's run; trials are numbered from 1."""
        return run_name(self.name, number)

    def values(self, picked: Picked) -> dict[str, Any]:
        """The values of a trial, by their keys."""
        return {axis.key: axis.value(picked[axis.key]) for axis in self.axes}

    def job(self, number: int, picked: Picked) -> Job:
        """The job of a trial; raises JobError, which names the trial's values, if there can be none."""
        values = self.values(picked)
        try:
            return self.make({**values, "name": self.run_name(number)})
        except JobError as error:
            told = ", ".join(f"{key}={value!r}" for key, value in values.items())
            raise JobError(f"{error}\nso is the trial with {told}") from None

    def grid(self) -> Iterator[Picked]:
        """What each trial picks, in their order, if there is no search."""
        picks = [range(len(axis.values)) for axis in self.axes if isinstance(axis, Choices)]
        for one in itertools.product(*picks):
            yield dict(zip((axis.key for axis in self.axes), one, strict=True))

    def probes(self) -> Iterator[Picked]:
        """What is checked before anything runs: all trials; of a search each value, and both ends of each range."""
        if self.search is None:
            yield from self.grid()
            return
        first = {axis.key: _picks(axis)[0] for axis in self.axes}
        yield first
        for axis in self.axes:
            yield from ({**first, axis.key: picked} for picked in _picks(axis)[1:])

    def describe(self) -> dict[str, Any]:
        """What the sweep is, as JSON without secrets; the job is that of the first trial, without what varies."""
        first = self.job(1, next(iter(self.probes())))
        job = that_count(first.describe())
        for axis in self.axes:
            job = _without(job, axis.key.split("."))
        told = {
            "job": job,
            "fingerprint": first.fingerprint(with_lengths=True),
            "over": {axis.key: axis.describe() for axis in self.axes},
            "search": self.search,
            "metric": self.metric,
            "mode": self.mode if self.metric else None,
        }
        plain: dict[str, Any] = json.loads(json.dumps(told, default=str))
        return plain

    def in_order_of(self, keys: Sequence[str]) -> "Definition":
        """The same sweep with its axes in the order of these keys, by which the trials are numbered."""
        by_key = {axis.key: axis for axis in self.axes}
        if by_key.keys() != set(keys):
            return self
        return replace(self, axes=tuple(by_key[key] for key in keys))


def run_name(sweep: str, number: int) -> str:
    """The name of the run of a sweep's trial.

    >>> run_name("digits-sweep", 3)
    'digits-sweep-3'
    """
    return f"{sweep}-{number}"


def _picks(axis: Axis) -> list[Number]:
    return list(range(len(axis.values))) if isinstance(axis, Choices) else list(axis.probes)


def _without(values: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Nested mappings without the value at a path."""
    first, *rest = path
    if not rest:
        return {key: value for key, value in values.items() if key != first}
    inner = values.get(first)
    return {**values, first: _without(inner, rest)} if isinstance(inner, Mapping) else dict(values)


def combinations(axes: Sequence[Axis]) -> int:
    """How many combinations there are of the values of some axes."""
    return math.prod(len(axis.values) for axis in axes if isinstance(axis, Choices))


def chosen_metric(job: Job, metric: str | None, mode: Mode | None) -> tuple[str | None, Mode]:
    """The metric by which trials are compared, and whether the least or the largest is best.

    By default the metric of `checkpoint.best`, else eval_loss, else the loss; None if the job measures nothing.
    Raises JobError if the job does not measure `metric`, or if nothing says which of its values are better.
    """
    best = job.checkpoint.best if job.task == "train" else None
    known = _measured(job)
    if metric is None:
        metric = best.metric if best else next((name for name in ("eval_loss", "loss") if name in known), None)
        metric = metric or next(iter(known), None)
    elif metric not in known and not any(metric.startswith(f"{name}_") for name in known):
        measures = ", ".join(known) or f"nothing: its task is {job.task}"
        raise JobError(f"--metric {metric}: the job measures {measures}{did_you_mean(metric, known)}")
    if metric is None and mode is not None:
        raise JobError(f"--{mode}imize: the job measures nothing that could be best: its task is {job.task}")
    if metric is None or mode is not None:
        return metric, mode or "min"
    if best and metric == best.metric:
        return metric, best.mode
    if metric not in ("loss", "eval_loss", "epoch_loss"):
        raise JobError(f"--metric {metric}: say which value is best: --minimize or --maximize")
    return metric, "min"


def _measured(job: Job) -> list[str]:
    """What the result of a job's run will hold as metrics; a vector adds its elements, with a number each."""
    if job.task == "predict":
        return []
    has_loss = job.loss is not None or job.step is not None
    if job.task == "evaluate":
        return [*["loss"] * has_loss, *job.metrics]
    return ["loss", "epoch_loss", *job.metrics, *job.eval_names]

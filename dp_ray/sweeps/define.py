"""The definition of a sweep: its job, the keys that vary, the metric that counts, and the job of each trial.

`parse_axis` reads an `--over KEY=VALUES`: the values that a key takes, or the range from which a search draws them.
It imports no torch.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from dp_ray.errors import JobError
from dp_ray.job.files import from_yaml
from dp_ray.job.job import Job, that_count
from dp_ray.rundir.files import SweepTrial
from dp_ray.text import did_you_mean, hide_in

Number = int | float

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(
    rf"(?P<log>log\()?\s*(?P<low>{_NUMBER})\s*\.\.\s*(?P<high>{_NUMBER})\s*(?::\s*(?P<step>{_NUMBER})\s*)?(?(log)\))"
)
LIKE_A_RANGE = re.compile(r"log\(.*|(?=.*\d)[-+\d.eE:]*\.\.[-+\d.eE:]*")
PER_RUN = {"name": "each trial is named by the sweep", "storage": "all trials share one"}


@dataclass(frozen=True)
class Choices:
    """A key that takes each of some values; a trial picks one by its index."""

    key: str
    values: tuple[Any, ...]

    @property
    def picks(self) -> Sequence[Number]:
        """All that a trial can pick."""
        return range(len(self.values))

    def value(self, picked: Number) -> Any:
        """Return the value that a trial has picked."""
        return self.values[int(picked)]

    def describe(self) -> Any:
        """Return the values as JSON, without the secrets of URLs."""
        return hide_in(json.loads(json.dumps(list(self.values), default=str)))


@dataclass(frozen=True)
class ValueRange:
    """A key whose values a search draws from `low` to `high`, both included; a trial picks the value itself.

    Whole numbers if both ends are whole. `is_log` draws by the logarithm; `step` keeps to low, low + step ...
    """

    key: str
    low: Number
    high: Number
    is_log: bool = False
    step: Number | None = None

    @property
    def picks(self) -> Sequence[Number]:
        """Both ends, which are checked before a search begins."""
        return self.low, self.high

    def value(self, picked: Number) -> Number:
        """Return the value that a trial has picked."""
        return picked

    def describe(self) -> dict[str, Any]:
        """Return the range as JSON."""
        return {"low": self.low, "high": self.high, "log": self.is_log, "step": self.step}

    def __str__(self) -> str:
        text = f"{self.low}..{self.high}" + (f":{self.step}" if self.step is not None else "")
        return f"log({text})" if self.is_log else text


Axis = Choices | ValueRange


def parse_axis(text: str) -> Axis:
    """Return the key of an `--over KEY=VALUES`, with its values or its range.

    Values are YAML with commas between them, as in `--set`: `batch_size=32,64`. A range is `LOW..HIGH`,
    `LOW..HIGH:STEP` or `log(LOW..HIGH)`. Raises JobError, which says what is wrong with it.

    >>> parse_axis("batch_size=32,64")
    Choices(key='batch_size', values=(32, 64))
    >>> parse_axis("optimizer.args.lr=log(1e-5..1e-2)")
    Range(key='optimizer.args.lr', low=1e-05, high=0.01, is_log=True, step=None)
    """
    key, equals, values = text.partition("=")
    if not equals or not all(key.split(".")):
        raise JobError(f"--over {text!r}: must be KEY=VALUES, like --over batch_size=32,64")
    outer = key.partition(".")[0]
    if outer in PER_RUN:
        raise JobError(f"--over {text!r}: {outer} cannot be swept: {PER_RUN[outer]}")
    if outer == "env":
        raise JobError(f"--over env: the values of env are not kept, so they cannot be swept; got {key!r}")
    try:
        if match := RANGE.fullmatch(values.strip()):
            return _range(key, match)
        return Choices(key, tuple(_listed(values)))
    except ValueError as error:
        raise JobError(f"--over {text!r}: {error}") from None


def _range(key: str, match: re.Match[str]) -> ValueRange:
    """Return the range of a match of RANGE; raise ValueError if nothing can be drawn from it."""
    low, high = _number(match["low"]), _number(match["high"])
    step = None if match["step"] is None else _number(match["step"])
    is_log = match["log"] is not None
    if not low < high:
        raise ValueError(f"the range must go up, got {low} to {high}")
    if is_log and low <= 0:
        raise ValueError(f"the logarithm needs a range above 0, got {low}")
    if is_log and step is not None:
        raise ValueError("a range by the logarithm has no step")
    if step is not None and not 0 < step <= high - low:
        raise ValueError(f"the step must be above 0 and fit into the range, got {step}")
    if any(isinstance(number, float) for number in (low, high, step)):
        low, high = float(low), float(high)
    return ValueRange(key, low, high, is_log, step)


def _number(text: str) -> Number:
    number: Number = int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a number")
    return number


def _listed(text: str) -> list[Any]:
    """Return the values of a text like `32,64`; raise ValueError if it holds none, or one twice."""
    try:
        values = from_yaml(f"[{text}\n]")
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"the values are not YAML with commas between them: {problem}") from None
    if not isinstance(values, list) or not values:
        raise ValueError("names no value; give some with commas between them, like 32,64")
    written = yaml.compose(f"[{text}\n]", yaml.SafeLoader)
    assert isinstance(written, yaml.SequenceNode)
    for node in written.value:
        if isinstance(node, yaml.ScalarNode) and node.style is None and LIKE_A_RANGE.fullmatch(node.value):
            raise ValueError(
                f"{node.value} is no range; one stands alone: 1..10, 0.0..0.5:0.1 or log(1e-5..1e-2); text has quotes"
            )
    if any(value != value for value in values):
        raise ValueError("nan is no value: it is not even itself, so the sweep could not be gone on with")
    texts = [json.dumps(value, default=str) for value in values]
    for at, listed in enumerate(texts):
        if listed in texts[:at]:
            raise ValueError(f"{listed} is given twice")
    return values


def check_axes(axes: Sequence[Axis], set_keys: Iterable[str], is_search: bool) -> None:
    """Raise JobError if axes overlap, if one hides a key that is set otherwise, or if a range has no search."""
    for at, axis in enumerate(axes):
        for other in axes[:at]:
            if _is_inside(axis.key, other.key) or _is_inside(other.key, axis.key):
                names = "is given twice" if axis.key == other.key else f"overlaps --over {other.key}"
                raise JobError(f"--over {axis.key}: {names}; each key stands in one --over")
        for key in set_keys:
            if _is_inside(key, axis.key):
                raise JobError(f"--over {axis.key}: {key} is set on the command line too; leave one of them out")
        if isinstance(axis, ValueRange) and not is_search:
            raise JobError(
                f"--over {axis.key}={axis}: values are drawn from a range by a search; add --search optuna and "
                "--trials N, or list the values"
            )


def _is_inside(key: str, outer: str) -> bool:
    return key == outer or key.startswith(f"{outer}.")


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
        """Return the name of a trial's run, `digits-sweep-3`; trials are numbered from 1."""
        return f"{self.name}-{number}"

    def values(self, picked: Picked) -> dict[str, Any]:
        """Return the values of a trial, by their keys."""
        return {axis.key: axis.value(picked[axis.key]) for axis in self.axes}

    def job(self, number: int, picked: Picked) -> Job:
        """Return the job of a trial; raise JobError, which names the trial's values, if there can be none."""
        values = self.values(picked)
        try:
            return self.make({**values, "name": self.run_name(number)})
        except JobError as error:
            settings = ", ".join(f"{key}={value!r}" for key, value in values.items())
            raise JobError(f"{error}\nso is the trial with {settings}") from None

    def probes(self) -> Iterator[Picked]:
        """Yield the picks of each trial, in their order; of a search, what is checked: each value and both ends."""
        picks = {axis.key: axis.picks for axis in self.axes}
        if self.search is None:
            for picked in itertools.product(*picks.values()):
                yield dict(zip(picks, picked, strict=True))
            return
        first = {key: of_key[0] for key, of_key in picks.items()}
        yield first
        for key, of_key in picks.items():
            yield from ({**first, key: picked} for picked in of_key[1:])

    @property
    def first(self) -> Job:
        """The job of the first trial; of a search, one such as its trials'."""
        return self.job(1, next(self.probes()))

    def trial(self, number: int, picked: Picked) -> SweepTrial:
        """Return a trial that waits."""
        values = json.loads(json.dumps(self.values(picked), default=str))
        return SweepTrial(number, values, self.run_name(number), "waiting", None, {}, "", dict(picked))

    def describe(self) -> dict[str, Any]:
        """Return the sweep as JSON without secrets; the job is that of the first trial."""
        first = self.first
        described = {
            "job": that_count(first.describe()),
            "fingerprint": first.fingerprint(with_lengths=True),
            "over": {axis.key: axis.describe() for axis in self.axes},
            "search": self.search,
            "metric": self.metric,
            "mode": self.mode if self.metric else None,
        }
        plain: dict[str, Any] = json.loads(json.dumps(described, default=str))
        return plain


def combinations(axes: Sequence[Axis]) -> int:
    """Return how many combinations there are of the values of some axes."""
    return math.prod(len(axis.picks) for axis in axes)


def chosen_metric(job: Job, metric: str | None, mode: Mode | None) -> tuple[str | None, Mode]:
    """Return the metric by which trials are compared, and whether the least or the largest is best.

    By default the metric of `checkpoint.best`, else eval_loss, else the loss; None if the job measures nothing.
    Raises JobError if the job does not measure `metric`, or if nothing says which of its values are better.
    """
    best = job.checkpoint.best if job.task == "train" else None
    # The metrics in the result of the job's run; a vector adds its elements, with a number each.
    known: list[str] = []
    if job.task == "evaluate":
        has_loss = job.loss is not None or job.step is not None
        known = [*(["loss"] if has_loss else []), *job.for_task().metrics]
    elif job.task != "predict":
        known = ["loss", "epoch_loss", *job.metrics, *job.eval_names]
    if metric is None:
        if best is None and job.task == "train" and len(job.evaluations) > 1:
            raise JobError(f"--metric: is missing; the job has several evaluations: name one of {', '.join(known)}")
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
    if metric not in ("loss", "epoch_loss", *(f"{evaluation.prefix}loss" for evaluation in job.evaluations)):
        raise JobError(f"--metric {metric}: say which value is best: --minimize or --maximize")
    return metric, "min"

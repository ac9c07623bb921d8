"""`--over KEY=VALUES`: the values that a key takes in a sweep, or the range from which a search draws them."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from dp_ray.errors import JobError
from dp_ray.job_file import from_yaml
from dp_ray.secrets import hide_in

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
    def probes(self) -> tuple[Any, ...]:
        """The values with which a job is checked before anything runs: all."""
        return self.values

    def value(self, picked: Number) -> Any:
        """The value that a trial has picked."""
        return self.values[int(picked)]

    def describe(self) -> Any:
        """The values as JSON, without the secrets of URLs."""
        return hide_in(json.loads(json.dumps(list(self.values), default=str)))


@dataclass(frozen=True)
class Range:
    """A key whose values a search draws from `low` to `high`, both included; a trial picks the value itself.

    Whole numbers if both ends are whole. `is_log` draws by the logarithm; `step` keeps to low, low + step ...
    """

    key: str
    low: Number
    high: Number
    is_log: bool = False
    step: Number | None = None

    @property
    def probes(self) -> tuple[Number, Number]:
        """The values with which a job is checked before anything runs: both ends."""
        return self.low, self.high

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def value(self, picked: Number) -> Number:
        """The value that a trial has picked."""
        return picked

    def describe(self) -> dict[str, Any]:
        """The range as JSON."""
        return {"low": self.low, "high": self.high, "log": self.is_log, "step": self.step}

    def __str__(self) -> str:
        text = f"{self.low}..{self.high}" + (f":{self.step}" if self.step is not None else "")
        return f"log({text})" if self.is_log else text


Axis = Choices | Range


def parse_axis(text: str) -> Axis:
    """The key of an `--over KEY=VALUES`, with its values or its range.

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
    if (given := key.partition(".")[0]) in PER_RUN:
        raise JobError(f"--over {text!r}: {given} cannot be swept: {PER_RUN[given]}")
    if key.partition(".")[0] == "env":
        raise JobError(f"--over env: the values of env are not kept, so they cannot be swept; got {key!r}")
    try:
        if match := RANGE.fullmatch(values.strip()):
            return _range(key, match)
        return Choices(key, tuple(_listed(values)))
    except ValueError as error:
        raise JobError(f"--over {text!r}: {error}") from None


def _range(key: str, match: re.Match[str]) -> Range:
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
    whole = isinstance(low, int) and isinstance(high, int)
    if not whole or isinstance(step, float):
        low, high = float(low), float(high)
    return Range(key, low, high, is_log, step)


def _number(text: str) -> Number:
    number: Number = int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a number")
    return number


def _listed(text: str) -> list[Any]:
    try:
        found = from_yaml(f"[{text}\n]")
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"the values are not YAML with commas between them: {problem}") from None
    if not isinstance(found, list) or not found:
        raise ValueError("names no value; give some with commas between them, like 32,64")
    written = yaml.compose(f"[{text}\n]", yaml.SafeLoader)
    assert isinstance(written, yaml.SequenceNode)
    for node in written.value:
        if isinstance(node, yaml.ScalarNode) and node.style is None and LIKE_A_RANGE.fullmatch(node.value):
            raise ValueError(
                f"{node.value} is no range; one stands alone: 1..10, 0.0..0.5:0.1 or log(1e-5..1e-2); text has quotes"
            )
    if any(value != value for value in found):
        raise ValueError("nan is no value: it is not even itself, so the sweep could not be gone on with")
    if twice := _first_twice([json.dumps(value, default=str) for value in found]):
        raise ValueError(f"{twice} is given twice")
    return found


def _first_twice(values: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


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
        if isinstance(axis, Range) and not is_search:
            raise JobError(
                f"--over {axis.key}={axis}: values are drawn from a range by a search; add --search optuna and "
                "--trials N, or list the values"
            )


def _is_inside(key: str, outer: str) -> bool:
    return key == outer or key.startswith(f"{outer}.")

"""A step of a training that was run again: its loss beside the history's, its rows, and what was not finite."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dp_ray.results.text import in_columns
from dp_ray.text import counted, relative

ROUNDING = 3e-7  # relative: a few units in the last place of fp32
SHOWN_ROWS = 20
EQUAL = "bitwise equal"


class ReplayedRow(NamedTuple):
    """A row of a step: its loss, None if not known, the sample's index, its shard, its position in the epoch.

    If the loss is over the batch, it is that of the batch, and `gradient` the norm of its gradient by the row's
    outputs.
    """

    loss: float | None
    sample: int
    shard: int
    position: int
    gradient: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; without `gradient` if there is none."""
        return {key: value for key, value in self._asdict().items() if key != "gradient" or value is not None}


@dataclass(frozen=True)
class Replayed:
    """A step that was run again from the state after `start` steps.

    `loss` is None if only a shard ran, `history_loss` if the history does not have the step. The rows are ordered by
    their losses, the largest first; `row_losses` says in words what these are. `weights`, `batch`, `output` and
    `gradient` are the first places that are not finite.
    """

    run_dir: str
    step: int
    epoch: int
    shard: int | None
    shards: int
    start: int
    bitwise: bool
    device: str
    loss: float | None
    history_loss: float | None
    row_losses: str
    rows: tuple[ReplayedRow, ...]
    weights: str | None
    batch: str | None
    output: dict[str, Any] | None
    gradient: dict[str, Any] | None

    @property
    def compared(self) -> str:
        """How the step's loss compares with the history's."""
        return compared(self.loss, self.history_loss)

    @property
    def relative_difference(self) -> float | None:
        """The losses' difference, relative to the history's; None where there are not two finite ones."""
        here, there = self.loss, self.history_loss
        if here is None or there is None or not math.isfinite(here) or not math.isfinite(there):
            return None
        return abs(here - there) / abs(there) if there else abs(here)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; numbers that JSON does not have are text: "nan", "inf", "-inf"."""
        values = {**asdict(self), "rows": [row.to_json() for row in self.rows]}
        values |= {"compared": self.compared, "difference": self.relative_difference}
        return {key: _plain(value) for key, value in values.items()}

    def lines(self) -> Iterator[str]:
        """Yield the same for people."""
        earlier = f", steps {self.start} to {self.step - 1} run again" if self.start < self.step else ""
        began = f"from the state after {counted(self.start, 'step')}{earlier},"
        yield f"step {self.step} (epoch {self.epoch}) of {relative(self.run_dir)}, {began} on {self.device}"
        if self.loss is None:
            yield f"shard {self.shard} of {self.shards} alone: its loss is not compared with the history's"
        else:
            known = self.history_loss is not None
            there = f"{self.history_loss!r} in the history" if known else "the history does not have it"
            apart = "" if not self.relative_difference else f" ({self.relative_difference:.2g} relative)"
            yield f"loss {self.loss!r} here, {there}: {self.compared}{apart}"
        if self.bitwise and self.loss is not None and self.history_loss is not None and self.compared != EQUAL:
            yield "the run is bitwise: code, data, versions or hardware are not those of the run"
        places = {
            "weights before the step": self.weights,
            "batch": self.batch,
            "output": self.output and self.output["text"],
            "gradient": self.gradient and self.gradient["text"],
        }
        for kind, place in places.items():
            if place is not None:
                yield f"not finite, first {kind}: {place}"
        if all(place is None for place in places.values()):
            yield "finite: the weights before the step, its batch, all outputs and gradients"
        is_gradient = bool(self.rows) and self.rows[0].gradient is not None
        what = "gradient" if is_gradient else "loss"
        yield f"{counted(len(self.rows), 'row')}, the largest {what} first: {self.row_losses}"
        table = [(what, "sample", "shard", "position")]
        for row in self.rows[:SHOWN_ROWS]:
            number = row.gradient if is_gradient else row.loss
            text = "unknown" if number is None else f"{number:.9g}"
            table.append((text, str(row.sample), str(row.shard), str(row.position)))
        yield in_columns(table)
        more = len(self.rows) - SHOWN_ROWS
        if more > 0:
            yield f"and {more:,} more, which --json has"


def compared(here: float | None, there: float | None) -> str:
    """Say how a loss compares with the history's: `bitwise equal`, `within rounding`, `differs`, `not compared`."""
    if here is None or there is None:
        return "not compared"
    if here == there or (math.isnan(here) and math.isnan(there)):
        return EQUAL
    if math.isfinite(there) and abs(here - there) <= ROUNDING * abs(there):
        return f"within rounding, {ROUNDING:g} relative"
    return "differs"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

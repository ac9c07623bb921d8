"""What a step that was run again gave: its loss beside the history's, its rows, and what was not finite."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dp_ray.results.short import aligned, relative
from dp_ray.text import counted

ROUNDING = 3e-7  # relative: a few units in the last place of fp32
SHOWN_ROWS = 20


class Row(NamedTuple):
    """A row of a step: its loss, None if not known, the sample's index, its shard, its position in the epoch."""

    loss: float | None
    sample: int
    shard: int
    position: int


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
    rows: tuple[Row, ...]
    weights: str | None
    batch: str | None
    output: dict[str, Any] | None
    gradient: dict[str, Any] | None

    @property
    def compared(self) -> str:
        """What the step's loss is beside the history's."""
        return compared(self.loss, self.history_loss)

    @property
    def relative_difference(self) -> float | None:
        """The losses' difference, relative to the history's; None where there are not two finite ones."""
        here, there = self.loss, self.history_loss
        if here is None or there is None or not math.isfinite(here) or not math.isfinite(there):
            return None
        return abs(here - there) / abs(there) if there else abs(here)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; numbers that are not finite, which JSON does not have, as text: "nan", "inf", "-inf"."""
        values = {**asdict(self), "rows": [one._asdict() for one in self.rows]}
        told: dict[str, Any] = _plain({**values, "compared": self.compared, "difference": self.relative_difference})
        return told

    def lines(self) -> Iterator[str]:
        """The same for people."""
        yield f"step {self.step} (epoch {self.epoch}) of {relative(self.run_dir)}, {self._began} on {self.device}"
        yield self._loss_line()
        if self.bitwise and self.loss is not None and self.history_loss is not None and self.compared != EQUAL:
            yield "the run is bitwise: code, data, versions or hardware are not those of the run"
        yield from self._not_finite_lines()
        yield from self._row_lines()

    @property
    def _began(self) -> str:
        again = f", steps {self.start} to {self.step - 1} run again" if self.start < self.step else ""
        return f"from the state after {counted(self.start, 'step')}{again},"

    def _loss_line(self) -> str:
        if self.loss is None:
            return f"shard {self.shard} of {self.shards} alone: its loss is not compared with the history's"
        there = (
            "the history does not have it" if self.history_loss is None else f"{self.history_loss!r} in the history"
        )
        apart = "" if not self.relative_difference else f" ({self.relative_difference:.2g} relative)"
        return f"loss {self.loss!r} here, {there}: {self.compared}{apart}"

    def _not_finite_lines(self) -> Iterator[str]:
        """The first of each kind that is not finite; one line if there is none."""
        output, gradient = (one and one["text"] for one in (self.output, self.gradient))
        found = {"weights before the step": self.weights, "batch": self.batch, "output": output, "gradient": gradient}
        told = {what: where for what, where in found.items() if where is not None}
        for what, where in told.items():
            yield f"not finite, first {what}: {where}"
        if not told:
            yield "finite: the weights before the step, its batch, all outputs and gradients"

    def _row_lines(self) -> Iterator[str]:
        yield f"{counted(len(self.rows), 'row')}, the largest loss first: {self.row_losses}"
        table = [("loss", "sample", "shard", "position")]
        table += [
            ("unknown" if one.loss is None else f"{one.loss:.9g}", str(one.sample), str(one.shard), str(one.position))
            for one in self.rows[:SHOWN_ROWS]
        ]
        yield aligned(table)
        if (more := len(self.rows) - SHOWN_ROWS) > 0:
            yield f"and {more:,} more, which --json has"


EQUAL = "bitwise equal"


def compared(here: float | None, there: float | None) -> str:
    """How a loss compares with the history's: `bitwise equal`, `within rounding ...`, `differs`, or not compared."""
    if here is None or there is None:
        return "not compared"
    if here == there or (math.isnan(here) and math.isnan(there)):
        return EQUAL
    if math.isfinite(there) and abs(here - there) <= ROUNDING * abs(there):
        return f"within rounding, {ROUNDING:g} relative"
    return "differs"


def largest_first(rows: list[Row]) -> tuple[Row, ...]:
    """The rows by their losses: NaN, then infinities and numbers downwards, then what is not known."""
    return tuple(sorted(rows, key=_rank))


def _rank(row: Row) -> tuple[int, float]:
    if row.loss is None:
        return 2, 0.0
    return (0, 0.0) if math.isnan(row.loss) else (1, -row.loss)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

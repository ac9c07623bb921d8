"""Paths, metrics, tables and times as short text; it imports no torch.

A list of rows that prints as a table and converts to pandas.

Curves as a line of block characters.

The text of `dp-ray list`: a row for each folder of a storage.
"""

import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dp_ray.rundir.history import is_inner
from dp_ray.rundir.listing import ListedRun
from dp_ray.text import printable

if TYPE_CHECKING:
    import pandas


def relative(path: str) -> str:
    """A path below the working directory, relative to it; any other path or URL unchanged."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if "://" not in path and Path(path).is_relative_to(here) else path


def measured(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics in six digits, without those that `verify` adds."""
    return {name: f"{value:.6g}" for name, value in metrics.items() if not is_inner(name)}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows with the same number of cells, as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def time_span(seconds: float) -> str:
    """Seconds in their largest unit: `12 s`, `5 min`, `3 h`, `20 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


ENDS = 5  # rows shown at the start, and at the end
T = TypeVar("T")


class Table(list[T]):
    """A list of rows, which are dicts or dataclasses, that prints as a table."""

    def to_pandas(self) -> "pandas.DataFrame":
        """A DataFrame with a column for each key or field; raises ImportError if pandas is not installed."""
        try:
            frame: type[pandas.DataFrame] = importlib.import_module("pandas").DataFrame
        except ImportError:
            raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas") from None
        return frame([dict(_values(row)) for row in self])

    def __repr__(self) -> str:
        return "\n".join([aligned(cells), self._size()]) if (cells := self._cells()) else "no rows"

    def _repr_html_(self) -> str:
        head, *body = (_html_row(row, "td" if at else "th") for at, row in enumerate(self._cells() or [["no rows"]]))
        return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table><p>{escape(self._size())}</p>"

    def _size(self) -> str:
        return f"{len(self)} rows"

    def _cells(self) -> list[list[str]]:
        """The names of the columns, then the first and the last rows."""
        is_cut = len(self) > 2 * ENDS + 1
        rows = [_values(row) for row in ([*self[:ENDS], *self[-ENDS:]] if is_cut else self)]
        names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        cells = [[_cell(row.get(name)) for name in names] for row in rows]
        if is_cut:
            cells.insert(ENDS, ["..." for _ in names])
        return [names, *cells] if names else []


def _values(row: Any) -> Mapping[str, Any]:
    return row if isinstance(row, Mapping) else vars(row)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _html_row(cells: list[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


BLOCKS = "▁▂▃▄▅▆▇█"
NO_NUMBER = "!"


def sparkline(values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None) -> str:
    """A curve in at most `width` characters, each the mean of its values; `!` is where a value is NaN or infinite.

    `low` and `high` are the ends of the scale; by default those of the curve.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    given = [value for value in values if value is not None]
    means = [_mean(piece) for piece in _pieces(given, width)]
    finite = [value for value in means if math.isfinite(value)]
    low = min(finite, default=0.0) if low is None else low
    high = max(finite, default=0.0) if high is None else high
    return "".join(_block(value, low, high) for value in means)


def _pieces(values: Sequence[float], width: int) -> list[Sequence[float]]:
    count = min(width, len(values))
    return [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return NO_NUMBER
    share = (value - low) / (high - low) if high > low else 0.0
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(share * len(BLOCKS))))]


COLUMNS = ("name", "task", "status", "age", "steps", "seconds", "metrics", "note")
NOTE = 80


def list_text(rows: Sequence[ListedRun]) -> str:
    """The rows as a table with a heading; control characters are shown as escapes."""
    cells = [[printable(cell) for cell in _cells(row)] for row in rows]
    return aligned([COLUMNS, *cells]) if cells else "no runs"


def _cells(row: ListedRun) -> list[str]:
    metrics = ", ".join(f"{name} {value}" for name, value in measured(row.metrics).items())
    return [
        row.name,
        row.task or "-",
        row.status,
        "-" if row.age is None else time_span(row.age),
        "-" if row.steps is None else f"{row.step}/{row.steps}",
        "-" if row.seconds is None else f"{row.seconds:.1f}",
        metrics or "-",
        row.note if len(row.note) <= NOTE else f"{row.note[: NOTE - 3]}...",
    ]

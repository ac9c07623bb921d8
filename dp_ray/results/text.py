"""Short text for people: paths, metrics, tables, curves, and the rows of `dp-ray list`; it imports no torch."""

import importlib
import itertools
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from dp_ray.plan.history import is_inner
from dp_ray.rundir.listing import ListedRun
from dp_ray.text import printable

if TYPE_CHECKING:
    import pandas

ENDS = 5  # rows shown at the start, and at the end
BLOCKS = "▁▂▃▄▅▆▇█"
NO_NUMBER = "!"
INDENT = 4
COLUMNS = ("name", "task", "status", "age", "steps", "seconds", "metrics", "note")
DETAILS = COLUMNS.index("metrics")  # from here on, the columns of any length
NOTE = 80
T = TypeVar("T")


def measured(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the metrics in six digits, without those that `verify` adds."""
    return {name: f"{value:.6g}" for name, value in metrics.items() if not is_inner(name)}


def setting_text(value: Any) -> str:
    """Return a value of a job or of an environment as text."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def short(value: Any) -> str:
    """Return a number in six digits, and any other value as its text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def time_span(seconds: float) -> str:
    """Format seconds in their largest unit: `12 s`, `5 min`, `3 h`, `20 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows with the same number of cells as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def list_text(rows: Sequence[ListedRun], width: int | None = None) -> str:
    """Format the rows as a table with a heading; control characters are shown as escapes.

    In a terminal of `width` columns that the table does not fit, metrics and note stand below their row, indented; if
    need be the name stands above it.
    """
    cells = [[printable(cell) for cell in _cells(row)] for row in rows]
    if not cells:
        return "no runs"
    table = in_columns([COLUMNS, *cells])
    if width is None or max(map(len, table.splitlines())) <= width:
        return table
    head, *lines = in_columns([row[:DETAILS] for row in (COLUMNS, *cells)]).splitlines()
    if max(map(len, (head, *lines))) > width:
        head, *lines = (
            f"  {line}" for line in in_columns([row[1:DETAILS] for row in (COLUMNS, *cells)]).splitlines()
        )
        head, lines = f"name\n{head}", [f"{row[0]}\n{line}" for row, line in zip(cells, lines, strict=True)]
    told = [head]
    for row, line in zip(cells, lines, strict=True):
        metrics, note = (shown if shown != "-" else "" for shown in row[DETAILS:])
        # A metric's name and its value stay together.
        below = [part.replace("\xa0", " ") for part in _wrapped(re.sub("(?<!,) ", "\xa0", metrics), width)]
        told += [line, *below, *_wrapped(note, width)]
    return "\n".join(told)


def _wrapped(text: str, width: int) -> list[str]:
    indent = " " * INDENT
    return textwrap.wrap(text, max(width, 2 * INDENT), initial_indent=indent, subsequent_indent=indent)


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


def sparkline(values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None) -> str:
    """Draw a curve in at most `width` characters, each the mean of its values; `!` marks a value that is not finite.

    `low` and `high` are the ends of the scale, by default the curve's.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    known = [value for value in values if value is not None]
    count = min(width, len(known))
    parts = [known[len(known) * at // count : len(known) * (at + 1) // count] for at in range(count)]
    means = [math.fsum(part) / len(part) if all(map(math.isfinite, part)) else math.nan for part in parts]
    finite = [value for value in means if math.isfinite(value)]
    low = min(finite, default=0.0) if low is None else low
    high = max(finite, default=0.0) if high is None else high
    return "".join(_block(value, low, high) for value in means)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return NO_NUMBER
    share = (value - low) / (high - low) if high > low else 0.0
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(share * len(BLOCKS))))]


class Table(list[T]):
    """A list of rows, which are dicts or dataclasses, that prints as a table."""

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame with a column for each key or field; raises ImportError if pandas is not installed."""
        try:
            frame: type[pandas.DataFrame] = importlib.import_module("pandas").DataFrame
        except ImportError:
            raise ImportError("to_pandas needs pandas, which is not installed: pip install pandas") from None
        return frame([dict(_values(row)) for row in self])

    def __repr__(self) -> str:
        cells = self._cells()
        return f"{in_columns(cells)}\n{len(self)} rows" if cells else "no rows"

    def _repr_html_(self) -> str:
        head, *body = [[escape(cell) for cell in row] for row in self._cells() or [["no rows"]]]
        names = "".join(f"<th>{cell}</th>" for cell in head)
        rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
        return f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table><p>{len(self)} rows</p>"

    def _cells(self) -> list[list[str]]:
        """Return the names of the columns, then the first and the last rows."""
        is_cut = len(self) > 2 * ENDS + 1
        rows = [_values(row) for row in ([*self[:ENDS], *self[-ENDS:]] if is_cut else self)]
        names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        cells = [["-" if value is None else short(value) for value in map(row.get, names)] for row in rows]
        if is_cut:
            cells.insert(ENDS, ["..." for _ in names])
        return [names, *cells] if names else []


def _values(row: Any) -> Mapping[str, Any]:
    return row if isinstance(row, Mapping) else vars(row)

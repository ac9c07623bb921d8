"""A list of rows that prints as a table and converts to pandas."""

import importlib
import itertools
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from dp_ray.results.short import aligned

if TYPE_CHECKING:
    import pandas

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

"""The rows of a block of a table: one by one as items, or many at once as columns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dp_ray.data.values import Rows, dicts, stacked, values_of

Column = np.ndarray[Any, Any]


class TableBlock:
    """A block that was read. Raises DataError for a value that is missing, when it is asked for."""

    def __init__(self, table: pa.Table) -> None:
        self.size: int = table.nbytes
        self._table = table
        self._values = {name: values_of(name, table.column(name)) for name in table.column_names}
        self._columns: dict[str, Column | None] = {}
        self._has_all = all(column.null_count == 0 for column in table.columns)

    @property
    def names(self) -> list[str]:
        """The names of its columns."""
        return list(self._values)

    def items(self, rows: Rows) -> list[dict[str, Any]]:
        """The values of some rows, by column."""
        return dicts({name: give(rows) for name, give in self._values.items()}, len(rows))

    def some(self, rows: Rows, names: Sequence[str]) -> list[dict[str, Any]] | None:
        """The values of some rows, of some columns alone; None if one of these is not there."""
        if not self._values.keys() >= set(names):
            return None
        return dicts({name: self._values[name](rows) for name in names}, len(rows))

    def column(self, name: str) -> Column | None:
        """The values of a column, of all rows; None if a batch cannot be cut from them, or a value is missing."""
        if name not in self._values or not self._has_all:
            return None
        if name not in self._columns:
            self._columns[name] = stacked(self._table.column(name))
        return self._columns[name]

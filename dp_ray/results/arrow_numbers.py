"""Arrow's columns of numbers as numpy arrays, without pandas: pyarrow's own `to_numpy` imports it, if installed."""

from typing import Any

import numpy as np
import pyarrow as pa

Numbers = np.ndarray[Any, np.dtype[Any]]


def numbers(column: pa.Array | pa.ChunkedArray) -> Numbers:
    """The values of a column of numbers that has no nulls; it may be a dictionary's, whose indices are returned."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.DictionaryArray):
        array = array.indices
    return np.from_dlpack(array) if len(array) else np.empty(0)


def plain_values(array: pa.Array) -> Numbers:
    """The values of an array of any plain type; they may not be written to."""
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if is_number and not array.null_count and len(array):
        return np.from_dlpack(array)
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def known_numbers(table: pa.Table, name: str) -> tuple[Numbers, Numbers]:
    """The steps of a table's rows in which a column has a value, and these values as float64."""
    rows = table.select(["step", name])
    if rows.column(1).null_count:
        rows = rows.drop_null()
    return numbers(rows.column(0)), numbers(rows.column(1)).astype(float)

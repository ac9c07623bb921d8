"""Convert between Arrow's columns and numpy arrays without pandas.

Some functions of pyarrow import pandas if it is installed, which takes half a second: `to_numpy`, `pa.array` and
`pa.table` of lists, `pq.read_table` and `group_by`. `pa.Array.from_buffers`, `pa.Table.from_arrays` of Arrow's arrays
and `pq.ParquetFile` do not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Numbers = np.ndarray[Any, np.dtype[Any]]


def numbers(column: pa.Array | pa.ChunkedArray) -> Numbers:
    """Return the values of a column of numbers that has no nulls; of a dictionary's, the indices."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.DictionaryArray):
        array = array.indices
    return np.from_dlpack(array) if len(array) else np.empty(0)


def plain_values(array: pa.Array) -> Numbers:
    """Return the values of an array of any plain type; they may not be written to."""
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if is_number and not array.null_count and len(array):
        return np.from_dlpack(array)
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def known_numbers(table: pa.Table, name: str) -> tuple[Numbers, Numbers]:
    """Return the steps of a table's rows in which a column has a value, and these values as float64."""
    rows = table.select(["step", name])
    if rows.column(1).null_count:
        rows = rows.drop_null()
    return numbers(rows.column(0)), numbers(rows.column(1)).astype(float)


def array_of(values: Numbers) -> pa.Array:
    """Return a vector of numbers as an Arrow array."""
    if values.dtype == bool:
        packed = pa.py_buffer(np.packbits(values, bitorder="little"))
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, packed])
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def array_of_texts(texts: Sequence[str]) -> pa.Array:
    """Return texts as an Arrow array."""
    encoded = [text.encode() for text in texts]
    starts = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(starts), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def array_of_some(values: Sequence[float | None], kind: pa.DataType) -> pa.Array:
    """Return numbers of Arrow's type `kind`, int64 or float64, as an Arrow array; some may be missing.

    Raises TypeError if one of them is no such number.
    """
    known = np.array([value is not None for value in values], bool)
    dtype = np.int64 if kind == pa.int64() else np.float64
    filled = np.array([0 if value is None else value for value in values] or [0]).astype(dtype, casting="safe")
    valid = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(filled)])


def table_of_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows of numbers as a table; what a row does not have is missing."""
    columns = [array_of_some([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)

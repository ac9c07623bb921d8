"""Arrow's tables: as numpy arrays, and in files; all without pandas.

`PartTable` is a table in numbered files that grows while a run goes on.
Some functions of pyarrow import pandas if it is installed, which takes half a second: `to_numpy`, `pa.array` and
`pa.table` of lists, `pq.read_table` and `group_by`. `pa.Array.from_buffers`, `pa.Table.from_arrays` of Arrow's arrays
and `pq.ParquetFile` do not.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import StorageError
from dp_ray.storage import Storage

READ_BYTES = 256 << 10

Numbers = np.ndarray[Any, np.dtype[Any]]


def numbers(column: pa.Array | pa.ChunkedArray) -> Numbers:
    """Return the values of a column of numbers that has no nulls; of a dictionary's, the indices."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.DictionaryArray):
        array = array.indices
    return np.from_dlpack(array) if len(array) else np.empty(0, array.type.to_pandas_dtype())


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


def array_of_named(places: Numbers, names: Sequence[str]) -> pa.DictionaryArray:
    """Return texts as an Arrow array: to each place in `names`, the text there."""
    return pa.DictionaryArray.from_arrays(array_of(places), array_of_texts(names))


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
    """Return rows of numbers as a table; a value that a row lacks is null."""
    columns = [array_of_some([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


@contextmanager
def undamaged(storage: Storage, name: str) -> Iterator[None]:
    """Raise StorageError, which names the file, if its reading in the block fails."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{storage.child(name)}: is damaged: {error}") from None


@contextmanager
def reading(storage: Storage, name: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file to read it one row group at a time; raises StorageError if it is damaged."""
    with undamaged(storage, name), storage.open(name) as stream:
        # By default pyarrow holds all that it will read of the file in memory at once.
        yield pq.ParquetFile(stream, pre_buffer=False, buffer_size=READ_BYTES)


def read_table(storage: Storage, name: str, schema: pa.Schema | None = None) -> pa.Table:
    """Read a Parquet file, with the columns of `schema`; raises StorageError if it is damaged."""
    with undamaged(storage, name):  # in one piece: a run that goes on may replace the file
        table = storage.read(name, lambda data: pq.ParquetFile(pa.BufferReader(data)).read())
        return table if schema is None else table.cast(schema)


def step_ranges(storage: Storage, name: str) -> list[tuple[int, int, int]]:
    """Return the first step, the last one and the number of rows of each row group of a file.

    The steps are the file's first column. Raises StorageError if it is damaged.
    """
    with reading(storage, name) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        columns = [group.column(0).statistics for group in groups]
        return [(column.min, column.max, group.num_rows) for column, group in zip(columns, groups, strict=True)]


def write_table(storage: Storage, name: str, table: pa.Table, **options: Any) -> None:
    """Write a table as a Parquet file; the options are those of `pq.write_table`."""
    with storage.writing(name) as stream:
        pq.write_table(table, stream, **options)


class PartTable:
    """A table in files `part-0.parquet`, `part-1.parquet` ... (`name`), written while a run goes on.

    Each `write` replaces the last file, until that has `full` rows; the next driver begins a new one. Rows may be
    added while another thread writes. If a later attempt repeats rows, the reader decides which count.
    """

    def __init__(self, folder: Storage, name: str, full: int, **options: Any) -> None:
        self._folder, self._name, self._full, self._options = folder, name, full, options
        self._number = max((number for (number,) in folder.numbered(name).values()), default=-1) + 1
        self._tables: list[pa.Table] = []  # of the last file
        self._written = 0

    @property
    def num_new(self) -> int:
        """The number of rows that no file holds."""
        return sum(map(len, self._tables)) - self._written

    def add(self, table: pa.Table) -> None:
        """Add rows, for the next `write`."""
        self._tables.append(table)

    def write(self) -> None:
        """Write the rows that are new; after a StorageError, the next call writes them."""
        if not self.num_new:
            return
        count = len(self._tables)
        table = pa.concat_tables(self._tables[:count]).unify_dictionaries().combine_chunks()
        self._folder.create()
        write_table(self._folder, self._name.format(self._number), table, **self._options)
        is_full = len(table) >= self._full
        self._tables[:count] = [] if is_full else [table]
        self._number, self._written = self._number + is_full, 0 if is_full else len(table)

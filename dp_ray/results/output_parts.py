"""Reads parts of the outputs in the order of their positions.

A part is an Arrow file: it is written and read several times as fast as Parquet, and lives until it is merged.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import StorageError
from dp_ray.results.arrow_numbers import array_of, numbers
from dp_ray.results.columns import SAMPLE_INDEX, Layout, converted
from dp_ray.storage import Storage

POSITION = "position"
AGAIN = "run the job again, which makes what is missing; if the error comes back, use another name (--name, name=)"
READ_BYTES = 256 << 10
LONG_RUN = 64  # rows


@contextmanager
def reading(storage: Storage, name: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file to read it one row group at a time; raises StorageError if it is damaged."""
    with _undamaged(storage, name), storage.open(name) as stream:
        # By default pyarrow holds all that it will read of the file in memory at once.
        yield pq.ParquetFile(stream, pre_buffer=False, buffer_size=READ_BYTES)


@contextmanager
def reading_part(parts: Storage, name: str) -> Iterator[pa.RecordBatchFileReader]:
    """Open a part to read it one batch at a time; raises StorageError if it is damaged."""
    with _undamaged(parts, name), parts.open(name) as stream:
        yield pa.ipc.open_file(stream)


@contextmanager
def _undamaged(storage: Storage, name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise StorageError(f"{storage.child(name)}: is damaged: {error}") from None


class PartReader:
    """Reads one part from its first row to its last, a batch at a time; its file is opened only while it is needed.

    No row of it is before position `first`.
    """

    def __init__(self, parts: Storage, name: str, first: int) -> None:
        self.first = first
        self._parts = parts
        self._name = name
        with reading_part(parts, name) as file:
            self.layout = Layout.from_metadata(file.schema.metadata)
        self._blocks: Iterator[pa.Table] | None = None
        self.block: pa.Table | None = None

    @property
    def next(self) -> int:
        """The first position in the current block."""
        assert self.block is not None
        return self.block.column(POSITION)[0].as_py()  # type: ignore[no-any-return]

    @property
    def last(self) -> int:
        """The last position in the current block."""
        assert self.block is not None
        return self.block.column(POSITION)[-1].as_py()  # type: ignore[no-any-return]

    def read(self, layout: Layout) -> bool:
        """Read the next block, in the merged file's layout; False at the end."""
        if self._blocks is None:
            self._blocks = self._laid_out(layout)
        self.block = next(self._blocks, None)
        return self.block is not None

    def take(self, boundary: int) -> pa.Table:
        """Remove and return the rows up to position `boundary`."""
        assert self.block is not None
        count = int(np.searchsorted(numbers(self.block.column(POSITION)), boundary, side="right"))
        taken, self.block = self.block.slice(0, count), self.block.slice(count)
        return taken

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._blocks is not None:
            self._blocks.close()  # type: ignore[attr-defined]

    def _laid_out(self, layout: Layout) -> Iterator[pa.Table]:
        with reading_part(self._parts, self._name) as file:
            for number in range(file.num_record_batches):
                rows = pa.Table.from_batches([file.get_batch(number)])
                yield lay_out(rows, self.layout, layout)


def lay_out(table: pa.Table, had: Layout, wanted: Layout) -> pa.Table:
    """The same rows with the columns of the wanted layout, which may turn fixed shapes into variable ones, say."""
    if had == wanted:
        return table
    given = [name for name in (POSITION, SAMPLE_INDEX) if name in table.column_names]
    columns = [table.column(name) for name in given]
    for before, after in zip(had.all_columns, wanted.all_columns, strict=True):
        columns.append(converted(before, after, table.column(before.name).combine_chunks()))
    return pa.Table.from_arrays(columns, schema=part_schema(wanted) if POSITION in given else wanted.schema)


def part_schema(layout: Layout) -> pa.Schema:
    """The schema of a part: the position of each row, then what the merged file has."""
    return layout.schema.insert(0, pa.field(POSITION, pa.int64()))


class RowsInOrder:
    """The rows of several parts, each ordered by position, as blocks ordered by position; parts may join later."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._waiting: list[PartReader] = []
        self._open: list[PartReader] = []

    def add(self, readers: Iterable[PartReader]) -> None:
        """Add parts, all of whose rows come after those that were taken."""
        self._waiting = sorted([*self._waiting, *readers], key=lambda reader: reader.first, reverse=True)

    def until(self, end: int) -> Iterator[pa.Table]:
        """The rows before position `end` that were not taken yet; all parts with such rows must have joined."""
        while (boundary := self._boundary(end)) is not None:
            yield _sorted(pa.concat_tables([reader.take(boundary) for reader in self._open]))
            self._open = [reader for reader in self._open if len(reader.block) or reader.read(self._layout)]  # type: ignore[arg-type]

    def left(self) -> int | None:
        """The position of the first row that was not taken; None if all were."""
        self._open += [reader for reader in self._waiting if reader.read(self._layout)]
        self._waiting = []
        return min((reader.next for reader in self._open), default=None)

    def close(self) -> None:
        """Close the parts' files."""
        for reader in (*self._open, *self._waiting):
            reader.close()

    def _boundary(self, end: int) -> int | None:
        """The last position before `end` up to which the blocks hold all rows; None if there are no such rows."""
        while True:
            boundary = min([end - 1, *(reader.last for reader in self._open)])
            if not self._waiting or self._waiting[-1].first > boundary:
                return boundary if any(reader.next <= boundary for reader in self._open) else None
            reader = self._waiting.pop()
            self._open += [reader] if reader.read(self._layout) else []


def _sorted(table: pa.Table) -> pa.Table:
    """The rows by their positions. They are not copied if they come in long runs, as large shards do."""
    positions = numbers(table.column(POSITION))
    if (positions[1:] > positions[:-1]).all():
        return table
    starts = np.array([0, *(np.flatnonzero(np.diff(positions) != 1) + 1)])
    if len(table) < LONG_RUN * len(starts):
        return table.take(array_of(np.argsort(positions, kind="stable")))
    lengths = np.diff([*starts, len(table)])
    runs = np.argsort(positions[starts], kind="stable")
    return pa.concat_tables([table.slice(starts[run], lengths[run]) for run in runs])

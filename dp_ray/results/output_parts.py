"""Reads part files in the order of their positions, and verifies that they hold each position once."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import StorageError
from dp_ray.plan.order import Order
from dp_ray.results.columns import SAMPLE_INDEX, Layout, converted
from dp_ray.storage import Storage

POSITION = "position"
AGAIN = "run the job again, which makes what is missing; if the error comes back, use another name (--name, name=)"
MERGE_BYTES = 4 << 20  # read at once of each part during a merge
MERGE_BYTES_IN_ALL = 256 << 20
READ_BYTES = 256 << 10


@contextmanager
def reading(storage: Storage, name: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file to read it one row group at a time; raises StorageError if it is damaged."""
    try:
        with storage.open(name) as stream:
            # By default pyarrow holds all that it will read of the file in memory at once.
            yield pq.ParquetFile(stream, pre_buffer=False, buffer_size=READ_BYTES)
    except (pa.ArrowInvalid, OSError) as error:
        raise StorageError(f"{storage.child(name)}: is damaged: {error}") from None


class PartReader:
    """Reads one part from its first row to its last, a block at a time; opened only while it is needed."""

    def __init__(self, parts: Storage, name: str, num_parts: int) -> None:
        self._parts = parts
        self._name = name
        with reading(parts, name) as file:
            self.layout = Layout.from_metadata(file.schema_arrow.metadata)
            group = file.metadata.row_group(0)
        self.first: int = group.column(0).statistics.min
        row_bytes = max(1, group.total_byte_size // group.num_rows)
        self._block_rows = max(1, min(MERGE_BYTES, MERGE_BYTES_IN_ALL // num_parts) // row_bytes)
        self._blocks: Iterator[pa.Table] | None = None
        self.block: pa.Table | None = None

    @property
    def last(self) -> int:
        """The last position in the current block."""
        assert self.block is not None
        return self.block.column(POSITION)[-1].as_py()  # type: ignore[no-any-return]

    def read(self, layout: Layout) -> bool:
        """Read the next block, in the merged file's layout; False at the end."""
        if self._blocks is None:
            self._blocks = self._converted(layout)
        self.block = next(self._blocks, None)
        return self.block is not None

    def take(self, boundary: int) -> pa.Table:
        """Remove and return the rows up to position `boundary`."""
        assert self.block is not None
        count = int(np.searchsorted(self.block.column(POSITION).to_numpy(), boundary, side="right"))
        taken, self.block = self.block.slice(0, count), self.block.slice(count)
        return taken

    def _converted(self, layout: Layout) -> Iterator[pa.Table]:
        with reading(self._parts, self._name) as file:
            for batch in file.iter_batches(batch_size=self._block_rows):
                yield _lay_out(pa.Table.from_batches([batch]), self.layout, layout)


def _lay_out(table: pa.Table, had: Layout, wanted: Layout) -> pa.Table:
    """The same rows with the columns of the wanted layout, which may turn fixed shapes into variable ones."""
    columns = [table.column(POSITION), table.column(SAMPLE_INDEX)]
    for before, after in zip(had.all_columns, wanted.all_columns, strict=True):
        columns.append(converted(before, after, table.column(before.name).combine_chunks()))
    return pa.table(columns, schema=wanted.schema.insert(0, pa.field(POSITION, pa.int64())))


def in_order(readers: list[PartReader], layout: Layout) -> Iterator[pa.Table]:
    """Merge parts, each ordered by position, into blocks of rows ordered by position."""
    waiting = sorted(readers, key=lambda reader: reader.first, reverse=True)
    active: list[PartReader] = []
    while waiting or active:
        if not active:
            active += _opened(waiting.pop(), layout)
        boundary = min(reader.last for reader in active)
        while waiting and waiting[-1].first <= boundary:
            active += _opened(waiting.pop(), layout)
            boundary = min(reader.last for reader in active)
        taken = pa.concat_tables([reader.take(boundary) for reader in active])
        yield _sorted(taken)
        active = [reader for reader in active if len(reader.block) or reader.read(layout)]  # type: ignore[arg-type]


def _opened(reader: PartReader, layout: Layout) -> list[PartReader]:
    return [reader] if reader.read(layout) else []


def _sorted(table: pa.Table) -> pa.Table:
    positions = table.column(POSITION).to_numpy()
    if (positions[1:] > positions[:-1]).all():
        return table
    return table.take(pa.array(np.argsort(positions, kind="stable")))


def verify_complete(blocks: Iterator[pa.Table], order: Order, rows: int) -> Iterator[pa.Table]:
    """Pass the blocks on without their positions, and verify them on the way.

    Raises StorageError, which names the position, unless they hold each of the first `rows` positions once, with the
    order's sample.
    """
    at = 0
    for block in blocks:
        positions = block.column(POSITION).to_numpy()
        wrong = np.flatnonzero(positions != np.arange(at, at + len(block)))
        if len(wrong):
            expected, got = at + int(wrong[0]), int(positions[wrong[0]])
            what = "is missing" if got > expected else "is there twice"
            raise StorageError(f"the outputs of position {min(expected, got)} {what}; {AGAIN}")
        if at + len(block) > rows:
            raise StorageError(f"there are outputs of position {rows}, but the job has {rows} rows; {AGAIN}")
        samples = block.column(SAMPLE_INDEX).to_numpy()
        wrong = np.flatnonzero(samples != order.indices(at, at + len(block)))
        if len(wrong):
            raise StorageError(
                f"position {at + int(wrong[0])} holds the outputs of sample {int(samples[wrong[0]])}, "
                f"where the order has sample {order[at + int(wrong[0])]}; {AGAIN}"
            )
        at += len(block)
        yield block.drop_columns([POSITION])
    if at != rows:
        raise StorageError(f"the outputs end at position {at} of {rows}; {AGAIN}")

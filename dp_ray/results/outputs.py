"""Outputs: each worker streams its rows to part files, the driver proves them whole and merges them in order.

A part holds a worker's rows of a range of steps, with their positions in the order. It appears under its final
name only when whole; its name says which steps and shards it holds, so that a later attempt leaves them out.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dp_ray.errors import StorageError
from dp_ray.plan.order import Order
from dp_ray.plan.split import Shard
from dp_ray.plan.work import Range
from dp_ray.results.columns import (
    SAMPLE_INDEX,
    Column,
    Layout,
    Rows,
    from_arrow,
    raw_bytes,
    rebuild,
    rows_of,
    to_arrow,
)
from dp_ray.results.storage import Storage, Unfinished

MERGED = "outputs.parquet"
POSITION = "position"
GROUP_BYTES = 8 << 20
PART_BYTES = 1 << 30
PART_SECONDS = 60.0
MERGE_BYTES = 4 << 20
Indices = np.ndarray[Any, np.dtype[np.int64]]
Piece = tuple[Shard, Indices, Rows]
PART_NAME = re.compile(r"steps-(\d+)-(\d+)-shards-(\d+)-(\d+)\.parquet")


class PartWriter:
    """Streams one worker's outputs to part files; `before_commit` runs before a part gets its name."""

    def __init__(
        self,
        storage: Storage,
        shards: range,
        batch_dim: int = 0,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._storage = storage
        self._shards = shards
        self._batch_dim = batch_dim
        self._before_commit = before_commit
        self._layout: Layout | None = None
        self._file: PartFile | None = None
        self._step: list[Piece] = []
        self._group: list[Piece] = []
        self._group_bytes = 0
        self._first_step = 0
        self._end_step = 0
        self._committed = time.monotonic()

    def on_shard(self, shard: Shard, indices: Indices, outputs: Any) -> None:
        """Take a shard's sample indices and outputs.

        Raises ModelError where an output has not one entry a row, or is of another kind than before.
        """
        layout, rows = rows_of(outputs, shard.rows, self._batch_dim)
        joined = layout if self._layout is None else self._layout.join(layout)
        if self._layout is not None and joined != self._layout:
            self._commit()  # what was written has fixed shapes, what follows has not
        self._layout = joined
        self._step.append((shard, indices, rows))

    def on_step(self, step: int) -> None:
        """All of this worker's shards of `step` were taken, or were done before."""
        self._end_step = step + 1
        if not self._step:
            return
        self._group += self._step
        self._group_bytes += sum(leaf.nbytes for _, _, rows in self._step for leaf in rows)
        self._step = []
        if self._group_bytes >= GROUP_BYTES:
            self._write_group()
        if time.monotonic() - self._committed > PART_SECONDS or (self._file and self._file.is_full):
            self._commit()

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit what is left; after an error, only what was committed before it counts."""
        if kind is None:
            self._commit()
        elif self._file:
            self._file.discard()

    def _write_group(self) -> None:
        assert self._layout is not None
        if self._file is None:
            self._file = PartFile(self._storage, self._layout)
        self._file.write(self._group)
        self._group, self._group_bytes = [], 0

    def _commit(self) -> None:
        if self._group:
            self._write_group()
        if self._file is not None:
            steps = f"steps-{self._first_step}-{self._end_step}"
            self._before_commit()
            self._file.commit(f"{steps}-shards-{self._shards.start}-{self._shards.stop}.parquet")
            self._file = None
        self._first_step = self._end_step
        self._committed = time.monotonic()


class PartFile:
    """One part while it is being written."""

    def __init__(self, storage: Storage, layout: Layout) -> None:
        self.layout = layout
        self._unfinished = Unfinished(storage, "part")
        self._schema = layout.schema.insert(0, pa.field(POSITION, pa.int64()))
        self._writer = open_writer(self._unfinished.stream, self._schema)
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._bytes >= PART_BYTES

    def write(self, group: list[Piece]) -> None:
        positions = np.concatenate([np.arange(shard.start, shard.stop) for shard, _, _ in group])
        leaves = [
            to_arrow(column, [rows[number] for _, _, rows in group])
            for number, column in enumerate(self.layout.columns)
        ]
        samples = np.concatenate([indices for _, indices, _ in group])
        columns = [pa.array(positions), pa.array(samples), *leaves]
        table = pa.table(columns, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, len(positions)))
        self._bytes += table.nbytes

    def commit(self, name: str) -> None:
        self._writer.close()
        self._unfinished.stream.close()
        self._unfinished.name = name
        self._unfinished.commit()

    def discard(self) -> None:
        self._unfinished.discard()


def done_ranges(parts: Storage) -> list[Range]:
    """The steps and shards that whole parts hold."""
    found = (PART_NAME.fullmatch(name) for name in parts.names())
    return [Range(*map(int, match.groups())) for match in found if match]


def open_writer(stream: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Outputs hardly compress and are read once: no encoding that costs more than it saves."""
    return pq.ParquetWriter(
        stream, schema, compression="none", use_dictionary=False, write_statistics=[POSITION, SAMPLE_INDEX]
    )


def merge(parts: Storage, run: Storage, order: Order, rows: int) -> None:
    """Merge all parts into the run's `outputs.parquet`, ordered by position, a few megabytes at a time.

    Raises StorageError, naming the position, unless the parts hold each of the `rows` first positions of `order`
    once, with the sample that the order has there.
    """
    readers = sorted((PartReader(parts, name) for name in _part_names(parts)), key=lambda reader: reader.first)
    if not readers:
        raise StorageError(f"{parts}: there are no outputs to merge")
    layout = readers[0].layout
    for reader in readers[1:]:
        layout = layout.join(reader.layout)
    with run.writing(MERGED) as stream, open_writer(stream, layout.schema) as writer:
        for block in _rechunk(_proven(_in_order(readers, layout), order, rows)):
            writer.write_table(block)


def _part_names(parts: Storage) -> list[str]:
    return [name for name in parts.names() if PART_NAME.fullmatch(name)]


class PartReader:
    """Reads one part from its first row to its last, a block at a time; opened only while it is needed."""

    def __init__(self, parts: Storage, name: str) -> None:
        self._parts = parts
        self._name = name
        with parts.open(name) as stream:
            footer = pq.read_metadata(stream)
            self.layout = Layout.from_metadata(footer.schema.to_arrow_schema().metadata)
        group = footer.row_group(0)
        self.first: int = group.column(0).statistics.min
        row_bytes = max(1, group.total_byte_size // group.num_rows)
        self._block_rows = max(1, MERGE_BYTES // row_bytes)
        self._blocks: Iterator[pa.RecordBatch] | None = None
        self._stream: Any = None
        self.block: pa.Table | None = None

    @property
    def last(self) -> int:
        """The last position in the block at hand."""
        assert self.block is not None
        return self.block.column(POSITION)[-1].as_py()  # type: ignore[no-any-return]

    def read(self, layout: Layout) -> bool:
        """Get the next block at hand, in the merged file's layout; False at the end."""
        if self._blocks is None:
            self._stream = self._parts.open(self._name)
            self._blocks = pq.ParquetFile(self._stream).iter_batches(batch_size=self._block_rows)
        batch = next(self._blocks, None)
        if batch is None:
            self._stream.close()
            return False
        self.block = _lay_out(pa.Table.from_batches([batch]), self.layout, layout)
        return True

    def take(self, boundary: int) -> pa.Table:
        """Remove and return the rows up to position `boundary`."""
        assert self.block is not None
        count = int(np.searchsorted(self.block.column(POSITION).to_numpy(), boundary, side="right"))
        taken, self.block = self.block.slice(0, count), self.block.slice(count)
        return taken


def _lay_out(table: pa.Table, had: Layout, wanted: Layout) -> pa.Table:
    """The same rows with columns of the wanted layout, which may be variable where theirs is fixed."""
    columns = [table.column(POSITION), table.column(SAMPLE_INDEX)]
    for before, after in zip(had.columns, wanted.columns, strict=True):
        column = table.column(before.name).combine_chunks()
        if before.shape != after.shape:
            leaves = from_arrow(before, column)
            column = to_arrow(after, [row.unsqueeze(0) for row in leaves])
        columns.append(column)
    return pa.table(columns, schema=wanted.schema.insert(0, pa.field(POSITION, pa.int64())))


def _in_order(readers: list[PartReader], layout: Layout) -> Iterator[pa.Table]:
    """Blocks of rows ordered by position, from parts that are each ordered and sorted by their first."""
    waiting = readers[::-1]
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


def _proven(blocks: Iterator[pa.Table], order: Order, rows: int) -> Iterator[pa.Table]:
    """The blocks, without their positions, as long as they hold each position once and the right samples."""
    at = 0
    for block in blocks:
        positions = block.column(POSITION).to_numpy()
        wrong = np.flatnonzero(positions != np.arange(at, at + len(block)))
        if len(wrong):
            expected, got = at + int(wrong[0]), int(positions[wrong[0]])
            what = "is missing" if got > expected else "is there twice"
            raise StorageError(f"the outputs of position {min(expected, got)} {what}; run again with --overwrite")
        samples = block.column(SAMPLE_INDEX).to_numpy()
        wrong = np.flatnonzero(samples != order.indices(at, at + len(block)))
        if len(wrong):
            raise StorageError(
                f"position {at + int(wrong[0])} holds the outputs of sample {int(samples[wrong[0]])}, "
                f"where the order has sample {order[at + int(wrong[0])]}; run again with --overwrite"
            )
        at += len(block)
        yield block.drop_columns([POSITION])
    if at != rows:
        raise StorageError(f"the outputs end at position {at} of {rows}; run again with --overwrite")


def _rechunk(blocks: Iterator[pa.Table], size: int = GROUP_BYTES) -> Iterator[pa.Table]:
    """The same rows in tables of about `size` bytes."""
    held: list[pa.Table] = []
    held_bytes = 0
    for block in blocks:
        held.append(block)
        held_bytes += block.nbytes
        if held_bytes >= size:
            yield pa.concat_tables(held)
            held, held_bytes = [], 0
    if held:
        yield pa.concat_tables(held)


@dataclass(frozen=True)
class Merged:
    """The merged outputs of a run: a file read anew for each question, never held."""

    run: Storage

    def _open(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.run.open(MERGED))

    def layout(self) -> Layout:
        with self._open() as file:
            return Layout.from_metadata(file.schema_arrow.metadata)

    def read(self) -> Any:
        """All outputs, in order, in the model's own nesting."""
        layout = self.layout()
        return rebuild(layout, [_whole(column, list(self._leaf(column))) for column in layout.columns])

    def batches(self, batch_size: int) -> Iterator[Any]:
        """The outputs of each global batch, in order, in the model's own nesting."""
        layout = self.layout()
        with self._open() as file:
            for rows in _slices(file.iter_batches(batch_size=batch_size), batch_size):
                leaves = [from_arrow(column, rows.column(column.name).combine_chunks()) for column in layout.columns]
                yield rebuild(layout, [_stacked(leaf) for leaf in leaves])

    def sha256(self) -> str:
        """The hash of the outputs' raw bytes: leaf after leaf, each row after row."""
        digest = hashlib.sha256()
        for column in self.layout().columns:
            for piece in self._leaf(column):
                for tensor in piece if isinstance(piece, list) else [piece]:
                    digest.update(raw_bytes(tensor))
        return digest.hexdigest()

    def _leaf(self, column: Column) -> Iterator[torch.Tensor | list[torch.Tensor]]:
        with self._open() as file:
            for number in range(file.num_row_groups):
                rows = file.read_row_group(number, columns=[column.name])
                yield from (from_arrow(column, chunk) for chunk in rows.column(0).chunks)


def _whole(column: Column, pieces: list[Any]) -> torch.Tensor | list[torch.Tensor]:
    if column.shape is None:
        return [row for piece in pieces for row in piece]
    return torch.cat(pieces) if pieces else torch.empty(0, *column.shape, dtype=column.torch_dtype)


def _stacked(leaf: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Rows of one shape as a tensor, also where other batches' rows have another shape."""
    if isinstance(leaf, list) and len({row.shape for row in leaf}) == 1:
        return torch.stack(leaf)
    return leaf


def _slices(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of `rows` rows, the last one maybe shorter."""
    held: pa.Table | None = None
    for batch in batches:
        table = pa.Table.from_batches([batch])
        held = table if held is None else pa.concat_tables([held, table])
        while len(held) >= rows:
            yield held.slice(0, rows)
            held = held.slice(rows)
    if held is not None and len(held):
        yield held

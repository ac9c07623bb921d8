"""Outputs: each worker streams its rows to part files; the driver verifies that they are complete and merges them.

A part holds a worker's rows of a range of steps, with their positions in the order. It gets its final name only when
it is complete. The name says which steps and shards it holds, so that a later attempt skips them, and which attempt
wrote it.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from dp_ray.results.carried import carried_arrays
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
    without_objects,
)
from dp_ray.results.output_parts import POSITION, PartReader, in_order, reading, verify_complete
from dp_ray.rundir.ledger import PART_NAME, part_name
from dp_ray.storage import Storage

MERGED = "outputs.parquet"
GROUP_BYTES = 8 << 20
PIECE_BYTES = 1 << 10  # a tensor's overhead beside its numbers
PART_BYTES = 1 << 30
PART_SECONDS = 60.0
Indices = np.ndarray[Any, np.dtype[np.int64]]
Piece = tuple[Shard, Indices, Rows]


class PartWriter:
    """Streams one worker's outputs to part files; `before_commit` runs before a part gets its name.

    It leaves out what is no tensor, number or text, and reports each such path once with `note`.
    """

    def __init__(
        self,
        storage: Storage,
        shards: range,
        batch_dim: int = 0,
        before_commit: Callable[[], None] = lambda: None,
        attempt: str = "",
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._storage = storage
        self._attempt = attempt
        self._note = note
        self._left_out: set[str] = set()
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

    def on_shard(
        self, shard: Shard, indices: Indices, outputs: Any, carried: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Take a shard's sample indices and outputs, and the values that are carried of its samples, by key.

        Raises ModelError if an output does not have one entry a row, or its nesting or dtype differs from before.
        Raises DataError if the values of a key are of several kinds.
        """
        kept, left_out = without_objects(outputs)
        for path in left_out.keys() - self._left_out:
            self._note(f"outputs: {path or 'all'} is a {left_out[path]}, no tensor, number or text: it is left out")
        self._left_out |= left_out.keys()
        layout, rows = rows_of(kept, shard.rows, self._batch_dim, carried_arrays(carried or {}, indices))
        joined = layout if self._layout is None else self._layout.join(layout)
        if self._layout is not None and joined != self._layout:
            self.commit()  # the open part has fixed shapes, the next rows differ
        self._layout = joined
        self._step.append((shard, indices, rows))

    def on_step(self, step: int) -> None:
        """End `step`: this worker's shards of it are taken, or an earlier attempt had committed them."""
        self._end_step = step + 1
        if not self._step:
            return
        self._group += self._step
        self._group_bytes += sum(PIECE_BYTES + leaf.nbytes for _, _, rows in self._step for leaf in rows)
        self._step = []
        if self._group_bytes >= GROUP_BYTES:
            self._write_group()
        if time.monotonic() - self._committed > PART_SECONDS or (self._file and self._file.is_full):
            self.commit()

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the remaining rows; after an error, discard them."""
        try:
            if kind is None:
                self.commit()
        finally:
            if self._file:
                self._file.discard()

    def _write_group(self) -> None:
        assert self._layout is not None
        if self._file is None:
            self._file = PartFile(self._storage, self._layout)
        self._file.write(self._group)
        self._group, self._group_bytes = [], 0

    def commit(self) -> None:
        """Write all rows taken so far and give the part its final name."""
        if self._group:
            self._write_group()
        if self._file is not None:
            self._before_commit()
            done = Range(self._first_step, self._end_step, self._shards.start, self._shards.stop)
            self._file.commit(part_name(done, self._attempt))
            self._file = None
        self._first_step = self._end_step
        self._committed = time.monotonic()


class PartFile:
    """A part that is being written."""

    def __init__(self, storage: Storage, layout: Layout) -> None:
        self.layout = layout
        self._unfinished = storage.unnamed()
        self._schema = layout.schema.insert(0, pa.field(POSITION, pa.int64()))
        self._writer = open_writer(self._unfinished, self._schema)
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the part has reached PART_BYTES."""
        return self._bytes >= PART_BYTES

    def write(self, group: list[Piece]) -> None:
        """Write the rows of some shards as one row group."""
        positions = np.concatenate([np.arange(shard.start, shard.stop) for shard, _, _ in group])
        leaves = [
            to_arrow(column, [rows[number] for _, _, rows in group])
            for number, column in enumerate(self.layout.all_columns)
        ]
        samples = np.concatenate([indices for _, indices, _ in group])
        columns = [pa.array(positions), pa.array(samples), *leaves]
        table = pa.table(columns, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, len(positions)))
        self._bytes += table.nbytes

    def commit(self, name: str) -> None:
        """Finish the file and give it its final name."""
        self._writer.close()
        self._unfinished.commit(name)

    def discard(self) -> None:
        """Remove the unfinished file."""
        with suppress(StorageError):
            self._writer.close()
        self._unfinished.discard()


def open_writer(stream: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Open a Parquet writer without compression or dictionaries: outputs hardly compress and are read once."""
    return pq.ParquetWriter(
        stream, schema, compression="none", use_dictionary=False, write_statistics=[POSITION, SAMPLE_INDEX]
    )


def merge(parts: Storage, run: Storage, order: Order, rows: int, committed: list[str] | None = None) -> None:
    """Merge the committed parts, by default all, into the run's `outputs.parquet`.

    The file is ordered by position and written a few megabytes at a time.

    Raises StorageError, which names the position, unless the parts hold each of the first `rows` positions of `order`
    once, with the order's sample.
    """
    names = committed if committed is not None else [name for name in parts.names() if PART_NAME.fullmatch(name)]
    if not names:
        raise StorageError(f"{parts}: there are no outputs to merge")
    readers = [PartReader(parts, name, len(names)) for name in names]
    layout = functools.reduce(Layout.join, (reader.layout for reader in readers))
    with run.writing(MERGED) as stream, open_writer(stream, layout.schema) as writer:
        for block in _rechunk(verify_complete(in_order(readers, layout), order, rows), GROUP_BYTES):
            writer.write_table(block)


def _rechunk(blocks: Iterator[pa.Table], size: int) -> Iterator[pa.Table]:
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
    """The merged outputs of a run; each method reads the file again, so nothing stays in memory."""

    run: Storage

    def layout(self) -> Layout:
        """The nesting and the columns of the outputs."""
        with reading(self.run, MERGED) as file:
            return Layout.from_metadata(file.schema_arrow.metadata)

    def read(self) -> Any:
        """All outputs, in order, in the model's own nesting."""
        layout = self.layout()
        return rebuild(layout, [_whole(column, list(self._leaf(column))) for column in layout.columns])

    def batches(self, batch_size: int) -> Iterator[Any]:
        """The outputs of each global batch, in order, in the model's own nesting."""
        layout = self.layout()
        with reading(self.run, MERGED) as file:
            for rows in _slices(file.iter_batches(batch_size=batch_size), batch_size):
                leaves = [from_arrow(column, rows.column(column.name).combine_chunks()) for column in layout.columns]
                yield rebuild(layout, [_stacked(leaf) for leaf in leaves])

    def sample_index(self) -> torch.Tensor:
        """The sample index of each row: int64 [rows]."""
        with reading(self.run, MERGED) as file:
            return torch.from_numpy(file.read(columns=[SAMPLE_INDEX]).column(0).to_numpy().copy())

    def carried(self) -> dict[str, list[Any]]:
        """The values that were carried, by key: one for each row, in order."""
        columns = self.layout().carried
        with reading(self.run, MERGED) as file:
            table = file.read(columns=[column.name for column in columns])
        return {column.key: table.column(column.name).to_pylist() for column in columns}

    def sha256(self) -> str:
        """The SHA-256 of the outputs' raw bytes: leaf by leaf, and each leaf row by row."""
        digest = hashlib.sha256()
        for column in self.layout().columns:
            for piece in self._leaf(column):
                for tensor in piece if isinstance(piece, list) else [piece]:
                    digest.update(raw_bytes(tensor))
        return digest.hexdigest()

    def _leaf(self, column: Column) -> Iterator[torch.Tensor | list[torch.Tensor]]:
        with reading(self.run, MERGED) as file:
            for number in range(file.num_row_groups):
                rows = file.read_row_group(number, columns=[column.name])
                yield from (from_arrow(column, chunk) for chunk in rows.column(column.name).chunks)


def _whole(column: Column, pieces: list[Any]) -> torch.Tensor | list[torch.Tensor]:
    if column.shape is None:
        return [row for piece in pieces for row in piece]
    return torch.cat(pieces) if pieces else torch.empty(0, *column.shape, dtype=column.torch_dtype)


def _stacked(leaf: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Stack rows of one shape into a tensor, even if the rows of other batches have another shape."""
    if isinstance(leaf, list) and len({row.shape for row in leaf}) == 1:
        return torch.stack(leaf)
    return leaf


def _slices(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of `rows` rows; the last one may be shorter."""
    held: pa.Table | None = None
    for batch in batches:
        table = pa.Table.from_batches([batch])
        held = table if held is None else pa.concat_tables([held, table])
        while len(held) >= rows:
            yield held.slice(0, rows)
            held = held.slice(rows)
    if held is not None and len(held):
        yield held

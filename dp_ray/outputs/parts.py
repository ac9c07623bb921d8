"""Write each worker's outputs to parts, and read parts in the order of their positions.

Workers merge the parts into the files of the outputs. A part holds a worker's rows of a range of steps, with their
positions in the order; it is all in one file of the outputs. It gets its final name only when it is complete. The
name says which steps and shards it holds, so that a later attempt skips them, and which attempt wrote it.
A part is an Arrow file: it is written and read several times as fast as Parquet, and lives until it is merged.

Begin at `PartWriter`; `RowsInOrder` reads.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dp_ray.engine.host_copy import ON_GPU, HostCopy
from dp_ray.engine.world import CPU, is_gpu
from dp_ray.errors import StorageError
from dp_ray.job.samples import Indices
from dp_ray.outputs import columns
from dp_ray.outputs.columns import SAMPLE_INDEX, Layout, LayoutKey, Rows
from dp_ray.plan.split import FilePlan, Range, Shard
from dp_ray.rundir.ledger import part_name
from dp_ray.storage import LocalFile, Storage, UnfinishedFile
from dp_ray.system.threads import waiting
from dp_ray.tables import array_of, numbers, undamaged
from dp_ray.tensors.tree import bare_tensors

POSITION = "position"
RUN_AGAIN = (
    "run the job again, which makes what is missing; if the error comes back, use another name (--name, name=)"
)
LONG_RUN = 64  # rows
GROUP_BYTES = 8 << 20  # written at once
TENSOR_BYTES = 1 << 10  # a tensor's overhead beside its numbers
PART_BYTES = 128 << 20  # of the parts of all workers together: so much is left to merge after the last step
PART_SECONDS = 60.0  # of a worker's time in a part, at most; a run that has just begun ends one sooner:
YOUNG_SECONDS, YOUNG_SHARE = 2.0, 0.1  # after so many seconds, and this share of the run: its length is not known
MERGE_BYTES = 256 << 20  # of the blocks of all workers together: a merging worker holds one of each


class ShardRows(NamedTuple):
    """A shard, the indices of its samples, and its rows; wait for `copies` before the rows' numbers are used.

    `nbytes` is the memory that it takes.
    """

    shard: Shard
    indices: Indices
    rows: Rows
    copies: Sequence[HostCopy]
    nbytes: int


FindPlan = Callable[[float], FilePlan | None]


@dataclass(frozen=True)
class WorkerParts:
    """The parts of one worker: the folder, the shards that it runs, its attempt, and how many workers write.

    All workers together share the bytes that are held. Dimension `batch_dim` of the outputs holds the rows.
    """

    storage: Storage
    shards: range
    attempt: str = ""
    num_workers: int = 1
    batch_dim: int = 0


@dataclass(eq=False)
class PartWriter:
    """A stream of one worker's outputs to part files; `before_commit` runs before a part gets its name.

    `find_plan` returns how the outputs are cut into files, given the bytes of a row. It returns None if the worker is
    to stop before that is known: then nothing is kept.
    An output that is no tensor, number or text is left out, and its path reported once with `say`.

    A GPU, the `device`, need not wait for it: the outputs of a step come to the host while the next step is computed,
    and a thread writes them.
    """

    parts: WorkerParts
    find_plan: FindPlan
    before_commit: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda text: None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self._plan: FilePlan | None = None
        self._left_out: set[str] = set()
        self._layout: Layout | None = None
        self._forms: set[LayoutKey] = set()  # those of bare tensors whose rows the layout holds
        self._file: PartFile | None = None
        self._step: list[ShardRows] = []
        self._group: list[ShardRows] = []
        self._group_bytes = 0
        # CUDA would give a thread the process's first GPU, and so open a context there.
        begin = functools.partial(torch.cuda.set_device, self.device) if is_gpu(self.device) else None
        self._thread = ThreadPoolExecutor(1, "outputs", begin)
        self._writing: Future[None] | None = None
        self._first_step = 0
        self._end_step = 0
        self._begun = self._committed = time.monotonic()

    def on_shard(
        self, shard: Shard, indices: Indices, outputs: Any, carried: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Take a shard's sample indices and outputs, and the values that are carried of its samples, by key.

        Raises ModelError if an output does not have one entry a row, or its nesting or dtype differs from before.
        Raises DataError if the values of a key are of several kinds.
        """
        copies: list[HostCopy] = []
        beside = columns.carried_arrays(carried, indices) if carried else {}
        tensors = bare_tensors(outputs) or ()
        form = columns.layout_key(outputs, tensors, shard.rows, beside)
        if form in self._forms:
            rows = [*beside.values()]
            for tensor in tensors:
                rows.append(columns.rows_first(tensor, self.parts.batch_dim, copies))
        else:
            rows = self._lay_out(shard, outputs, beside, copies)
            if tensors and all(tensor.ndim for tensor in tensors):  # of one row, a scalar is kept as a vector
                self._forms.add(form)
        nbytes = TENSOR_BYTES * len(rows)
        for leaf in rows:
            nbytes += leaf.nbytes
        self._step.append(ShardRows(shard, indices, rows, copies, nbytes))

    def _lay_out(self, shard: Shard, outputs: Any, beside: Mapping[str, pa.Array], copies: list[HostCopy]) -> Rows:
        """Return a shard's rows, and have the layout hold them."""
        kept, left_out = columns.without_objects(outputs)
        for path in left_out.keys() - self._left_out:
            self.say(f"outputs: {path or 'all'} is a {left_out[path]}, no tensor, number or text: it is left out")
        self._left_out |= left_out.keys()
        layout, rows = columns.rows_of(kept, shard.rows, self.parts.batch_dim, beside, copies)
        joined = layout if self._layout is None else self._layout.join(layout)
        if self._layout is not None and joined != self._layout:
            self.commit()  # the open part has fixed shapes, the next rows differ
        self._layout = joined
        return rows

    def on_step(self, step: int) -> None:
        """End `step`: this worker's shards of it are taken, or an earlier attempt had committed them."""
        if self._step and self._plan is None:
            num_rows = sum(kept.shard.rows for kept in self._step)
            self._plan = self.find_plan(sum(leaf.nbytes for kept in self._step for leaf in kept.rows) / num_rows)
            if self._plan is None:  # without a plan the rows are dropped
                self._step, self._first_step = [], step + 1
            else:  # a part is in one file alone
                self._first_step = max(self._first_step, self._plan.steps_of(self._plan.number_of(step)).start)
        self._end_step = step + 1
        self._group += self._step
        coming = 0  # the GPU may still be computing these rows
        for kept in self._step:
            coming += bool(kept.copies)
            self._group_bytes += kept.nbytes
        self._step = []
        if self._group_bytes >= GROUP_BYTES and len(self._group) > coming:
            self._write_group(coming)
        ends_file = self._plan is not None and step + 1 == self._plan.steps_of(self._plan.number_of(step)).stop
        is_full = self._file is not None and self._file.bytes >= PART_BYTES // self.parts.num_workers
        now = time.monotonic()
        seconds = min(PART_SECONDS, max(YOUNG_SECONDS, YOUNG_SHARE * (now - self._begun)))
        if ends_file or is_full or now - self._committed > seconds:
            self.commit()

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the remaining rows; after an error, discard them."""
        try:
            if kind is None:
                self.commit()
        finally:
            self._thread.shutdown()
            if self._file:
                self._file.discard()

    def _write_group(self, coming: int = 0) -> None:
        """Write the rows taken so far, without those of the last `coming` shards."""
        self._wait()
        assert self._layout is not None
        if self._file is None:
            self._file = PartFile(self.parts.storage, self._layout, MERGE_BYTES // self.parts.num_workers)
        size = len(self._group) - coming
        group, self._group = self._group[:size], self._group[size:]
        self._group_bytes = sum(kept.nbytes for kept in self._group)
        if any(kept.copies for kept in group):
            self._writing = self._thread.submit(self._file.write, group)
        else:
            self._file.write(group)

    def _wait(self) -> None:
        """Wait for the group that is being written; re-raises the write's error."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with waiting(ON_GPU):
                writing.result()

    def commit(self) -> None:
        """Write all rows taken so far and give the part its final name."""
        if self._group:
            self._write_group()
        self._wait()
        if self._file is not None:
            # What is told of these steps is kept first: once the part has its name, they never run again.
            self.before_commit()
            shards = self.parts.shards
            done = Range(self._first_step, self._end_step, shards.start, shards.stop)
            self._file.commit(part_name(done, self.parts.attempt))
            self._file = None
        self._first_step = self._end_step
        self._committed = time.monotonic()


class PartFile:
    """A part that is being written, in blocks of about `block_bytes`."""

    def __init__(self, storage: Storage, layout: Layout, block_bytes: int) -> None:
        self.layout = layout
        self.bytes = 0
        self._block_bytes = block_bytes
        self._unfinished = storage.unnamed()
        self._schema = part_schema(layout)
        self._writer = pa.ipc.new_file(self._unfinished, self._schema)

    def write(self, group: list[ShardRows]) -> None:
        """Write the rows of some shards."""
        for copy in chain.from_iterable(kept.copies for kept in group):
            copy.wait()
        shards = [kept.shard for kept in group]
        positions = np.concatenate(
            [
                np.array(shard.positions, np.int64) if shard.missing else np.arange(shard.start, shard.stop)
                for shard in shards
            ]
        )
        every = zip(self.layout.all_columns, zip(*(kept.rows for kept in group), strict=True), strict=True)
        leaves = [columns.to_arrow(column, pieces) for column, pieces in every]
        samples = np.concatenate([kept.indices for kept in group])
        table = pa.Table.from_arrays([array_of(positions), array_of(samples), *leaves], schema=self._schema)
        blocks = max(1, table.nbytes // min(GROUP_BYTES, self._block_bytes))
        self._writer.write_table(table, max_chunksize=max(1, len(positions) // blocks))
        self.bytes += table.nbytes

    def commit(self, name: str) -> None:
        """Finish the file and give it its final name."""
        self._writer.close()
        self._unfinished.commit(name)

    def discard(self) -> None:
        """Remove the unfinished file."""
        discard(self._writer, self._unfinished)


def discard(writer: pq.ParquetWriter | pa.ipc.RecordBatchFileWriter, file: UnfinishedFile | LocalFile) -> None:
    """End a writer of Arrow, and remove the unfinished file into which it wrote."""
    try:
        with suppress(StorageError, pa.ArrowException, OSError):  # the first error is the one that is reported
            writer.close()
    finally:
        file.discard()


def part_schema(layout: Layout) -> pa.Schema:
    """Return the schema of a part: the position of each row, then the columns of the merged file."""
    return layout.schema.insert(0, pa.field(POSITION, pa.int64()))


def lay_out(table: pa.Table, had: Layout, wanted: Layout) -> pa.Table:
    """Convert rows to the columns of the wanted layout, which may have variable shapes in place of fixed ones."""
    if had == wanted:
        return table
    leading = [name for name in (POSITION, SAMPLE_INDEX) if name in table.column_names]
    arrays = [table.column(name) for name in leading]
    for before, after in zip(had.all_columns, wanted.all_columns, strict=True):
        arrays.append(columns.converted(before, after, table.column(before.name).combine_chunks()))
    return pa.Table.from_arrays(arrays, schema=part_schema(wanted) if POSITION in leading else wanted.schema)


class PartReader:
    """A part, read from its first row to its last, a batch at a time; its file is opened only while it is needed.

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


@dataclass(eq=False)
class RowsInOrder:
    """The rows of several parts, each ordered by position, as blocks ordered by position; parts may join later."""

    layout: Layout
    _waiting: list[PartReader] = field(default_factory=list, init=False)
    _open: list[PartReader] = field(default_factory=list, init=False)

    def add(self, readers: Iterable[PartReader]) -> None:
        """Add parts, all of whose rows come after those that were taken."""
        self._waiting = sorted([*self._waiting, *readers], key=lambda reader: reader.first, reverse=True)

    def until(self, end: int) -> Iterator[pa.Table]:
        """Yield the rows before position `end` that were not taken yet; all parts with such rows must have joined."""
        while (boundary := self._boundary(end)) is not None:
            yield _sorted(pa.concat_tables([reader.take(boundary) for reader in self._open]))
            self._open = [reader for reader in self._open if len(reader.block) or reader.read(self.layout)]  # type: ignore[arg-type]

    def left(self) -> int | None:
        """Return the position of the first row that was not taken; None if all were."""
        self._open += [reader for reader in self._waiting if reader.read(self.layout)]
        self._waiting = []
        return min((reader.next for reader in self._open), default=None)

    def close(self) -> None:
        """Close the parts' files."""
        for reader in (*self._open, *self._waiting):
            reader.close()

    def _boundary(self, end: int) -> int | None:
        """Return the last position before `end` up to which the blocks hold all rows; None without such rows."""
        while True:
            boundary = min([end - 1, *(reader.last for reader in self._open)])
            if not self._waiting or self._waiting[-1].first > boundary:
                return boundary if any(reader.next <= boundary for reader in self._open) else None
            reader = self._waiting.pop()
            if reader.read(self.layout):
                self._open.append(reader)


def _sorted(table: pa.Table) -> pa.Table:
    """Sort rows by their positions. They are not copied if they come in long runs, as large shards do."""
    positions = numbers(table.column(POSITION))
    if (positions[1:] > positions[:-1]).all():
        return table
    starts = np.array([0, *(np.flatnonzero(np.diff(positions) != 1) + 1)])
    if len(table) < LONG_RUN * len(starts):
        return table.take(array_of(np.argsort(positions, kind="stable")))
    lengths = np.diff([*starts, len(table)])
    runs = np.argsort(positions[starts], kind="stable")
    return pa.concat_tables([table.slice(starts[run], lengths[run]) for run in runs])


@contextmanager
def reading_part(parts: Storage, name: str) -> Iterator[pa.RecordBatchFileReader]:
    """Open a part to read it one batch at a time; raises StorageError if it is damaged."""
    with undamaged(parts, name), parts.open(name) as stream:
        yield pa.ipc.open_file(stream)

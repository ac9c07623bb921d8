"""Merges parts into one file of the outputs, step after step, as its parts are committed."""

import functools
import hashlib
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import StorageError
from dp_ray.plan.file_cut import FileCut
from dp_ray.plan.order import Order
from dp_ray.plan.split import Shard, Split
from dp_ray.plan.work import Frontier, Range
from dp_ray.results.columns import METADATA, SAMPLE_INDEX, Layout
from dp_ray.results.manifest import OUTPUTS, FileRecord, write_record
from dp_ray.results.output_parts import AGAIN, POSITION, PartReader, RowsInOrder
from dp_ray.results.proof import RowProof
from dp_ray.results.step_digests import StepDigests
from dp_ray.rundir.ledger import PART_NAME, PARTS, Ledger, check_newest, fenced, range_of, record_name
from dp_ray.storage import Storage, UnfinishedFile

GROUP_BYTES = 8 << 20


class FileMerge:
    """The merging of one file. If it is ended before the file has its name, it is begun anew from the parts.

    `between` is called between two blocks of rows, and may raise an error to end the merging. `find_missing` gives
    the positions that have no outputs, as far as they are known.
    """

    def __init__(
        self,
        run: Storage,
        ledger: Ledger,
        cut: FileCut,
        number: int,
        split: Split,
        order: Order,
        between: Callable[[], None] = lambda: None,
        find_missing: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._between = between
        self._run = fenced(run, ledger.attempt)
        self._parts = self._run.child(PARTS)
        self._ledger = ledger
        self._cut = cut
        self._number = number
        self._steps = cut.steps_of(number)
        self._split = split
        self._order = order
        self._find_missing = find_missing
        self._missing: Collection[int] = ()
        self._seen: set[str] = set()  # all names in the folder of the parts
        self._names: list[str] = []
        self._done = Frontier(self._steps.start)
        self._through = self._steps.start
        self._open: OpenFile | None = None

    @property
    def first_step(self) -> int:
        """The first step of the file."""
        return self._steps.start

    @property
    def through(self) -> int:
        """The first step that is not merged yet."""
        return self._through

    def advance(self) -> bool:
        """Merge the steps all of whose parts are there by now; True once the file has its name.

        Raises StorageError if the parts do not hold each position once, or if this attempt is superseded.
        """
        new = self._look()
        self._missing = frozenset(self._find_missing())  # after the parts: a bad sample is kept before its part
        self._move_on()
        if new:
            self._join(new)
        if self._open is not None:
            self._open.proof.know_missing(self._missing)
            self._open.write_until(self._position(self._through), self._through, self._between)
        if self._through < self._steps.stop:
            return False
        self._commit()
        return True

    def refuse(self) -> None:
        """Raise StorageError for a file whose parts are not all there, though no worker will write any more."""
        lost = next(shard for shard in self._shards() if shard not in self._done and not self._is_missing(shard))
        raise StorageError(f"the outputs of position {lost.start} is missing; {AGAIN}")

    def close(self) -> None:
        """Discard the file unless it has its name."""
        if self._open is not None:
            self._open.discard()
            self._open = None

    def _look(self) -> list[str]:
        """Find the parts of this file that have come since the last look. Only names that are new are looked at."""
        names = self._parts.names()
        new = self._ledger.counting(name for name in names if name not in self._seen)
        self._seen.update(names)
        parts = [name for name in new if _first_step(name) in self._steps]
        self._names += parts
        for name in parts:
            self._done.add(_range(name))
        return parts

    def _move_on(self) -> None:
        """Find the first step of which parts are missing."""
        while self._through < self._steps.stop and all(map(self._is_there, self._shards())):
            self._through += 1

    def _shards(self) -> list[Shard]:
        """All shards of the first step that is not merged yet."""
        return self._split.worker(1, 0, self._through)

    def _is_there(self, shard: Shard) -> bool:
        """Whether a shard's rows are in a part, or will not come."""
        if shard not in self._done and self._is_missing(shard):
            self._done.skip(shard)
        return shard in self._done

    def _is_missing(self, shard: Shard) -> bool:
        """Whether no row of a shard will come, since all its samples were set aside."""
        return bool(self._missing) and all(at in self._missing for at in range(shard.start, shard.stop))

    def _join(self, names: list[str]) -> None:
        """Add parts to the open file. If its layout cannot hold their rows, it is begun anew in one that can."""
        new = self._readers(names)
        layouts = [*([self._open.layout] if self._open else []), *(reader.layout for reader in new)]
        layout = functools.reduce(Layout.join, layouts)
        if self._open is None or self._open.layout != layout:
            self.close()
            self._open, new = self._begin(layout), self._readers(self._names)
        self._open.rows.add(new)

    def _readers(self, names: list[str]) -> list[PartReader]:
        return [PartReader(self._parts, name, self._position(_first_step(name))) for name in names]

    def _begin(self, layout: Layout) -> "OpenFile":
        first, end = self._position(self._steps.start), self._position(self._steps.stop)
        proof = RowProof(self._order, first, end, self._missing)
        digests = StepDigests(layout, self._split.batch_size, self._steps.start)
        return OpenFile(self._run, self._cut.name(self._number), layout, proof, digests)

    def _position(self, step: int) -> int:
        """The first position of a step, or the end of all of them."""
        return min(self._split.rows_kept, step * self._split.batch_size)

    def _commit(self) -> None:
        """Give the file its name and its record; then its parts are not needed any more."""
        first, end = self._position(self._steps.start), self._position(self._steps.stop)
        record = self._open.commit(first, end) if self._open else self._without_rows(first, end)
        self._open = None
        done = Range(self._steps.start, self._steps.stop, 0, self._split.shards)
        write_record(self._run, record_name(self._number, done, self._ledger.attempt), record)
        check_newest(self._run, self._ledger.attempt)
        for name in self._names:
            self._parts.delete(name)

    def _without_rows(self, first: int, end: int) -> FileRecord:
        """The record of a file that is not there, since all its samples were set aside."""
        nothing = hashlib.sha256().hexdigest()
        name = self._cut.name(self._number)
        return FileRecord(name, 0, first, end, 0, nothing, (nothing,) * len(self._steps))


def _range(name: str) -> Range:
    """The steps and shards of a part; an empty range before all steps if this is not the name of one."""
    match = PART_NAME.fullmatch(name)
    return range_of(match) if match else Range(-1, -1, 0, 0)


def _first_step(name: str) -> int:
    return _range(name).first_step


class OpenFile:
    """A file of the outputs that is being written, and the rows that go into it."""

    def __init__(self, run: Storage, name: str, layout: Layout, proof: RowProof, digests: StepDigests) -> None:
        self.layout = layout
        self.rows = RowsInOrder(layout)
        self._name = name
        self.proof = proof
        self._digests = digests
        self._stream = HashedFile(UnfinishedFile(run, f"{OUTPUTS}/{name}"))
        self._writer = open_writer(self._stream, layout.schema)
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._num_rows = 0

    def write_until(self, end: int, step: int, between: Callable[[], None]) -> None:
        """Prove, hash and write the rows before position `end`, where `step` begins."""
        for block in self.rows.until(end):
            between()
            self.proof.take(block)
            self._digests.take(block)
            self._held.append(block.drop_columns([POSITION]))
            self._held_bytes += block.nbytes
            if self._held_bytes >= GROUP_BYTES:
                self._write_group()
        self._digests.through(step)

    def _write_group(self) -> None:
        group = pa.concat_tables(self._held)
        self._writer.write_table(group, row_group_size=max(1, len(group)))
        self._num_rows += len(group)
        self._held, self._held_bytes = [], 0

    def commit(self, first: int, end: int) -> FileRecord:
        """Finish the file, which holds the positions `first .. end - 1`, and give it its name."""
        self.proof.end()
        if (left := self.rows.left()) is not None:
            self.proof.refuse(left)
        if self._held:
            self._write_group()
        self._writer.close()
        self.close()
        self._stream.commit()
        written = self._stream.tell()
        steps = tuple(self._digests.done)
        layout = self.layout.metadata[METADATA].decode()
        return FileRecord(self._name, self._num_rows, first, end, written, self._stream.sha256, steps, layout)

    def close(self) -> None:
        """Close what is read."""
        self.rows.close()
        self._digests.close()

    def discard(self) -> None:
        """Remove the unfinished file."""
        self.close()
        try:
            with suppress(StorageError, pa.ArrowException, OSError):  # the first error is what is told
                self._writer.close()
        finally:
            self._stream.discard()


class HashedFile:
    """An unfinished file that hashes the bytes written to it."""

    closed = False

    def __init__(self, file: UnfinishedFile) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._bytes = 0

    @property
    def sha256(self) -> str:
        """The SHA-256 of the bytes so far."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> None:
        """Write bytes."""
        self._digest.update(data)
        self._bytes += len(memoryview(data).cast("B"))
        self._file.write(data)

    def tell(self) -> int:
        """The number of bytes written."""
        return self._bytes

    def flush(self) -> None:
        """Flush the stream."""
        self._file.flush()

    def close(self) -> None:
        """Do nothing, as `UnfinishedFile.close`."""

    def commit(self) -> None:
        """Give the file its name."""
        self._file.commit()

    def discard(self) -> None:
        """Remove the file."""
        self._file.discard()


def open_writer(stream: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Open a Parquet writer without compression or dictionaries: outputs hardly compress and are read once."""
    return pq.ParquetWriter(
        stream,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=[SAMPLE_INDEX],
        write_batch_size=1 << 16,
    )

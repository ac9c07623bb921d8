"""The files of the outputs: merged from parts, hashed, proved and listed.

Begin at `FileMerge`: it merges the parts of one file, step after step, as workers commit them. `RowProof` proves the
rows on the way: each position of the order once, with the order's sample. `StepDigests` hashes each step's raw bytes:
leaf after leaf, and each leaf row after row. So a digest depends neither on workers and files, nor on how a leaf is
stored. A `FileRecord` notes that a file is whole.

At the end the driver proves the files by their records alone (`prove_outputs`), and writes the manifest: which files
hold the outputs of a run, in order, with their rows, bytes and hashes.
"""

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import DataError, ModelError, StorageError
from dp_ray.outputs.columns import METADATA, SAMPLE_INDEX, Layout, bytes_of_value, from_arrow, raw_bytes
from dp_ray.outputs.parts import POSITION, RUN_AGAIN, PartReader, RowsInOrder, discard
from dp_ray.plan.order import EpochOrder
from dp_ray.plan.split import Done, FilePlan, Range, Shard, Split
from dp_ray.records import Record, damage_told
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, OUTPUTS, PART_NAME, PARTS, Ledger, check_newest, fenced, range_of, record_name
from dp_ray.storage import Storage, UnfinishedFile
from dp_ray.tables import numbers, plain_values

HELD_BYTES = 16 << 20  # of one leaf of one step; more of it is held on the local disk
PIECE = 1 << 20
GROUP_BYTES = 8 << 20
MANIFEST = "outputs_manifest.json"  # beside the folder, which polars cannot read if it holds any other file
BEGIN_ANEW = "make them alike, and run the job again with --overwrite (overwrite=True)"
Positions = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class FileRecord:
    """A file of the outputs: its name, and the positions `first .. end - 1` that it holds.

    `sha256` is that of the file's bytes. `steps` are the digests of its steps, in order. `layout` is its columns, as
    the file's metadata has them; earlier versions did not keep it. If all samples were set aside, the record has no
    rows and there is no file.
    """

    name: str
    rows: int
    first: int
    end: int
    bytes: int
    sha256: str
    steps: tuple[str, ...]
    layout: str = ""

    @property
    def path(self) -> str:
        """The file's path in the run directory."""
        return f"{OUTPUTS}/{self.name}"

    def described(self) -> dict[str, Any]:
        """Return the file's entry in the manifest: a hash in place of the digests of its steps."""
        values = asdict(self)
        del values["steps"], values["end"], values["layout"]
        return {**values, "steps_sha256": hash_of_steps([self])}


@dataclass(frozen=True)
class AttemptOutputs:
    """The outputs that an attempt writes: where, after which earlier parts, of which rows in which order.

    `find_missing` gives the positions that have no outputs, as far as they are known.
    """

    run: Storage
    ledger: Ledger
    split: Split
    order: EpochOrder
    find_missing: Callable[[], Collection[int]] = tuple

    def position(self, step: int) -> int:
        """Return the first position of a step, or the end of all of them."""
        return min(self.split.rows_kept, step * self.split.batch_size)


FILE_JSON = Record[FileRecord](FileRecord, hides=False)  # once there is one, the file counts
MANIFEST_JSON = Record[dict[str, Any]](dict, MANIFEST, indent=2)


class FileMerge:
    """The merging of one file. If it ends before the file has its name, the next attempt merges the parts again.

    `between` is called between two blocks of rows, and may raise an error to end the merging.
    """

    def __init__(
        self, outputs: AttemptOutputs, plan: FilePlan, number: int, between: Callable[[], None] = lambda: None
    ) -> None:
        self._outputs = outputs
        self._between = between
        self._run = fenced(outputs.run, outputs.ledger.attempt)
        self._parts = self._run.child(PARTS)
        self._number = number
        self._name = plan.name(number)
        self._steps = plan.steps_of(number)
        self.first_step = self._steps.start
        self._first, self._end = outputs.position(self._steps.start), outputs.position(self._steps.stop)
        self._missing: Collection[int] = ()
        self._seen: set[str] = set()  # all names in the folder of the parts
        self._names: list[str] = []
        self._done = Done()
        self.through = self._steps.start  # the first step that is not merged yet
        self._open: OpenFile | None = None

    def advance(self) -> bool:
        """Merge the steps all of whose parts are there by now; True once the file has its name.

        Raises StorageError if the parts do not hold each position once, or if this attempt is superseded.
        """
        names = self._parts.names()
        counting = self._outputs.ledger.counting(name for name in names if name not in self._seen)
        self._seen.update(names)  # of a thousand steps the folder may hold each part: none is looked at twice
        new = [name for name in counting if _range(name).first_step in self._steps]
        self._names += new
        for name in new:
            self._done.add(_range(name))
        # After the parts: a bad sample is kept before its part.
        self._missing = frozenset(self._outputs.find_missing())
        while self.through < self._steps.stop and all(map(self._is_there, self._shards())):
            self.through += 1
        if new:
            self._join(new)
        if self._open is not None:
            self._open.proof.know_missing(self._missing)
            self._open.write_until(self._outputs.position(self.through), self.through, self._between)
        if self.through < self._steps.stop:
            return False
        self._commit()
        return True

    def refuse(self) -> None:
        """Raise StorageError for a file whose parts are not all there, though no worker will write any more."""
        lost = next(shard for shard in self._shards() if not self._is_there(shard))
        raise StorageError(f"the outputs of position {lost.start} is missing; {RUN_AGAIN}")

    def close(self) -> None:
        """Discard the file unless it has its name."""
        if self._open is not None:
            self._open.discard()
            self._open = None

    def _shards(self) -> list[Shard]:
        """Return all shards of the first step that is not merged yet."""
        return self._outputs.split.worker(1, 0, self.through)

    def _is_there(self, shard: Shard) -> bool:
        """Return whether a shard's rows are in a part, or none will come, since all its samples were set aside."""
        return shard in self._done or all(at in self._missing for at in range(shard.start, shard.stop))

    def _join(self, names: list[str]) -> None:
        """Add parts to the open file; if its layout cannot hold their rows, write it again in one that can."""
        new = self._readers(names)
        layouts = [] if self._open is None else [self._open.layout]
        layout = functools.reduce(Layout.join, [*layouts, *(reader.layout for reader in new)])
        if self._open is None or self._open.layout != layout:
            self.close()
            proof = RowProof(self._outputs.order, self._first, self._end, self._missing)
            digests = StepDigests(layout, self._outputs.split.batch_size, self._steps.start)
            self._open = OpenFile(self._run, self._name, layout, proof, digests)
            new = self._readers(self._names)
        self._open.rows.add(new)

    def _readers(self, names: list[str]) -> list[PartReader]:
        return [PartReader(self._parts, name, self._outputs.position(_range(name).first_step)) for name in names]

    def _commit(self) -> None:
        """Give the file its name and its record; then its parts are not needed any more."""
        if self._open is not None:
            record = self._open.commit(self._first, self._end)
        else:  # all samples of its steps were set aside: there is a record, and no file
            nothing = hashlib.sha256().hexdigest()
            record = FileRecord(self._name, 0, self._first, self._end, 0, nothing, (nothing,) * len(self._steps))
        self._open = None
        done = Range(self._steps.start, self._steps.stop, 0, self._outputs.split.shards)
        # Killed before the record, the file is merged again from its parts, and replaced. Killed after it, the parts
        # that are left are not read again.
        FILE_JSON.write(self._run.child(FILES), record, record_name(self._number, done, self._outputs.ledger.attempt))
        check_newest(self._run, self._outputs.ledger.attempt)  # a newer attempt may need these parts
        for name in self._names:
            self._parts.delete(name)


def _range(name: str) -> Range:
    """Return the steps and shards of a part; an empty range before all steps if this is not the name of one."""
    match = PART_NAME.fullmatch(name)
    return range_of(match) if match else Range(-1, -1, 0, 0)


class RowProof:
    """The proof of rows, block after block: of the positions `first .. end - 1` but for the `missing` ones."""

    def __init__(self, order: EpochOrder, first: int, end: int, missing: Collection[int] = ()) -> None:
        self._order = order
        self._at = first
        self._end = end
        self.know_missing(missing)

    def know_missing(self, missing: Collection[int]) -> None:
        """Note the positions that are known so far to have no outputs."""
        self._missing = np.array(sorted(missing), np.int64)

    def take(self, block: pa.Table) -> None:
        """Prove the next rows; raises StorageError, which names the position, if others were to come."""
        positions = numbers(block.column(POSITION))
        expected = self._next(len(positions))
        wrong = np.flatnonzero(positions != expected)
        if len(wrong):
            due, got = int(expected[wrong[0]]), int(positions[wrong[0]])
            what = "is missing" if got > due else "is there twice"
            raise StorageError(f"the outputs of position {min(due, got)} {what}; {RUN_AGAIN}")
        if len(positions) and positions[-1] >= self._end:
            self.refuse(self._end)
        self._check_samples(positions, numbers(block.column(SAMPLE_INDEX)))
        self._at = int(positions[-1]) + 1 if len(positions) else self._at

    def refuse(self, position: int) -> None:
        """Raise StorageError for rows from `position` on, where the file has to end."""
        raise StorageError(
            f"there are outputs of position {position}, but no more than {self._end} are due; {RUN_AGAIN}"
        )

    def end(self) -> None:
        """Raise StorageError, which names the position, unless the rows are complete."""
        due = self._next(1)
        if len(due) and due[0] < self._end:
            raise StorageError(f"the outputs end at position {due[0]} of {self._end}; {RUN_AGAIN}")

    def _next(self, count: int) -> Positions:
        """Return the next `count` positions that are due."""
        candidates = np.arange(self._at, self._at + count + len(self._missing))
        return np.setdiff1d(candidates, self._missing, assume_unique=True)[:count]

    def _check_samples(self, positions: Positions, samples: Positions) -> None:
        if not len(positions):
            return
        first = int(positions[0])
        expected = self._order.indices(first, int(positions[-1]) + 1)[positions - first]
        wrong = np.flatnonzero(samples != expected)
        if len(wrong):
            raise StorageError(
                f"position {positions[wrong[0]]} holds the outputs of sample {samples[wrong[0]]}, "
                f"where the order has sample {expected[wrong[0]]}; {RUN_AGAIN}"
            )


class StepDigests:
    """The digests of the steps from `first_step` on; takes their rows in order, in blocks of any size."""

    def __init__(self, layout: Layout, batch_size: int, first_step: int) -> None:
        self.done: list[str] = []
        self._layout = layout
        self._batch_size = batch_size
        self._first_step = first_step
        self._begin()

    def take(self, block: pa.Table) -> None:
        """Hash the next rows, which have their positions."""
        steps = numbers(block.column(POSITION)) // self._batch_size
        borders = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
        for first, end in pairwise(borders):
            if first < end:
                self.through(int(steps[first]))
                self._add(block.slice(first, end - first))

    def through(self, step: int) -> None:
        """End all steps before `step`, even those without rows."""
        while self._first_step + len(self.done) < step:
            for leaf in self._others:
                leaf.seek(0)
                while piece := leaf.read(PIECE):
                    self._digest.update(piece)
            self.close()
            self.done.append(self._digest.hexdigest())
            self._begin()

    def close(self) -> None:
        """Remove the bytes that are kept on the local disk."""
        for leaf in self._others:
            leaf.close()

    def _begin(self) -> None:
        self._digest = hashlib.sha256()
        self._others: list[Any] = []

    def _add(self, rows: pa.Table) -> None:
        """Hash the first leaf's bytes at once; keep those of all other leaves, which come after them."""
        self._others = self._others or [SpooledTemporaryFile(HELD_BYTES) for _ in self._layout.columns[1:]]  # noqa: SIM115
        takers: list[Callable[[Any], Any]] = [self._digest.update, *(leaf.write for leaf in self._others)]
        for column, take in zip(self._layout.columns, takers, strict=True):
            for chunk in rows.column(column.name).chunks:
                if column.is_stored_raw:
                    flat = chunk.storage.flatten() if isinstance(chunk, pa.ExtensionArray) else chunk
                    take(memoryview(plain_values(flat).data).cast("B"))
                    continue
                leaf = from_arrow(column, chunk)
                if column.is_value:
                    for value in leaf:
                        take(bytes_of_value(value))
                    continue
                if column.depth is not None:  # where a row ends counts too
                    for row in leaf:
                        take(np.array([row.ndim, *row.shape], np.int64).tobytes())
                        take(raw_bytes(row))
                    continue
                for tensor in leaf if isinstance(leaf, list) else [leaf]:
                    take(raw_bytes(tensor))


class HashedFile(UnfinishedFile):
    """An unfinished file that hashes the bytes written to it, as the stream of a Parquet writer."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__(storage, name)
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> None:
        """Write bytes."""
        self.digest.update(data)
        super().write(data)


class OpenFile:
    """A file of the outputs that is being written, and the rows that go into it."""

    def __init__(self, run: Storage, name: str, layout: Layout, proof: RowProof, digests: StepDigests) -> None:
        self.layout = layout
        self.rows = RowsInOrder(layout)
        self._name = name
        self.proof = proof
        self._digests = digests
        self._file = HashedFile(run, f"{OUTPUTS}/{name}")
        # Neither compressed nor with dictionaries: outputs hardly compress, and are read once.
        self._writer = pq.ParquetWriter(
            self._file,
            layout.schema,
            compression="none",
            use_dictionary=False,
            write_statistics=[SAMPLE_INDEX],
            write_batch_size=1 << 16,
        )
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
        left = self.rows.left()
        if left is not None:
            self.proof.refuse(left)
        if self._held:
            self._write_group()
        self._writer.close()
        self.close()
        written, sha256 = self._file.tell(), self._file.digest.hexdigest()
        self._file.commit()
        steps = tuple(self._digests.done)
        layout = self.layout.metadata[METADATA].decode()
        return FileRecord(self._name, self._num_rows, first, end, written, sha256, steps, layout)

    def close(self) -> None:
        """Close the parts' files, and remove the bytes that are kept on the local disk."""
        self.rows.close()
        self._digests.close()

    def discard(self) -> None:
        """Remove the unfinished file."""
        self.close()
        discard(self._writer, self._file)


def hash_of_steps(records: Iterable[FileRecord]) -> str:
    """Return the SHA-256 of the digests of the files' steps, in order; of all files it is `outputs_sha256`."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(bytes.fromhex("".join(record.steps)))
    return digest.hexdigest()


def read_records(run: Storage, names: Iterable[str]) -> list[FileRecord]:
    """Read the records among these names, in the order of their files; raise StorageError if one is damaged."""
    return [FILE_JSON.read(run.child(FILES), name) for _, name in sorted(ledger.records_in(names).items())]


def drop_lost(run: Storage) -> None:
    """Remove the records of files that are gone or have another size: their steps run again."""
    folder = run.child(FILES)
    for name in ledger.records_in(ledger.committed(run)).values():
        record = FILE_JSON.read(folder, name)
        if record.rows and run.size(record.path) != record.bytes:
            folder.delete(name)


def prove_outputs(run: Storage, rows: int, missing: Collection[int] = ()) -> None:
    """Prove that the files of a run's outputs are whole, and write their manifest; no row of them is read.

    Raises what `check_files` and `check_layouts` raise.
    """
    records = read_records(run, ledger.committed(run))
    if not records:
        raise StorageError(f"{run}: there are no outputs; {RUN_AGAIN}")
    check_files(run, records, rows, missing)
    check_layouts(run, records)
    if not any(record.rows for record in records):
        raise DataError(f"{run}: there are no outputs: all samples were set aside, see quarantine/")
    values = {"rows": sum(record.rows for record in records), "outputs_sha256": hash_of_steps(records)}
    MANIFEST_JSON.write(run, {**values, "files": [record.described() for record in records if record.rows]})


def check_files(run: Storage, records: Sequence[FileRecord], rows: int, missing: Collection[int] = ()) -> None:
    """Raise StorageError unless the files hold the positions `0 .. rows - 1` in order, but for the `missing` ones.

    Each file must have as many bytes as were written.
    """
    at = 0
    for record in records:
        if record.first != at:
            raise StorageError(f"{run}/{record.path}: begins at position {record.first}, not {at}; {RUN_AGAIN}")
        absent = sum(record.first <= position < record.end for position in missing)
        if record.rows != record.end - record.first - absent:
            due = record.end - record.first - absent
            raise StorageError(f"{run}/{record.path}: holds {record.rows} rows, where {due} are due; {RUN_AGAIN}")
        size = run.size(record.path)
        if size != record.bytes and record.rows:
            got = "is gone" if size is None else f"has {size} bytes, where {record.bytes} were written"
            raise StorageError(f"{run}/{record.path}: {got}; {RUN_AGAIN}")
        at = record.end
    if at != rows:
        raise StorageError(f"the outputs end at position {at} of {rows}; {RUN_AGAIN}")


def check_layouts(run: Storage, records: Sequence[FileRecord]) -> None:
    """Raise ModelError or DataError, naming steps, unless the files can be read as one: only shapes may differ."""
    joined: Layout | None = None
    first = 0
    for record in records:
        end = first + len(record.steps)
        if record.layout:
            layout = Layout.from_metadata({METADATA: record.layout.encode()})
            try:
                joined = layout if joined is None else joined.join(layout)
            except (ModelError, DataError) as error:
                where = f"the outputs of steps {first} to {end - 1} do not go with those of the steps before"
                raise type(error)(f"{run}/{record.path}: {where}: {error}; {BEGIN_ANEW}") from error
        first = end


def names_so_far(run: Storage) -> list[str]:
    """Return the whole files of the outputs of a run that goes on, up to the first gap."""
    if run.exists(MANIFEST):
        return file_names(run)
    records = ledger.records_in(ledger.committed(run))
    whole = [number for number in range(len(records)) if all(before in records for before in range(number + 1))]
    return [record.path for record in read_records(run, [records[number] for number in whole]) if record.rows]


def file_names(run: Storage) -> list[str]:
    """Return the files of a finished run's outputs, in order, by their paths in the run directory.

    Raises StorageError if the manifest is damaged.
    """
    with damage_told(f"{run}/{MANIFEST}"):
        return [f"{OUTPUTS}/{file['name']}" for file in MANIFEST_JSON.read(run)["files"]]


def outputs_sha256(run: Storage) -> str:
    """Return the hash of a finished run's outputs, as its manifest has it."""
    return str(MANIFEST_JSON.read(run)["outputs_sha256"])

"""Proves that the outputs are whole: each position of the order once, with the order's sample.

The worker that merges a file proves its rows, block by block. The driver proves the files, by their records alone.
Positions that are known to be missing can be given to both.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dp_ray.errors import DataError, ModelError, StorageError
from dp_ray.plan.order import Order
from dp_ray.results.arrow_numbers import numbers
from dp_ray.results.columns import METADATA, SAMPLE_INDEX, Layout
from dp_ray.results.manifest import FileRecord, read_records, write_manifest
from dp_ray.results.output_parts import AGAIN, POSITION
from dp_ray.rundir import ledger
from dp_ray.storage import Storage

ANEW = "make them alike, and run the job again with --overwrite (overwrite=True)"
Positions = np.ndarray[Any, np.dtype[np.int64]]


class RowProof:
    """Proves blocks of rows, one after another, of the positions `first .. end - 1` but for the `missing` ones."""

    def __init__(self, order: Order, first: int, end: int, missing: Collection[int] = ()) -> None:
        self._order = order
        self._at = first
        self._end = end
        self.know_missing(missing)

    def know_missing(self, missing: Collection[int]) -> None:
        """Take the positions that have no outputs, as they are known by now."""
        self._missing = np.array(sorted(missing), np.int64)

    def take(self, block: pa.Table) -> None:
        """Prove the next rows; raises StorageError, which names the position, if others were to come."""
        positions = numbers(block.column(POSITION))
        expected = self._next(len(positions))
        wrong = np.flatnonzero(positions != expected)
        if len(wrong):
            due, got = int(expected[wrong[0]]), int(positions[wrong[0]])
            what = "is missing" if got > due else "is there twice"
            raise StorageError(f"the outputs of position {min(due, got)} {what}; {AGAIN}")
        if len(positions) and positions[-1] >= self._end:
            self.refuse(self._end)
        self._check_samples(positions, numbers(block.column(SAMPLE_INDEX)))
        self._at = int(positions[-1]) + 1 if len(positions) else self._at

    def refuse(self, position: int) -> None:
        """Raise StorageError for rows from `position` on, which are more than there are to be."""
        raise StorageError(f"there are outputs of position {position}, but no more than {self._end} are due; {AGAIN}")

    def end(self) -> None:
        """Raise StorageError, which names the position, unless the rows are complete."""
        if len(due := self._next(1)) and due[0] < self._end:
            raise StorageError(f"the outputs end at position {due[0]} of {self._end}; {AGAIN}")

    def _next(self, count: int) -> Positions:
        """The next `count` positions that are due."""
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
                f"where the order has sample {expected[wrong[0]]}; {AGAIN}"
            )


def prove_outputs(run: Storage, rows: int, missing: Collection[int] = ()) -> None:
    """Prove that the files of a run's outputs are whole, and write their manifest; no row of them is read.

    Raises what `check_files` and `check_layouts` raise.
    """
    records = read_records(run, ledger.committed(run))
    if not records:
        raise StorageError(f"{run}: there are no outputs; {AGAIN}")
    check_files(run, records, rows, missing)
    check_layouts(run, records)
    if not any(record.rows for record in records):
        raise DataError(f"{run}: there are no outputs: all samples were set aside, see quarantine/")
    write_manifest(run, records)


def check_files(run: Storage, records: Sequence[FileRecord], rows: int, missing: Collection[int] = ()) -> None:
    """Raise StorageError unless the files hold the positions `0 .. rows - 1` in order, but for the `missing` ones.

    Each file must have as many bytes as were written.
    """
    at = 0
    for record in records:
        if record.first != at:
            raise StorageError(f"{run}/{record.path}: begins at position {record.first}, not {at}; {AGAIN}")
        absent = sum(record.first <= position < record.end for position in missing)
        if record.rows != record.end - record.first - absent:
            due = record.end - record.first - absent
            raise StorageError(f"{run}/{record.path}: holds {record.rows} rows, where {due} are due; {AGAIN}")
        if (size := run.size(record.path)) != record.bytes and record.rows:
            got = "is gone" if size is None else f"has {size} bytes, where {record.bytes} were written"
            raise StorageError(f"{run}/{record.path}: {got}; {AGAIN}")
        at = record.end
    if at != rows:
        raise StorageError(f"the outputs end at position {at} of {rows}; {AGAIN}")


def check_layouts(run: Storage, records: Sequence[FileRecord]) -> None:
    """Raise ModelError or DataError, which names steps, unless the files can be read as one: alike but for shapes."""
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
                raise type(error)(f"{run}/{record.path}: {where}: {error}; {ANEW}") from error
        first = end

"""Keep what the workers report, on the driver: the shapes of each shard, and the times of each step.

`ReportTables` writes both as they arrive, while a run goes on. Workers may be ahead of others, and steps run twice:
`merge_reports` puts the shape reports in order, at a run's end. It takes some steps at a time, so that memory does
not grow with their number.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import StorageError
from dp_ray.messages import Report
from dp_ray.rundir.files import SHAPES
from dp_ray.storage import Storage
from dp_ray.system.threads import repeated
from dp_ray.tables import PartTable, array_of, numbers, reading, step_ranges
from dp_ray.telemetry.shapes import SCHEMA, ShardReport, decode_sizes
from dp_ray.telemetry.times import step_time_parts, times_table

REPORTS = "reports"  # the folder of an unfinished run's shape reports, in the order of their arrival
PIECE = "piece-{}.parquet"
ROWS_IN_A_PIECE = 1 << 14  # it is written again with each commit, until it is full
PENDING = "pending.parquet"  # of a run of an earlier version: the reports of workers that were ahead
ROWS_IN_A_GROUP = 1 << 16  # of a file, which are read together
ROWS_AT_ONCE = 1 << 18  # that are put in order together
WRITE_SECONDS = 5.0
SHARE_OF_WRITES = 0.02  # of the driver's time, at most


class ReportTables:
    """The reports of a run on disk: a thread writes them every few seconds, and `keep` at once.

    The run may have reports of earlier drivers. It raises StorageError if one of their files is damaged: now, and not
    when they are merged, after the last step.
    """

    def __init__(self, run: Storage, num_steps: int) -> None:
        for file in report_files(run):
            step_ranges(*file)
        self._run, self._num_steps = run, num_steps
        self._shapes = PartTable(run.child(REPORTS), PIECE, ROWS_IN_A_PIECE, row_group_size=ROWS_IN_A_GROUP)
        self._times = step_time_parts(run)
        self._attempt = 0
        self._due = 0.0
        self._writing = threading.Lock()  # a table is written by one thread at a time
        self._is_open = ExitStack()
        self._is_open.enter_context(repeated("reports", WRITE_SECONDS, self._write))

    def begin(self, attempt: int) -> None:
        """Begin an attempt of the run, counted from 0."""
        self._attempt = attempt

    def add(self, report: Report) -> None:
        """Add the report of a worker of the current attempt."""
        if report.shapes is not None:
            self._shapes.add(report.shapes)
        if report.times is not None:
            self._times.add(times_table(self._attempt, report.world, report.times))

    def keep(self) -> None:
        """Write all shape reports: a worker is about to commit their steps."""
        with self._writing, suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
            self._shapes.write()

    def close(self) -> None:
        """Write what is new, and put the shape reports in order."""
        self._is_open.close()
        self._shapes.write()
        merge_reports(self._run, self._num_steps)
        with suppress(StorageError):  # the times only inform
            self._times.write()

    def _write(self) -> None:
        began = time.monotonic()
        if began >= self._due or self._shapes.num_new >= ROWS_IN_A_GROUP:  # so that memory has a limit
            self.keep()
            with suppress(StorageError):
                self._times.write()
            self._due = began + (time.monotonic() - began) / SHARE_OF_WRITES


def report_files(run: Storage) -> list[tuple[Storage, str]]:
    """Return the files with shape reports of a run, the oldest reports first."""
    folder = run.child(REPORTS)
    merged = [(run, SHAPES)] if run.exists(SHAPES) else []  # those of the drivers before
    pending = [(folder, PENDING)] if folder.exists(PENDING) else []
    return [*merged, *pending, *((folder, name) for name in folder.numbered(PIECE))]


def merge_reports(run: Storage, num_steps: int) -> None:
    """Write the shape reports of a run's steps to `shapes.parquet`: each shard once, as it ran last, in order.

    A driver that is killed meanwhile loses none of them: they are merged again.
    """
    files = [(file, step_ranges(*file)) for file in report_files(run)]
    groups = [group for _, groups in files for group in groups]
    end = min(num_steps, 1 + max((last for _, last, _ in groups), default=-1))
    window = max(1, end * ROWS_AT_ONCE // max(1, sum(rows for *_, rows in groups)))
    with run.writing(SHAPES) as stream, pq.ParquetWriter(stream, SCHEMA) as writer:
        for begin in range(0, end, window):
            stop = min(end, begin + window)
            tables = []
            for file, groups in files:
                within = [at for at, (first, last, _) in enumerate(groups) if first < stop and last >= begin]
                if within:
                    tables.append(_rows_between(file, within, begin, stop))
            if any(map(len, tables)):
                writer.write_table(_as_ran_last(pa.concat_tables(tables)), ROWS_IN_A_GROUP)
    run.child(REPORTS).remove()


def _rows_between(file: tuple[Storage, str], groups: list[int], begin: int, stop: int) -> pa.Table:
    """Read the rows of some row groups whose steps are `begin` to `stop - 1`."""
    with reading(*file) as parquet:
        table = parquet.read_row_groups(groups).cast(SCHEMA)
        step = numbers(table["step"])
        return table.filter(array_of((begin <= step) & (step < stop)))


def _as_ran_last(table: pa.Table) -> pa.Table:
    """Return the last row of each step and shard, ordered by them."""
    table = table.unify_dictionaries().combine_chunks()
    step, shard = numbers(table["step"]), numbers(table["shard"])
    order = np.lexsort((shard, step))  # stable: the newest row of a shard comes last
    is_last = (np.diff(step[order], append=-1) != 0) | (np.diff(shard[order], append=-1) != 0)
    return table.take(array_of(order[is_last]))


def read_reports(file: pq.ParquetFile) -> Iterator[ShardReport]:
    """Read the shard reports of a file, in its order."""
    decode = cache(decode_sizes)
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            yield ShardReport(**{**row, **{key: decode(row[key]) for key in ("input_size", "output_size")}})

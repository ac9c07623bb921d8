"""The time of each worker's steps, in files that are written while the run goes on.

`times/part-N.parquet` has a row for each step of each worker: COLUMNS, and the seconds of each part of PARTS. Read it
with `read_step_times`, which leaves out what ran twice and tells waiting from exchanging.
"""

import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import StorageError
from dp_ray.replica.step_clock import PARTS, TimedStep
from dp_ray.replica.world import World
from dp_ray.results.arrow_numbers import array_of, array_of_texts
from dp_ray.storage import Storage

TIMES = "times"
PART_FILE = re.compile(r"part-(\d+)\.parquet")
ROWS_IN_A_PART = 1 << 16
WRITE_SECONDS = 5.0
SHARE_OF_WRITES = 0.02  # of the driver's time, at most

COLUMNS = {
    "step": pa.int64(),
    "attempt": pa.int32(),  # the place in `world_sizes` of result.json
    "rank": pa.int32(),
    "node": pa.dictionary(pa.int32(), pa.string()),
    "rows": pa.int32(),  # that the worker ran in the step
}
SCHEMA = pa.schema([*COLUMNS.items(), *((name, pa.float32()) for name in PARTS)])


class TimedSteps(NamedTuple):
    """Steps of one worker, int64 [n]; the rows that it ran, int32 [n]; the seconds of PARTS, float32 [n, parts]."""

    steps: np.ndarray[Any, np.dtype[np.int64]]
    rows: np.ndarray[Any, np.dtype[np.int32]]
    seconds: np.ndarray[Any, np.dtype[np.float32]]


def packed(timed: Sequence[TimedStep]) -> TimedSteps:
    """Steps as arrays, to be sent."""
    steps = np.array([one.step for one in timed], np.int64)
    rows = np.array([one.rows for one in timed], np.int32)
    return TimedSteps(steps, rows, np.array([one.seconds for one in timed], np.float32))


class StepTimeWriter:
    """Writes the steps' times in a thread, every few seconds; the last file is replaced until it is full."""

    def __init__(self, folder: Storage) -> None:
        self._folder = folder
        self._number = max(part_numbers(folder), default=-1) + 1
        self._attempt = 0
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._has_news = False
        self._written = time.monotonic()
        self._seconds = 0.0
        self._thread = ThreadPoolExecutor(1, "step-times")
        self._writing: Future[None] | None = None

    def begin(self, attempt: int) -> None:
        """Begin an attempt of the run, counted from 0."""
        self._attempt = attempt

    def add(self, world: World, timed: TimedSteps) -> None:
        """Add steps of a worker of the current attempt."""
        self._tables.append(table_of(world, self._attempt, timed))
        self._rows += len(timed.steps)
        self._has_news = True

    def tick(self) -> None:
        """Begin to write what is new, if it is time for it."""
        pause = max(WRITE_SECONDS, self._seconds / SHARE_OF_WRITES)
        is_writing = self._writing is not None and not self._writing.done()
        if self._has_news and not is_writing and time.monotonic() - self._written >= pause:
            self._begin_to_write()

    def close(self) -> None:
        """Write what is new, and wait for it."""
        if self._has_news:
            self._begin_to_write()
        self._thread.shutdown()

    def _begin_to_write(self) -> None:
        self._writing = self._thread.submit(self._write, f"part-{self._number}.parquet", list(self._tables))
        self._has_news, self._written = False, time.monotonic()
        if self._rows >= ROWS_IN_A_PART:
            self._number, self._tables, self._rows = self._number + 1, [], 0

    def _write(self, name: str, tables: list[pa.Table]) -> None:
        began = time.monotonic()
        with suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
            self._folder.create()
            with self._folder.writing(name) as stream:
                table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
                pq.write_table(table, stream, compression="zstd", use_dictionary=["node"])
        self._seconds = time.monotonic() - began


def table_of(world: World, attempt: int, timed: TimedSteps) -> pa.Table:
    """Steps of a worker as rows of a file."""
    num = len(timed.steps)
    same = np.full(num, attempt, np.int32), np.full(num, world.rank, np.int32)
    node = pa.DictionaryArray.from_arrays(array_of(np.zeros(num, np.int32)), array_of_texts([world.node]))
    before = [array_of(one) for one in (timed.steps, *same)]
    after = [array_of(one) for one in (timed.rows, *timed.seconds.T)]
    return pa.Table.from_arrays([*before, node, *after], schema=SCHEMA)


def part_numbers(folder: Storage) -> list[int]:
    """The numbers of the files, in order."""
    return sorted(int(match[1]) for match in map(PART_FILE.fullmatch, folder.names()) if match)

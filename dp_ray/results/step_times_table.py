"""Read the time of each worker's steps, of a run that has finished, failed or goes on."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import StorageError
from dp_ray.replica.step_clock import PARTS
from dp_ray.results.arrow_numbers import array_of, numbers
from dp_ray.results.step_time_files import COLUMNS, SCHEMA, TIMES, part_numbers
from dp_ray.storage import Storage

# All parts of a step: those that are written, and `waiting`, which is told from `exchange` here.
STEP_PARTS = (*PARTS[: PARTS.index("exchange") + 1], "waiting", *PARTS[PARTS.index("exchange") + 1 :])


def read_step_times(run: Storage, newest: int | None = None) -> pa.Table:
    """The seconds of each part of each step of each worker: COLUMNS and STEP_PARTS, ordered by step and rank.

    A step that ran twice is there as it ran last. A row's parts add up to its worker's whole step. The table has no
    rows if the run has no such files. `newest` reads only so many files, those of the last steps. Raises StorageError
    if a file is damaged.
    """
    folder = run.child(TIMES)
    parts = part_numbers(folder)
    tables = [_part(folder, f"part-{number}.parquet") for number in parts[-(newest or len(parts)) :]]
    whole = pa.concat_tables([pa.Table.from_batches([], SCHEMA), *tables]).unify_dictionaries()
    kept = _last_runs(*(numbers(whole.column(name)) for name in ("step", "attempt", "rank")))
    return _with_waiting(whole.take(array_of(kept)))


def _part(folder: Storage, name: str) -> pa.Table:
    try:  # read in one piece: a run that goes on replaces its last file
        # pq.read_table would import pyarrow.dataset, and pandas with it
        return pq.ParquetFile(pa.BufferReader(folder.read_bytes(name))).read().cast(SCHEMA)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{folder}/{name}: is damaged: {error}") from None


def _last_runs(
    step: np.ndarray[Any, Any], attempt: np.ndarray[Any, Any], rank: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """The places of the rows to keep: of each step those of its newest attempt, ordered by step and rank."""
    numbers = (step * (attempt.max(initial=0) + 1) + attempt) * (rank.max(initial=0) + 1) + rank
    order = np.argsort(numbers, kind="stable")  # fast for what is nearly ordered
    numbers, step, attempt = numbers[order], step[order], attempt[order]
    ends = np.flatnonzero(np.diff(step, append=-1))
    newest = np.repeat(attempt[ends], np.diff(ends, prepend=-1))
    kept: np.ndarray[Any, Any] = order[(attempt == newest) & (np.diff(numbers, append=-1) != 0)]
    return kept


def _with_waiting(table: pa.Table) -> pa.Table:
    """Tell waiting for late workers from exchanging.

    An exchange ends at about the same moment on all workers. So the worker that arrives last has the shortest one, in
    which it waits for nobody; what the others have beyond that is waiting. No two workers' clocks are compared.
    """
    exchange, step = numbers(table.column("exchange")), numbers(table.column("step"))
    begins = np.flatnonzero(np.diff(step, prepend=-1))
    shortest = np.minimum.reduceat(exchange, begins) if len(begins) else exchange
    own = np.repeat(shortest, np.diff(np.append(begins, len(step))))
    named = {name: table.column(name) for name in table.column_names}
    named |= {"exchange": array_of(own.astype(np.float32)), "waiting": array_of((exchange - own).astype(np.float32))}
    names = [*COLUMNS, *STEP_PARTS]
    return pa.Table.from_arrays([named[name] for name in names], names=names)

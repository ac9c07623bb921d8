"""The files of a training's history: its pieces, which are merged into `metrics.parquet`.

`plan/history.py` makes the rows, and names the columns; `History` has the numbers for them. A training writes a piece
with each checkpoint. The rows after the last one only the driver has; it writes them to `recent.parquet`, so that
running and failed runs show them.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from dp_ray.errors import StorageError
from dp_ray.plan.history import LOSS_OF, history_columns, history_row, is_measured, is_of_many
from dp_ray.plan.mixture import Mixture
from dp_ray.plan.split import Split
from dp_ray.rundir.files import is_finished, replacing
from dp_ray.storage import Storage
from dp_ray.system.threads import waiting
from dp_ray.tables import read_table, table_of_rows, write_table

if TYPE_CHECKING:
    from dp_ray.engine.host_copy import HostCopy
    from dp_ray.engine.trainer import Update

METRICS = "metrics.parquet"
HISTORY = "history"
RECENT = "recent.parquet"  # of an unfinished run: the rows after the last piece
SEGMENT = "steps-{}-{}.parquet"  # of the steps from the first number to before the second
SEND_SECONDS = 0.5  # between two times that rows are sent to the driver
RECENT_SECONDS = 2.0  # between two writes of the recent rows
SHARE = 0.01  # of the time, for writing them


class FinishedStep(NamedTuple):
    """A finished step, as each worker holds it which may have to write its row.

    `measured` has the values evaluated after it. It `ended` at this time of the worker's clock, and until then the
    worker has waited for data for `data_wait` seconds in all.
    """

    number: int
    update: "Update"
    measured: dict[str, float]
    ended: float
    data_wait: float


@dataclass(eq=False)
class History:
    """Rank 0's history; it reads the numbers from the device at most twice a second, and before each checkpoint.

    From a GPU they come while the training goes on, and are sent the next time. Only a checkpoint waits for them.
    Pieces that end at `step` or before are kept.
    Of a `mixture`, each row has the rows of each source in the step's batch, also those that are set aside.
    """

    folder: Storage
    split: Split
    names: Sequence[str]
    extra: Sequence[str]
    step: int
    send: Callable[[Sequence[dict[str, Any]]], None]
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        self._extra = dict.fromkeys(self.extra)  # a dict keeps the order of the first measurement
        self._data_wait = 0.0
        self._pending: list[tuple[FinishedStep, float, float]] = []  # with the seconds that it took, and waited
        self._coming: deque[tuple[list[Any], HostCopy]] = deque()  # those whose numbers are on their way
        self._rows: list[dict[str, Any]] = []
        self._sent = self._ended = time.perf_counter()
        forget_from(self.folder, self.step)
        self._kept = end_of_pieces(self.folder)

    def add(self, finished: FinishedStep) -> None:
        """Add the row of a finished step."""
        _, _, measured, ended, data_wait = finished
        self._pending.append((finished, ended - self._ended, data_wait - self._data_wait))
        self._ended, self._data_wait = ended, data_wait
        if measured:
            self._extra.update(dict.fromkeys(measured))
            self._ended = time.perf_counter()  # an evaluation's time is not the next step's
        if ended - self._sent > SEND_SECONDS:
            self._read(must_wait=False)

    def take_in(self, steps: Sequence[FinishedStep]) -> None:
        """Add the rows of steps that this worker, or another one, has finished before it was rank 0."""
        ended, waited = None, 0.0
        for finished in steps:
            seconds = 0.0 if ended is None else finished.ended - ended
            self._pending.append((finished, seconds, max(0.0, finished.data_wait - waited)))
            self._extra.update(dict.fromkeys(finished.measured))
            ended, waited = finished.ended, finished.data_wait

    def flush(self) -> None:
        """Read the numbers of all steps so far from the device, and send them to the driver."""
        self._read(must_wait=True)

    def _read(self, must_wait: bool) -> None:
        import torch  # it takes long, and who only reads a history needs none

        from dp_ray.engine.host_copy import ON_GPU, HostCopy

        steps, self._pending, self._sent = self._pending, [], time.perf_counter()
        if steps:
            sums = torch.stack([step.update.sums for step, *_ in steps])
            norms = torch.stack([step.update.gradient_norm for step, *_ in steps]).to(sums)
            stacked = torch.cat([sums, norms.unsqueeze(1)], 1)
            if not stacked.is_cuda:
                self._add_rows(steps, stacked.tolist())
                return
            self._coming.append((steps, HostCopy(stacked)))
        while self._coming and (must_wait or self._coming[0][1].is_here()):
            steps, coming = self._coming.popleft()
            with waiting(ON_GPU):
                read = coming.wait().tolist()
            self._add_rows(steps, read)

    def _add_rows(self, steps: Sequence[tuple[FinishedStep, float, float]], read: Sequence[Sequence[float]]) -> None:
        from dp_ray.engine.sums.votes import Totals

        rows: list[dict[str, Any]] = []
        for (finished, seconds, waited), (*sums, norm) in zip(steps, read, strict=True):
            means, missing = Totals.means(sums, finished.update.is_sum)
            first, end = self.split.batch(finished.number)
            epoch, num_rows = finished.number // self.split.steps, end - first - missing
            row = history_row(
                finished.number,
                epoch,
                dict(zip(self.names, means, strict=True)),
                (finished.update.learning_rate, norm),
                num_rows,
                (seconds, waited),
                None if self.mixture is None else self.mixture.counts_between(epoch, first, end),
            )
            rows.append(row | finished.measured)
        self._rows += rows
        self.send(rows)

    def take(self) -> pa.Table:
        """Return the rows added since the last call that no piece holds yet, for `write_piece`."""
        self.flush()
        rows, self._rows = [row for row in self._rows if row["step"] >= self._kept], []
        sources = () if self.mixture is None else self.mixture.names
        return table_of_rows(rows, history_schema(self.names, list(self._extra), sources))


def history_schema(names: Sequence[str], extra: Sequence[str], sources: Sequence[str] = ()) -> pa.Schema:
    """Return the columns of the history: those of every step, then `extra`, which only some steps have."""
    columns = history_columns(names, extra, sources)
    return pa.schema([(name, pa.int64() if kind is int else pa.float64()) for name, kind in columns.items()])


def forget_from(folder: Storage, step: int) -> None:
    """Remove the pieces with `step` or later steps, which an earlier attempt wrote and which are run again."""
    later = [name for name, (_, end) in folder.numbered(SEGMENT).items() if end > step]
    if later:
        folder.before_commit()  # after the look: those of a newer attempt are not among them
    for name in later:
        folder.delete(name)


def write_piece(folder: Storage, rows: pa.Table) -> None:
    """Write rows of consecutive steps as a piece, if there are any."""
    if len(rows):
        steps = rows.column("step")
        write_table(folder, SEGMENT.format(steps[0].as_py(), steps[-1].as_py() + 1), rows)


def merge_history(folder: Storage, run: Storage, steps: int, start: int = 0) -> None:
    """Merge all pieces into `metrics.parquet`; raises StorageError unless they hold each step from `start` on once.

    The elements of a vector metric are columns from the piece of their first measurement on; the metric's own name is
    no column then.
    """
    tables, at = [], start
    for name, (first, end) in folder.numbered(SEGMENT).items():
        if first != at:
            break
        tables.append(read_table(folder, name))
        at = end
    if at != steps:
        raise StorageError(f"{folder}: the history has {at} of {steps} steps; start anew {replacing(run)}")
    merged = pa.concat_tables(tables, promote_options="default")
    rare = [name for name in merged.column_names if name.startswith(("eval_", LOSS_OF))]
    never = [name for name in rare if merged.column(name).null_count == len(merged)]
    write_table(run, METRICS, merged.drop_columns(never))


def unmerge_history(run: Storage, checkpoints: Sequence[int]) -> None:
    """Cut `metrics.parquet` into pieces that end at the checkpoints, so that a training can resume from any of them.

    This undoes `merge_history`; the merged file stays.
    """
    table = read_table(run, METRICS)
    steps = table.column("step")
    start, last = steps[0].as_py(), steps[-1].as_py() + 1
    ends = [step for step in sorted(checkpoints) if start < step < last]
    folder = run.child(HISTORY)
    folder.create()
    for first, end in pairwise([start, *ends, last]):
        write_piece(folder, table.slice(first - start, end - first))


def history_so_far(run: Storage, since: int = 0) -> pa.Table | None:
    """Return the rows that a run has by now, by step: those of pieces and after them, or the merged; None if none.

    Of a step that was run again, the newest row counts. Pieces that end before step `since` are not read.
    """
    folder = run.child(HISTORY)
    pieces = folder.numbered(SEGMENT)
    tables = [read_table(folder, name) for name, (_, end) in pieces.items() if end > since]
    names = [*([] if pieces else [METRICS]), RECENT]
    tables += [read_table(run, name) for name in names if run.exists(name)]
    if not tables:
        return None
    table = pa.concat_tables(tables, promote_options="permissive")
    steps = np.from_dlpack(table.column("step").combine_chunks())
    if (steps[1:] > steps[:-1]).all():
        return table
    _, last = np.unique(steps[::-1], return_index=True)
    return table.take((len(steps) - 1 - last).tolist())


class StepRows:
    """The rows of a history by their steps, each read when it is asked for; none of a run without a history."""

    def __init__(self, table: pa.Table | None) -> None:
        self._table = table
        self._steps = np.empty(0, np.int64) if table is None else table.column("step").to_numpy()

    def __contains__(self, step: int) -> bool:
        return bool(self.row(step))

    def row(self, step: int) -> dict[str, Any]:
        """Return the row of a step; empty if there is none."""
        at = int(np.searchsorted(self._steps, step))
        if self._table is None or at == len(self._steps) or self._steps[at] != step:
            return {}
        return dict(self._table.slice(at, 1).to_pylist()[0])


def end_of_pieces(folder: Storage, until: float = math.inf) -> int:
    """Return the step after the last that a piece holds, of pieces that end at `until` or before; 0 without one."""
    return max((end for _, end in folder.numbered(SEGMENT).values() if end <= until), default=0)


def history_of(run: Storage) -> pa.Table | None:
    """Return the whole history of a finished training, or the rows so far; None if there are none.

    A finished training that goes on for longer has its merged history still, as of the end that it had.
    """
    if not run.exists(METRICS):
        return history_so_far(run)
    merged = read_table(run, METRICS)
    end = merged.column("step")[-1].as_py() + 1
    has_more = run.exists(RECENT) or end_of_pieces(run.child(HISTORY)) > end
    return history_so_far(run) if has_more and not is_finished(run) else merged


def read_history(run: Storage) -> Iterator[dict[str, Any]]:
    """Read the rows of the history, in the order of steps; of an unfinished run, those so far."""
    table = history_of(run)
    yield from [] if table is None else table.to_pylist()


def summary(run: Storage) -> dict[str, float]:
    """Return the last value of each measured column, like loss and epoch_loss; a batch without rows has none."""
    table = read_table(run, METRICS)
    with_rows = np.flatnonzero(np.from_dlpack(table.column("rows").combine_chunks()))
    until_rows = table.slice(0, int(with_rows[-1]) + 1 if len(with_rows) else 0)
    names = list(filter(is_measured, table.column_names))
    columns = {name: (table if is_of_many(name) else until_rows).column(name).drop_null() for name in names}
    return {name: column[-1].as_py() for name, column in columns.items() if len(column)}


def best_of(run: Storage, metric: str, mode: str, kept: Collection[int]) -> dict[str, Any] | None:
    """Return the first kept checkpoint with the best value of an evaluated metric: metric, value, and steps done."""
    measured = [(row[metric], row["step"] + 1) for row in read_history(run) if row.get(metric) is not None]
    measured = [(value, step) for value, step in measured if value == value and step in kept]
    if not measured:
        return None
    value = (min if mode == "min" else max)(value for value, _ in measured)
    return {"metric": metric, "value": value, "step": next(step for measure, step in measured if measure == value)}


@dataclass(eq=False)
class RecentHistory:
    """The history's rows that no piece holds yet, which the driver writes; a repeated step replaces later ones.

    `is_followed`: trackers read them there, so that they are written at once, whatever share of the time that takes.
    """

    run: Storage
    is_followed: bool = False
    _rows: list[dict[str, Any]] = field(default_factory=list, init=False)
    _is_saved: bool = field(default=True, init=False)
    _due: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)  # of the rows

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take rows, for the next `save`."""
        with self._lock:
            if rows and self._rows and rows[0]["step"] <= self._rows[-1]["step"]:
                self._rows = [row for row in self._rows if row["step"] < rows[0]["step"]]
            self._rows += rows
            self._is_saved = False

    def save_if_due(self) -> None:
        """Write the rows if there are new ones, and if it has not taken much of the time; a thread calls this."""
        began = time.monotonic()
        if not self._is_saved and (self.is_followed or began >= self._due):
            self.save()
            self._due = began + (time.monotonic() - began) / SHARE

    def save(self) -> None:
        """Write the rows that no piece holds; a storage that fails is left to what must be written."""
        try:
            kept = end_of_pieces(self.run.child(HISTORY))
            with self._lock:
                self._rows = [row for row in self._rows if row["step"] >= kept]
                rows, self._is_saved = list(self._rows), True
            if rows:
                # A table with the columns of all rows: only some have measured values.
                names = dict.fromkeys(chain.from_iterable(rows))
                have_fractions = {
                    name for row in rows for name, value in row.items() if not isinstance(value, int | None)
                }
                kinds = [(name, pa.float64() if name in have_fractions else pa.int64()) for name in names]
                write_table(self.run, RECENT, table_of_rows(rows, pa.schema(kinds)))
        except StorageError:
            self._is_saved = False

    close = save  # as all that writes the history's rows ends

"""What each worker did over the steps, in buckets of steps: rows, milliseconds, and the parts of a step.

The times of the workers' steps tell it; of a run of an earlier version, which has none, its shape reports do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dp_ray.replica.step_clock import PARTS
from dp_ray.results.arrow_numbers import numbers
from dp_ray.results.output_parts import reading
from dp_ray.results.shape_journal import PENDING, PIECE, REPORTS
from dp_ray.results.step_time_files import TIMES, part_numbers
from dp_ray.rundir.files import SHAPES
from dp_ray.storage import Storage

CELLS = 24_000  # of a heat map: more are slow to draw
MOST_COLUMNS = 240
BATCH = 1 << 20  # rows that are read at once
EXCHANGE = "exchange"  # in the files, it includes the waiting for others: no work of the worker's own

Grid = np.ndarray[Any, np.dtype[np.float64]]
File = tuple[Storage, str]


@dataclass(frozen=True)
class WorkerGrid:
    """Means over steps `edges[i] .. edges[i + 1] - 1`: arrays of [ranks, columns], NaN where a worker did nothing.

    `milliseconds` are the worker's own, without the exchange of gradients; `slowest` is its slowest step of a cell.
    `nodes` are those of the ranks. `parts` are the milliseconds of each part of a step, means over all workers; empty
    if only the shape reports are there, whose `milliseconds` are those of the model.
    """

    edges: list[int]
    nodes: list[str]
    rows: Grid
    milliseconds: Grid
    slowest: Grid
    parts: dict[str, Grid]


class Reports(NamedTuple):
    """What workers told of some steps: arrays of one entry a report; `seconds` are those of PARTS, or none."""

    step: Any
    rank: Any
    rows: Any
    milliseconds: Any
    seconds: tuple[Any, ...] = ()


def worker_grid(run: Storage, steps: int) -> WorkerGrid | None:
    """The grid of a run with this many steps, from what there is by now; None without a report."""
    times = run.child(TIMES)
    files = [(times, f"part-{number}.parquet") for number in part_numbers(times)]
    is_timed = bool(files)
    files = files or _shape_files(run)
    nodes = {rank: node for file in files for rank, node in _nodes_of(file)}
    if not nodes or steps <= 0:
        return None
    steps = min(steps, 1 + max(map(_last_step, files)))
    num_ranks = max(nodes) + 1
    columns = max(1, min(steps, MOST_COLUMNS, CELLS // num_ranks))
    sums = _Sums(num_ranks, np.arange(columns + 1) * steps // columns)
    for file in files:
        for reports in _timed(file) if is_timed else _shaped(file):
            sums.add(reports)
    return sums.grid([nodes.get(rank, "") for rank in range(num_ranks)])


class _Sums:
    """Adds up reports in the cells of a grid."""

    def __init__(self, num_ranks: int, edges: Any) -> None:
        self._edges = edges
        self._shape = num_ranks, len(edges) - 1
        self._rows, self._milliseconds, self._slowest, self._steps = (np.zeros(self._shape) for _ in range(4))
        self._parts = np.zeros((len(PARTS), len(edges) - 1))

    def add(self, reports: Reports) -> None:
        """Add reports."""
        step, rank = reports.step, reports.rank.astype(np.int64)
        column = np.clip(np.searchsorted(self._edges, step, side="right") - 1, 0, self._shape[1] - 1)
        cell = rank * self._shape[1] + column
        self._rows += self._total(cell, reports.rows)
        self._milliseconds += self._total(cell, reports.milliseconds)
        np.maximum.at(self._slowest.reshape(-1), cell, reports.milliseconds)
        for number, seconds in enumerate(reports.seconds):
            self._parts[number] += 1000 * np.bincount(column, seconds, self._shape[1])
        # A worker may have several shards of a step, each with a report of its shapes.
        worked = cell if reports.seconds else np.unique(np.stack([step, cell]), axis=1)[1]
        self._steps += self._total(worked, None)

    def _total(self, cell: Any, weights: Any) -> Any:
        return np.bincount(cell, weights, self._rows.size).reshape(self._shape)

    def grid(self, nodes: list[str]) -> WorkerGrid:
        """The means over the steps of each cell."""
        with np.errstate(invalid="ignore", divide="ignore"):
            rows, milliseconds = self._rows / self._steps, self._milliseconds / self._steps
            parts = self._parts / self._steps.sum(0)
        slowest = np.where(self._steps > 0, self._slowest, np.nan)
        told = {name: part for name, part in zip(PARTS, parts, strict=True) if np.nansum(part) > 0}
        return WorkerGrid(self._edges.tolist(), nodes, rows, milliseconds, slowest, told)


def _timed(file: File) -> Iterator[Reports]:
    """The reports in a file of the steps' times."""
    with reading(*file) as parquet:
        for batch in parquet.iter_batches(batch_size=BATCH):
            seconds = tuple(numbers(batch.column(name)) for name in PARTS)
            own = sum(one for name, one in zip(PARTS, seconds, strict=True) if name != EXCHANGE)
            step, rank, rows = (numbers(batch.column(name)) for name in ("step", "rank", "rows"))
            yield Reports(step, rank, rows, 1000 * own, seconds)


def _shaped(file: File) -> Iterator[Reports]:
    """The reports in a file of shape reports."""
    names = ["step", "rank", "rows", "milliseconds"]
    with reading(*file) as parquet:
        for batch in parquet.iter_batches(batch_size=BATCH, columns=names):
            step, rank, rows, milliseconds = (numbers(batch.column(name)) for name in names)
            yield Reports(step, rank, rows, milliseconds)


def _shape_files(run: Storage) -> list[File]:
    """The file of a run's shape reports, and the pieces of a run that goes on."""
    folder = run.child(REPORTS)
    pieces = sorted((name for name in folder.names() if PIECE.fullmatch(name)), key=lambda name: (len(name), name))
    pending = [PENDING] * folder.exists(PENDING)
    whole = [(run, SHAPES)] * run.exists(SHAPES)
    return [*whole, *((folder, name) for name in (*pieces, *pending))]


def _last_step(file: File) -> int:
    """The last step in a file, by its statistics."""
    with reading(*file) as parquet:
        groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
        return max((int(group.column(0).statistics.max) for group in groups), default=-1)


def _nodes_of(file: File) -> Iterator[tuple[int, str]]:
    """The ranks in a file, each with its newest node."""
    with reading(*file) as parquet:
        for batch in parquet.iter_batches(batch_size=BATCH, columns=["rank", "node"]):
            ranks, nodes = batch.columns
            found, last = np.unique(numbers(ranks)[::-1], return_index=True)
            for rank, at in zip(found.tolist(), (len(ranks) - 1 - last).tolist(), strict=True):
                yield rank, nodes[at].as_py()

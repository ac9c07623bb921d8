"""Rows and milliseconds of each worker over the steps, from the shape reports: what the heat maps show."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dp_ray.results.arrow_numbers import numbers
from dp_ray.results.output_parts import reading
from dp_ray.results.shape_journal import PENDING, PIECE, REPORTS
from dp_ray.rundir.files import SHAPES
from dp_ray.storage import Storage

COLUMNS = ["step", "rank", "rows", "milliseconds"]
CELLS = 24_000  # of a heat map: more are slow to draw
MOST_COLUMNS = 240
BATCH = 1 << 20  # reports that are read at once

Grid = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class WorkerGrid:
    """Means over steps `edges[i] .. edges[i + 1] - 1`: arrays of [ranks, columns], NaN where a worker did nothing.

    `slowest` is the longest of a single shard. `nodes` are those of the ranks.
    """

    edges: list[int]
    nodes: list[str]
    rows: Grid
    milliseconds: Grid
    slowest: Grid


def worker_grid(run: Storage, steps: int) -> WorkerGrid | None:
    """The grid of a run with this many steps, from the shape reports that there are by now; None without any."""
    files = _files(run)
    ranks = [_ranks_of(folder, name) for folder, name in files]
    nodes = {rank: node for one in ranks for rank, node in one.items()}
    if not nodes or steps <= 0:
        return None
    num_ranks = max(nodes) + 1
    columns = max(1, min(steps, MOST_COLUMNS, CELLS // num_ranks))
    edges = np.arange(columns + 1) * steps // columns
    sums = _Sums(num_ranks, edges)
    for folder, name in files:
        for batch in _batches(folder, name):
            sums.add(*batch)
    return sums.grid([nodes.get(rank, "") for rank in range(num_ranks)])


class _Sums:
    """Adds up shape reports in the cells of a grid."""

    def __init__(self, num_ranks: int, edges: Any) -> None:
        self._edges = edges
        self._shape = num_ranks, len(edges) - 1
        self._rows, self._milliseconds, self._slowest, self._steps = (np.zeros(self._shape) for _ in range(4))

    def add(self, step: Any, rank: Any, rows: Any, milliseconds: Any) -> None:
        """Add reports, which come in the order of their steps."""
        ranks, columns = self._shape
        column = np.minimum(np.searchsorted(self._edges, step, side="right") - 1, columns - 1)
        cell = rank.astype(np.int64) * columns + column

        def total(weights: Any) -> Grid:
            return np.bincount(cell, weights, ranks * columns).reshape(self._shape).astype(float)

        self._rows += total(rows)
        self._milliseconds += total(milliseconds)
        np.maximum.at(self._slowest.reshape(-1), cell, milliseconds)
        self._steps += self._new_steps(step, rank, cell).reshape(self._shape)

    def _new_steps(self, step: Any, rank: Any, cell: Any) -> Any:
        """How many steps of a worker begin in each cell: it may have several shards of a step."""
        worker_step = np.unique(np.stack([rank.astype(np.int64), step, cell]), axis=1)
        return np.bincount(worker_step[2], minlength=self._rows.size)

    def grid(self, nodes: list[str]) -> WorkerGrid:
        """The means over the steps of each cell."""
        with np.errstate(invalid="ignore"):
            rows, milliseconds = self._rows / self._steps, self._milliseconds / self._steps
        slowest = np.where(self._steps > 0, self._slowest, np.nan)
        return WorkerGrid(self._edges.tolist(), nodes, rows, milliseconds, slowest)


def _files(run: Storage) -> list[tuple[Storage, str]]:
    """The file of a run's shape reports, and the pieces of a run that goes on."""
    folder = run.child(REPORTS)
    pieces = sorted((name for name in folder.names() if PIECE.fullmatch(name)), key=lambda name: (len(name), name))
    pending = [PENDING] * folder.exists(PENDING)
    whole = [(run, SHAPES)] * run.exists(SHAPES)
    return [*whole, *((folder, name) for name in (*pieces, *pending))]


def _ranks_of(folder: Storage, name: str) -> dict[int, str]:
    """The ranks in a file, each with its newest node."""
    with reading(folder, name) as file:
        found: dict[int, str] = {}
        for batch in file.iter_batches(batch_size=BATCH, columns=["rank", "node"]):
            ranks, nodes = batch.columns
            _, last = np.unique(numbers(ranks)[::-1], return_index=True)
            found |= {ranks[at].as_py(): nodes[at].as_py() for at in (len(ranks) - 1 - last).tolist()}
        return found


def _batches(folder: Storage, name: str) -> Iterator[Iterable[Any]]:
    with reading(folder, name) as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=COLUMNS):
            yield [numbers(batch.column(column)) for column in COLUMNS]

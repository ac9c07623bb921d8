"""Read a run directory, finished or not, as one `RunData`; no code of the run is imported or run.

Begin at `read_run`. Two of its parts are computed here: a sample of a prediction's outputs, and the grid of what each
worker did over the steps, from the times of their steps.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dp_ray.engine.clock import PARTS
from dp_ray.outputs.columns import SAMPLE_INDEX, Layout, from_arrow
from dp_ray.outputs.files import names_so_far
from dp_ray.outputs.previews import read_previews
from dp_ray.rundir.files import ABOUT_JSON, RESULT, RESULT_JSON, RUN_JSON
from dp_ray.rundir.history import history_of
from dp_ray.rundir.incidents import INCIDENTS, INCIDENTS_JSON, IncidentLog
from dp_ray.rundir.quarantine import QUARANTINE, QUARANTINED, RECORDS_JSON, BadRecord, record_files
from dp_ray.rundir.unfinished import UnfinishedRun, unfinished
from dp_ray.storage import Storage
from dp_ray.tables import numbers, read_table, reading, step_ranges
from dp_ray.telemetry.times import PART, TIMES, read_step_times, steady, time_split, verdict_of
from dp_ray.text import hide_in, relative

CELLS = 24_000  # of a heat map: more are slow to draw
MOST_COLUMNS = 240
BATCH = 1 << 20  # rows that are read at once
EXCHANGE = "exchange"  # in the files, it includes the waiting for others: no work of the worker's own

Grid = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class WorkerGrid:
    """Means over steps `edges[i] .. edges[i + 1] - 1`: arrays of [ranks, columns], NaN where a worker did nothing.

    `milliseconds` are the worker's own, without the exchange of gradients; `slowest` is its slowest step of a cell.
    `nodes` are those of the ranks. `parts` are the milliseconds of each part of a step, means over all workers.
    """

    edges: list[int]
    nodes: list[str]
    rows: Grid
    milliseconds: Grid
    slowest: Grid
    parts: dict[str, Grid]


NEWEST = 4  # files of steps' times that tell the verdict of a run that goes on
SET_ASIDE = 200  # set-aside samples that are shown


@dataclass
class RunData:
    """A run, as far as its files could be read. `problems` says what could not be read."""

    where: str
    job: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    state: UnfinishedRun | None = None
    drivers: list[dict[str, Any]] = field(default_factory=list)
    incidents: IncidentLog = field(default_factory=IncidentLog)
    history: pa.Table | None = None
    grid: WorkerGrid | None = None
    time_split: dict[str, Any] | None = None
    verdict: str | None = None
    quarantined: list[BadRecord] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    written: datetime = field(default_factory=lambda: datetime.now(UTC))
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's own name, or its directory."""
        return str(self.job.get("name") or self.result.get("name") or self.where)

    @property
    def task(self) -> str:
        """`train`, `predict` or `evaluate`; `run` if it is unknown."""
        return str(self.job.get("task") or self.result.get("task") or "run")

    @property
    def status(self) -> str:
        """Done, failed, interrupted, running, or killed: its last driver left no result.

        A driver that has left its result holds its lease still, while it writes the page.
        """
        is_driven = self.state is not None and self.state.status == "running"
        otherwise = "running" if is_driven else "killed" if self.state else "unknown"
        return str(self.result.get("status") or otherwise)

    @property
    def is_in_process(self) -> bool:
        """Whether the run has no workers: the driver's process runs the steps."""
        return self.job.get("workers") == 0

    @property
    def total_steps(self) -> int:
        """How many steps the whole run has."""
        return int(self.state.steps if self.state else self.result.get("total_steps") or 0)

    @property
    def steps_done(self) -> int:
        """How many steps the run has done, as far as its files tell."""
        if self.status == "done":
            return int((self.result.get("stopped_early") or {}).get("step", self.total_steps))
        seen = int(self.history.column("step")[-1].as_py()) + 1 if self.history else 0
        return max(seen, self.state.step if self.state else 0)


def read_run(run: Storage) -> RunData:
    """Read a run's directory. A file that is damaged, or that changes meanwhile, is left out and told of."""
    data = RunData(relative(str(run)))
    with _problem_noted(data, "the result"):
        data.result = hide_in(RESULT_JSON.read(run))
    with _problem_noted(data, "the job"):
        data.job = hide_in(RUN_JSON.read(run).get("job", {}))
    with _problem_noted(data, "the state"):
        data.state = unfinished(run.location)
    with _problem_noted(data, "about.json"):
        data.drivers = ABOUT_JSON.read(run).drivers
    with _problem_noted(data, "the interruptions"):
        data.incidents = INCIDENTS_JSON.read(run, RESULT if data.result.get("status") == "done" else INCIDENTS)
    with _problem_noted(data, "the history"):
        data.history = history_of(run)
    with _problem_noted(data, "the times of the steps"):
        if data.result.get("time_split"):
            data.time_split, data.verdict = data.result["time_split"], data.result.get("verdict")
        else:  # of a run that goes on: the newest steps
            table = read_step_times(run, NEWEST)
            verdict = verdict_of(table, data.job)
            data.time_split, data.verdict = time_split(steady(table)), verdict.text if verdict else None
    with _problem_noted(data, "the times of the workers"):
        data.grid = worker_grid(run, data.total_steps)
    with _problem_noted(data, "the samples set aside"):
        data.quarantined = _quarantined(run)
    with _problem_noted(data, "the outputs"):
        data.samples = output_samples(run) if data.task == "predict" else []
    return data


@contextmanager
def _problem_noted(data: RunData, name: str) -> Iterator[None]:
    """A block that reads a part of the run; an error in it is noted, and the part stays empty."""
    try:
        yield
    except Exception as error:  # files of any content
        data.problems.append(f"{name} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}")


def _quarantined(run: Storage) -> list[BadRecord]:
    """Return the first samples that were set aside."""
    folder = run.child(QUARANTINE)
    records: list[BadRecord] = []
    for name in record_files(folder)[:SET_ASIDE]:
        records += RECORDS_JSON.read(folder, name)
    if not records and run.exists(QUARANTINED):
        records = read_table(run, QUARANTINED).slice(0, SET_ASIDE).to_pylist()
    return records[:SET_ASIDE]


ROWS = 8  # from the start, and as many from the end
CHARACTERS = 200  # of a text
NUMBERS = 4  # of a row's numbers that are shown
PROBABLE_CLASSES = range(2, 10_001)


def output_samples(run: Storage) -> list[dict[str, Any]]:
    """Return the first rows of the outputs so far and the last: sample index, what was carried, outputs, preview."""
    names = names_so_far(run)
    previews = {preview.sample_index: preview for preview in read_previews(run)}
    rows: list[dict[str, Any]] = []
    if names:
        with reading(run, names[0]) as file:
            for batch in itertools.islice(file.iter_batches(batch_size=ROWS), 1):
                rows += _as_rows(pa.Table.from_batches([batch]))
        with reading(run, names[-1]) as file:
            if file.num_row_groups:
                table = file.read_row_group(file.num_row_groups - 1)
                rows += _as_rows(table.slice(max(0, len(table) - ROWS)))
    # A short table's first rows are among its last too.
    samples = {row["sample_index"]: {**row, "preview": previews.get(row["sample_index"])} for row in rows}
    return list(samples.values())


def _as_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    layout = Layout.from_metadata(table.schema.metadata)
    carried = {column.key: table.column(column.name).to_pylist() for column in layout.carried}
    leaves: dict[str, Any] = {
        column.name: from_arrow(column, table.column(column.name).combine_chunks()) for column in layout.columns
    }
    for at, sample in enumerate(table.column(SAMPLE_INDEX).to_pylist()):
        yield {
            "sample_index": sample,
            "carried": {key: str(values[at]) for key, values in carried.items()},
            "outputs": {name: value_text(rows[at]) for name, rows in leaves.items()},
        }


def value_text(value: torch.Tensor | str | float) -> str:
    """Return a row of an output in a few words: its numbers if they are few; of a vector, where its largest is."""
    if isinstance(value, str):
        return value if len(value) <= CHARACTERS else f"{value[:CHARACTERS]}..."
    if not isinstance(value, torch.Tensor):
        return _number(value)
    numbers = value.flatten()
    if not len(numbers):
        return "empty"
    if value.is_complex() or len(numbers) <= NUMBERS:
        shown = ", ".join(map(_number, numbers[:NUMBERS].tolist()))
        return shown if value.ndim == 0 or len(numbers) == 1 else f"[{shown}]"
    numbers = numbers.float()
    if value.ndim == 1 and len(numbers) in PROBABLE_CLASSES:
        at = int(numbers.argmax())
        return f"largest at {at}: {_number(float(numbers[at]))} (of {len(numbers)})"
    least, mean, most = (_number(float(number)) for number in (numbers.min(), numbers.mean(), numbers.max()))
    return f"{'x'.join(map(str, value.shape))}: {least} to {most}, mean {mean}"


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def worker_grid(run: Storage, steps: int) -> WorkerGrid | None:
    """Return the grid of a run with this many steps, from the files that there are by now; None without one."""
    times = run.child(TIMES)
    files = [(times, name) for name in times.numbered(PART)]
    nodes = {rank: node for file in files for rank, node in _nodes_of(file)}
    if not nodes or steps <= 0:
        return None
    steps = min(steps, 1 + max((last for file in files for _, last, _ in step_ranges(*file)), default=-1))
    num_ranks = max(nodes) + 1
    columns = max(1, min(steps, MOST_COLUMNS, CELLS // num_ranks))
    edges = np.arange(columns + 1) * steps // columns
    rows, milliseconds, slowest, worked = (np.zeros((num_ranks, columns)) for _ in range(4))
    parts = np.zeros((len(PARTS), columns))
    for batch in (batch for file in files for batch in _batches_of(file)):
        step, rank, counts, *seconds = (numbers(batch.column(name)) for name in ("step", "rank", "rows", *PARTS))
        own = 1000 * sum(part for name, part in zip(PARTS, seconds, strict=True) if name != EXCHANGE)
        column = np.clip(np.searchsorted(edges, step, side="right") - 1, 0, columns - 1)
        cell = rank.astype(np.int64) * columns + column
        for sums, values in ((rows, counts), (milliseconds, own), (worked, None)):
            sums += np.bincount(cell, values, sums.size).reshape(sums.shape)
        np.maximum.at(slowest.reshape(-1), cell, own)
        parts += [1000 * np.bincount(column, part, columns) for part in seconds]
    with np.errstate(invalid="ignore", divide="ignore"):
        rows, milliseconds, parts = rows / worked, milliseconds / worked, parts / worked.sum(0)
    slowest = np.where(worked > 0, slowest, np.nan)
    measured = {name: part for name, part in zip(PARTS, parts, strict=True) if np.nansum(part) > 0}
    names = [nodes.get(rank, "") for rank in range(num_ranks)]
    return WorkerGrid(edges.tolist(), names, rows, milliseconds, slowest, measured)


def _batches_of(file: tuple[Storage, str], columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    with reading(*file) as parquet:
        yield from parquet.iter_batches(batch_size=BATCH, columns=columns)


def _nodes_of(file: tuple[Storage, str]) -> Iterator[tuple[int, str]]:
    """Yield the ranks in a file, each with its newest node."""
    for batch in _batches_of(file, ["rank", "node"]):
        ranks, nodes = batch.columns
        known, last = np.unique(numbers(ranks)[::-1], return_index=True)
        for rank, at in zip(known.tolist(), (len(ranks) - 1 - last).tolist(), strict=True):
            yield rank, nodes[at].as_py()

"""Reads what a run directory holds, finished or not, as one value; no code of the run is imported or run."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.key_hints import renamed
from dp_ray.report.samples import output_samples
from dp_ray.report.worker_grid import WorkerGrid, worker_grid
from dp_ray.results.short import relative
from dp_ray.results.step_times_table import read_step_times
from dp_ray.results.time_split import time_split
from dp_ray.results.verdicts import facts_of, verdict_of
from dp_ray.rundir.about import read_about
from dp_ray.rundir.claim import read_claim
from dp_ray.rundir.files import RESULT, is_finished, read_json
from dp_ray.rundir.history_file import history_of
from dp_ray.rundir.incidents import INCIDENTS, IncidentLog, read_incidents
from dp_ray.rundir.quarantine_files import QUARANTINE, QUARANTINED, Record, read_records, record_files
from dp_ray.rundir.unfinished import UnfinishedRun, unfinished
from dp_ray.secrets import hide_in
from dp_ray.storage import Storage

T = TypeVar("T")
NO_TIMES: tuple[dict[str, Any] | None, str | None] = None, None
NEWEST = 4  # files of steps' times that tell the verdict of a run that goes on
SET_ASIDE = 200  # set-aside samples that are shown


@dataclass
class RunData:
    """What is known of a run. `problems` says what could not be read."""

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
    quarantined: list[Record] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    written: datetime = field(default_factory=lambda: datetime.now(UTC))
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.job.get("name") or self.result.get("name") or self.where)

    @property
    def task(self) -> str:
        """The run's task."""
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
    def total_steps(self) -> int:
        """The steps of the whole run."""
        return int(self.state.steps if self.state else self.result.get("total_steps") or 0)

    @property
    def steps_done(self) -> int:
        """How many steps the run has done, as far as its files tell."""
        if self.status == "done":
            return int((self.result.get("stopped_early") or {}).get("step", self.total_steps))
        seen = (
            int(self.history.column("step")[-1].as_py()) + 1 if self.history is not None and len(self.history) else 0
        )
        return max(seen, self.state.step if self.state else 0)


def read_run(run: Storage) -> RunData:
    """Read a run's directory. A file that is damaged, or that changes meanwhile, is left out and told of."""
    data = RunData(relative(str(run)))

    def part(name: str, read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except Exception as error:  # files of any content
            data.problems.append(f"{name} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}")
            return default

    done = part("the result", lambda: is_finished(run), False)
    data.job = part("the job", lambda: hide_in(renamed(read_claim(run).get("job", {}))), {})
    data.result = part("the result", lambda: hide_in(read_json(run, RESULT)) if run.exists(RESULT) else {}, {})
    data.state = part("the state", lambda: unfinished(run.location), None)
    data.drivers = part("about.json", lambda: read_about(run), [])
    data.incidents = part(
        "the interruptions", lambda: read_incidents(run, RESULT if done else INCIDENTS), IncidentLog()
    )
    data.history = part("the history", lambda: history_of(run), None)
    data.time_split, data.verdict = part("the times of the steps", lambda: _times(run, data), NO_TIMES)
    data.grid = part("the shape reports", lambda: worker_grid(run, data.total_steps), None)
    data.quarantined = part("the samples set aside", lambda: _quarantined(run), [])
    data.samples = part("the outputs", lambda: output_samples(run) if data.task == "predict" else [], [])
    return data


def _times(run: Storage, data: RunData) -> tuple[dict[str, Any] | None, str | None]:
    """The shares of a step's parts and the verdict: those of the result, else of the newest steps."""
    if data.result.get("time_split"):
        return data.result["time_split"], data.result.get("verdict")
    table = read_step_times(run, NEWEST)
    verdict = verdict_of(table, facts_of(data.job))
    return time_split(table), verdict.text if verdict else None


def _quarantined(run: Storage) -> list[Record]:
    """The first samples that were set aside."""
    folder = run.child(QUARANTINE)
    found: list[Record] = []
    for name in record_files(folder)[:SET_ASIDE]:
        found += read_records(folder, name)
    if not found and run.exists(QUARANTINED):
        with run.open(QUARANTINED) as stream:
            found = pq.ParquetFile(stream).read().slice(0, SET_ASIDE).to_pylist()
    return found[:SET_ASIDE]


def as_text(value: Any) -> str:
    """A value of a job or of an environment as text."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)

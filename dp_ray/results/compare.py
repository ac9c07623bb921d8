"""Compare runs in any state: their jobs and environments, metrics, throughput, time and curves; imports no torch."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dp_ray.errors import StorageError
from dp_ray.job.errors import renamed
from dp_ray.job.files import dotted, same
from dp_ray.job.job import Job
from dp_ray.results.text import aligned, measured, relative, sparkline
from dp_ray.rundir.files import ABOUT_JSON, RESULT_JSON, RUN, RUN_JSON
from dp_ray.rundir.history import history_of, is_inner
from dp_ray.rundir.listing import DAMAGED, ListedRun, listed_run
from dp_ray.storage import Storage
from dp_ray.text import hide_in, listed, printable

NO_DIFFERENCE = ("name", "storage")  # not compared: each run has its own
OF_EACH_DRIVER = ("started", "command", "folder", "plan")
OBJECT = re.compile(r"<[\w.]+:[^:]+>")
CURVE_WIDTH = 60
NO_CURVE = {"step", "epoch", "rows", "rows_per_second", "data_wait_seconds"}


@dataclass(frozen=True)
class ComparedRun:
    """A run as it is compared: its directory, its row in a list, its files."""

    where: str
    row: ListedRun
    job: dict[str, Any]
    result: dict[str, Any]
    environment: dict[str, Any]
    history: pa.Table | None

    @property
    def rows_per_second(self) -> float | None:
        """The rows of all steps, divided by the steps' seconds; None if unknown."""
        if self.history is not None and len(self.history):
            rows, rates = (self.history.column(name).to_pylist() for name in ("rows", "rows_per_second"))
            timed = [(count, count / rate) for count, rate in zip(rows, rates, strict=True) if rate]
            seconds = math.fsum(seconds for _, seconds in timed)
            return sum(count for count, _ in timed) / seconds if seconds else None
        # Without a history: the rows divided by the seconds of the loop, unless that was interrupted.
        seconds = max((worker.get("loop_seconds", 0.0) for worker in self.result.get("workers", [])), default=0.0)
        if not seconds or len(self.result.get("world_sizes", [])) != 1:
            return None
        return float(self.result["rows"] * self.result["epochs"] / seconds)

    @property
    def time_split(self) -> dict[str, float]:
        """The shares of the steps' time that the result has."""
        parts = (self.result.get("time_split") or {}).get("all", {})
        shares = {"data_wait_share": self.result.get("data_wait_share")}
        shares |= {f"time_split.{part}": share for part, share in parts.items()}
        return {key: value for key, value in shares.items() if isinstance(value, int | float)}

    def curve(self, name: str) -> list[float | None]:
        """Return the values of a column of the history, one for each step; empty if there is none."""
        if self.history is None or name not in self.history.column_names:
            return []
        return self.history.column(name).to_pylist()  # type: ignore[no-any-return]


def read_compared_run(run: Storage) -> ComparedRun:
    """Read a run, whatever its state; raises StorageError if it is no run, or if it is damaged."""
    row = listed_run(run, run.path.rstrip("/").rpartition("/")[2])
    if not run.exists(RUN):
        raise StorageError(f"{run}: holds no {RUN}: not a run directory")
    if row.status == DAMAGED:
        raise StorageError(f"{run}: is damaged: {row.note}")
    drivers = ABOUT_JSON.read(run).drivers
    return ComparedRun(
        where=relative(str(run)),
        row=row,
        job=hide_in(renamed(RUN_JSON.read(run).get("job", {}))),
        result=hide_in(RESULT_JSON.read(run)),
        environment=dict(dotted(hide_in(drivers[-1]) if drivers else {})),
        history=history_of(run),
    )


def comparison_values(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the runs as JSON values: results, what differs in jobs and environments, metrics, throughput, time."""
    names = dict.fromkeys(name for run in runs for name in run.row.metrics)
    parts = dict.fromkeys(name for run in runs for name in run.time_split)
    return {
        "runs": [run.result or run.row.to_json() for run in runs],
        "status": [run.row.status for run in runs],
        "job": differing_keys(runs),
        "environment": differing_environment(runs),
        "metrics": {name: [run.row.metrics.get(name) for run in runs] for name in names},
        "rows_per_second": [run.rows_per_second for run in runs],
        "time_split": {name: [run.time_split.get(name) for run in runs] for name in parts},
        "seconds": [run.row.seconds for run in runs],
    }


def comparison_text(runs: Sequence[ComparedRun]) -> str:
    """Show the runs side by side: what is the same, a table of what differs and of their figures, sparklines."""
    rows = [[printable(cell) for cell in row] for row in _table(runs)]
    return "\n".join([", ".join(_verdict(runs)), aligned(rows), *_curves(runs)])


def _verdict(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield whether the runs have the same job, weights and outputs."""
    differing = differing_keys(runs)
    counting = {key for key in differing if not {key, key.partition(".")[0]} & Job.CANNOT_CHANGE_THE_RESULT}
    alike = f"the same job (but for {listed(differing)})" if differing else "the same job"
    objects = [key.removesuffix(".target") for key, value in dotted(runs[0].job) if _is_object(key, value)]
    if objects:
        alike += f" as far as can be told: {listed(objects)} from Python cannot be compared"
    yield "different jobs" if counting else alike
    for what in ("weights", "outputs"):
        hashes = [run.result.get(f"{what}_sha256") for run in runs]
        if all(hashes):
            yield f"{'the same' if len(set(hashes)) == 1 else 'different'} {what}"


def _is_object(key: str, value: Any) -> bool:
    """Return whether a key of a job had a Python object: a file keeps its type alone, `<module:Class>`."""
    if isinstance(value, list):
        return any(_is_object(key, one) for one in value)
    return isinstance(value, str) and OBJECT.fullmatch(value) is not None and not key.startswith("hooks.")


def _table(runs: Sequence[ComparedRun]) -> Iterator[list[str]]:
    metrics = [measured(run.row.metrics) for run in runs]
    yield ["", *(run.where for run in runs)]
    for key, values in (*differing_keys(runs).items(), *differing_environment(runs).items()):
        yield [key, *map(_as_text, values)]
    yield ["status", *(run.row.status for run in runs)]
    steps = [(run.row.step, run.row.steps) for run in runs]
    yield ["steps", *(str(total) if done == total else f"{done}/{_as_text(total)}" for done, total in steps)]
    for name in dict.fromkeys(name for one in metrics for name in one):
        yield [f"metrics.{name}", *(one.get(name, "-") for one in metrics)]
    yield ["rows/s", *(_figure(run.rows_per_second, ",.0f") for run in runs)]
    parts = dict.fromkeys(name for run in runs for name in run.time_split)
    if "time_split.data_wait" in parts:  # the share of the waits stands among the parts
        parts.pop("data_wait_share", None)
    for part in parts:
        yield [part, *(_figure(run.time_split.get(part), ".3g") for run in runs)]
    yield ["seconds", *(_figure(run.row.seconds, ".1f") for run in runs)]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _as_text(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _curves(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield, for each measured column of the histories, a sparkline of each run, all on one scale."""
    columns = dict.fromkeys(name for run in runs if run.history is not None for name in run.history.column_names)
    longest = max((len(run.history) for run in runs if run.history is not None), default=0)
    for name in columns:
        curves = [[value for value in run.curve(name) if value is not None] for run in runs]
        finite = [value for curve in curves for value in curve if math.isfinite(value)]
        if name in NO_CURVE or is_inner(name) or len(finite) < 3:
            continue
        yield f"{name}, {min(finite):.4g} to {max(finite):.4g}"
        where = max(len(run.where) for run in runs)
        for run, curve in zip(runs, curves, strict=True):
            steps = 0 if run.history is None else len(run.history)
            line = sparkline(curve, max(1, CURVE_WIDTH * steps // longest), min(finite), max(finite))
            yield f"  {printable(run.where):{where}}  {line}"


def differing_keys(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the keys in which the jobs of runs differ, as dotted paths, with each job's value."""
    return _differing([dict(dotted(run.job)) for run in runs], NO_DIFFERENCE)


def differing_environment(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the versions, the git commit and the hardware in which the newest drivers of runs differ."""
    return _differing([run.environment for run in runs if run.environment], OF_EACH_DRIVER, len(runs))


def _differing(each_run: list[dict[str, Any]], left_out: Sequence[str], number: int = 0) -> dict[str, list[Any]]:
    """Return the keys whose values differ; none if only some of `number` runs have values."""
    if len(each_run) < number:
        return {}
    keys = dict.fromkeys(key for one in each_run for key in one if key not in left_out)
    values = {key: [one.get(key) for one in each_run] for key in keys}
    return {key: each for key, each in values.items() if not all(same(value, each[0]) for value in each)}

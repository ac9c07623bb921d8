"""Compare runs in any state: their jobs and environments, metrics, throughput, time and curves; imports no torch."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dp_ray.errors import StorageError
from dp_ray.job.files import dotted, same
from dp_ray.job.job import Job
from dp_ray.plan.history import CLOCKED, COUNTS, is_inner
from dp_ray.results.text import in_columns, setting_text, sparkline
from dp_ray.rundir.files import ABOUT_JSON, RESULT_JSON, RUN, RUN_JSON, in_keys_of_now, runs_there
from dp_ray.rundir.history import history_of
from dp_ray.rundir.listing import DAMAGED, ListedRun, listed_run
from dp_ray.rundir.numerics import summary_of
from dp_ray.storage import Storage
from dp_ray.tables import numbers
from dp_ray.text import hide_in, listed, printable, relative

NO_DIFFERENCE = ("name", "storage")  # not compared: each run has its own
OF_EACH_DRIVER = ("started", "command", "folder", "plan")
OBJECT = re.compile(r"<[\w.]+:[^:]+>")
CURVE_WIDTH = 60
NO_CURVE = {*COUNTS, *CLOCKED}


@dataclass(frozen=True)
class ComparedRun:
    """A run as it is compared: its directory, its row in a list, its files."""

    where: str
    row: ListedRun
    job: dict[str, Any]
    result: dict[str, Any]
    environment: dict[str, Any]
    computed: dict[str, str]
    history: pa.Table | None

    @property
    def rows_per_second(self) -> float | None:
        """The mean speed of the run; None if unknown."""
        return mean_speed(self.history, self.result)

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
    row = listed_run(run)
    if not run.exists(RUN):
        raise StorageError(f"{run}: holds no {RUN}: not a run directory{runs_there(run)}")
    if row.status == DAMAGED:
        raise StorageError(f"{run}: is damaged: {row.note}")
    about = ABOUT_JSON.read(run)
    drivers = about.drivers
    return ComparedRun(
        where=relative(str(run)),
        row=row,
        job=hide_in(in_keys_of_now(RUN_JSON.read(run).get("job", {}))),
        result=hide_in(RESULT_JSON.read(run)),
        environment=dict(dotted(hide_in(drivers[-1]) if drivers else {})),
        computed=hide_in(summary_of([kind for attempt in about.attempts for kind in attempt.kinds])),
        history=history_of(run),
    )


def mean_speed(history: pa.Table | None, result: Mapping[str, Any]) -> float | None:
    """Return the rows per second of a run: its rows divided by the seconds of its steps; None if unknown."""
    if history is not None and len(history):
        rows, seconds = rows_and_seconds(history)
    else:  # without a history: the longest loop's seconds, which cover all rows only if there was a single attempt
        loops = [worker.get("loop_seconds") or 0.0 for worker in result.get("workers", [])]
        is_whole = result.get("status") == "done" and len(result.get("world_sizes", [])) == 1
        rows = result.get("rows", 0) * result.get("epochs", 1)
        seconds = max(loops, default=0.0) if is_whole else 0.0
    return rows / seconds if rows and seconds > 0 else None


def rows_and_seconds(history: pa.Table) -> tuple[float, float]:
    """Return the rows of the steps in a history, and the seconds that they took."""
    rows, speeds = (numbers(history.column(name)) for name in ("rows", "rows_per_second"))
    is_known = speeds > 0
    return float(rows[is_known].sum()), float((rows[is_known] / speeds[is_known]).sum())


def comparison_values(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the runs as JSON values: results, what differs in jobs and environments, metrics, throughput, time."""
    environments = [run.environment for run in runs]
    is_known = all(environments)  # else nothing differs, as far as is known
    return {
        "runs": [run.result or run.row.to_json() for run in runs],
        "status": [run.row.status for run in runs],
        "job": differing_keys(runs),
        "environment": differing(environments, OF_EACH_DRIVER) if is_known else {},
        "computed": differing_numerics(runs),
        "metrics": side_by_side([run.row.metrics for run in runs]),
        "rows_per_second": [run.rows_per_second for run in runs],
        "time_split": side_by_side([run.time_split for run in runs]),
        "seconds": [run.row.seconds for run in runs],
    }


def comparison_text(runs: Sequence[ComparedRun], width: int | None = None) -> str:
    """Show the runs side by side: what is the same, a table of what differs and of their figures, sparklines.

    The sparklines fit a terminal of `width` columns.
    """
    rows = [[printable(cell) for cell in row] for row in table_of(runs)]
    return "\n".join([likeness(runs), in_columns(rows), *_curves(runs, width)])


def likeness(runs: Sequence[ComparedRun]) -> str:
    """Say whether the runs have the same job, weights and outputs: `the same job, the same weights`."""
    keys = differing_keys(runs)
    counting = {key for key in keys if not {key, key.partition(".")[0]} & Job.CANNOT_CHANGE_THE_RESULT}
    alike = f"the same job (but for {listed(keys)})" if keys else "the same job"
    objects = [key.removesuffix(".target") for key, value in dotted(runs[0].job) if _is_object(key, value)]
    if objects:
        alike += f" as far as can be told: {listed(objects)} from Python cannot be compared"
    says = ["different jobs" if counting else alike]
    for what in ("weights", "outputs"):
        hashes = [run.result.get(f"{what}_sha256") for run in runs]
        if all(hashes):
            says.append(f"{'the same' if len(set(hashes)) == 1 else 'different'} {what}")
    if computed := differing_numerics(runs):
        says.append(f"computed on different kinds of workers ({listed(computed)}), so their bits may differ")
    return ", ".join(says)


def _is_object(key: str, value: Any) -> bool:
    """Return whether a key of a job had a Python object: a file keeps its type alone, `<module:Class>`."""
    if isinstance(value, list):
        return any(_is_object(key, item) for item in value)
    return isinstance(value, str) and OBJECT.fullmatch(value) is not None and not key.startswith("hooks.")


def table_of(runs: Sequence[ComparedRun]) -> Iterator[list[str]]:
    """Yield the rows of the table that compares runs: their directories, what differs, and their figures."""
    values = comparison_values(runs)
    yield ["", *(run.where for run in runs)]
    computed = {f"computed.{name}": row for name, row in values["computed"].items()}
    for key, row in (*values["job"].items(), *values["environment"].items(), *computed.items()):
        yield [key, *map(setting_text, row)]
    yield ["status", *values["status"]]
    steps = [(run.row.step, run.row.steps) for run in runs]
    yield ["steps", *(str(total) if done == total else f"{done}/{setting_text(total)}" for done, total in steps)]
    if "time_split.data_wait" in values["time_split"]:  # the share of the waits stands among the parts
        values["time_split"].pop("data_wait_share", None)
    figures = {f"metrics.{name}": (row, ".6g") for name, row in values["metrics"].items()}
    figures |= {"rows/s": (values["rows_per_second"], ",.0f")}
    figures |= {part: (row, ".3g") for part, row in values["time_split"].items()}
    figures |= {"seconds": (values["seconds"], ".1f")}
    for name, (row, form) in figures.items():
        yield [name, *("-" if value is None else format(value, form) for value in row)]


def _curves(runs: Sequence[ComparedRun], width: int | None) -> Iterator[str]:
    """Yield, for each measured column of the histories, a sparkline of each run, all on one scale."""
    columns = dict.fromkeys(name for run in runs if run.history is not None for name in run.history.column_names)
    longest = max((len(run.history) for run in runs if run.history is not None), default=0)
    where = max(len(printable(run.where)) for run in runs)
    cells = CURVE_WIDTH if width is None else max(1, min(CURVE_WIDTH, width - where - 4))
    for name in columns:
        curves = [[value for value in run.curve(name) if value is not None] for run in runs]
        finite = [value for curve in curves for value in curve if math.isfinite(value)]
        if name in NO_CURVE or is_inner(name) or len(finite) < 3:
            continue
        yield f"{name}, {min(finite):.4g} to {max(finite):.4g}"
        for run, curve in zip(runs, curves, strict=True):
            steps = 0 if run.history is None else len(run.history)
            line = sparkline(curve, max(1, cells * steps // longest), min(finite), max(finite))
            yield f"  {printable(run.where):{where}}  {line}"


def differing_keys(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the keys in which the jobs of runs differ, as dotted paths, with each job's value."""
    return differing([dict(dotted(run.job)) for run in runs], NO_DIFFERENCE)


def differing_numerics(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the kinds of workers that computed the runs, if they differ and all runs have recorded theirs."""
    each_run = [run.computed for run in runs]
    return differing(each_run, ()) if all(each_run) else {}


def differing(each_run: Sequence[Mapping[str, Any]], left_out: Sequence[str]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, with the values of all."""
    rows = side_by_side(each_run).items()
    return {key: row for key, row in rows if key not in left_out and not all(same(number, row[0]) for number in row)}


def side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each key that one of the mappings has; None stands for one that is not there."""
    keys = dict.fromkeys(key for record in columns for key in record)
    return {key: [record.get(key) for record in columns] for key in keys}

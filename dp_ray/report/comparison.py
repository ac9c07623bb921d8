"""Makes the page that compares runs: what differs, their curves laid over each other, their figures side by side.

Writes the page of a run, or of several, where the user wants it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dp_ray.errors import StorageError
from dp_ray.job.files import dotted
from dp_ray.report.charts import WHOLE, Chart, charts_of
from dp_ray.report.page import (
    REPORT,
    duration,
    metrics_of,
    page_of,
    rendered,
    rows_per_second,
    speed_text,
    spoken,
    time_split,
    write_page,
)
from dp_ray.report.run_data import RunData, as_text, read_run
from dp_ray.results.compare import NO_DIFFERENCE
from dp_ray.rundir.files import RESULT, RUN, damage_told
from dp_ray.storage import Storage

ENVIRONMENT = ("command", "folder", "python", "packages", "host", "platform", "cpus", "gpus")
Rows = dict[str, list[Any]]


class Trials(NamedTuple):
    """The sweep whose runs are compared: its name, a name for each run, and a table of all trials, best first.

    `has_best` says that the first row is the best trial.
    """

    sweep: str
    names: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_best: bool


def comparison_of(runs: Sequence[Storage], trials: Trials | None = None) -> str:
    """The page that compares runs, as HTML; with `trials`, the page of their sweep."""
    return render_comparison([read_run(run) for run in runs], trials)


def render_comparison(runs: Sequence[RunData], trials: Trials | None = None) -> str:
    """The page that compares what is known of some runs."""
    names = list(trials.names) if trials else labels(runs)
    charts = overlaid(runs, names)
    tables = {
        "Figures": figures(runs),
        "Final metrics": metrics(runs),
        "Where the time goes": time_splits(runs),
        "The jobs differ in": differing([run.job for run in runs]),
        "The environments differ in": differing([environment_of(run) for run in runs]),
    }
    drawing = {
        "steps": max(1, *(run.total_steps for run in runs)),
        "charts": [one.to_json() for one in charts],
        "heatMaps": [],
        "parts": None,
        "epochs": [],
        "interruptions": [],
        "live": None,
    }
    known = {"names": names, "runs": runs, "charts": charts, "tables": tables, "trials": trials}
    return rendered("comparison.html", drawing, **known)


def labels(runs: Sequence[RunData]) -> list[str]:
    """A name for each run: its own, or its directory where several have the same."""
    names = [run.name for run in runs]
    return [run.where if names.count(run.name) > 1 else run.name for run in runs]


def overlaid(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """A chart for each value that a run measured, with a series for each run, of the same colour everywhere."""
    found: dict[str, Chart] = {}
    for at, (label, run) in enumerate(zip(names, runs, strict=True)):
        for mine in charts_of(run.history, WHOLE // len(runs)):
            chart = found.setdefault(mine.title, Chart(f"chart-{len(found)}", mine.title, []))
            for number, series in enumerate(mine.series):
                name = f"{label}: {series['name']}" if number else label
                chart.series.append({**series, "name": name, "color": at, "dash": at + number})
    return list(found.values())


def figures(runs: Sequence[RunData]) -> Rows:
    """Status, steps, rows per second and seconds of each run."""
    seconds = [run.result.get("seconds") for run in runs]
    return {
        "status": [run.status for run in runs],
        "steps": [f"{run.steps_done:,} of {run.total_steps:,}" for run in runs],
        "rows per second": [speed_text(run) for run in runs],
        "against the first": [_ratio(rows_per_second(run), rows_per_second(runs[0])) for run in runs],
        "time": [duration(one) for one in seconds],
        "interruptions": [len(run.incidents.interruptions) for run in runs],
    }


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f} x" if one and other else ""


def metrics(runs: Sequence[RunData]) -> Rows:
    """The final metrics of each run."""
    found = [{one.label: one.value for one in metrics_of(run)} for run in runs]
    return _side_by_side(found)


def time_splits(runs: Sequence[RunData]) -> Rows:
    """The share of each part of a step in each run."""
    found = [{spoken(one.name): f"{one.share:.1%}" for one in time_split(run)} for run in runs]
    return _side_by_side(found)


def differing(values: Sequence[Mapping[str, Any]]) -> Rows:
    """The keys in which mappings differ, as dotted paths, with the value of each."""
    rows = _side_by_side([dict(dotted(one)) for one in values])
    return {
        key: [as_text(one) for one in row]
        for key, row in rows.items()
        if key not in NO_DIFFERENCE and any(one != row[0] for one in row)
    }


def environment_of(run: RunData) -> dict[str, Any]:
    """What a run was made with: the code's commit and changed files, versions and machine."""
    driver = run.drivers[-1] if run.drivers else {}
    git = driver.get("git") or {}
    told = {"git": {key: git.get(key) for key in ("commit", "branch", "changed")}} if git else {}
    return {**{key: driver[key] for key in ENVIRONMENT if key in driver}, **told}


def _side_by_side(found: Sequence[Mapping[str, Any]]) -> Rows:
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: [one.get(key) for one in found] for key in keys}


def save_page(run_dirs: Sequence[str], file: str | None = None) -> str:
    """Write the page of a run, or the one that compares several; return where it is.

    Without `file`, it is `report.html` in the directory of the first run. Raises StorageError if one holds no run, or
    if the files of one are so damaged that no page can be made.
    """
    runs = [Storage(run_dir) for run_dir in run_dirs]
    for run in runs:
        if not (run.exists(RUN) or run.exists(RESULT)):
            raise StorageError(f"{run}: is not a run directory")
    with damage_told(" or ".join(run_dirs)):
        if file is None:
            write_page(runs[0])
            return runs[0].shown(REPORT)
        place = Path(file).absolute()
        page = page_of(runs[0]) if len(runs) == 1 else comparison_of(runs)
    Storage(str(place.parent)).write_text(place.name, page)
    return str(place)


def save_comparison(runs: Sequence[Storage], folder: Storage, trials: Trials) -> str:
    """Write the page of a sweep, with its runs, into a folder; return where it is. Raises what `save_page` raises."""
    with damage_told(" or ".join(map(str, runs))):
        page = comparison_of(runs, trials)
    folder.write_text(REPORT, page)
    return folder.shown(REPORT)

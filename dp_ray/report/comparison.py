"""Write the page of a run, or the one that compares several, where the user wants it.

A comparison shows what differs, the runs' curves laid over each other, and their figures side by side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dp_ray.errors import StorageError
from dp_ray.job.files import dotted
from dp_ray.job.keys import named_evals
from dp_ray.records import damage_told
from dp_ray.report import page
from dp_ray.report.charts import WHOLE, Chart, charts_of
from dp_ray.report.run_data import RunData, read_run
from dp_ray.results.compare import NO_DIFFERENCE, differing, likeness, mean_speed, side_by_side
from dp_ray.results.text import setting_text
from dp_ray.rundir.files import RESULT, RUN, runs_there
from dp_ray.storage import Storage

ENVIRONMENT = ("command", "folder", "python", "packages", "host", "platform", "cpus", "gpus")
RunColumns = dict[str, list[Any]]


class Trials(NamedTuple):
    """The sweep whose runs are compared: its name, a name for each run, and a table of all trials, best first.

    `has_best` says that the first row is the best trial.
    """

    sweep: str
    names: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    has_best: bool


def save_page(run_dirs: Sequence[str], file: str | None = None) -> str:
    """Write the page of a run, or the one that compares several; return where it is.

    Without `file`, it is `report.html` in the directory of the first run. Raises StorageError if one holds no run, or
    if the files of one are so damaged that no page can be made.
    """
    runs = [Storage(run_dir) for run_dir in run_dirs]
    for run in runs:
        if not (run.exists(RUN) or run.exists(RESULT)):
            raise StorageError(f"{run}: is not a run directory{runs_there(run)}")
    with damage_told(" or ".join(run_dirs)):
        if file is None:
            page.write_page(runs[0])
            return runs[0].shown(page.REPORT)
        place = Path(file).absolute()
        text = page.page_of(runs[0]) if len(runs) == 1 else comparison_of(runs)
    Storage(str(place.parent)).write_text(place.name, text)
    return str(place)


def save_comparison(runs: Sequence[Storage], folder: Storage, trials: Trials) -> str:
    """Write the page of a sweep, with its runs, into a folder; return where it is. Raises what `save_page` raises."""
    with damage_told(" or ".join(map(str, runs))):
        text = comparison_of(runs, trials)
    folder.write_text(page.REPORT, text)
    return folder.shown(page.REPORT)


def comparison_of(runs: Sequence[Storage], trials: Trials | None = None) -> str:
    """Return the page that compares runs, as HTML; with `trials`, the page of their sweep."""
    known = [read_run(run) for run in runs]
    # A run goes by its own name, or by its directory where several have the same.
    own = [run.name for run in known]
    names = list(trials.names) if trials else [run.where if own.count(run.name) > 1 else run.name for run in known]
    charts = overlaid(known, names)
    tables = {
        "Figures": figures(known),
        "Final metrics": side_by_side([{fact.label: fact.value for fact in page.metrics_of(run)} for run in known]),
        "Where the time goes": side_by_side(
            [{page.spoken(share.name): f"{share.share:.1%}" for share in page.time_shares(run)} for run in known]
        ),
        "The jobs differ in": shown_differences([run.job for run in known]),
        "The environments differ in": shown_differences([environment_of(run) for run in known]),
    }
    drawing = {"steps": max(1, *(run.total_steps for run in known)), "charts": list(map(vars, charts))}
    alike = likeness(known) if trials is None and all(run.job for run in known) else ""
    shown = {"names": names, "runs": known, "charts": charts, "tables": tables, "trials": trials, "alike": alike}
    return page.rendered("comparison.html", drawing, **shown)


def overlaid(runs: Sequence[RunData], names: Sequence[str]) -> list[Chart]:
    """Return a chart for each value that a run measured, with a series for each run, in the same colour on all."""
    charts: dict[str, Chart] = {}
    for at, (label, run) in enumerate(zip(names, runs, strict=True)):
        for mine in charts_of(run.history, named_evals(run.job.get("eval")), WHOLE // len(runs)):
            chart = charts.setdefault(mine.title, Chart(f"chart-{len(charts)}", mine.title, []))
            for number, series in enumerate(mine.series):
                name = f"{label}: {series['name']}" if number else label
                chart.series.append({**series, "name": name, "color": at, "dash": at + number})
    return list(charts.values())


def figures(runs: Sequence[RunData]) -> RunColumns:
    """Return status, steps, rows per second and seconds of each run."""
    speeds = [mean_speed(run.history, run.result) for run in runs]
    return {
        "status": [run.status for run in runs],
        "steps": [f"{run.steps_done:,} of {run.total_steps:,}" for run in runs],
        "rows per second": [page.speed_text(speed) for speed in speeds],
        "against the first": [f"{speed / speeds[0]:.2f} x" if speed and speeds[0] else "" for speed in speeds],
        "time": [page.duration(run.result.get("seconds")) for run in runs],
        "interruptions": [len(run.incidents.interruptions) for run in runs],
    }


def shown_differences(values: Sequence[Mapping[str, Any]]) -> RunColumns:
    """Return the keys in which mappings differ, as dotted paths, with the value of each."""
    rows = differing([dict(dotted(options)) for options in values], NO_DIFFERENCE)
    return {key: list(map(setting_text, row)) for key, row in rows.items()}


def environment_of(run: RunData) -> dict[str, Any]:
    """Return what a run was made with: the code's commit and changed files, versions and machine."""
    driver = run.drivers[-1] if run.drivers else {}
    git = driver.get("git") or {}
    code = {"git": {key: git.get(key) for key in ("commit", "branch", "changed")}} if git else {}
    return {**{key: driver[key] for key in ENVIRONMENT if key in driver}, **code}

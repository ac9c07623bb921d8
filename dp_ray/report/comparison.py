"""Write the page of a run, or the one that compares several, where the user wants it.

A comparison has the table of `dp-ray compare`, and the runs' curves laid over each other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dp_ray.errors import StorageError
from dp_ray.records import damage_told
from dp_ray.report import page
from dp_ray.report.charts import WHOLE, Chart, charts_of
from dp_ray.results.compare import ComparedRun, likeness, read_compared_run, table_of
from dp_ray.rundir.files import RESULT, RUN, runs_there
from dp_ray.storage import Storage


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
    known = [read_compared_run(run) for run in runs]
    (_, *where), *rows = table_of(known)
    own = [run.row.name for run in known]
    names = list(trials.names) if trials else own if len(set(own)) == len(own) else where
    charts = overlaid(known, names)
    alike = "" if trials else likeness(known)
    shown = {"names": names, "charts": charts, "rows": rows, "trials": trials, "alike": alike}
    return page.rendered("comparison.html", {"charts": list(map(vars, charts))}, **shown)


def overlaid(runs: Sequence[ComparedRun], names: Sequence[str]) -> list[Chart]:
    """Return a chart for each value that a run measured, with a series for each run, in the same colour on all."""
    charts: dict[str, Chart] = {}
    for at, (label, run) in enumerate(zip(names, runs, strict=True)):
        for mine in charts_of(run.history, run.job, WHOLE // len(runs)):
            chart = charts.setdefault(mine.title, Chart(f"chart-{len(charts)}", mine.title, []))
            for number, series in enumerate(mine.series):
                name = f"{label}: {series['name']}" if number else label
                chart.series.append({**series, "name": name, "color": at, "dash": at + number})
    return list(charts.values())

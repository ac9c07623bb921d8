"""Makes the page of a run: one HTML file that needs no network.

It runs no code of the run, and escapes all that it shows.
"""

import functools
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from markupsafe import Markup

from dp_ray.report.curves import Chart, charts_of, epochs_of, workers_chart
from dp_ray.report.facts import color_of, duration, facts_of, metrics_of, number, spoken, time_split
from dp_ray.report.run_data import RunData, as_text, read_run
from dp_ray.report.worker_grid import WorkerGrid
from dp_ray.results.arrow_numbers import known_numbers
from dp_ray.rundir.incidents import IncidentLog
from dp_ray.secrets import hide_in
from dp_ray.storage import Storage
from dp_ray.text import harmless

REPORT = "report.html"
HERE = Path(__file__).parent
SCRIPTS = ("bokeh.min.js", "bokeh-api.min.js")
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the fast one, where it was built
EVALUATIONS = 50  # the newest, in the table


def write_page(run: Storage) -> None:
    """Write `report.html` into a run directory."""
    run.write_text(REPORT, page_of(run))


def page_of(run: Storage, live: float | None = None) -> str:
    """The page of a run, finished or not, as HTML; it takes itself anew from its server every `live` seconds."""
    return render_run(read_run(run), live)


def render_run(data: RunData, live: float | None = None) -> str:
    """The page of what is known of a run."""
    charts = [*charts_of(data.history), *workers_chart(data.incidents, data.steps_done)]
    return rendered(
        "run.html",
        {**drawing_of(data, charts), "live": live},
        run=data,
        charts=charts,
        facts=facts_of(data),
        metrics=metrics_of(data),
        split=time_split(data),
        job_file=job_file_of(data.job),
        driver=data.drivers[-1] if data.drivers else {},
        evaluations=evaluations_of(data),
        heat_maps=heat_maps(data.grid),
        parts_drawn=step_parts(data.grid),
    )


def drawing_of(data: RunData, charts: Sequence[Chart]) -> dict[str, Any]:
    """What the page's script draws, as JSON values."""
    return {
        "steps": max(1, data.total_steps),
        "charts": [one.to_json() for one in charts],
        "heatMaps": heat_maps(data.grid),
        "parts": step_parts(data.grid),
        "epochs": epochs_of(data.history),
        "interruptions": _steps_of(data.incidents),
    }


def rendered(template: str, drawing: dict[str, Any], **values: Any) -> str:
    """A template as HTML, with the scripts and the values that they draw."""
    scripts = plotting_scripts()
    return (
        _templates()
        .get_template(template)
        .render(
            **values,
            drawing=hide_in(drawing),
            can_draw=bool(scripts),
            styles=Markup((HERE / "page.css").read_text()),
            scripts=[Markup(one) for one in (*scripts, (HERE / "page.js").read_text())],
            theme_script=Markup((HERE / "theme.js").read_text()),
        )
    )


def job_file_of(job: dict[str, Any]) -> str:
    """A job with all of its keys as YAML."""
    try:
        return str(yaml.dump(job, Dumper=DUMPER, sort_keys=False, allow_unicode=True)) if job else ""
    except UnicodeEncodeError:  # the fast dumper takes no halves of characters
        return str(yaml.dump(job, Dumper=yaml.SafeDumper, sort_keys=False))


@functools.cache
def plotting_scripts() -> tuple[str, ...]:
    """BokehJS, from the installed package, without importing it; empty if it is not installed."""
    found = find_spec("bokeh")
    if found is None or not found.submodule_search_locations:
        return ()
    folder = Path(found.submodule_search_locations[0]) / "server" / "static" / "js"
    try:
        # In a script's text only this ends the element; in its strings, both spellings are the same.
        return tuple((folder / name).read_text().replace("</script", "<\\/script") for name in SCRIPTS)
    except OSError:
        return ()


@functools.cache
def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(HERE)
    # What an earlier version did not keep is left out.
    found = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    found.filters |= {"number": number, "duration": duration, "text": as_text}
    return found


def _shown(value: Any) -> Any:
    """A value that a template shows: a text without secrets, what would turn its direction, or cannot be encoded."""
    return harmless(value) if type(value) is str else value


def heat_maps(grid: WorkerGrid | None) -> list[dict[str, Any]]:
    """The heat maps of a run as JSON values: milliseconds and rows of each worker, a step."""
    if grid is None:
        return []
    both = {"edges": grid.edges, "nodes": grid.nodes}
    counted = "without the exchange" if grid.parts else "in the model"
    return [
        {
            **both,
            "key": "heat-milliseconds",
            "title": f"Milliseconds of each worker per step, {counted}",
            "unit": "ms",
            "values": _without_nan(grid.milliseconds),
            "slowest": _without_nan(grid.slowest),
        },
        {
            **both,
            "key": "heat-rows",
            "title": "Rows of each worker per step",
            "unit": "rows",
            "values": _without_nan(grid.rows),
            "slowest": None,
        },
    ]


def step_parts(grid: WorkerGrid | None) -> dict[str, Any] | None:
    """The milliseconds of each part of a step over the steps, as JSON values; None if they were not measured."""
    if grid is None or not grid.parts:
        return None
    values = [_plain(part.tolist()) for part in grid.parts.values()]
    names, colors = map(spoken, grid.parts), map(color_of, grid.parts)
    return {"edges": grid.edges, "names": list(names), "colors": list(colors), "values": values}


def _without_nan(grid: Any) -> list[list[float | None]]:
    return [_plain(row) for row in grid.tolist()]


def _plain(values: Sequence[float]) -> list[float | None]:
    """Numbers in six digits, with None for NaN, which JSON does not have."""
    return [float(f"{one:.6g}") if math.isfinite(one) else None for one in values]


def _steps_of(incidents: IncidentLog) -> list[dict[str, Any]]:
    return [{"step": one.step, "kind": one.kind.value} for one in incidents.interruptions]


def evaluations_of(data: RunData) -> dict[str, Any]:
    """The newest evaluations of a training: their columns, and a row for each."""
    names = [name for name in (data.history.column_names if data.history else []) if name.startswith("eval_")]
    if data.history is None or not names:
        return {"names": [], "rows": []}
    table = data.history.select(["step", "epoch", *names])
    steps = np.unique(np.concatenate([known_numbers(table, name)[0] for name in names]))
    newest = np.searchsorted(known_numbers(table, "epoch")[0], steps[-EVALUATIONS:][::-1])
    rows = [row for at in newest.tolist() for row in table.slice(at, 1).to_pylist()]
    return {"names": names, "rows": rows, "count": len(steps)}

"""Make the page of a run: one HTML file that needs no network. Begin at `page_of`.

It runs no code of the run, and escapes all that it shows. The first screen shows status, error, progress, speed,
where the time goes, final metrics and the command.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml
from markupsafe import Markup

from dp_ray.plan.history import is_inner, is_measured, is_of_many
from dp_ray.report.charts import charts_of, epochs_of, workers_chart
from dp_ray.report.run_data import RunData, WorkerGrid, read_run
from dp_ray.results.compare import mean_speed
from dp_ray.results.text import setting_text
from dp_ray.storage import Storage
from dp_ray.tables import known_numbers
from dp_ray.telemetry.times import STEP_PARTS
from dp_ray.text import harmless, hide_in

REPORT = "report.html"
HERE = Path(__file__).parent
SCRIPTS = ("bokeh.min.js", "bokeh-api.min.js")
EVALUATIONS = 50  # the newest, in the table
# The charts of a single run.
OF_A_RUN: dict[str, Any] = {"heat": None, "parts": None, "epochs": [], "interruptions": []}


def write_page(run: Storage) -> None:
    """Write `report.html` into a run directory."""
    run.write_text(REPORT, page_of(run))


def page_of(run: Storage) -> str:
    """Return the page of a run, finished or not, as HTML."""
    data = read_run(run)
    charts = [
        *charts_of(data.history, data.job),
        *workers_chart(data.incidents, data.steps_done),
    ]
    heat, parts = (heat_map(data.grid), step_parts(data.grid)) if data.grid else (None, None)
    drawing = {
        "charts": list(map(vars, charts)),
        "heat": heat,
        "parts": parts,
        "epochs": epochs_of(data.history),
        "interruptions": [{"step": event.step, "kind": event.kind.value} for event in data.incidents.interruptions],
    }
    return rendered(
        "run.html",
        drawing,
        run=data,
        charts=charts,
        facts=page_facts(data),
        metrics=metrics_of(data),
        split=time_shares(data),
        job_file=job_file_of(data.job),
        driver=data.drivers[-1] if data.drivers else {},
        evaluations=evaluation_rows(data),
        heat=heat,
        parts_drawn=parts,
    )


def rendered(template: str, drawing: dict[str, Any], **values: Any) -> str:
    """Render a template as HTML, with the scripts and the values that they draw."""
    scripts = plotting_scripts()
    return TEMPLATES.get_template(template).render(
        **values,
        drawing=hide_in({**OF_A_RUN, **drawing}),
        can_draw=bool(scripts),
        styles=Markup((HERE / "page.css").read_text()),
        scripts=[Markup(script) for script in (*scripts, (HERE / "page.js").read_text())],
    )


@functools.cache
def plotting_scripts() -> tuple[str, ...]:
    """Return BokehJS from the installed package, without importing it; nothing if it is not installed."""
    package = find_spec("bokeh")
    if package is None or not package.submodule_search_locations:
        return ()
    folder = Path(package.submodule_search_locations[0]) / "server" / "static" / "js"
    try:
        # In a script's text only this ends the element; in its strings, both spellings are the same.
        return tuple((folder / name).read_text().replace("</script", "<\\/script") for name in SCRIPTS)
    except OSError:
        return ()


@dataclass(frozen=True)
class Fact:
    """A value on the first screen, with what explains it below."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class TimePart:
    """A part of the workers' time, as a share of the whole."""

    name: str
    share: float
    color: int


def page_facts(data: RunData) -> list[Fact]:
    """Return progress, speed, time and workers of a run."""
    result = data.result
    done, total = data.steps_done, data.total_steps
    epochs = ""
    if result.get("epochs", 1) > 1:
        epochs = f"{result['epochs']} epochs of {result['steps']:,}"
        if result["epochs"] * result["steps"] != total:
            epochs = f"{result['steps']:,} in an epoch"
    early = (result.get("stopped_early") or {}).get("text", "")
    times = ["since it was resumed"] if len(data.drivers) > 1 else []
    before, after = (result.get(f"seconds_{when}_steps") for when in ("before", "after"))
    if before is not None and after is not None:
        times.append(f"{duration(before)} before the first step, {duration(after)} after the last")
    sizes, where = data.incidents.world_sizes or tuple(result.get("world_sizes", ())), ""
    if data.is_in_process and sizes:
        sizes, where = (0,), "in the driver's process"
    is_resized = len(set(sizes)) > 1
    aside = result.get("quarantined") or len(data.quarantined)
    facts = [
        Fact("steps", f"{done:,} of {total:,}" if done != total else f"{total:,}", early or epochs),
        Fact("rows per second", speed_text(mean_speed(data.history, result)), "mean of the run"),
        Fact("time", duration(result.get("seconds")), ", ".join(times)),
        Fact("workers", str(sizes[-1]) if sizes else "", where or " → ".join(map(str, sizes if is_resized else ()))),
        Fact("interruptions", str(len(data.incidents.interruptions))),
        Fact("set aside", str(aside) if aside else "", "samples"),
    ]
    return [fact for fact in facts if fact.value]


def metrics_of(data: RunData) -> list[Fact]:
    """Return the final metrics, or the newest of a run that goes on."""
    metrics = data.result.get("metrics") or {}
    if not metrics and data.history is not None:
        names = list(filter(is_measured, data.history.column_names))
        columns = {name: data.history.column(name).drop_null() for name in names}
        metrics = {name: column[-1].as_py() for name, column in columns.items() if len(column)}
    best = data.result.get("best") or {}
    is_training = data.task == "train"
    notes = {name: "of the last batch" for name in metrics if is_training and not is_of_many(name)}
    if best.get("metric"):
        notes[best["metric"]] = f"best {metric_text(best['value'])} after step {best['step'] - 1:,}"
    return [Fact(key, metric_text(value), notes.get(key, "")) for key, value in metrics.items() if not is_inner(key)]


def speed_text(speed: float | None) -> str:
    """Return rows per second as text."""
    return "" if speed is None else f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


def time_shares(data: RunData) -> list[TimePart]:
    """Return the parts of the workers' time, which add up to the whole; the largest first."""
    shares = (data.time_split or {}).get("all", {})
    parts = [TimePart(spoken(name), share, color_of(name)) for name, share in shares.items() if share > 0]
    return sorted(parts, key=lambda part: -part.share)


def color_of(part: str) -> int:
    """Return the number of a part's colour, the same everywhere on the page."""
    return STEP_PARTS.index(part) if part in STEP_PARTS else len(STEP_PARTS)


def spoken(part: str) -> str:
    """Return the name of a part of a step as words."""
    return part.replace("_", " ")


def metric_text(value: Any) -> str:
    """Return a metric as text; None stands for NaN in JSON."""
    if isinstance(value, bool | int | str):
        return str(value)
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else "not finite"


def duration(seconds: float | None) -> str:
    """Return seconds in the two largest units.

    >>> [duration(one) for one in (3.25, 75, 7384, 180000)]
    ['3.2 s', '1 min 15 s', '2 h 3 min', '2 d 2 h']
    """
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    at = next(number for number, (_, size) in enumerate(units) if seconds >= size)
    (large, size), (small, part) = units[at : at + 2]
    return f"{int(seconds // size)} {large} {int(seconds % size // part)} {small}"


def job_file_of(job: dict[str, Any]) -> str:
    """Return a job with all of its keys as YAML."""
    # Not by the fast dumper, which takes no halves of characters.
    return str(yaml.safe_dump(job, sort_keys=False, allow_unicode=True)) if job else ""


def heat_map(grid: WorkerGrid) -> dict[str, Any]:
    """Return the heat map of a run as JSON values: milliseconds of each worker, a step, with its rows."""
    return {
        "edges": grid.edges,
        "nodes": grid.nodes,
        "values": _without_nan(grid.milliseconds),
        "slowest": _without_nan(grid.slowest),
        "rows": _without_nan(grid.rows),
    }


def step_parts(grid: WorkerGrid) -> dict[str, Any]:
    """Return the milliseconds of each part of a step over the steps, as JSON values."""
    return {
        "edges": grid.edges,
        "names": [spoken(part) for part in grid.parts],
        "colors": [color_of(part) for part in grid.parts],
        "values": _without_nan(grid.parts.values()),
    }


def _without_nan(rows: Iterable[Any]) -> list[list[float | None]]:
    """Return arrays of numbers in six digits, with None for NaN, which JSON does not have."""
    return [[float(f"{value:.6g}") if math.isfinite(value) else None for value in row.tolist()] for row in rows]


def evaluation_rows(data: RunData) -> dict[str, Any]:
    """Return the newest evaluations of a training: their columns, and a row for each."""
    names = [name for name in (data.history.column_names if data.history else []) if name.startswith("eval_")]
    if data.history is None or not names:
        return {"names": [], "rows": []}
    table = data.history.select(["step", "epoch", *names])
    steps = np.unique(np.concatenate([known_numbers(table, name)[0] for name in names]))
    newest = np.searchsorted(known_numbers(table, "epoch")[0], steps[-EVALUATIONS:][::-1])
    rows = [row for at in newest.tolist() for row in table.slice(at, 1).to_pylist()]
    return {"names": names, "rows": rows, "count": len(steps)}


def _shown(value: Any) -> Any:
    """Return a value for a template: a text without characters that cannot be encoded or turn its direction."""
    return harmless(value) if type(value) is str else value


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE),
    autoescape=True,
    undefined=jinja2.ChainableUndefined,  # values that an earlier version did not keep are left out
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_shown,
)
TEMPLATES.filters |= {"number": metric_text, "duration": duration, "text": setting_text}

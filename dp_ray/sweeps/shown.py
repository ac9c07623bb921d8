"""What a sweep shows of its trials: a table, JSON, and which runs its page compares."""

from typing import Any

from dp_ray.results.short import aligned, relative
from dp_ray.rundir.files import RUN
from dp_ray.secrets import hide, hide_in
from dp_ray.storage import Storage
from dp_ray.sweeps.axes import Choices
from dp_ray.sweeps.definition import Definition
from dp_ray.sweeps.record import Record, Trial
from dp_ray.text import printable

COMPARED = 50  # runs on the page, the best ones: each is a curve in each chart


def best_first(record: Record) -> list[Trial]:
    """The trials with the best value of the metric first; then those without a value, by their numbers."""
    metric, mode = record.definition.metric, record.definition.mode
    sign = 1 if mode == "min" else -1
    ranked = [(value, trial) for trial in record.trials if (value := trial.value(metric)) is not None]
    ranked.sort(key=lambda one: (sign * one[0], one[1].number))
    known = {trial.number for _, trial in ranked}
    return [*(trial for _, trial in ranked), *(trial for trial in record.trials if trial.number not in known)]


def table(record: Record, base: Storage) -> str:
    """The trials as a table, best first: number, values, metric, state, run."""
    definition, metric = record.definition, record.definition.metric
    head = ["trial", *(axis.key for axis in definition.axes), *[metric or ""] * (metric is not None), "state", "run"]
    rows = [_cells(trial, definition, base) for trial in best_first(record)]
    return aligned([[printable(cell) for cell in row] for row in [head, *rows]])


def _cells(trial: Trial, definition: Definition, base: Storage) -> list[str]:
    value = trial.value(definition.metric)
    return [
        str(trial.number),
        *(hide(_as_text(one)) for one in definition.values(trial.picked).values()),
        *["-" if value is None else f"{value:.6g}"] * (definition.metric is not None),
        trial.state,
        relative(base.shown(definition.run_name(trial.number))),
    ]


def _as_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def space(definition: Definition) -> list[str]:
    """Lines on what a search draws from; none of a grid, whose trials tell it."""
    if definition.search is None:
        return []
    lines = [f"{definition.count} trials, whose values {definition.search} draws from"]
    for axis in definition.axes:
        drawn = ", ".join(map(_as_text, axis.values)) if isinstance(axis, Choices) else str(axis)
        lines.append(f"  {axis.key}: {hide(drawn)}")
    return lines


def to_json(record: Record, base: Storage) -> dict[str, Any]:
    """The sweep as JSON values: its trials, best first."""
    definition, ordered = record.definition, best_first(record)
    has_best = bool(ordered) and ordered[0].value(definition.metric) is not None
    return {
        "name": definition.name,
        "sweep_dir": str(record.folder),
        "metric": definition.metric,
        "mode": definition.mode if definition.metric else None,
        "over": {axis.key: axis.describe() for axis in definition.axes},
        "search": definition.search,
        "count": definition.count,
        "best": ordered[0].number if has_best else None,
        "trials": [
            {
                "number": trial.number,
                "values": hide_in(definition.values(trial.picked)),
                **trial.to_json(definition.metric),
                "state": trial.state,
                "run": base.shown(definition.run_name(trial.number)),
                "error": hide(trial.error) or None,
            }
            for trial in ordered
        ],
    }


def runs_to_compare(record: Record, base: Storage) -> list[Storage]:
    """The runs of the trials for the page that compares them, best first."""
    runs = [base.child(record.definition.run_name(trial.number)) for trial in best_first(record)]
    return [run for run in runs if run.exists(RUN)][:COMPARED]

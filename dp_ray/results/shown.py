"""Formats a result for people: paths, numbers, tables."""

from collections.abc import Mapping
from html import escape
from typing import Any

from dp_ray.results.short import measured, relative
from dp_ray.results.time_split import split_line
from dp_ray.rundir.incidents import read_interruption

PATHS = ("run_dir", "outputs", "weights")
WIDTH = 16


def shown(values: Mapping[str, Any]) -> dict[str, str]:
    """The values of a `result.json` as text; `metrics` has a line for each metric, and `-` means no value."""
    found = {key: _plainly(value) for key, value in values.items() if key != "total_steps"}
    found |= {key: relative(values[key]) for key in PATHS if values[key]}
    found["steps"] = _steps(values["total_steps"], values["steps"], values["epochs"])
    if not values["quarantined"]:
        found["quarantined"] = "-"
    if values["best"]:
        found["best"] = "{metric} {value:.6g} after step {step}".format(**values["best"])
    if values.get("ema"):
        found["ema"] = f"decay {values['ema']['decay']:g}: {relative(values['ema']['weights'])}"
    if values.get("stopped_early"):
        found["stopped_early"] = values["stopped_early"]["text"]
    if values.get("failure"):
        found["failure"] = _failure(values["failure"])
    if values["time_split"]:
        found["time_split"] = split_line(values["time_split"])
    metrics = measured(values["metrics"])
    width = max(map(len, metrics), default=0)
    found["metrics"] = "\n".join(f"{name:{width}} {value}" for name, value in metrics.items()) or "-"
    return found


def key_lines(found: Mapping[str, str]) -> str:
    """One line for each key and value; a value's further lines are indented below its first."""
    width = max([WIDTH, *(len(key) + 1 for key in found)])
    return "\n".join(f"{key:{width}}{value}".replace("\n", "\n" + " " * width) for key, value in found.items())


def as_html(found: Mapping[str, str]) -> str:
    """The keys and values as an HTML table."""
    rows = [f"<tr><th>{escape(key)}</th><td>{_html(value)}</td></tr>" for key, value in found.items()]
    return f"<table>{''.join(rows)}</table>"


def _html(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _failure(values: Mapping[str, Any]) -> str:
    """Where a run failed, and the user's frames: `rank 0, node 10.0.0.2, step 7, sample 50`, then the frames."""
    where = ", ".join(f"{key} {value}" for key, value in values.items() if key != "frames" and value is not None)
    return f"{where}\n{values.get('frames') or ''}".rstrip()


def _steps(total: int, steps: int, epochs: int) -> str:
    """The steps of a run: `24 (3 epochs of 8)`."""
    total = total or steps * epochs
    if total != steps * epochs:
        return f"{total} ({steps} in an epoch)"
    return str(total) if epochs == 1 else f"{total} ({epochs} epochs of {steps})"


def _plainly(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "kind" in value[0]:
        return "; ".join(str(read_interruption(one)) for one in value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "; ".join(f"rank {one['rank']} {one['node']} {one.get('device', '-')}" for one in value)
    return "-" if value in (None, [], {}) else str(value)

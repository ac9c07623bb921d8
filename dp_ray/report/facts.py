"""The first screen of the page: status, error, progress, speed, where the time goes, final metrics, the command."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dp_ray.report.run_data import RunData
from dp_ray.results.arrow_numbers import numbers
from dp_ray.results.step_times_table import STEP_PARTS
from dp_ray.rundir.history_file import is_inner


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
    color: int = 0


def facts_of(data: RunData) -> list[Fact]:
    """Progress, speed, time and workers of a run."""
    return [one for one in _facts(data) if one.value]


def _facts(data: RunData) -> Iterator[Fact]:
    result = data.result
    done, total = data.steps_done, data.total_steps
    epochs = f"{result['epochs']} epochs of {result['steps']:,}" if result.get("epochs", 1) > 1 else ""
    early = (result.get("stopped_early") or {}).get("text", "")
    yield Fact("steps", f"{done:,} of {total:,}" if done != total else f"{total:,}", early or epochs)
    yield Fact("rows per second", speed_text(data), "mean of the run")
    yield Fact("time", duration(result.get("seconds")), ", ".join(_of_the_time(data)))
    sizes = data.incidents.world_sizes or tuple(result.get("world_sizes", ()))
    yield Fact("workers", str(sizes[-1]) if sizes else "", " → ".join(map(str, sizes)) if len(set(sizes)) > 1 else "")
    yield Fact("interruptions", str(len(data.incidents.interruptions)))
    aside = result.get("quarantined") or len(data.quarantined)
    yield Fact("set aside", str(aside) if aside else "", "samples")


def _of_the_time(data: RunData) -> Iterator[str]:
    before, after = (data.result.get(f"seconds_{one}_steps") for one in ("before", "after"))
    if len(data.drivers) > 1:
        yield "since it was resumed"
    if before is not None and after is not None:
        yield f"{duration(before)} before the first step, {duration(after)} after the last"


def metrics_of(data: RunData) -> list[Fact]:
    """The final metrics, or the newest of a run that goes on."""
    found = data.result.get("metrics") or _newest(data)
    best = data.result.get("best") or {}
    told = {best["metric"]: f"best {number(best['value'])} after step {best['step']:,}"} if best.get("metric") else {}
    return [Fact(name, number(value), told.get(name, "")) for name, value in found.items() if not is_inner(name)]


def _newest(data: RunData) -> dict[str, Any]:
    """The last value of each measured column of the history."""
    if data.history is None:
        return {}
    skipped = {"step", "epoch", "rows", "learning_rate", "gradient_norm", "rows_per_second", "data_wait_seconds"}
    names = [name for name in data.history.column_names if name not in skipped]
    columns = {name: data.history.column(name).drop_null() for name in names}
    return {name: column[-1].as_py() for name, column in columns.items() if len(column)}


def rows_per_second(data: RunData) -> float | None:
    """The mean over the run: of a training by its history, else by the rows and the workers' longest loop."""
    if data.history is not None and len(data.history):
        rows, seconds = _rows_and_seconds(data)
        return rows / seconds if seconds > 0 else None
    loops = [worker.get("loop_seconds") or 0.0 for worker in data.result.get("workers", [])]
    rows = data.result.get("rows") or 0
    return rows / max(loops) if rows and max(loops, default=0.0) > 0 and data.status == "done" else None


def _rows_and_seconds(data: RunData) -> tuple[float, float]:
    assert data.history is not None
    rows, speeds = (numbers(data.history.column(name)) for name in ("rows", "rows_per_second"))
    is_known = speeds > 0
    return float(rows[is_known].sum()), float((rows[is_known] / speeds[is_known]).sum())


def speed_text(data: RunData) -> str:
    """The mean speed, for people."""
    speed = rows_per_second(data)
    return "" if speed is None else f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


def time_split(data: RunData) -> list[TimePart]:
    """Where the workers' time went, in parts that add up to the whole; the largest first."""
    if shares := (data.time_split or {}).get("all"):
        parts = [TimePart(spoken(name), share, color_of(name)) for name, share in shares.items() if share > 0]
        return sorted(parts, key=lambda one: -one.share)
    loops, waits = (
        [worker.get(f"{name}_seconds") or 0.0 for worker in data.result.get("workers", [])]
        for name in ("loop", "data_wait")
    )
    whole, wait = sum(loops), sum(waits)
    if not whole and data.history is not None and len(data.history):
        whole, wait = _rows_and_seconds(data)[1], float(numbers(data.history.column("data_wait_seconds")).sum())
    if whole <= 0:
        return []
    share = min(1.0, wait / whole)
    return [TimePart("data wait", share, color_of("data_wait")), TimePart("all else", 1 - share, color_of("other"))]


def color_of(part: str) -> int:
    """The number of a part's colour, the same everywhere on the page."""
    return STEP_PARTS.index(part) if part in STEP_PARTS else len(STEP_PARTS)


def spoken(part: str) -> str:
    """The name of a part of a step for people."""
    return part.replace("_", " ")


def number(value: Any) -> str:
    """A metric for people; None stands for NaN in JSON."""
    if isinstance(value, bool | int | str):
        return str(value)
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else "not finite"


def duration(seconds: float | None) -> str:
    """Seconds for people.

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

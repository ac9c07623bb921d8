"""A run's gauges for Prometheus: their names, and their values by its progress."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dp_ray.engine.clock import PARTS
from dp_ray.monitor.console import Progress
from dp_ray.plan.history import is_measured

# Ray puts `ray_` before each name. Every gauge has the tag `run`, and those that stand here.
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dp_ray_running": ("1 while the run goes on, then 0", ()),
    "dp_ray_step": ("steps that all workers have finished", ()),
    "dp_ray_steps": ("steps of the whole run", ()),
    "dp_ray_progress": ("share of the steps that are finished", ()),
    "dp_ray_rows_per_second": ("rows that all workers finish in a second", ()),
    "dp_ray_workers": ("workers of the current attempt", ()),
    "dp_ray_interruptions": ("interruptions so far", ()),
    "dp_ray_metric": ("last value of the loss, a metric or an evaluation", ("metric",)),
    "dp_ray_step_part_seconds": ("seconds of a part of the newest steps, mean of the workers", ("part",)),
}


def values_of(
    progress: Progress, interruptions: int, is_running: bool
) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield the name, the tags besides `run`, and the value of each gauge that has one."""
    yield "dp_ray_running", {}, float(is_running)
    yield "dp_ray_step", {}, progress.step
    yield "dp_ray_steps", {}, progress.steps
    yield "dp_ray_progress", {}, progress.step / max(1, progress.steps)
    yield "dp_ray_rows_per_second", {}, progress.rows_per_second if is_running else 0.0
    yield "dp_ray_workers", {}, len(progress.workers) if is_running else 0
    yield "dp_ray_interruptions", {}, interruptions
    for name, value in progress.last.items():
        if is_measured(name) and value is not None and math.isfinite(value):
            yield "dp_ray_metric", {"metric": name}, value
    each = list(progress.seconds.values())
    for part, seconds in zip(PARTS, zip(*each, strict=True), strict=False):
        yield "dp_ray_step_part_seconds", {"part": part}, math.fsum(seconds) / len(each)

"""A run's progress as gauges of `ray.util.metrics`, which a Ray with dashboard agents exports to Prometheus."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.metrics import Gauge

from dp_ray.monitor.console import Progressed
from dp_ray.monitor.progress_writer import NO_METRIC
from dp_ray.replica.step_clock import PARTS
from dp_ray.system.repeating import repeated

SECONDS = 2.0  # Ray itself reports every 10 s
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


@contextmanager
def gauged(run: str, progress: Progressed, interruptions: Callable[[], int]) -> Iterator[None]:
    """Keep the gauges of a run up to date while the block runs; without an agent that exports them, do nothing."""
    if not exports_metrics():
        yield
        return
    gauges = {name: Gauge(name, text, tag_keys=("run", *tags)) for name, (text, tags) in GAUGES.items()}

    def update(is_running: bool) -> None:
        for name, tags, value in values_of(progress, interruptions(), is_running):
            gauges[name].set(value, {"run": run, **tags})

    try:
        with repeated("gauges", SECONDS, lambda: update(True)):
            yield
    finally:
        update(False)


def exports_metrics() -> bool:
    """Whether any node has an agent that exports metrics; the nodes of an embedded Ray have none."""
    return any(node["Alive"] and node.get("MetricsExportPort", 0) > 0 for node in ray.nodes())


def values_of(
    progress: Progressed, interruptions: int, is_running: bool
) -> Iterator[tuple[str, dict[str, Any], float]]:
    """The name, the tags besides `run`, and the value of each gauge that has one."""
    yield "dp_ray_running", {}, float(is_running)
    yield "dp_ray_step", {}, progress.step
    yield "dp_ray_steps", {}, progress.steps
    yield "dp_ray_progress", {}, progress.step / max(1, progress.steps)
    yield "dp_ray_rows_per_second", {}, progress.rows_per_second if is_running else 0.0
    yield "dp_ray_workers", {}, len(progress.workers) if is_running else 0
    yield "dp_ray_interruptions", {}, interruptions
    for name, value in progress.last.items():
        if name not in NO_METRIC and value is not None and math.isfinite(value):
            yield "dp_ray_metric", {"metric": name}, value
    each = list(progress.seconds.values())
    for part, seconds in zip(PARTS, zip(*each, strict=True), strict=False):
        yield "dp_ray_step_part_seconds", {"part": part}, math.fsum(seconds) / len(each)

"""Metrics with a state, as torchmetrics has them: only an evaluation measures them."""

from collections.abc import Iterator
from typing import Any

from dp_ray.job import Job
from dp_ray.job_target import Target
from dp_ray.replica.targets import resolve


def keeps_state(made: Any) -> bool:
    """Whether a metric, or its class, has the interface of a torchmetrics metric."""
    return all(hasattr(made, name) for name in ("update", "compute", "merge_state", "reset"))


def unmeasured(job: Job) -> Iterator[str]:
    """Yield a line for each metric with a state in a training without evaluations: nothing measures it."""
    if job.task != "train" or job.eval is not None:
        return
    for name, given in job.metrics.items():
        found = resolve(f"metrics.{name}", given) if isinstance(given, Target) else given
        if keeps_state(found):
            only = "is measured over a whole dataset, so by evaluations only"
            yield f"metrics.{name}: {only}, and there are none: set eval"

"""A prediction's workers one after another in this process: none ever waits for another."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import StepControl
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support.group import Stopped


def predict_parts(job: Job, folder: Path, control: StepControl | None = None) -> list[Any]:
    """Run each worker to its end, or until `control` ends it; what they sent. Their parts are not merged."""
    run = Storage(str(folder))
    run.child(PARTS).create()
    sent: list[Any] = []
    for rank in range(job.max_workers):
        with suppress(Stopped):
            run_task(job, World(rank, job.max_workers), run, sent.append, control)
    return sent

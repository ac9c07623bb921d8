"""Has the workers of a run with `shards: auto` find its number of shards, before the run itself."""

import io
from collections.abc import Callable

from dp_ray.errors import WorkerError
from dp_ray.in_process import run_in_process, with_own_objects
from dp_ray.job import Job
from dp_ray.monitor.console import Console
from dp_ray.monitor.monitor import Monitor
from dp_ray.monitor.writers import Writers
from dp_ray.plan.plan import Plan
from dp_ray.results.shape_reports import ReportFile
from dp_ray.rundir.claim import RunDir


def with_found_shards(
    job: Job, plan: Plan, claimed: RunDir, console: Console, on_ray: Callable[[Monitor], None]
) -> Job:
    """The job with the number of shards that its workers find; `on_ray` runs it on them, followed by the monitor.

    What happens to them meanwhile is told, and not kept in the run's directory.
    """
    monitor = Monitor(job, plan.split, ReportFile(io.BytesIO()), Writers(()), console, shapes=False)
    try:
        with console.live(monitor.progress):
            if job.max_workers == 0:
                run_in_process(with_own_objects(job), claimed, monitor, plan.rows)
            else:
                on_ray(monitor)
    finally:
        monitor.close()
    found = monitor.task_messages.shards_found
    if found is None:
        raise WorkerError("shards: auto: the workers ended without a number of shards; run the job again")
    return job.model_copy(update={"shards": found})

"""Run several jobs on the same workers: for `dp-ray run A.yaml B.yaml` and `dp-ray verify`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dp_ray.driver.run import Options, execute
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.monitor.console import Console
from dp_ray.results.result import Result, load
from dp_ray.rundir.settled import finished_run
from dp_ray.text import relative


@contextmanager
def running(jobs: Sequence[Job], options: Options) -> Iterator[Callable[[Job, Options], Result]]:
    """Yield a function that runs any of the jobs: several jobs in one session, a single one on workers of its own.

    Of several jobs, one that is done is not run again: so the same command goes on after it was stopped.
    Raises JobError if the jobs have no names of their own, or if they cannot share a session.
    """
    with_workers = [job for job in jobs if job.max_workers > 0]
    if len(jobs) == 1:
        yield execute
        return
    if not with_workers:
        yield lambda job, options: _done_before(job, options) or execute(job, options)
        return
    names = [job.run_name for job in jobs]
    if len(set(names)) < len(names):
        raise JobError(f"name: several jobs need names of their own, got {', '.join(names)}")
    from dp_ray.driver.sessions import Session, keys_for  # imports Ray, which `workers: 0` does not need

    with Session(keys_for(with_workers), options) as session:
        yield lambda job, options: _done_before(job, options) or session.execute(job, options)


def _done_before(job: Job, options: Options) -> Result | None:
    """Return the result of the job's finished run; None if it has none, or is to replace it."""
    run = None if options.overwrite else finished_run(job)
    if run is None:
        return None
    Console(job.run_name, options.quiet).say(f"is done: {relative(str(run))}")
    return load(run.location)

"""What will run, worked out before anything is started or written."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

from dp_ray.checks import check_targets
from dp_ray.cluster.ray_version import check_ray
from dp_ray.errors import JobError
from dp_ray.in_process import ONE_AT_A_TIME, with_own_model
from dp_ray.job import Job
from dp_ray.monitor.console import Console
from dp_ray.monitor.faults import Fault, parse_faults
from dp_ray.plan.plan import Plan
from dp_ray.planning import dataset_rows, make_plan, taken_over
from dp_ray.rundir.claim import RunDir, base_storage, with_full_init_from, with_shards_of_run
from dp_ray.rundir.lease_file import Lease
from dp_ray.rundir.unfinished import last_end
from dp_ray.system.environment import environment
from dp_ray.trackers.process import check_installed


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A job as it will run, with the shards of the run that it resumes; its plan, and the faults to inject."""

    job: Job
    plan: Plan
    faults: tuple[Fault, ...]

    def cut_as(self, job: Job) -> "Prepared":
        """The same, with this job's number of shards."""
        return Prepared(job, make_plan(job, self.plan.rows), self.faults)


def prepare(job: Job, console: Console, overwrite: bool = False, inject: str = "") -> Prepared:
    """Work out what will run, before anything is started or written; raises an Error if the job cannot run."""
    job = job.for_task()
    check_installed(job.trackers or ())
    faults = parse_faults(inject)
    if faults and job.max_workers == 0:
        raise JobError("--inject: workers is 0, so the job runs in the driver's process; set workers to at least 1")
    if job.max_workers > 0:
        check_ray()
    asked = with_full_init_from(job)
    job = asked if overwrite else with_shards_of_run(asked, base_storage(asked))
    building = console.if_slow("building the dataset")
    with ONE_AT_A_TIME, contextlib.redirect_stdout(sys.stderr), environment(job.env), building:
        check_targets(job)  # stdout is kept free of what user code prints
        plan = make_plan(job, dataset_rows(job), taken_over(asked, job))
    if job.max_workers == 0:
        job = with_own_model(job)
    return Prepared(job, plan, faults)


def resumption_lines(prepared: Prepared, claimed: RunDir, killed: Lease | None) -> Iterator[str]:
    """Lines for the user of a resumed run; `killed` is the lease of its last driver, if that was killed."""
    if not claimed.is_resumed:
        return
    split = prepared.plan.split
    if claimed.lengths:
        yield f"continues to step {split.total_steps} ({claimed.lengths})"
    if end := last_end(prepared.job, split, claimed.storage, killed):
        yield f"the last driver was {end.what}"

"""What an unfinished run holds: how far it is, and how it is carried on."""

import re

from dp_ray.job import Job
from dp_ray.plan.split import Split, num_filled
from dp_ray.plan.work import Done
from dp_ray.rundir import ledger
from dp_ray.rundir.checkpoint import CHECKPOINTS, steps_of
from dp_ray.storage import Storage

NAMED_BY_TIME = re.compile(r"run-\d{8}-\d{6}-\d{6}")


def kept_steps(run: Storage, task: str, split: Split) -> int:
    """How many steps from the first on need not be run again."""
    if task == "train":
        return max(steps_of(run.child(CHECKPOINTS)), default=0)
    done = Done(ledger.done_ranges(ledger.committed(run)))
    return done.through(range(num_filled(min(split.rows, split.batch_size), split.shards)))


def interruption(job: Job, run: Storage, split: Split, overwrite: bool) -> str:
    """What the user who stopped a run wants to know: after which step, and how it is carried on."""
    if job.task == "evaluate":
        return "interrupted; an evaluation keeps nothing: it begins anew"
    kept = kept_steps(run, job.task, split)
    where = f"after step {kept} of {split.total_steps}" if kept else "before a step was kept"
    return f"interrupted {where}; {_again(job, overwrite)} to {'carry on' if kept else 'begin anew'}"


def _again(job: Job, overwrite: bool) -> str:
    if overwrite:
        return "run it again without --overwrite"
    if NAMED_BY_TIME.fullmatch(job.run_name):
        return f"run it again with name={job.run_name!r}"
    return "run the same command"

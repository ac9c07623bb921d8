"""Which samples the steps of a checkpoint hold, and whether they are those of a job."""

from typing import Any

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.plan.split import Split


def cut_of(job: Job, split: Split) -> dict[str, Any]:
    """All that decides which samples a step holds; a checkpoint stores it."""
    keys = {"seed": job.seed, "shuffle": job.shuffle, "rows": split.rows, "batch_size": split.batch_size}
    return {**keys, "drop_last": split.drop_last}


def check_cut(what: str, about: dict[str, Any], job: Job, split: Split, advice: str) -> None:
    """Raise JobError if a checkpoint's steps hold other samples than this job's; the error names `what`."""
    if (there := about.get("cut")) != (here := cut_of(job, split)):
        raise JobError(f"{what} differ from this job's: {there} there, {here} here; {advice}")

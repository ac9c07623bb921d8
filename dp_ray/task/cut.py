"""Which samples the steps of a checkpoint hold, and whether they are those of a job."""

from typing import Any, TypeAlias

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.plan.split import Split
from dp_ray.replica.sample_order import describe_blocks

Cut: TypeAlias = dict[str, Any]


def cut_of(job: Job, split: Split, dataset: Any) -> Cut:
    """All that decides which samples a step holds; a checkpoint stores it."""
    keys = {"seed": job.seed, "shuffle": job.is_shuffled, "rows": split.rows, "batch_size": split.batch_size}
    blocks = describe_blocks(job, dataset)
    return {**keys, "drop_last": split.drop_last, **({} if blocks is None else {"blocks": blocks})}


def check_cut(what: str, about: dict[str, Any], here: Cut, advice: str) -> None:
    """Raise JobError if a checkpoint's steps hold other samples than this job's; the error names `what`."""
    if (there := about.get("cut")) != here:
        raise JobError(f"{what} differ from this job's: {there} there, {here} here; {advice}")

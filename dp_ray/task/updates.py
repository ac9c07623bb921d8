"""How a job updates the weights, and whether a checkpoint can go on with it: their state is the checkpoint's."""

import json
from typing import Any, TypeAlias

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.rundir.differences import differences, same

Updates: TypeAlias = dict[str, Any]


def updates_of(job: Job, as_objects: bool = False) -> Updates:
    """The job's optimizer and scheduler; a checkpoint stores them. `as_objects` is that of `Job.describe`."""
    described = job.describe(as_objects)
    kept: Updates = json.loads(json.dumps({key: described[key] for key in ("optimizer", "scheduler")}, default=str))
    return kept


def check_updates(what: str, there: Updates | None, job: Job, advice: str) -> str | None:
    """What to say of another scheduler than the checkpoint's; None if nothing. A checkpoint may have no Updates.

    Raises JobError if the optimizers differ, or one side alone has a scheduler: the checkpoint's state would take
    the place of what the job says, learning rate and all.
    """
    if there is None or same(there, updates_of(job, as_objects=True)):  # as an earlier version told them
        return None
    here = updates_of(job)
    changed = ", ".join(differences(there, here))
    alone = (there["scheduler"] is None) != (here["scheduler"] is None)
    if not same(there["optimizer"], here["optimizer"]) or alone:
        raise JobError(
            f"{what} goes on with the optimizer and scheduler that it was trained with, and this job's differ "
            f"({changed}); set them as they were, or {advice}"
        )
    return f"{what}: {changed}; what the scheduler's state holds goes on as it was" if changed else None

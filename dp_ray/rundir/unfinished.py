"""What a run has kept that did not end: after how many steps it resumes, and what is said of it."""

import re
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from dp_ray.job.job import Job
from dp_ray.plan.split import Done, Split, num_filled, split_of_run
from dp_ray.rundir import ledger
from dp_ray.rundir.files import CHECKPOINTS, RESULT, RUN, RUN_JSON, is_finished, steps_of
from dp_ray.rundir.incidents import INCIDENTS_JSON, IncidentKind, Interruption
from dp_ray.rundir.lease import Lease, last_alive
from dp_ray.rundir.start import first_step
from dp_ray.storage import Storage
from dp_ray.text import counted

NAMED_BY_TIME = re.compile(r"run-\d{8}-\d{6}-\d{6}")


@dataclass(frozen=True)
class UnfinishedRun:
    """An unfinished run: `step` of `steps` steps are kept; `status` is running or unfinished.

    `has_result` says whether its last driver left a `result.json`, which a killed driver does not.
    """

    status: str
    name: str
    task: str
    run_dir: str
    step: int
    steps: int
    last_alive: datetime | None
    has_result: bool

    def __str__(self) -> str:
        kept = f"newest checkpoint after {self.step} of {self.steps} steps"
        if self.task == "predict":
            kept = f"outputs of {self.step} of {self.steps} steps"
        elif self.task == "evaluate":
            kept = "an evaluation keeps nothing"
        elif self.step == 0:
            kept = f"no checkpoint yet of {self.steps} steps"
        clock = "at an unknown time"
        if self.last_alive is not None:  # a local time, with its date unless that is today
            local = self.last_alive.astimezone()
            is_today = local.date() == datetime.now().astimezone().date()
            clock = local.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S")
        return f"{self.status}: {kept}, last alive {clock}"

    def to_json(self) -> dict[str, Any]:
        """Return the values for `dp-ray report --json`; the time as ISO 8601."""
        return {**asdict(self), "last_alive": self.last_alive and self.last_alive.isoformat()}


def unfinished(location: str) -> UnfinishedRun | None:
    """Return the unfinished run in a directory; None if the run is finished, or if no claim records its rows."""
    run = Storage(location)
    claimed = RUN_JSON.read(run)
    rows = claimed.get("rows", {}).get("dataset")
    if rows is None or is_finished(run):
        return None
    job = claimed["job"]
    split = split_of_run(job, rows)
    is_driven, heard = last_alive(run)
    return UnfinishedRun(
        status="running" if is_driven else "unfinished",
        name=job["name"],
        task=job["task"],
        run_dir=str(run),
        step=kept_steps(run, job["task"], split),
        steps=split.total_steps,
        last_alive=heard or run.modified(RESULT) or run.modified(RUN),
        has_result=run.exists(RESULT),
    )


def kept_steps(run: Storage, task: str, split: Split) -> int:
    """Return how many steps, counted from the first, need not run again."""
    if task == "train":
        return max(steps_of(run.child(CHECKPOINTS)), default=0)
    done = Done(ledger.done_ranges(ledger.committed(run)))
    return done.through(range(num_filled(split.largest_batch, split.shards)))


def resumption(run: Storage, task: str, split: Split) -> str:
    """Return a line on the steps after which a job resumes the run."""
    kept = kept_steps(run, task, split)
    after = f"after {kept} of {split.total_steps} steps" if kept else "from its start, since no step is kept yet"
    return f"resumes {run} {after}"


def last_end(run: Storage, task: str, split: Split, killed: Lease | None) -> Interruption | None:
    """Return how the last driver of a resumed run ended; None if no driver had workers yet.

    A killed driver could not record its end, so it is recorded here, from the lease that it left.
    """
    incidents = INCIDENTS_JSON.read(run)
    if killed and incidents.world_sizes and not incidents.driver_end:
        step = max(killed.step, kept_steps(run, task, split), first_step(run))
        what = f"killed, or its machine lost, after {counted(step, 'step')} (as far as it reported)"
        incidents = incidents.interrupted(Interruption(IncidentKind.DRIVER, what, step))
        INCIDENTS_JSON.write(run, incidents)
    return incidents.driver_end


def stop_message(job: Job, run: Storage, split: Split, overwrite: bool) -> str:
    """Return the message for the user who stopped a run: after how many steps it stopped, and how to resume it."""
    if job.task == "evaluate":
        return "interrupted; an evaluation keeps nothing: it begins anew"
    kept = kept_steps(run, job.task, split)
    where = f"after {kept} of {split.total_steps} steps" if kept else "before a step was kept"
    needs = [f"name={job.run_name!r}"] if NAMED_BY_TIME.fullmatch(job.run_name) else []
    needs += [] if job.is_all_targets else ["resume=True"]
    command = f"run it again with {', '.join(needs)}" if needs else "run the same command"
    if overwrite:
        command = "run it again without --overwrite"
    return f"interrupted {where}; {command} to {'resume' if kept else 'begin anew'}"

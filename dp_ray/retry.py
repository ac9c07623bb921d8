"""Runs the shards again in which a prediction had set samples aside; what succeeds takes its place in the order."""

from collections.abc import Mapping
from typing import Any

from dp_ray.errors import JobError
from dp_ray.follow_up import check_no_objects
from dp_ray.job import Job
from dp_ray.job_file import job_of
from dp_ray.key_hints import renamed
from dp_ray.plan.split import Split
from dp_ray.results.reopen import reopen
from dp_ray.rundir.claim import base_storage, located, read_claim
from dp_ray.rundir.files import BEFORE_RETRY, RUN, is_finished
from dp_ray.rundir.quarantine_files import merged_positions
from dp_ray.storage import Storage
from dp_ray.task.pins import let_files_change

NOT_A_PREDICTION = {
    "train": "a training reads its bad samples again in each epoch: train longer with more epochs",
    "evaluate": "an evaluation keeps nothing: run it again with --overwrite",
}


def retried(run_dir: str, overrides: Mapping[str, Any]) -> Job:
    """The job of a prediction that is to run again where samples were set aside.

    Raises JobError if `run_dir` holds no prediction, if it has set nothing aside, or if its job had Python objects.
    """
    run = located(run_dir)
    job = _job_kept(run, overrides)
    if is_finished(run) and not merged_positions(run):
        raise JobError(f"{run} has set no sample aside, so there is nothing to retry")
    return job


def reopened(split: Split, run: Storage) -> None:
    """Have the shards of a finished prediction run again in which samples were set aside.

    Of an unfinished run these are still to run. Either way files of its dataset may have been mended.
    """
    if is_finished(run):
        reopen(run, split, merged_positions(run))
    if run.exists(BEFORE_RETRY):
        let_files_change(run, "dataset")


def _job_kept(run: Storage, overrides: Mapping[str, Any]) -> Job:
    """The job in a prediction's run.json."""
    if not run.exists(RUN):
        raise JobError(f"{run} holds no {RUN}: name the run directory of a prediction")
    kept = renamed(read_claim(run)["job"])
    if kept["task"] != "predict":
        raise JobError(f"retry: {run} is a run of task {kept['task']}; {NOT_A_PREDICTION[kept['task']]}")
    check_no_objects(run, "predict", {**kept, "eval": None}, {})
    # Where the run is, not where it was: a copy's run.json names the run that was copied.
    values = {**kept, "storage": run.parent.location, "name": run.name, "env": {}}
    job = job_of(values, overrides, run.name)
    if base_storage(job).child(job.run_name).path != run.path:
        raise JobError(f"retry: runs in {run} itself; leave name and storage as they are")
    return job

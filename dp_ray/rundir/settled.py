"""The job as it runs, settled once: by its task, by where its workers find files, and by the run that it may resume.

Below `settled`: in what the job of a run differs from another one, and the run of a job that is done.
"""

import json
from collections.abc import Mapping
from typing import Any

from dp_ray.job.files import differences
from dp_ray.job.job import AS_BEFORE, Job, that_count
from dp_ray.job.keys import FORMS, Elastic
from dp_ray.rundir.files import RUN_JSON, has_kept_nothing, in_keys_of_now, is_finished
from dp_ray.storage import Storage, located
from dp_ray.text import SHOWN


def run_of(job: Job) -> Storage:
    """Return the directory of a job's run, STORAGE/NAME."""
    return located(job.storage).child(job.run_name)


def settled(job: Job, is_new: bool = False) -> Job:
    """Return the job over its task's dataset, with `init_from` as all workers find it, and its run's task and shards.

    A job that says no task goes on as the prediction that it was in an earlier version, if that is unfinished.
    A job that sets no shards, or auto, takes those of the run in its directory, which it may resume, unless its own
    `is_new`. Each shard goes to one worker, so the number of workers is capped at the number of shards. A run that
    was stopped before it had found its number has none, and one that kept nothing binds no other job.
    """
    job, run = job.for_task(), run_of(job)
    if job.init_from is not None:
        job = job.model_copy(update={"init_from": located(job.init_from).location})
    if is_new:
        return job
    claimed = RUN_JSON.read(run)
    if job.why_trains and claimed.get("job", {}).get("task") == "predict" and not is_finished(run):
        predicts = job.model_copy(update={"task": "predict"})
        if predicts.has_fingerprint(claimed.get("fingerprint")) and not has_kept_nothing(run):
            job = predicts
    shards = claimed.get("job", {}).get("shards")
    is_cut_alike = not job.finds_shards and shards == job.num_shards
    if isinstance(job.shards, int) or not isinstance(shards, int) or is_cut_alike:
        return job
    workers: Any = min(job.max_workers, shards)
    if isinstance(job.workers, Elastic):
        workers = Elastic(min=min(job.min_workers, shards), max=workers)
    resumed = Job.make({**dict(job), "shards": shards, "workers": workers}, job.run_name)
    is_replaced = (not job.finds_shards or other_job(claimed, resumed)) and has_kept_nothing(run)
    return job if is_replaced else resumed


def taken_over(asked: Job, job: Job) -> list[str]:
    """Return lines on what differs from the job that was `asked` for: a task that it left out, a run's shards."""
    lines = []
    if asked.why_trains:
        was = ", as when this run began" if job.task == "predict" else ""
        lines = [f"task: {job.task}{was or f', because the job has {asked.why_trains}'}; set task to say another"]
    if job.finds_shards or (asked.num_shards == job.num_shards and not asked.finds_shards):
        return lines
    line = f"shards: {job.num_shards}, as when this run began"
    if asked.max_workers > job.num_shards:
        line += f"; so at most {job.num_shards} workers run, not {asked.max_workers}"
    return [*lines, line]


def finished_run(job: Job) -> Storage | None:
    """Return the finished run of this job in STORAGE/NAME; None if there is none, or one of another job or length."""
    asked, run = settled(job), run_of(job)
    if not is_finished(run):
        return None
    claimed = RUN_JSON.read(run)
    is_same = asked.has_fingerprint(claimed.get("fingerprint")) and not changed_lengths(claimed, asked)
    return run if is_same else None


def changed_lengths(claimed: Mapping[str, Any], job: Job) -> str:
    """Return the keys that make a training longer or shorter than the run was: `epochs: 2 before, 4 now`."""
    there, here = claimed.get("job", {}), job.describe()
    keys = [key for key in job.LENGTHS if job.task == "train" and there.get(key) != here[key]]
    return "; ".join(f"{key}: {there.get(key) or 'none'} before, {here[key] or 'none'} now" for key in keys)


def other_job(claimed: Mapping[str, Any], job: Job) -> str:
    """Return the keys in which the run's job differs from this one; empty if it is the same job."""
    if job.has_fingerprint(claimed.get("fingerprint")):
        return ""
    there, before = that_count(in_keys_of_now(claimed.get("job", {}))), dict(AS_BEFORE)
    if there["scatter"] == "batch":
        return "its scatter: batch is gone, so no job goes on with it; list, report and compare show it"
    lists = []
    for described in map(job.describe, FORMS):
        here = json.loads(json.dumps(that_count(described), default=str))
        lists.append(list(differences({key: there.get(key, before.get(key)) for key in here}, here)))
    shortest = min(lists, key=len)
    more = [f"and {len(shortest) - SHOWN} more"] if len(shortest) > SHOWN else []
    return "; ".join([*shortest[:SHOWN], *more]) or "made by another version of dp_ray"

"""The run directory: who may use it, and what it holds from one run of a job to the next."""

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dp_ray.errors import JobError, StorageError
from dp_ray.job import Job
from dp_ray.job_parts import Elastic
from dp_ray.rundir.checkpoint import CHECKPOINTS, steps_of
from dp_ray.rundir.contents import replacing
from dp_ray.rundir.differences import differences
from dp_ray.rundir.files import RESULT, RUN
from dp_ray.rundir.weights import check_start, find_start
from dp_ray.storage import Storage


@dataclass(frozen=True)
class RunDir:
    """A claimed run directory; `token` is what this driver wrote there, `carried_on` whether it held work.

    Each file that is committed to `storage` raises StorageError if another driver has claimed the directory since.
    """

    storage: Storage
    token: str
    carried_on: bool


def claim(job: Job, base: Storage, overwrite: bool = False, rows: Mapping[str, int] | None = None) -> RunDir:
    """Make STORAGE/NAME this run's, or carry on the unfinished run of the same job that it holds.

    `rows` are the lengths of its datasets, by their keys: part of what the job is.
    Raises JobError where it holds a finished run, a run of a different job, or no run at all; and where the file that
    `init_from` names, or with which the run began, is not there.
    """
    storage = base.child(job.run_name)
    token = uuid.uuid4().hex
    says = {"token": token, "fingerprint": job.fingerprint(), "rows": rows or {}, "job": _without_secrets(job)}
    text = json.dumps(says, indent=2, default=str) + "\n"
    if overwrite:
        _check_is_run(storage)
    carried_on = not overwrite and _check_may_carry_on(job, storage, rows or {})
    _check_start(job, storage, carried_on)
    if overwrite:
        storage.remove()
    storage.create()
    storage.write_text(RUN, text)
    storage.child("parts").create()
    claimed = RunDir(storage, token, carried_on)
    return replace(claimed, storage=storage.guarded(lambda: check_ours(claimed)))


def with_shards_of_run(job: Job, base: Storage) -> Job:
    """The job with the shards that the run in STORAGE/NAME began with, where the job itself sets none.

    A shard is one worker's, so there are as many workers as shards at most.
    """
    storage = base.child(job.run_name)
    shards = _claimed(storage).get("job", {}).get("shards")
    if job.shards is not None or shards in (None, job.num_shards):
        return job
    workers: Any = min(job.max_workers, shards)
    if isinstance(job.workers, Elastic):
        workers = Elastic(min=min(job.min_workers, shards), max=workers)
    return Job.make({**dict(job), "shards": shards, "workers": workers}, job.run_name)


def is_ours(claimed: RunDir) -> bool:
    """Whether no other driver has claimed the run directory since."""
    return _claimed(claimed.storage).get("token") == claimed.token


def check_ours(claimed: RunDir) -> None:
    """Raise StorageError where another driver has claimed the run directory since: what is there is its own."""
    if not is_ours(claimed):
        raise StorageError(f"{claimed.storage} was taken over by another driver, which was started after this one")


def check_shared(run: Storage, token: str, who: str) -> None:
    """Raise StorageError unless this process sees the very directory that the driver claimed."""
    seen = _claimed(run).get("token")
    if seen != token:
        what = "cannot see" if seen is None else "sees another run's in place of"
        raise StorageError(
            f"storage is not shared by all nodes: {who} {what} the run directory {run} of the driver; "
            "set storage to a folder that every node mounts, or to a URL such as s3://bucket/folder"
        )


def base_storage(job: Job) -> Storage:
    """The job's storage; in a Ray job, whose working directory is a copy that Ray removes, under the home."""
    return located(job.storage)


def located(location: str) -> Storage:
    """A folder of runs, or what is in one, where all workers find it."""
    if "://" in location or Path(location).is_absolute() or not _in_shipped_folder():
        return Storage(location)
    return Storage(str(Path.home() / location))


def _in_shipped_folder() -> bool:
    return "runtime_resources" in Path(os.getcwd()).parts


def _check_may_carry_on(job: Job, storage: Storage, rows: Mapping[str, int]) -> bool:
    claimed = _claimed(storage)
    if not claimed:
        _check_is_run(storage)
        return False
    advice = f"give it another name (--name, name=), or replace it {replacing(storage)}"
    if claimed.get("fingerprint") != job.fingerprint():
        raise JobError(f"{storage} holds a run of a different job ({_difference(claimed, job)}); {advice}")
    if others := _other_rows(claimed.get("rows", {}), rows):
        raise JobError(f"{storage} holds a run of a different job ({others}); {advice}")
    if storage.exists(RESULT) and _read(storage, RESULT).get("status") == "done":
        raise JobError(f"{storage} holds this run, finished; {advice}")
    if not job.is_all_targets:
        raise JobError(f"{storage} holds a run of Python objects; whether these are the same is unknown; {advice}")
    return True


def _check_start(job: Job, storage: Storage, carried_on: bool) -> None:
    if job.init_from is None or (job.task == "train" and carried_on and steps_of(storage.child(CHECKPOINTS))):
        return  # a training goes on from its own checkpoint
    if carried_on:
        check_start(storage, job.init_from)
    else:
        find_start(job.init_from)


def _difference(claimed: dict[str, Any], job: Job) -> str:
    """The keys that tell the job which made the run from this one."""
    there, here = claimed.get("job", {}), json.loads(json.dumps(job.describe(), default=str))
    keys = [key for key in here if key not in job.CANNOT_CHANGE_THE_RESULT]
    found = differences({key: there.get(key) for key in keys}, {key: here[key] for key in keys})
    return "; ".join(found)


def _other_rows(there: Mapping[str, int], here: Mapping[str, int]) -> str:
    """The datasets whose length has changed since the run began."""
    keys = [key for key in here if there.get(key, here[key]) != here[key]]
    return "; ".join(f"{key}: {there[key]} rows there, {here[key]} rows here" for key in keys)


def _check_is_run(storage: Storage) -> None:
    if not storage.is_empty() and not storage.exists(RUN):
        raise JobError(f"{storage} holds files that are no run; choose another --name or --storage")


def _claimed(storage: Storage) -> dict[str, Any]:
    return _read(storage, RUN) if storage.exists(RUN) else {}


def _read(storage: Storage, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(storage.read_text(name)))
    except (ValueError, TypeError) as error:
        raise StorageError(f"{storage}/{name}: is damaged: {error}") from None


def _without_secrets(job: Job) -> dict[str, Any]:
    return {**job.describe(), "env": dict.fromkeys(job.env, "(not kept)")}

"""Claim a run directory for a driver, decide whether its run can be resumed, and hold its lease.

The run that `--overwrite` replaces is kept until the new one has done a step: it is renamed to `.NAME.replaced`,
beside the new one. A killed driver leaves both; the next one puts the old run back, or removes it if the new one
holds work. An object store cannot rename: there the old run is removed at once.
"""

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from dp_ray.errors import JobError, StorageError
from dp_ray.job.files import differences, located_at
from dp_ray.job.job import AS_BEFORE, Job, that_count
from dp_ray.job.keys import Elastic, Target
from dp_ray.plan.split import Done, Split, num_filled, split_of
from dp_ray.rundir import files, ledger
from dp_ray.rundir.checkpoint import CHECKPOINTS, steps_of
from dp_ray.rundir.files import RESULT, RESULT_JSON, RUN, RUN_JSON, is_finished
from dp_ray.rundir.history import METRICS, unmerge_history
from dp_ray.rundir.incidents import INCIDENTS_JSON, IncidentKind, Interruption
from dp_ray.rundir.lease import EXPIRE_SECONDS, LEASE, LEASE_JSON, Lease, last_alive, take_request
from dp_ray.rundir.quarantine import unmerge_quarantine
from dp_ray.rundir.start import check_start, files_of_start, find_start, first_step
from dp_ray.storage import Storage
from dp_ray.system.linux import machine
from dp_ray.system.process import is_dead, this_process
from dp_ray.system.threads import has_begun, repeated
from dp_ray.text import SHOWN, command_for, counted, hide, listed

PATTERN = re.compile(r"[*?\[{]")  # where the fixed part of a path ends
NAMED_BY_TIME = re.compile(r"run-\d{8}-\d{6}-\d{6}")
RENEW_SECONDS = 5.0
TELL_SECONDS = 1.0  # between two checks of the steps done, on local disks, where a write is cheap
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class RunDir:
    """A claimed run directory; `token` identifies this driver's claim, `is_resumed` says whether it resumes a run.

    `lengths` says which keys make a training longer or shorter than before. `replaces` says that it takes the place
    of a run that had kept nothing; `is_replacing`, that the run which was here waits aside, until this one has done
    a step.
    Committing a file to `storage` raises StorageError if another driver has claimed the directory since.
    """

    storage: Storage
    token: str
    is_resumed: bool
    lengths: str = ""
    replaces: bool = False
    is_replacing: bool = False


def claim(
    job: Job,
    base: Storage,
    overwrite: bool = False,
    rows: Mapping[str, int] | None = None,
    steps: int | None = None,
    resume: bool = False,
    reopen: Callable[[Storage], None] | None = None,
) -> RunDir:
    """Claim STORAGE/NAME for a new run, or to resume the unfinished run of the same job in it.

    `rows` are the lengths of the datasets, by their keys; a run with other lengths counts as a different job. `steps`
    is the total number of steps: a finished training is resumed if it has more steps now. `resume` says that the
    job's Python objects are those of the run. A finished prediction is resumed if `reopen` makes it unfinished, which
    is called once nothing speaks against the job. A run of a different job that failed before it kept anything is
    replaced.
    Raises JobError if the directory holds a finished run, a run of a different job, or files of no run. Raises it too
    if the file that `init_from` names, or with which the run began, is missing, or would be deleted by `overwrite`.
    """
    storage = base.child(job.run_name)
    token = uuid.uuid4().hex
    contents = _contents({"token": token, "rows": rows or {}}, job)
    is_resumed = check_claim(job, storage, rows or {}, steps, resume, reopen is not None, overwrite)
    has_begun()
    lengths = _changed_lengths(RUN_JSON.read(storage), job) if is_resumed else ""
    if is_resumed and reopen is not None:
        reopen(storage)
    elif is_resumed and is_finished(storage):  # a training that goes on from its last checkpoint
        # Before the result is deleted: a driver killed here leaves a finished run, for which all this is done anew.
        unmerge_history(storage, steps_of(storage.child(CHECKPOINTS)))
        unmerge_quarantine(storage)
        INCIDENTS_JSON.write(storage, INCIDENTS_JSON.read(storage, RESULT))
    if is_resumed:
        storage.delete(RESULT)  # if this driver is killed, the last driver's result must not pass for its own
    replaces = not overwrite and not is_resumed and storage.exists(RUN)
    if replaces:
        storage.remove()
    is_replacing = overwrite and move_aside(storage)
    try:
        storage.create()
        RUN_JSON.write(storage, contents)
        storage.child("parts").create()
    except BaseException:
        if is_replacing:
            put_back(storage)
        raise
    claimed = RunDir(storage, token, is_resumed, lengths, replaces, is_replacing)
    return replace(claimed, storage=storage.guarded(lambda: check_ours(claimed)))


def check_claim(
    job: Job,
    storage: Storage,
    rows: Mapping[str, int],
    steps: int | None,
    resume: bool = False,
    is_reopened: bool = False,
    overwrite: bool = False,
) -> bool:
    """Return whether a claim would resume the run there; False if there is none, or one that it would replace.

    The arguments are those of `claim`; `is_reopened` says that a finished prediction may be resumed. It writes
    nothing, and raises what `claim` raises.
    """
    if overwrite:
        _check_is_run(storage)
    is_resumed = not overwrite and _is_resumable(job, storage, rows, steps, resume, is_reopened)
    if job.init_from is not None and not is_resumed:
        find_start(job.init_from)
    elif job.init_from is not None and not (job.task == "train" and steps_of(storage.child(CHECKPOINTS))):
        check_start(storage, job.init_from)  # a training with checkpoints resumes from its own
    if overwrite:
        check_reads_nothing_of(storage, job)
    return is_resumed


def _is_resumable(
    job: Job, storage: Storage, rows: Mapping[str, int], steps: int | None, resume: bool, is_reopened: bool
) -> bool:
    claimed = RUN_JSON.read(storage)
    if not claimed:
        _check_is_run(storage)
        return False
    advice = f"give it another name (--name, name=), or replace it {files.replacing(storage)}"
    before = claimed.get("rows", {})
    keys = [key for key in rows if before.get(key, rows[key]) != rows[key]]
    other_rows = "; ".join(f"{key}: {before[key]} rows there, {rows[key]} rows here" for key in keys)
    others = _other_job(claimed, job) or other_rows
    if (others or not (job.is_all_targets or resume)) and files.has_kept_nothing(storage):
        return False
    if others:
        raise JobError(f"{storage} holds a run of a different job ({others}); {advice}")
    obstacle = "" if is_reopened else _obstacle(job, storage, _changed_lengths(claimed, job), steps)
    if obstacle:
        raise JobError(f"{storage} holds this run, {obstacle}{advice}")
    if not job.is_all_targets and not resume:
        unknown = "whether these are the same is unknown: if they are, resume=True resumes it"
        raise JobError(f"{storage} holds a run of Python objects ({listed(job.untold)}); {unknown}; else {advice}")
    return True


def _obstacle(job: Job, storage: Storage, lengths: str, steps: int | None) -> str:
    """Return why the run cannot be resumed with this many steps, up to the advice; empty if it can."""
    kept = steps_of(storage.child(CHECKPOINTS)) if job.task == "train" else []
    done = max(kept, default=0)
    if steps is not None and steps < done:
        return f"which has done {done} steps, and this job has {steps} ({lengths}); "
    if not is_finished(storage):
        return ""
    load = f"load its result (dp_ray.load({str(storage)!r})), "
    early, wanted = RESULT_JSON.read(storage).get("stopped_early"), job.early_stopping
    if early and wanted is not None:  # it would stop there again at any length
        same = (wanted.column, wanted.mode, wanted.min_delta) == (early["metric"], early["mode"], early["min_delta"])
        if same and wanted.patience <= early["times"] and early["text"]:
            patience = "give early_stopping more patience or leave it out"
            return f"which {early['text']}; {load}or to train on, {patience}; else "
    if not lengths or steps == done:
        use = ", ".join(command_for(name, storage) for name in ("evaluate", "predict"))
        use = f"use it ({use}), train longer with more epochs, "
        return f"finished; {load}{use if job.task == 'train' else ''}"
    if not kept or not storage.exists(METRICS):
        return "finished, without the checkpoints and the history from which it could resume; "
    return ""


def _changed_lengths(claimed: dict[str, Any], job: Job) -> str:
    """Return the keys that make a training longer or shorter than the run was: `epochs: 2 before, 4 now`."""
    there, here = claimed.get("job", {}), job.describe()
    keys = [key for key in job.LENGTHS if job.task == "train" and there.get(key) != here[key]]
    return "; ".join(f"{key}: {there.get(key) or 'none'} before, {here[key] or 'none'} now" for key in keys)


def _other_job(claimed: dict[str, Any], job: Job) -> str:
    """Return the keys in which the run's job differs from this one; empty if it is the same job."""
    if job.has_fingerprint(claimed.get("fingerprint")):
        return ""
    there, before = that_count(claimed.get("job", {})), dict(AS_BEFORE)
    lists = []
    for described in (job.describe(), job.describe(as_objects=True)):  # as this version and earlier ones write args
        here = json.loads(json.dumps(that_count(described), default=str))
        lists.append(list(differences({key: there.get(key, before.get(key)) for key in here}, here)))
    shortest = min(lists, key=len)
    more = [f"and {len(shortest) - SHOWN} more"] if len(shortest) > SHOWN else []
    return "; ".join([*shortest[:SHOWN], *more]) or "made by another version of dp_ray"


def _check_is_run(storage: Storage) -> None:
    if not storage.is_empty() and not storage.exists(RUN):
        raise JobError(f"{storage} holds files that are no run; choose another --name or --storage")


def check_reads_nothing_of(run: Storage, job: Job) -> None:
    """Raise JobError if the job reads files of a run that it is to replace: it would delete them first.

    They are those of `init_from`, and each path among the args of targets and in datasets from Python.
    """
    if not run.exists(RUN):
        return
    for key, location in _inputs(job):
        if run.holds(location):
            raise JobError(
                f"{key}: {hide(location)} lies in {run}, which --overwrite (overwrite=True) would delete before it "
                "is read; give the new run another name (--name, name=), or copy what it reads to another place first"
            )


def _inputs(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the paths and URLs that a job reads as far as its keys tell, each with its key."""
    if job.init_from is not None:
        yield from (("init_from", file) for file in files_of_start(job.init_from))
    for key, given in job.targets.items():
        if not key.startswith("hooks."):  # they write
            if isinstance(given, Target):
                values: Any = given.args
            else:  # of an object from Python: its own values, and the files that a source of dp_ray has found
                own = getattr(given, "__dict__", {}).values()
                pins = getattr(given, "pins", None)
                values = [value for value in own if isinstance(value, str | os.PathLike)]
                values += pins if isinstance(pins, dict) else ()
            yield from ((key, location) for location in _locations(values))


def _locations(values: Any) -> Iterator[str]:
    """Yield the URLs among some values, and the paths of what exists; of a pattern, the folder in which it looks."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for one in values:
            yield from _locations(one)
    elif isinstance(values, str | os.PathLike) and (text := os.fspath(values)) and isinstance(text, str):
        fixed = PATTERN.split(text)[0]
        if fixed != text:
            fixed = fixed.rpartition("/")[0] or ("/" if text.startswith("/") else "")
        if "://" in fixed or (fixed and os.path.lexists(os.path.expanduser(fixed))):
            yield fixed


def keep_shards(claimed: RunDir, job: Job) -> None:
    """Write the job into the run directory that was claimed with `shards: auto`, now that its number is found."""
    kept = RUN_JSON.read(claimed.storage)
    RUN_JSON.write(claimed.storage, _contents({key: kept[key] for key in ("token", "rows")}, job))


def _contents(values: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return what a claim holds: the values, and the job without its secrets."""
    described = {**job.describe(), "env": dict.fromkeys(job.env, "(not kept)")}
    return {**values, "fingerprint": job.fingerprint(), "job": described}


def with_shards_of_run(job: Job, base: Storage) -> Job:
    """Return the job with the number of shards of the run in STORAGE/NAME, if the job sets none, or auto.

    Each shard goes to one worker, so the number of workers is capped at the number of shards. A run that was stopped
    before it had found its number has none, and one that kept nothing binds no other job.
    """
    storage = base.child(job.run_name)
    shards = RUN_JSON.read(storage).get("job", {}).get("shards")
    if isinstance(job.shards, int) or not isinstance(shards, int):
        return job
    if not job.finds_shards and shards == job.num_shards:
        return job
    workers: Any = min(job.max_workers, shards)
    if isinstance(job.workers, Elastic):
        workers = Elastic(min=min(job.min_workers, shards), max=workers)
    resumed = Job.make({**dict(job), "shards": shards, "workers": workers}, job.run_name)
    is_replaced = files.has_kept_nothing(storage) and (
        not job.finds_shards or _other_job(RUN_JSON.read(storage), resumed)
    )
    return job if is_replaced else resumed


def is_ours(claimed: RunDir) -> bool:
    """Return whether no other driver has claimed the run directory since."""
    return RUN_JSON.read(claimed.storage).get("token") == claimed.token


def check_ours(claimed: RunDir) -> None:
    """Raise StorageError if another driver has claimed the run directory since, or if it was removed."""
    if not is_ours(claimed):
        raise StorageError(lost(claimed.storage, RUN))


def lost(folder: Storage, name: str) -> str:
    """Return why a folder is not this driver's any more, which keeps its claim in the file `name`."""
    if folder.exists(name):
        return f"{folder} was taken over by another driver, which was started after this one"
    return (
        f"{folder} was removed while this driver ran in it: its {name} is gone, and what was kept with it; "
        "run it again, and leave the folder until its end"
    )


def check_shared(run: Storage, token: str, who: str) -> None:
    """Raise StorageError unless this process sees the same directory that the driver claimed."""
    seen = RUN_JSON.read(run).get("token")
    if seen != token:
        what = "cannot see" if seen is None else "sees another run's in place of"
        raise StorageError(
            f"storage is not shared by all nodes: {who} {what} the run directory {run} of the driver; "
            "set storage to a folder that every node mounts, or to a URL such as s3://bucket/folder"
        )


def finished_run(job: Job) -> Storage | None:
    """Return the finished run of this job in STORAGE/NAME; None if there is none, or one of another job or length."""
    base = located(job.storage)
    asked, run = with_shards_of_run(with_full_init_from(job.for_task()), base), base.child(job.run_name)
    if not is_finished(run):
        return None
    claimed = RUN_JSON.read(run)
    is_same = asked.has_fingerprint(claimed.get("fingerprint")) and not _changed_lengths(claimed, asked)
    return run if is_same else None


def located(location: str) -> Storage:
    """Return a folder of runs, or a path in one, where all workers find it."""
    return Storage(located_at(location))


def with_full_init_from(job: Job) -> Job:
    """Return the job with `init_from` as all workers find it."""
    if job.init_from is None:
        return job
    return job.model_copy(update={"init_from": located(job.init_from).location})


def move_aside(run: Storage) -> bool:
    """Free the name of a run: rename its folder, or remove it; returns whether a run can be put back.

    A link to a folder, a mounted disk, and what is on an object store are removed.
    """
    if is_aside(run):  # then what is here has not begun
        run.remove()
        return True
    if run.is_local and run.exists(RUN) and not os.path.islink(run.path):
        with suppress(OSError):
            os.rename(run.path, _aside(run))
            return True
    run.remove()
    return False


def is_aside(run: Storage) -> bool:
    """Return whether an old run waits to be put back."""
    return run.is_local and os.path.isdir(_aside(run))


def replacement_has_begun(run: Storage) -> bool:
    """Return whether the files of a new run say that it has begun."""
    return is_finished(run) or files.holds_work(run)


def settle(run: Storage, is_begun: bool) -> str:
    """Remove the old run if the new one has begun, else put it back; returns a line on that."""
    if is_begun or replacement_has_begun(run):
        try:
            os.rename(_aside(run), _removed(run))  # first, so that a crash leaves no part of it to be put back
        except OSError as error:
            raise StorageError(f"{_aside(run)}: cannot be removed: {error}") from error
        _clear(run)
        return "the run that it replaces is removed"
    put_back(run)
    return "the run that was there before is back, since the one that was to replace it did no step"


def put_back(run: Storage) -> None:
    """Put the old run back under its name, in place of the new one; it is never removed, whatever fails."""
    left = _removed(run)
    try:
        is_there = os.path.isdir(run.path)
        if is_there:
            os.rename(run.path, left)
        try:
            os.rename(_aside(run), run.path)
        except OSError:  # another driver was first, and what is there is the old run
            if is_there:
                os.rename(left, run.path)
            raise
    except OSError as error:
        raise StorageError(f"{run}: the run that was there before cannot be put back: {error}") from error
    _clear(run)


def _aside(run: Storage) -> str:
    return run.parent.file(f".{run.name}.replaced")


def _removed(run: Storage) -> str:
    return run.parent.file(f".{run.name}.removed-{uuid.uuid4().hex[:8]}")


def _clear(run: Storage) -> None:
    """Remove what is to be removed, also what killed drivers left of it."""
    for name in os.listdir(run.parent.path):
        if name.startswith(f".{run.name}.removed-"):
            run.parent.child(name).remove()


def wait_until_free(run: Storage, say: Callable[[str], None]) -> Lease | None:
    """Wait until no other driver is active in the run directory; return the last one's lease if it was killed.

    Raises JobError as soon as another driver is known to be alive: at once on the same host, else when it renews its
    lease.
    """
    seen = LEASE_JSON.read(run)
    if seen is None or is_dead(seen.driver):
        return seen
    if seen.driver.machine == machine():
        raise _alive(run, seen)
    say(f"waiting up to {EXPIRE_SECONDS:g} s for the lease of {seen.driver}, which may be alive")
    until = time.monotonic() + EXPIRE_SECONDS
    while time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        now = LEASE_JSON.read(run)
        if now is None:
            return None
        if now != seen:
            raise _alive(run, now)
    return seen


@contextmanager
def held(claimed: RunDir, steps_done: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Hold the lease of a claimed run directory while the block runs, and renew it in the background.

    It records how many steps are done, for the next driver in case this one is killed. At the end, a request to stop
    that came too late is removed.
    """
    try:
        with kept(claimed.storage, claimed.token, lambda: is_ours(claimed), steps_done):
            yield
    finally:
        take_request(claimed.storage, claimed.token)


@contextmanager
def kept(
    folder: Storage, token: str, is_still_ours: Callable[[], bool], steps_done: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """Hold the lease of a folder while the block runs, as long as the folder is this driver's."""
    has_begun()
    lease, due = Lease(this_process(), token), time.monotonic() + RENEW_SECONDS
    LEASE_JSON.write(folder, lease)
    looks = RENEW_SECONDS if folder.is_atomic else min(TELL_SECONDS, RENEW_SECONDS)

    def renew() -> None:
        nonlocal lease, due
        step = steps_done()
        if step == lease.step and time.monotonic() < due:
            return
        due = time.monotonic() + RENEW_SECONDS
        lease = replace(lease, renewals=lease.renewals + 1, step=step)
        with suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
            if is_still_ours():
                LEASE_JSON.write(folder, lease)

    try:
        with repeated("lease", looks, renew):
            yield
    finally:
        with suppress(StorageError):
            if is_still_ours():
                folder.delete(LEASE)


def _alive(run: Storage, lease: Lease) -> JobError:
    return JobError(
        f"{run} is being run by {lease.driver}, which is alive: wait for its end, end it, "
        "or give this run another name (--name, name=)"
    )


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
    split = split_of(job, rows)
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


def last_end(job: Job, split: Split, run: Storage, killed: Lease | None) -> Interruption | None:
    """Return how the last driver of a resumed run ended; None if no driver had workers yet.

    A killed driver could not record its end, so it is recorded here, from the lease that it left.
    """
    incidents = INCIDENTS_JSON.read(run)
    if killed and incidents.world_sizes and not incidents.driver_end:
        step = max(killed.step, kept_steps(run, job.task, split), first_step(run))
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

"""Claim a run directory for a driver: decide what becomes of what it holds, and take it.

`decide` is pure: from a snapshot of the directory and the run that is wanted it says New, Resume, Replace or Refused.
`check_claim` raises a refusal as an error, and writes nothing. `claim` acts on the rest, one effect after another: a
driver may be killed between any two.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dp_ray.errors import JobError, StorageError
from dp_ray.job.job import Job
from dp_ray.rundir import files
from dp_ray.rundir.files import CHECKPOINTS, RESULT, RESULT_JSON, RUN, RUN_JSON, steps_of
from dp_ray.rundir.history import METRICS, unmerge_history
from dp_ray.rundir.incidents import INCIDENTS_JSON
from dp_ray.rundir.lease import lost
from dp_ray.rundir.quarantine import unmerge_quarantine
from dp_ray.rundir.replaced import ReplacedRun, check_reads_nothing_of
from dp_ray.rundir.settled import changed_lengths, other_job
from dp_ray.rundir.start import CLASSES, check_start
from dp_ray.storage import Storage
from dp_ray.system.threads import has_begun
from dp_ray.text import command_for, listed


@dataclass(frozen=True)
class New:
    """There is no run yet."""


@dataclass(frozen=True)
class Resume:
    """The run of this job goes on; `lengths` says which keys make a training longer or shorter than before."""

    lengths: str = ""
    was_finished: bool = False


@dataclass(frozen=True)
class Replace:
    """A new run takes the place of the one there: it `is_asked` for by the user, or that one had kept nothing."""

    is_asked: bool


@dataclass(frozen=True)
class Refused:
    """The directory stays as it is. `why` begins the error; advice follows if it holds a run."""

    why: str
    is_run: bool = True


Decision = New | Resume | Replace


@dataclass(frozen=True)
class Wanted:
    """The run that a driver wants in a directory.

    `rows` are the lengths of the job's datasets, by their keys; a run with other lengths counts as a different job.
    `steps` is the total number of steps: a finished training is resumed if it has more steps now. `overwrite`
    replaces whatever run is there. `resume` says that the job's Python objects are those of the run, and
    `is_reopened` that a finished prediction may be resumed. `modes` are the script's settings of torch, with which a
    new run begins. `classes` are those of its dataset.
    """

    job: Job
    rows: Mapping[str, int]
    steps: int | None = None
    overwrite: bool = False
    resume: bool = False
    is_reopened: bool = False
    modes: Mapping[str, Any] = field(default_factory=dict)
    classes: Sequence[str] = ()


@dataclass(frozen=True)
class DirectoryState:
    """What a run directory holds, as far as a claim depends on it; `where` is its path or URL, for people.

    `claimed` and `result` are its JSON files. `has_kept_nothing` says that the run failed or was interrupted before
    it kept a step. Only a training has `checkpoints`, by their steps, and a history.
    """

    where: str
    is_foreign: bool = False  # it holds files, and no run
    has_run: bool = False
    claimed: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    has_kept_nothing: bool = False
    checkpoints: tuple[int, ...] = ()
    has_history: bool = False

    @classmethod
    def of(cls, run: Storage, overwrite: bool = False) -> "DirectoryState":
        """Read what a directory holds; of a run that is to be replaced only that it is there: it may be damaged."""
        claimed = {} if overwrite else RUN_JSON.read(run)
        has_run = run.exists(RUN) if overwrite else bool(claimed)
        if overwrite or not has_run:
            is_foreign = not has_run and not run.is_empty() and run.entries() != {files.LAST_END}
            return cls(str(run), is_foreign=is_foreign, has_run=has_run)
        is_training = claimed.get("job", {}).get("task") == "train"
        return cls(
            str(run),
            has_run=True,
            claimed=claimed,
            result=RESULT_JSON.read(run),
            has_kept_nothing=files.has_kept_nothing(run),
            checkpoints=tuple(steps_of(run.child(CHECKPOINTS))) if is_training else (),
            has_history=is_training and run.exists(METRICS),
        )


def decide(found: DirectoryState, wanted: Wanted) -> Decision | Refused:
    """Decide what becomes of what a directory holds; it reads and writes nothing."""
    job, rows = wanted.job, wanted.rows
    if found.is_foreign:
        return Refused("holds files that are no run; choose another --name or --storage", is_run=False)
    if not found.has_run:
        return New()
    if wanted.overwrite:
        return Replace(is_asked=True)
    before = found.claimed.get("rows", {})
    keys = [key for key in rows if before.get(key, rows[key]) != rows[key]]
    other_rows = "; ".join(f"{key}: {before[key]} rows there, {rows[key]} rows here" for key in keys)
    others, is_known = other_job(found.claimed, job) or other_rows, job.is_all_targets or wanted.resume
    if found.has_kept_nothing and (others or not is_known):
        return Replace(is_asked=False)
    if others:
        return Refused(f"holds a run of a different job ({others}); ")
    lengths, is_finished = changed_lengths(found.claimed, job), found.result.get("status") == "done"
    if not wanted.is_reopened and (obstacle := _obstacle(found, wanted, lengths, is_finished)):
        return Refused(f"holds this run, {obstacle}")
    if not is_known:
        unknown = "whether these are the same is unknown: if they are, resume=True resumes it"
        return Refused(f"holds a run of Python objects ({listed(job.untold)}); {unknown}; else ")
    return Resume(lengths, is_finished)


def _obstacle(found: DirectoryState, wanted: Wanted, lengths: str, is_finished: bool) -> str:
    """Return why the run cannot be resumed with so many steps, up to the advice; empty if it can."""
    done, steps, job = max(found.checkpoints, default=0), wanted.steps, wanted.job
    if steps is not None and steps < done:
        return f"which has done {done} steps, and this job has {steps} ({lengths}); "
    if not is_finished:
        return ""
    load = f"load its result (dp_ray.load({found.where!r})), "
    early, stopping = found.result.get("stopped_early"), job.early_stopping
    if early and stopping is not None:  # it would stop there again at any length
        here = (stopping.column, stopping.mode, stopping.min_delta)
        same = here == (early["metric"], early["mode"], early["min_delta"]) and early["text"]
        ways = []
        if same and stopping.patience is not None and stopping.patience <= early["times"]:
            ways.append("more patience")
        is_low = early.get("below") is not None and stopping.below is not None
        if same and is_low and (early["best"] is None or early["best"] < stopping.below):  # None stands for -inf
            ways.append("a smaller below")
        if ways:
            on = f"give early_stopping {' and '.join(ways)} or leave it out"
            return f"which {early['text']}; {load}or to train on, {on}; else "
    if not lengths or steps == done:
        use = ", ".join(command_for(name, found.where) for name in ("evaluate", "predict"))
        use = f"use it ({use}), train longer with more epochs, "
        return f"finished; {load}{use if job.task == 'train' else ''}"
    if not found.checkpoints or not found.has_history:
        return "finished, without the checkpoints and the history from which it could resume; "
    return ""


def check_claim(run: Storage, wanted: Wanted) -> Decision:
    """Return what `decide` says of a run directory; it writes nothing.

    Raises JobError if the directory holds a finished run, a run of a different job, or files of no run. Raises it too
    if the file that `init_from` names, or with which the run began, is missing, or would be deleted by `overwrite`.
    """
    found = DirectoryState.of(run, wanted.overwrite)
    decision, init_from = decide(found, wanted), wanted.job.init_from
    if isinstance(decision, Refused):
        advice = f"give it another name (--name, name=), or replace it {files.replacing(run)}"
        raise JobError(f"{run} {decision.why}{advice if decision.is_run else ''}")
    is_resumed = isinstance(decision, Resume)
    if init_from is not None and not (is_resumed and found.checkpoints):  # from which a training resumes
        check_start(run if is_resumed else None, init_from)
    if wanted.overwrite:
        check_reads_nothing_of(run, wanted.job)
    return decision


@dataclass(frozen=True)
class RunDir:
    """A claimed run directory; `token` identifies this driver's claim, `is_resumed` says whether it resumes a run.

    `replaced` is the run that was here before, while it waits aside until this one has done a step.
    Committing a file to `storage` raises StorageError if another driver has claimed the directory since.
    """

    storage: Storage
    token: str
    is_resumed: bool
    replaced: ReplacedRun | None = None

    @property
    def is_ours(self) -> bool:
        """Whether no other driver has claimed the run directory since."""
        return bool(RUN_JSON.read(self.storage).get("token") == self.token)

    def check_ours(self) -> None:
        """Raise StorageError if another driver has claimed the run directory since, or if it was removed."""
        if not self.is_ours:
            raise StorageError(lost(self.storage, RUN))


def claim(
    run: Storage, wanted: Wanted, decision: Decision, reopen: Callable[[Storage], None] | None = None
) -> RunDir:
    """Claim a run directory as `check_claim` has decided; `reopen` makes a finished prediction unfinished.

    A driver may be killed between any two effects. Each says what it leaves then.
    """
    # Before any effect, since it raises JobError for args that cannot be hashed.
    modes = kept_modes(run) if isinstance(decision, Resume) else wanted.modes
    contents = {"token": uuid.uuid4().hex, "rows": wanted.rows, "modes": modes, **_described(wanted.job)}
    if wanted.classes:
        contents[CLASSES] = list(wanted.classes)
    waiting = ReplacedRun(run)
    has_begun()
    # 1. What was finished goes on. Until 2 it is finished, and all this is done anew.
    if isinstance(decision, Resume) and reopen is not None:
        reopen(run)
    elif isinstance(decision, Resume) and decision.was_finished:  # a training, from its last checkpoint
        unmerge_history(run, steps_of(run.child(CHECKPOINTS)))
        unmerge_quarantine(run)
        INCIDENTS_JSON.write(run, INCIDENTS_JSON.read(run, RESULT))
    # 2. The last driver's result must not pass for this one's. The run is unfinished, and the next driver resumes it.
    if isinstance(decision, Resume):
        run.delete(RESULT)
        if not files.holds_work(run):  # it begins anew, with the files of its datasets as they are now
            for name in filter(files.OF_DATASETS.fullmatch, run.entries()):
                run.delete(name)
    # 3. A run that had kept nothing is removed. A part of its traces may be left: without a run.json, the next driver
    # refuses to touch them.
    if decision == Replace(is_asked=False):
        run.remove()
    # 4. A run that the user replaces waits aside, alone: the next driver puts it back.
    replaced = waiting if decision == Replace(is_asked=True) and waiting.keep() else None
    try:
        # 5. The folder is there, and no run in it: the next driver begins one, or puts back what waits aside.
        run.create()
        # 6. The directory is this driver's. The next driver resumes the run, or puts back what waits aside.
        RUN_JSON.write(run, contents)
        # 7. The folder of parts is there. A driver that resumes the run makes it too.
        run.child("parts").create()
    except BaseException:
        if replaced is not None:
            replaced.restore()
        raise
    claimed = RunDir(run, contents["token"], isinstance(decision, Resume), replaced)
    return replace(claimed, storage=run.guarded(claimed.check_ours))


def keep_shards(claimed: RunDir, job: Job) -> None:
    """Write the job into the run directory that was claimed with `shards: auto`, now that its number is found."""
    kept = RUN_JSON.read(claimed.storage)
    stays = {key: kept[key] for key in ("token", "rows", "modes", CLASSES) if key in kept}
    RUN_JSON.write(claimed.storage, {**stays, **_described(job)})


def kept_modes(run: Storage) -> dict[str, Any]:
    """Return the settings of torch with which a run began, by their names; a run of an earlier version has none."""
    modes: dict[str, Any] = RUN_JSON.read(run).get("modes", {})
    return modes


def _described(job: Job) -> dict[str, Any]:
    """Return what a claim keeps of the job, without its secrets."""
    described = {**job.describe(), "env": dict.fromkeys(job.env, "(not kept)")}
    return {"fingerprint": job.fingerprint(), "job": described}


def check_shared(run: Storage, token: str, who: str) -> None:
    """Raise StorageError unless this process sees the same directory that the driver claimed."""
    seen = RUN_JSON.read(run).get("token")
    if seen != token:
        what = "cannot see" if seen is None else "sees another run's in place of"
        raise StorageError(
            f"storage is not shared by all nodes: {who} {what} the run directory {run} of the driver; "
            "set storage to a folder that every node mounts, or to a URL such as s3://bucket/folder"
        )

"""The files of a run directory that several modules read: their names, its JSON files, and the work that it holds.

Each other file is named in the module that writes it. `about.json` keeps, for each driver, the command, the code's
commit, versions, hardware and plan; and for each attempt what its workers compute on.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal

import psutil
from pyarrow import fs as pafs

from dp_ray import __version__
from dp_ray.errors import JobError, StorageError
from dp_ray.records import IGNORE, Damaged, Record, T
from dp_ray.rundir.numerics import Computed, Kind
from dp_ray.storage import Storage, with_names
from dp_ray.system.linux import gpu_models, processor
from dp_ray.system.process import git_state, without_values
from dp_ray.text import hide, listed, relative

RUN = "run.json"  # the job, and which driver runs it
RESULT = "result.json"
BEFORE_RETRY = "before-retry.json"  # the result of a prediction that is retried; gone once the retry has ended well
SHAPES = "shapes.parquet"
FACTS = "facts.json"  # what was asked before the first step (`tasks/preflight.py`); gone once the run is done
AUDITS = "audits.json"  # what audits know of processors (`tasks/audits.py`)
SWEEP = "sweep.json"  # in the directory of a sweep: its definition and its trials
CHECKPOINTS = "checkpoints"  # the folder of a training's checkpoints
FLIGHT_RECORDER = "flight_recorder"  # the folder of the collectives of attempts that hung
NCCL_RECORD = "{}-nccl-rank-{}"  # in it, what NCCL writes before it ends the process of an attempt's rank
NAME = re.compile(r"step-(\d+)\.safetensors")  # of a checkpoint


COUNTED = {  # folder: the noun for one file in it, and for several
    "checkpoints": ("checkpoint", "checkpoints"),
    "parts": ("part of the outputs", "parts of the outputs"),
}
NAMED = {
    "history": "history",
    "metrics.parquet": "history",
    "weights.safetensors": "weights",
    "model.safetensors.index.json": "weights",
    "outputs": "outputs",
}
LAST_END = "kuberay.json"  # how a job in Kubernetes has ended; of a bad job it is alone in the directory
# What a run leaves that failed before a step was kept; files of the user's own are not among them.
TRACES = frozenset(
    (
        *("run.json", "result.json", "about.json", "report.html", "story.json", "progress.json", "attempt.json"),
        FACTS,
        *("lease.json", "stop.json", "init_from.json", "init_from", "previews", "shapes.parquet", "reports", "times"),
        *("fetched.json", LAST_END),
        *("flight_recorder", "recent.parquet", "tensorboard", "trackers", "files"),
    )
)
# What the first attempt keeps of each dataset, also of those of evaluations: its files, and the form of its items.
OF_DATASETS = re.compile(r"(files|reference)-of-(eval\.([\w-]+\.)?)?dataset\.json")
ABOUT = "about.json"
PACKAGES = ("torch", "ray", "numpy", "pyarrow", "torchvision", "transformers")
KEPT = 20  # drivers of a run that was resumed often, and attempts
_ABOUT = threading.Lock()  # held while the file is read and written anew: by two threads of a driver


@dataclass(frozen=True)
class About:
    """The drivers of a run, in order: of each its command, code, versions, hardware and plan; and its attempts."""

    drivers: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[Computed] = field(default_factory=list)


State = Literal["waiting", "running", "done", "failed", "interrupted"]


@dataclass(frozen=True)
class SweepTrial:
    """A trial as `sweep.json` keeps it; `values` are for people, `picked` tells what to run again."""

    number: int
    values: dict[str, Any]
    run: str
    state: State
    metric: float | None
    metrics: dict[str, float | None]
    error: str
    picked: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The contents of `sweep.json`; `token` identifies the driver that may write it."""

    token: str
    definition: dict[str, Any]
    trials: list[SweepTrial]


RUN_JSON = Record[dict[str, Any]](dict, RUN, missing={}, indent=2)
RESULT_JSON = Record[dict[str, Any]](dict, RESULT, missing={}, indent=2)
ABOUT_JSON = Record[About](About, ABOUT, missing=About(), damaged=IGNORE, unreachable=IGNORE, indent=2)
SWEEP_JSON = Record[Sweep](Sweep, SWEEP, indent=2)


def kept_job(run: Storage, noun: str) -> dict[str, Any]:
    """Return the job of a run, in keys of this version; raises JobError if there is no run."""
    claimed = RUN_JSON.read(run)
    if not claimed:
        raise JobError(f"{run} holds no {RUN}: name the run directory of {noun}{or_elsewhere(run)}{runs_there(run)}")
    return in_keys_of_now(claimed["job"])


def in_keys_of_now(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kept job without the keys that version 0.2 had: one that is left is told as any key that is none.

    So is `scatter: batch`, without which the batches would be others.
    """
    job = dict(kept)
    if job.get("scatter") == "samples":
        del job["scatter"]
    if job.get("call") == "one":
        job["call"] = "auto"
    if job.get("loader"):
        job["loader"] = {key: value for key, value in job["loader"].items() if key != "context"}
    if blocks := job.pop("blocks", None):
        job["device_map"] = blocks
    if job.get("on_error"):
        job["on_error"] = {key: value for key, value in job["on_error"].items() if key != "timeout"}
    return job


def runs_there(run: Storage) -> str:
    """Return what an error adds about a run that is not there: which runs are.

    They are those in the folder itself, else those beside it, else those where a job keeps them by default.
    """
    for folder in (run, run.parent, *([Storage("runs")] if run.is_local else [])):
        with suppress(StorageError, OSError):  # the error is of another thing
            if runs := _runs_in(folder):
                return f"; the runs there: {listed(map(shlex.quote, runs))}"
    return ""


def or_elsewhere(run: Storage) -> str:
    """Return what an error adds about a run that is not there: how it comes here if a cluster ran it."""
    if not run.is_local or os.path.exists(run.path):
        return ""
    what = shlex.join([run.name, relative(run.parent.location)])
    return f" (if a cluster ran it, `dp-ray fetch {what} --address http://HEAD:8265` brings it here)"


def _runs_in(folder: Storage) -> list[str]:
    """Return the directories of the runs in a folder, the newest first, as a user names them."""
    infos = with_names(folder.fs.get_file_info(pafs.FileSelector(folder.path, allow_not_found=True)))
    names = [info.base_name for info in infos if info.type == pafs.FileType.Directory]
    claims = folder.fs.get_file_info([folder.child(name).file(RUN) for name in names])
    found = [(claim.mtime_ns or 0, name) for claim, name in zip(claims, names, strict=True) if claim.is_file]
    return [relative(str(folder.child(name))) for _, name in sorted(found, reverse=True)]


def read_or_advise(record: Record[T], run: Storage) -> T:
    """Read a file without which a run cannot go on: if it is damaged, the error says how to start anew."""
    try:
        return record.read(run)
    except Damaged as error:
        raise StorageError(f"{error}; start anew {replacing(run)}") from None


def steps_of(checkpoints: Storage) -> list[int]:
    """Return the steps of the checkpoints in a folder, in order."""
    matches = (NAME.fullmatch(name) for name in checkpoints.names())
    return sorted(int(match[1]) for match in matches if match)


def is_finished(run: Storage) -> bool:
    """Return whether a run directory holds a finished run."""
    return RESULT_JSON.read(run).get("status") == "done"


def has_kept_nothing(run: Storage) -> bool:
    """Return whether a run failed, or was interrupted, before it kept a step: then another job may take its place."""
    if RESULT_JSON.read(run).get("status") not in ("failed", "interrupted"):
        return False
    return all(name in TRACES or OF_DATASETS.fullmatch(name) for name in run.entries())


def replacing(run: Storage) -> str:
    """Return the flag that replaces a run, and what it deletes: `... which deletes its 3 checkpoints and history`."""
    nouns = _work_of(run)
    work = " and ".join(part for part in (", ".join(nouns[:-1]), *nouns[-1:]) if part)
    return f"(--overwrite, overwrite=True), which deletes its {work or 'files (it has kept no step)'}"


def holds_work(run: Storage) -> bool:
    """Return whether a run directory holds checkpoints, history, weights or outputs."""
    return bool(_work_of(run))


def _work_of(run: Storage) -> list[str]:
    counts = [(len(run.child(folder).names()), singular, more) for folder, (singular, more) in COUNTED.items()]
    nouns = [f"{count} {singular if count == 1 else more}" for count, singular, more in counts if count]
    return nouns + list(
        dict.fromkeys(noun for name, noun in NAMED.items() if run.exists(name) or run.child(name).names())
    )


@contextmanager
def recorded_about(run: Storage, plan: str, is_forked: bool) -> Iterator[None]:
    """Add this driver to the run's `about.json` in the background, while the block runs; `plan` is its text.

    If the block may fork this process, as loaders do, it begins once git has told its state: a fork would hold the
    pipes open through which git does. A file that cannot be written is left out: it only informs.
    """
    now, git = datetime.now(UTC), cache(git_state)
    if is_forked:
        git()

    def record() -> None:
        driver = {**_this_driver(now, git()), "plan": plan}
        with suppress(OSError), _ABOUT:
            about = ABOUT_JSON.read(run)
            ABOUT_JSON.write(run, replace(about, drivers=[*about.drivers, driver][-KEPT:]))

    thread = threading.Thread(target=record, name="about", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def keep_computed(run: Storage, step: int, kinds: list[Kind]) -> list[Kind]:
    """Keep what an attempt that begins with `step` computes on; return what the last attempt that is kept did.

    A file that cannot be written is left out: it only informs.
    """
    computed = Computed(datetime.now(UTC).isoformat(timespec="seconds"), step, kinds)
    with _ABOUT:
        about = ABOUT_JSON.read(run)
        ABOUT_JSON.write(run, replace(about, attempts=[*about.attempts, computed][-KEPT:]))
    return about.attempts[-1].kinds if about.attempts else []


def _this_driver(started: datetime, git: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "started": started.isoformat(timespec="seconds"),
        "command": command_of(sys.orig_argv),
        "folder": os.getcwd(),
        "git": git,
        "packages": {"dp-ray": __version__} | {name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpu_models(),
    }


def command_of(arguments: Sequence[str]) -> str:
    """Return the command line of a process as one would type it, without secrets.

    >>> command_of(["/usr/bin/python3", "/venv/bin/dp-ray", "run", "job.yaml", "--set", "env.KEY=abc"])
    "dp-ray run job.yaml --set 'env.KEY=(not shown)'"
    """
    program, *rest = arguments or ["python"]
    if rest and os.path.basename(rest[0]) == "dp-ray":
        program, *rest = rest
    return hide(shlex.join([os.path.basename(program), *without_values(rest)]))


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None

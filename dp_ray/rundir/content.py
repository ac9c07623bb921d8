"""The files of a run as they are copied elsewhere: which belong to what was asked for, and what each one holds.

`dp-ray fetch` copies runs. `content_of` lists the files where the run lies, with its trials if it is a sweep.
`FETCHED` stays in each directory that was fetched: it says from where it came, and which files it got.
"""

import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from pyarrow import fs as pafs

from dp_ray.errors import JobError, StorageError
from dp_ray.records import IGNORE, Record
from dp_ray.rundir.files import CHECKPOINTS, RUN, SWEEP, SWEEP_JSON, runs_there
from dp_ray.rundir.lease import LEASE, REQUEST
from dp_ray.rundir.listing import listed_run
from dp_ray.storage import TEMPORARY, Storage, with_names
from dp_ray.text import relative

KINDS = ("weights", "outputs", "page")
FETCHED = "fetched.json"
ABOUT_RUN = re.compile(r"[^/]+\.(json|parquet)|(history|times)/.*")  # small files, which each fetched run has
OF_KIND = {
    "weights": re.compile(r"[^/]+\.safetensors(\.index\.json)?"),
    "outputs": re.compile(r"outputs\.parquet|(outputs|parts|files|quarantine)/.*"),
    "page": re.compile(r"report\.html"),
}
CHECKPOINT = re.compile(rf"{CHECKPOINTS}/(?:pieces/)?step-(\d+)\..*")  # the pieces are a sharded model's
OF_A_DRIVER = (LEASE, REQUEST, FETCHED)  # what holds for the directory in which the driver runs, and not for a copy


@dataclass(frozen=True)
class Entry:
    """A file: its bytes, when it was written (ns), and its SHA-256, which is "" if it was not read."""

    size: int
    modified: int = 0
    sha256: str = ""

    def is_like(self, other: "Entry") -> bool:
        """Return whether both have the same contents: by their digests, else by their times."""
        both = self.sha256 and other.sha256
        same = self.sha256 == other.sha256 if both else self.modified == other.modified
        return self.size == other.size and same


@dataclass(frozen=True)
class Content:
    """Files of runs, each as RUN/FILE; `running` has the runs whose driver is alive."""

    files: dict[str, Entry]
    running: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fetched:
    """From where a run directory was fetched, and which of its files, as they were there; `lacks` kinds of them."""

    place: str
    address: str | None
    files: dict[str, Entry]
    lacks: list[str] = field(default_factory=list)


CONTENT_JSON = Record[Content](Content, hides=False)
FETCHED_JSON = Record[Fetched | None](Fetched, FETCHED, missing=None, damaged=IGNORE, unreachable=IGNORE)


def content_of(base: Storage, name: str, kinds: Collection[str]) -> Content:
    """Return the files of the run or the sweep `name` in a storage; those of `kinds` alone, or with none all.

    Raises JobError if there is no such run, if it has none of a kind, or if all of a run is wanted that goes on.
    """
    run = base.child(name)
    if not run.exists(RUN) and not run.exists(SWEEP):
        raise JobError(f"{run} holds no run{runs_there(run)}")
    runs = [name]
    if not run.exists(RUN):  # the trials of a sweep are runs beside it
        runs += [trial.run for trial in SWEEP_JSON.read(run).trials if base.child(trial.run).exists(RUN)]
    running = [each for each in runs if listed_run(base.child(each)).status == "running"]
    if running and not kinds:
        raise JobError(
            f"{base.child(running[0])} goes on, so its files change: wait for its end, stop it (dp-ray stop), or "
            f"take what it has: {', '.join(f'--{kind}' for kind in KINDS)}"
        )
    files: dict[str, Entry] = {}
    for each in runs:
        found = _files_in(base.child(each))
        files |= {f"{each}/{file}": found[file] for file in chosen_files(found, kinds)}
    for kind in kinds:
        if not has_kind(kind, [path.partition("/")[2] for path in files]):
            raise JobError(f"{run} has no {kind}; fetch it without --{kind} to get what it has")
    return Content(dict(sorted(files.items())), running)


def check_fetched(run: Storage, kind: str) -> None:
    """Raise StorageError if a run was fetched without its files of a kind; it says how they come."""
    fetched = FETCHED_JSON.read(run) if run.is_local else None
    if fetched is not None and kind in fetched.lacks:
        where = ["--address", fetched.address] if fetched.address else ["--storage", fetched.place]
        command = shlex.join(["dp-ray", "fetch", run.name, relative(run.parent.location), f"--{kind}", *where])
        raise StorageError(f"{run}: was fetched without its {kind}; `{command}` brings what is missing")


def chosen_files(names: Iterable[str], kinds: Collection[str]) -> list[str]:
    """Return which files of a run belong to these kinds, or with none all; what tells of the run always does.

    A training that goes on has its weights in its newest checkpoint.
    """
    kept = [name for name in names if name not in OF_A_DRIVER and not PurePosixPath(name).name.startswith(TEMPORARY)]
    if not kinds:
        return kept
    heavy = [name for name in kept if any(OF_KIND[kind].fullmatch(name) for kind in KINDS)]
    taken = {name for name in heavy if any(OF_KIND[kind].fullmatch(name) for kind in kinds)}
    if "weights" in kinds and not any(OF_KIND["weights"].fullmatch(name) for name in taken):
        steps = {name: int(found[1]) for name in kept if (found := CHECKPOINT.fullmatch(name))}
        taken |= {name for name, step in steps.items() if step == max(steps.values())}
    taken |= {name for name in kept if ABOUT_RUN.fullmatch(name) and name not in heavy}
    return [name for name in kept if name in taken]


def has_kind(kind: str, names: Iterable[str]) -> bool:
    """Return whether files of a run are of a kind; a checkpoint holds weights."""
    return any(OF_KIND[kind].fullmatch(name) or (kind == "weights" and CHECKPOINT.fullmatch(name)) for name in names)


def check_names(content: Content, name: str) -> None:
    """Raise StorageError if a file of a list that came from elsewhere would leave the directory of its run."""
    for path in content.files:
        parts = path.split("/")
        is_clean = len(parts) > 1 and not any(part in ("", ".", "..") or "\0" in part for part in parts)
        if not is_clean or not path.isprintable():
            raise StorageError(f"{name}: a file of it is called {path!r}, which no run directory holds: not fetched")


def _files_in(run: Storage) -> dict[str, Entry]:
    selector = pafs.FileSelector(run.path, allow_not_found=True, recursive=True)
    try:
        infos = [info for info in with_names(run.fs.get_file_info(selector)) if info.is_file]
    except OSError as error:
        raise StorageError(f"{run}: cannot be listed: {error}") from error
    prefix = f"{run.path.rstrip('/')}/"
    return {info.path.removeprefix(prefix): Entry(info.size, info.mtime_ns or 0) for info in infos}

"""Bring a run here from the storage of a cluster: what `dp-ray fetch` does; begin at `fetch_run`.

A storage with a URL, and without a dashboard any one, is read from here. A folder of a cluster comes through its
dashboard: a job on the head node offers the files (`offer.py`), and this process downloads them, checks each one's
SHA-256, and ends the job.

The files are gathered in a folder beside the run's, and become the run directory when all of them are there. An
interrupted fetch leaves that folder, and the same command goes on with it.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dp_ray.cluster.connect import RUN_STORAGE
from dp_ray.cluster.offer import LISTING
from dp_ray.cluster.submit import LOOK_SECONDS, STATUSES, Dashboard, Say, in_megabytes, run_name_of
from dp_ray.errors import BAD_JOB, ClusterError, JobError, StorageError
from dp_ray.job.job import NAME
from dp_ray.rundir.content import (
    CONTENT_JSON,
    FETCHED_JSON,
    KINDS,
    Content,
    Entry,
    Fetched,
    check_names,
    content_of,
)
from dp_ray.rundir.files import RUN, SWEEP
from dp_ray.rundir.lease import last_alive
from dp_ray.storage import PIECE, TEMPORARY, Storage
from dp_ray.text import counted, hide

SAY_SECONDS = 5.0
TRIES, AGAIN_SECONDS = 6, 5.0
STAGE = ".dp_ray-fetch-"  # before the run's name: the folder that gathers its files


@dataclass(frozen=True)
class FetchRequest:
    """What to fetch: a run or sweep by its name or its job's id, and files of it of some kinds, or with none all.

    `storage` and `address` say where it is: the folder or URL as the cluster sees it, and the cluster's dashboard.
    """

    name: str
    kinds: tuple[str, ...] = ()
    storage: str | None = None
    address: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Arrival:
    """What is to come into a run directory: files as RUN/FILE, beside those that it `keeps` or in place of all.

    `lacks` are the kinds of files of which none was fetched before.
    """

    run: str
    files: dict[str, Entry]
    keeps: dict[str, Entry] = field(default_factory=dict)
    lacks: Sequence[str] = KINDS
    replaces: bool = False


class FromHere:
    """A run in a storage that this machine reads itself."""

    def __init__(self, place: str, name: str, kinds: Sequence[str]) -> None:
        self.base = Storage(place)
        self.content = content_of(self.base, name, kinds)

    def lies_in(self, run: str, run_dir: Storage) -> bool:
        """Return whether a run's directory is this one, or lies in it; by links too."""
        return run_dir.holds(self.base.child(run).location)

    @contextmanager
    def pieces(self, path: str) -> Iterator[Iterator[bytes]]:
        """Within the block, read a file in pieces."""
        with self.base.open(path) as stream:
            yield iter(lambda: stream.read(PIECE), b"")


@dataclass(frozen=True)
class ThroughCluster:
    """A run whose files a job on the head node offers, by their SHA-256."""

    dashboard: Dashboard
    node_id: str
    offer: str
    content: Content

    def lies_in(self, run: str, run_dir: Storage) -> bool:
        """Return False: the same path may be another folder there."""
        return False

    @contextmanager
    def pieces(self, path: str) -> Iterator[Iterator[bytes]]:
        """Within the block, read a file in pieces."""
        with self.dashboard.reading(self.node_id, f"{self.offer}/{self.content.files[path].sha256}") as pieces:
            yield pieces


RunSource = FromHere | ThroughCluster


def fetch_run(request: FetchRequest, folder: Path, say: Say) -> list[Path]:
    """Fetch a run into FOLDER/NAME, a sweep with its trials beside it; return the directories.

    Raises JobError if there is no such run, or if FOLDER/NAME holds another state of it or anything else.
    Raises StorageError if its files cannot be read or written, or change meanwhile, and ClusterError if the cluster
    goes away.
    """
    dashboard = Dashboard(request.address) if request.address else None
    name, place = _located(request, dashboard)
    says = f"fetches {name} from {hide(place)}"
    if dashboard is None or "://" in place:
        say(says)
        opened: AbstractContextManager[RunSource] = nullcontext(FromHere(place, name, request.kinds))
    else:
        say(f"{says} through the cluster at {dashboard.address}; it lists the files first")
        opened = _through(dashboard, name, place, request.kinds)
    with opened as source:
        check_names(source.content, name)
        runs = dict.fromkeys(path.partition("/")[0] for path in source.content.files)
        arrivals = [_arrival(folder / run, run, source, request.overwrite) for run in runs]
        stage = folder / f"{STAGE}{name}"
        try:
            _gather(source, {path: entry for each in arrivals for path, entry in each.files.items()}, stage, say)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; the same command goes on from there") from None
    for each in arrivals:
        new = {path.partition("/")[2]: entry for path, entry in each.files.items()}
        lacks = [kind for kind in each.lacks if kind not in request.kinds] if request.kinds else []
        try:
            _settle(stage, folder, each, Fetched(hide(place), request.address, {**each.keeps, **new}, lacks))
        except OSError as error:
            raise StorageError(
                f"{error}: all files came, and lie in {stage}; make room for them, and the same command goes on"
            ) from error
    shutil.rmtree(stage)
    return [folder / run for run in runs]


def _located(request: FetchRequest, dashboard: Dashboard | None) -> tuple[str, str]:
    """Return the name of the run, and the storage in which it lies."""
    name, place = request.name, request.storage
    if place is None and dashboard is None:
        raise JobError(
            f"fetch {name}: give --address, the dashboard of the cluster that ran it, or --storage, a folder "
            "or URL that this machine can read"
        )
    if place is None and dashboard is not None:
        job = dashboard.find(name)
        name, place = run_name_of(job) or "", (job.metadata or {}).get(RUN_STORAGE)
        if not name or not place:
            raise JobError(
                f"{job.submission_id} is {STATUSES[job.status]}, and has begun no run; a run that lies elsewhere is "
                "found by its name and --storage"
            )
    if not NAME.fullmatch(name):
        raise JobError(f"{name!r} is no name of a run: it has letters, digits, '.', '_' and '-'")
    return name, str(place)


@contextmanager
def _through(dashboard: Dashboard, name: str, place: str, kinds: Sequence[str]) -> Iterator[ThroughCluster]:
    """Have the head node offer the files while the block runs; raises what the offering job failed with."""
    offer = dashboard.start(["python", "-m", "dp_ray.cluster.offer", place, name, *kinds])
    try:
        listing, looks = b"", 0
        while not listing:  # on a busy machine the dashboard may send nothing of a file that is there
            time.sleep(LOOK_SECONDS)
            job = dashboard.details(offer)
            if job.status.is_terminal():
                said = dashboard.logs(offer).strip().splitlines()[-1:] or [str(job.message)]
                kind = JobError if job.driver_exit_code == BAD_JOB else ClusterError
                raise kind(f"the cluster at {dashboard.address} cannot offer {name}: {said[0]}")
            with suppress(FileNotFoundError), dashboard.reading(job.driver_node_id, f"{offer}/{LISTING}") as pieces:
                listing, looks = b"".join(pieces), looks + 1
            if looks == TRIES and not listing:
                raise ClusterError(f"the cluster at {dashboard.address} sends nothing of the list of files")
        yield ThroughCluster(dashboard, job.driver_node_id, offer, CONTENT_JSON.parse(listing.decode()))
    finally:
        with suppress(ClusterError):  # then the job ends by itself
            dashboard.ask_to_stop(offer)


def _arrival(run_dir: Path, run: str, source: RunSource, overwrite: bool) -> Arrival:
    """Return what is to come into a run directory here.

    Raises JobError if that cannot be made, is where the run lies itself, or holds something else, or the run in an
    earlier state, unless it is to `overwrite` a run.
    """
    files = {path: entry for path, entry in source.content.files.items() if path.startswith(f"{run}/")}
    if run_dir.is_symlink():
        raise JobError(f"{run_dir} is a link to {run_dir.readlink()}; name the folder that is to hold the run as DIR")
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"{run_dir.parent} cannot be made a folder: {error}; fetch into another folder") from error
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        return Arrival(run, files)
    here = Storage(str(run_dir))
    if source.lies_in(run, here) or _holds_original(run_dir, run, files):
        raise JobError(f"{run_dir} is where the run lies; fetch into another folder")
    earlier = FETCHED_JSON.read(here) if run_dir.is_dir() else None
    known = {} if earlier is None else earlier.files
    new = {path: entry for path, entry in files.items() if path.partition("/")[2] not in known}
    changed = [
        name for path in files.keys() - new.keys() if not known[name := path.partition("/")[2]].is_like(files[path])
    ]
    if earlier is not None and not changed:
        return Arrival(run, new, keeps=known, lacks=earlier.lacks)
    if run_dir.is_dir() and last_alive(here)[0]:
        raise JobError(f"{run_dir} is being run here: wait for its end, or fetch into another folder")
    if overwrite and run_dir.is_dir() and (here.exists(RUN) or here.exists(SWEEP)):
        return Arrival(run, files, replaces=True)
    says = f"{run_dir} holds an earlier state of the run: {min(changed)} has changed since" if changed else ""
    says = says or f"{run_dir} is there already, and was not fetched"
    raise JobError(f"{says}; fetch into another folder, or replace a run by --overwrite")


def _holds_original(run_dir: Path, run: str, files: Mapping[str, Entry]) -> bool:
    """Return whether the file that each run begins with was written here: its time tells, whatever the paths are."""
    for name in (RUN, SWEEP):
        if (entry := files.get(f"{run}/{name}")) is not None and (run_dir / name).is_file():
            status = (run_dir / name).stat()
            return (status.st_size, status.st_mtime_ns) == (entry.size, entry.modified)
    return False


def _gather(source: RunSource, files: Mapping[str, Entry], stage: Path, say: Say) -> None:
    """Bring files into the stage; those stay that an interrupted fetch has brought, if they are the same."""
    stage.mkdir(parents=True, exist_ok=True)
    noted, before = Storage(str(stage)), dict[str, Entry]()
    with suppress(StorageError):  # there was none
        before = CONTENT_JSON.read(noted, LISTING).files
    left = {path: entry for path, entry in files.items() if not _is_there(stage / path, entry, before.get(path))}
    keep = {stage / path for path in files.keys() - left.keys()}
    for file in [file for file in stage.rglob("*") if file.is_file() and file not in keep]:
        file.unlink()  # also what an earlier fetch of other files has left
    CONTENT_JSON.write(noted, Content(dict(files)), LISTING)  # from here on, a file in the stage is as it says
    if len(left) < len(files):
        say(f"{counted(len(files) - len(left), 'file')} of an earlier try need not come again")
    due, done, whole = time.monotonic() + SAY_SECONDS, 0, sum(entry.size for entry in left.values())
    for number, (path, entry) in enumerate(left.items(), 1):
        _bring(source, path, entry, stage / path)
        done += entry.size
        if time.monotonic() > due:
            due = time.monotonic() + SAY_SECONDS
            say(f"{number} of {counted(len(left), 'file')}, {in_megabytes(done)} of {in_megabytes(whole)}")


def _is_there(file: Path, entry: Entry, before: Entry | None) -> bool:
    is_same = before is not None and before.is_like(entry)
    return is_same and file.is_file() and file.stat().st_size == entry.size


def _bring(source: RunSource, path: str, entry: Entry, file: Path) -> None:
    """Write a file, which appears whole; where the connection breaks, it is begun anew, `TRIES` times at most."""
    partial = file.with_name(f"{TEMPORARY}{file.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    for left in reversed(range(TRIES)):
        size, digest = 0, hashlib.sha256()
        nothing: AbstractContextManager[Iterator[bytes]] = nullcontext(iter(()))
        try:
            with partial.open("wb") as copy, source.pieces(path) if entry.size else nothing as pieces:
                for piece in pieces:
                    size += copy.write(piece)
                    digest.update(piece)
        except ClusterError as error:
            if not left:
                raise ClusterError(f"{path} does not come: {error}; the same command goes on") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be fetched: {error}; the same command goes on") from error
        else:
            if size == entry.size and entry.sha256 in ("", digest.hexdigest()):
                os.replace(partial, file)
                return
        time.sleep(AGAIN_SECONDS)
    partial.unlink()
    raise StorageError(
        f"{path} is not what was listed ({size} bytes came, {entry.size} were listed): if its run goes on, fetch it "
        "when that has ended"
    )


def _settle(stage: Path, folder: Path, arrival: Arrival, fetched: Fetched) -> None:
    """Make what came the run directory, or put it there.

    The note of it comes last: after a crash before it, the same command puts the files there again.
    """
    came, run_dir = stage / arrival.run, folder / arrival.run
    if arrival.keeps:
        for path in arrival.files:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / path, target)
        FETCHED_JSON.write(Storage(str(run_dir)), fetched)
        return
    FETCHED_JSON.write(Storage(str(came)), fetched)
    old = stage / f"{TEMPORARY}{arrival.run}"
    shutil.rmtree(old, ignore_errors=True)  # empty folders: whatever was killed between the two renames
    if arrival.replaces:
        os.rename(run_dir, old)
    try:
        os.rename(came, run_dir)  # also over an empty folder
    except OSError:
        if arrival.replaces:
            os.rename(old, run_dir)
        raise

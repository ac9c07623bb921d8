"""List the runs in a storage, from the small files of their directories; it imports no torch.

A damaged run, or a folder that holds no run, is a row that says so.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from pyarrow import fs as pafs

from dp_ray.errors import JobError, StorageError
from dp_ray.plan.history import is_inner
from dp_ray.plan.split import split_of_run
from dp_ray.records import IGNORE, Record
from dp_ray.rundir.files import CHECKPOINTS, RESULT, RESULT_JSON, RUN, RUN_JSON, SWEEP, SWEEP_JSON, steps_of
from dp_ray.rundir.lease import LEASE, LEASE_JSON, is_alive
from dp_ray.storage import Storage, with_names
from dp_ray.text import did_you_mean

PROGRESS = "progress.json"  # where the driver notes a run's progress, for `dp-ray watch` and `dp-ray list`
PROGRESS_JSON = Record[dict[str, Any]](dict, PROGRESS, missing={}, damaged=IGNORE, unreachable=IGNORE)
THREADS = 32  # for object stores, where each file is a request
NO_RUN, DAMAGED, OF_RUNS = "no run", "damaged", "sweep"
WATCH_SECONDS = {False: 1.0, True: 5.0}  # between two looks at a watched run: on a disk, on an object store
SORTABLE = ("name", "task", "status", "age", "step", "steps", "seconds")


@dataclass(frozen=True)
class ListedRun:
    """A folder in a storage, as a row of the list.

    `status` is that of `result.json`, or running, unfinished (its driver was killed), damaged, sweep, or no run.
    `age` is the seconds since the run's end or last sign of life. `note` says what is damaged, or the error's first
    line.
    """

    name: str
    status: str
    task: str | None = None
    age: float | None = None
    step: int | None = None
    steps: int | None = None
    seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens: the run ended, its driver was killed, or its directory is damaged."""
        return self.status not in (NO_RUN, "running")

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": finite}

    def value(self, key: str) -> Any:
        """Return the value by which the list is sorted, a column's or a metric's; None if there is none, or NaN."""
        value = getattr(self, key) if key in SORTABLE else self.metrics.get(key)
        return None if value != value else value


def listed_runs(base: Storage, now: datetime | None = None) -> list[ListedRun]:
    """Return all folders of a storage as rows, the newest first; raises JobError if there is no such storage."""
    now = now or datetime.now(UTC)
    names = _folders(base)
    if base.is_local:
        rows = [listed_run(base.child(name), now) for name in names]
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            rows = list(pool.map(lambda name: listed_run(base.child(name), now), names))
    return sorted_by(rows, "age")


def sorted_by(rows: Sequence[ListedRun], key: str, is_reversed: bool = False) -> list[ListedRun]:
    """Sort rows by a column or a metric, those without a value last; raises JobError if no run has the key."""
    known = [*SORTABLE, *dict.fromkeys(name for row in rows for name in row.metrics)]
    if key not in known:
        raise JobError(f"--sort: no run has {key!r}; it may be {', '.join(known)}{did_you_mean(key, known)}")
    valued = [row for row in rows if row.value(key) is not None]
    others = [row for row in rows if row.value(key) is None]
    return [*sorted(valued, key=lambda row: row.value(key), reverse=is_reversed), *others]


def _folders(base: Storage) -> list[str]:
    if base.exists(RUN):
        raise JobError(f"{base} is a run, not a folder of runs; `dp-ray report` shows it")
    try:
        infos = base.fs.get_file_info(pafs.FileSelector(base.path))
    except FileNotFoundError:
        raise JobError(f"{base}: there is no such folder; `dp-ray list` takes one that holds runs") from None
    except NotADirectoryError:
        raise JobError(f"{base} is a file, not a folder of runs") from None
    except OSError as error:
        raise JobError(f"{base}: cannot be listed: {error}") from None
    return sorted(info.base_name for info in with_names(infos) if info.type == pafs.FileType.Directory)


def listed_run(run: Storage, now: datetime | None = None) -> ListedRun:
    """Return a folder as a row of the list."""
    name, now = run.name, now or datetime.now(UTC)
    try:
        infos = with_names(run.fs.get_file_info(pafs.FileSelector(run.path)))
        written = {info.base_name: info.mtime for info in infos if info.is_file}
        if RUN not in written and SWEEP in written:  # its trials are runs of their own, with rows of their own
            states = [trial.state for trial in SWEEP_JSON.read(run).trials]
            note = f"{states.count('done')} of {len(states)} trials are done"
            return ListedRun(name, OF_RUNS, age=_age(written[SWEEP], now), note=note)
        if RUN not in written:
            return ListedRun(name, NO_RUN, note=f"has no {RUN}")
        return _run(run, written, now)
    except (StorageError, OSError) as error:
        return ListedRun(name, DAMAGED, note=str(error).removeprefix(f"{run}/"))
    except Exception as error:  # files of any content
        return ListedRun(name, DAMAGED, note=f"{type(error).__name__}: {error}")


def watched(run: Storage) -> ListedRun:
    """Return a run as a row, also one that is yet to come, or whose storage does not answer for a moment."""
    with suppress(StorageError):
        if run.exists(RUN):
            return listed_run(run)
    return ListedRun(run.name, NO_RUN)


def _run(run: Storage, written: dict[str, datetime | None], now: datetime) -> ListedRun:
    """Return the row of a run directory; `written` tells when each of its files was written."""
    claimed = RUN_JSON.read(run)
    # The folder is listed already: on an object store, each read of what is not there would be a request.
    result = RESULT_JSON.read(run) if RESULT in written else {}
    lease = LEASE_JSON.read(run) if LEASE in written else None
    progress = PROGRESS_JSON.read(run) if PROGRESS in written else {}
    is_done = result.get("status") == "done"
    is_driven = not is_done and is_alive(lease, written.get(LEASE))
    early = result.get("stopped_early") or {}
    if is_done:
        steps: int | None = int(result["total_steps"])
        step = int(early.get("step", result["total_steps"]))
    else:
        rows = (claimed.get("rows") or {}).get("dataset")
        steps = None if rows is None else split_of_run(claimed["job"], rows).total_steps
        # The newest checkpoint of a training may be ahead of the step that a killed driver noted last.
        kept = steps_of(run.child(CHECKPOINTS)) if claimed["job"]["task"] == "train" else []
        step = max(lease.step if lease else 0, int(progress.get("step") or 0), *kept)
    times = [written.get(name) for name in ((RESULT,) if is_done else (LEASE, PROGRESS, RESULT, RUN))]
    metrics = {str(key): value for key, value in (result.get("metrics") or progress.get("metrics") or {}).items()}
    # JSON has no number that is not finite: there null stands for it.
    numbers = {key: _number(math.nan if value is None else value) for key, value in metrics.items()}
    note = "" if is_driven else str(result.get("error") or early.get("text") or "")
    return ListedRun(
        name=run.name,
        status="running" if is_driven else str(result.get("status") or "unfinished"),
        task=str(claimed["job"]["task"]),
        age=_age(max(filter(None, times), default=None), now),
        step=step,
        steps=steps,
        seconds=_number(result.get("seconds")),
        metrics={key: value for key, value in numbers.items() if value is not None and not is_inner(key)},
        note=next(iter(note.splitlines()), ""),
    )


def _age(heard: datetime | None, now: datetime) -> float | None:
    return None if heard is None else max(0.0, round((now - heard).total_seconds(), 1))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None

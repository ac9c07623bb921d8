"""A sweep's directory, STORAGE/NAME: `sweep.json` keeps the sweep's definition and the state of its trials.

`open_record` reads it, a `SweepRecord` writes it. Below them: the trials as a table and as JSON.
"""

import json
import math
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dp_ray.errors import JobError, StorageError
from dp_ray.job.files import differences
from dp_ray.job.job import Job
from dp_ray.records import damage_told
from dp_ray.results.text import in_columns, short
from dp_ray.rundir.files import RUN, SWEEP, SWEEP_JSON, State, Sweep, SweepTrial
from dp_ray.rundir.lease import LEASE, held, lost, wait_until_free
from dp_ray.rundir.replaced import check_reads_nothing_of
from dp_ray.rundir.settled import settled
from dp_ray.storage import Storage
from dp_ray.sweeps.define import Choices, Definition, Picked, run_name
from dp_ray.text import hide, hide_in, printable, relative


@dataclass(frozen=True)
class Trial:
    """A trial: its number from 1 up, what it picked of each axis, its state, and what its run measured."""

    number: int
    picked: Picked
    state: State = "waiting"
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    def to_json(self, metric: str | None) -> dict[str, Any]:
        """Return the metrics of its run for JSON, which has only finite numbers."""
        metrics = {name: number if math.isfinite(number) else None for name, number in self.metrics.items()}
        return {"metric": metrics.get(metric or "") if self.state == "done" else None, "metrics": metrics}

    def value(self, metric: str | None) -> float | None:
        """Return the metric of its run if it is a finite number: no file keeps another, so no search may count it."""
        value = self.metrics.get(metric) if metric and self.state == "done" else None
        return value if value is not None and math.isfinite(value) else None


class SweepRecord:
    """The content of `sweep.json`; within `held`, this driver is the one that may write it."""

    def __init__(self, folder: Storage, definition: Definition, trials: Sequence[Trial]) -> None:
        self.folder = folder
        self.definition = definition
        self._trials = {trial.number: trial for trial in trials}
        self._described = definition.describe()
        self._token = uuid.uuid4().hex
        self._writes = threading.Lock()

    @property
    def trials(self) -> list[Trial]:
        """All trials, by their numbers."""
        return sorted(self._trials.values(), key=lambda trial: trial.number)

    @property
    def is_over(self) -> bool:
        """Return whether all trials are done, so that there is nothing to run."""
        done = sum(trial.state == "done" for trial in self.trials)
        return done == len(self._trials) and done >= self.definition.count

    @property
    def best_first(self) -> list[Trial]:
        """The trials: the best value of the metric first, at the end those without a value, by their numbers."""
        metric, sign = self.definition.metric, 1 if self.definition.mode == "min" else -1
        values = [(value is None, sign * (value or 0.0)) for value in (trial.value(metric) for trial in self.trials)]
        return [trial for _, trial in sorted(zip(values, self.trials, strict=True), key=lambda pair: pair[0])]

    @property
    def has_best(self) -> bool:
        """Whether a trial has a value of the metric, so that the first of `best_first` is the best."""
        return any(trial.value(self.definition.metric) is not None for trial in self.trials)

    def rows(self, base: Storage) -> tuple[list[str], list[list[str]]]:
        """Return the head of the table and a row for each trial, best first."""
        definition, metric = self.definition, self.definition.metric
        measured = [] if metric is None else [metric]
        rows = []
        for trial in self.best_first:
            values = [hide(short(setting)) for setting in definition.values(trial.picked).values()]
            value = trial.value(metric)
            scores = ["-" if value is None else f"{value:.6g}" for _ in measured]
            place = relative(base.shown(definition.run_name(trial.number)))
            rows.append([str(trial.number), *values, *scores, trial.state, place])
        return ["trial", *(axis.key for axis in definition.axes), *measured, "state", "run"], rows

    def put(self, trial: Trial) -> None:
        """Replace the record's entry of a trial.

        Raises StorageError if another driver has taken the sweep over.
        """
        with self._writes:
            self._trials[trial.number] = trial
            if not self._is_ours():
                raise StorageError(lost(self.folder, SWEEP))
            self._write()

    @contextmanager
    def held(self, say: Callable[[str], None]) -> Iterator[None]:
        """Claim the sweep while the block runs; raises JobError if another driver is active in it."""
        wait_until_free(self.folder, say)
        self.folder.create()
        self.folder.remove_unfinished()
        self._write()
        with held(self.folder, self._token, self._is_ours):
            yield

    def _is_ours(self) -> bool:
        return self.folder.exists(SWEEP) and SWEEP_JSON.read(self.folder).token == self._token

    def _write(self) -> None:
        trials = [
            SweepTrial(
                trial.number,
                json.loads(json.dumps(self.definition.values(trial.picked), default=str)),
                self.definition.run_name(trial.number),
                trial.state,
                **trial.to_json(self.definition.metric),
                error=trial.error,
                picked=dict(trial.picked),
            )
            for trial in self.trials
        ]
        SWEEP_JSON.write(self.folder, Sweep(self._token, self._described, trials))


def open_record(definition: Definition, base: Storage, is_new: bool = False) -> SweepRecord:
    """Return the record of a sweep in STORAGE/NAME: as an earlier driver left it, or with the trials of a new sweep.

    `is_new` says that an earlier sweep will be removed. Nothing is written.
    Raises JobError if the directory holds another sweep, or something else.
    """
    folder = base.child(definition.name)
    has_sweep = folder.exists(SWEEP)
    if not has_sweep:
        if folder.exists(RUN):
            raise JobError(f"{folder} holds a run; give the sweep another name (--name)")
        if set(folder.names()) - {LEASE}:
            raise JobError(f"{folder} holds files that are no sweep; choose another --name or --storage")
    if is_new or not has_sweep:
        return SweepRecord(folder, definition, _new_trials(definition))
    with damage_told(f"{folder}/{SWEEP}"):
        kept_sweep = SWEEP_JSON.read(folder)
        if all(trial.state == "waiting" for trial in kept_sweep.trials):  # nothing has run that could be lost
            return SweepRecord(folder, definition, _new_trials(definition))
        first = kept_sweep.trials[0].run
        if first != definition.run_name(1):
            raise JobError(
                f"{folder} holds a sweep that was given another name: its first run is {first}; move it back there, "
                "or choose another --name"
            )
        keys = list(kept_sweep.definition["over"])
        axes = {axis.key: axis for axis in definition.axes}
        if axes.keys() == set(keys):  # the trials are numbered by the order of the keys that the sweep began with
            definition = replace(definition, axes=tuple(axes[key] for key in keys))
        changes = "; ".join(_changes(kept_sweep.definition, definition.describe()))
        trials = _trials(kept_sweep.trials, definition) if not changes else []
    if changes:
        raise JobError(
            f"{folder} holds a different sweep ({changes}); give this one another name (--name), or replace that "
            "one, with the runs of its trials (--overwrite)"
        )
    return SweepRecord(folder, definition, trials)


def _new_trials(definition: Definition) -> list[Trial]:
    """Return all trials of a grid; a search draws each when it begins."""
    picks = definition.grid() if definition.search is None else ()
    return [Trial(number, picked) for number, picked in enumerate(picks, start=1)]


def _trials(rows: Sequence[SweepTrial], definition: Definition) -> list[Trial]:
    """Return the trials that a file tells; raise an error of any kind if it is damaged."""
    trials = []
    for row in rows:
        definition.values(row.picked)  # raises if the file is damaged
        trials.append(Trial(row.number, row.picked, row.state, metrics_of_file(row.metrics), row.error))
    of_grid = definition.search is not None or [trial.picked for trial in trials] == list(definition.grid())
    if not of_grid or [trial.number for trial in trials] != list(range(1, len(trials) + 1)):
        raise ValueError("its trials are not those of this sweep")
    return trials


def metrics_of_file(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics of a file, in which a number that is not finite is null; raise if they are damaged."""
    return {name: math.nan if value is None else float(value) for name, value in metrics.items()}


def _changes(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return what differs between two sweeps; the metric only if it guided a search."""
    compared = ["over", "search"] if there["search"] is None else ["over", "search", "metric", "mode"]
    changes = list(differences({key: there[key] for key in compared}, {key: here[key] for key in compared}))
    if there["fingerprint"] != here["fingerprint"]:
        jobs = list(differences({key: there["job"].get(key) for key in here["job"]}, here["job"]))
        changes += jobs
        if not changes:
            changes.append("made by another version of dp_ray")
    return changes


def remove_sweep(folder: Storage, base: Storage, jobs: Sequence[Job], say: Callable[[str], None]) -> None:
    """Remove the sweep in a directory, whatever it is, with the runs of its trials; nothing if there is none.

    A run in the place of a trial that has not begun is not the sweep's, and stays; so does a run of another name.
    Raises JobError, and removes nothing, if the driver of the sweep, or of a run, is active, or if one of the new
    trials' `jobs` reads files of a run.
    """
    if not folder.exists(SWEEP):
        return
    wait_until_free(folder, say)
    name = folder.path.rpartition("/")[2]
    begun = [trial for trial in SWEEP_JSON.read(folder).trials if trial.state != "waiting"]
    names = [trial.run for trial in begun if trial.run == run_name(name, trial.number)]
    # Nothing is removed before all are checked.
    runs = [run for run in map(base.child, names) if run.exists(RUN)]
    for run in runs:
        wait_until_free(run, say)
        for job in jobs:
            check_reads_nothing_of(run, settled(job, is_new=True))
    for run in runs:
        run.remove()
    folder.remove()  # last: after a kill in between, the record still names the runs that are left


NAMED = 40  # characters of a value in a trial's name


def trials_table(record: SweepRecord, base: Storage) -> str:
    """Return the trials as a table, best first: number, values, metric, state, run."""
    head, rows = record.rows(base)
    return in_columns([[printable(cell) for cell in row] for row in [head, *rows]])


def value_name(trial: Trial, definition: Definition) -> str:
    """Return a short name of a trial by what it varies: `3: lr 0.003, batch_size 64`."""
    values = definition.values(trial.picked)
    last = [key.rpartition(".")[2] for key in values]
    keys = last if len(set(last)) == len(last) else list(values)
    texts = [hide(short(value)) for value in values.values()]
    settings = (f"{key} {text[:NAMED]}" for key, text in zip(keys, texts, strict=True))
    return f"{trial.number}: {', '.join(settings)}"


def space(definition: Definition) -> list[str]:
    """Return lines on the ranges of a search; none for a grid, whose trials show them."""
    if definition.search is None:
        return []
    lines = [f"{definition.count} trials, whose values {definition.search} draws from"]
    for axis in definition.axes:
        drawn = ", ".join(map(short, axis.values)) if isinstance(axis, Choices) else str(axis)
        lines.append(f"  {axis.key}: {hide(drawn)}")
    return lines


def to_json(record: SweepRecord, base: Storage) -> dict[str, Any]:
    """Return the sweep as JSON values: its trials, best first."""
    definition, ordered = record.definition, record.best_first
    return {
        "name": definition.name,
        "sweep_dir": str(record.folder),
        "metric": definition.metric,
        "mode": definition.mode if definition.metric else None,
        "over": {axis.key: axis.describe() for axis in definition.axes},
        "search": definition.search,
        "count": definition.count,
        "best": ordered[0].number if record.has_best else None,
        "trials": [
            {
                "number": trial.number,
                "values": hide_in(definition.values(trial.picked)),
                **trial.to_json(definition.metric),
                "state": trial.state,
                "run": base.shown(definition.run_name(trial.number)),
                "error": hide(trial.error) or None,
            }
            for trial in ordered
        ],
    }

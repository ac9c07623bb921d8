"""A sweep's directory, STORAGE/NAME: `sweep.json` keeps the sweep's definition and the state of its trials.

`open_record` reads it, a `SweepRecord` writes it. Below them: the trials as a table and as JSON.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dp_ray.errors import JobError, StorageError
from dp_ray.job.files import differences
from dp_ray.job.job import Job
from dp_ray.records import damage_told
from dp_ray.results.text import in_columns, short
from dp_ray.rundir.files import RUN, SWEEP, SWEEP_JSON, Sweep, SweepTrial
from dp_ray.rundir.lease import LEASE, held, lost, wait_until_free
from dp_ray.rundir.replaced import check_reads_nothing_of
from dp_ray.rundir.settled import settled
from dp_ray.storage import Storage
from dp_ray.sweeps.define import Choices, Definition
from dp_ray.text import hide, hide_in, printable, relative


class SweepRecord:
    """The content of `sweep.json`; within `held`, this driver is the one that may write it.

    The value of a trial is the metric of its run: a finite number, since no file keeps another.
    """

    def __init__(self, folder: Storage, definition: Definition, trials: Sequence[SweepTrial]) -> None:
        self.folder = folder
        self.definition = definition
        self._trials = {trial.number: self._measured(trial) for trial in trials}
        self._described = definition.describe()
        self._token = uuid.uuid4().hex
        self._writes = threading.Lock()

    @property
    def trials(self) -> list[SweepTrial]:
        """All trials, by their numbers."""
        return sorted(self._trials.values(), key=lambda trial: trial.number)

    @property
    def num_done(self) -> int:
        """How many trials are done."""
        return sum(trial.state == "done" for trial in self.trials)

    @property
    def is_over(self) -> bool:
        """Return whether all trials are done, so that there is nothing to run."""
        return self.num_done == len(self._trials) and self.num_done >= self.definition.count

    @property
    def best_first(self) -> list[SweepTrial]:
        """The trials: the best value of the metric first, at the end those without a value, by their numbers."""
        sign = 1 if self.definition.mode == "min" else -1
        return sorted(self.trials, key=lambda trial: (trial.metric is None, sign * (trial.metric or 0.0)))

    @property
    def has_best(self) -> bool:
        """Whether a trial has a value of the metric, so that the first of `best_first` is the best."""
        return any(trial.metric is not None for trial in self.trials)

    def rows(self, base: Storage) -> tuple[list[str], list[list[str]]]:
        """Return the head of the table and a row for each trial, best first."""
        measured = [] if self.definition.metric is None else [self.definition.metric]
        rows = []
        for trial in self.best_first:
            values = [hide(short(value)) for value in trial.values.values()]
            scores = ["-" if trial.metric is None else f"{trial.metric:.6g}" for _ in measured]
            rows.append([str(trial.number), *values, *scores, trial.state, relative(base.shown(trial.run))])
        return ["trial", *(axis.key for axis in self.definition.axes), *measured, "state", "run"], rows

    def put(self, trial: SweepTrial) -> None:
        """Replace the record's entry of a trial.

        Raises StorageError if another driver has taken the sweep over.
        """
        with self._writes:
            self._trials[trial.number] = self._measured(trial)
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

    def _measured(self, trial: SweepTrial) -> SweepTrial:
        """Return a trial with its value: what counts may be another metric than when it ran."""
        value = trial.metrics.get(self.definition.metric or "") if trial.state == "done" else None
        return replace(trial, metric=value)

    def _is_ours(self) -> bool:
        return self.folder.exists(SWEEP) and SWEEP_JSON.read(self.folder).token == self._token

    def _write(self) -> None:
        SWEEP_JSON.write(self.folder, Sweep(self._token, self._described, self.trials))


def open_record(definition: Definition, base: Storage, is_new: bool = False) -> SweepRecord:
    """Return the record of a sweep in STORAGE/NAME: as an earlier driver left it, or with the trials of a new sweep.

    `is_new` says that an earlier sweep will be removed. Nothing is written.
    Raises JobError if the directory holds another sweep, or something else.
    """
    folder = base.child(definition.name)
    # A search draws each trial when it begins.
    new = [] if definition.search else [definition.trial(*each) for each in enumerate(definition.probes(), start=1)]
    if not folder.exists(SWEEP):
        if set(folder.names()) - {LEASE}:
            what = "a run" if folder.exists(RUN) else "files that are no sweep"
            raise JobError(f"{folder} holds {what}; give the sweep another name (--name)")
        return SweepRecord(folder, definition, new)
    if is_new:
        return SweepRecord(folder, definition, new)
    with damage_told(f"{folder}/{SWEEP}"):
        there = SWEEP_JSON.read(folder)
        if all(trial.state == "waiting" for trial in there.trials):  # nothing has run that could be lost
            return SweepRecord(folder, definition, new)
        keys = list(there.definition["over"])
        axes = {axis.key: axis for axis in definition.axes}
        if axes.keys() == set(keys):  # the trials are numbered by the order of the keys that the sweep began with
            definition = replace(definition, axes=tuple(axes[key] for key in keys))
        changes = "; ".join(_changes(there, definition))
        if not changes:
            _check_trials(there.trials, definition)
    if changes:
        raise JobError(
            f"{folder} holds a different sweep ({changes}); give this one another name (--name), or replace that "
            "one, with the runs of its trials (--overwrite)"
        )
    return SweepRecord(folder, definition, there.trials)


def _check_trials(trials: Sequence[SweepTrial], definition: Definition) -> None:
    """Raise an error of any kind if the trials of a file are not those of its sweep."""
    for trial in trials:
        definition.values(trial.picked)  # raises if the file is damaged
    of_grid = definition.search is not None or [trial.picked for trial in trials] == list(definition.probes())
    if not of_grid or [trial.number for trial in trials] != list(range(1, len(trials) + 1)):
        raise ValueError("its trials are not those of this sweep")


def _changes(kept: Sweep, definition: Definition) -> list[str]:
    """Return what differs from a kept sweep; the metric only if it guided a search."""
    there, here = kept.definition, definition.describe()
    compared = ["over", "search"] if there["search"] is None else ["over", "search", "metric", "mode"]
    changes = list(differences({key: there[key] for key in compared}, {key: here[key] for key in compared}))
    if not definition.first.has_fingerprint(there["fingerprint"], with_lengths=True):
        of_job = differences({key: there["job"].get(key) for key in here["job"]}, here["job"])
        changes += [each for each in of_job if each.partition(":")[0] not in here["over"]]
        changes = changes or ["made by another version of dp_ray"]
    if (first := kept.trials[0].run) != definition.run_name(1):
        changes.append(f"given another name: its first run is {first}")
    return changes


def remove_sweep(record: SweepRecord, base: Storage, jobs: Sequence[Job], say: Callable[[str], None]) -> None:
    """Remove the sweep in a record's directory, whatever it is, with its trials' runs; nothing if there is none.

    A run in the place of a trial that has not begun is not the sweep's, and stays; so does a run of another name.
    Raises JobError, and removes nothing, if the driver of the sweep, or of a run, is active, or if one of the new
    trials' `jobs` reads files of a run.
    """
    if not record.folder.exists(SWEEP):
        return
    wait_until_free(record.folder, say)
    begun = [trial for trial in SWEEP_JSON.read(record.folder).trials if trial.state != "waiting"]
    own = [trial.run for trial in begun if trial.run == record.definition.run_name(trial.number)]
    # Nothing is removed before all are checked.
    runs = [run for run in map(base.child, own) if run.exists(RUN)]
    for run in runs:
        wait_until_free(run, say)
        for job in jobs:
            check_reads_nothing_of(run, settled(job, is_new=True))
    for run in runs:
        run.remove()
    record.folder.remove()  # last: after a kill in between, the record still names the runs that are left


NAMED = 40  # characters of a value in a trial's name


def trials_table(record: SweepRecord, base: Storage) -> str:
    """Return the trials as a table, best first: number, values, metric, state, run."""
    head, rows = record.rows(base)
    return in_columns([[printable(cell) for cell in row] for row in [head, *rows]])


def value_name(trial: SweepTrial) -> str:
    """Return a short name of a trial by what it varies: `3: lr 0.003, batch_size 64`."""
    last = [key.rpartition(".")[2] for key in trial.values]
    keys = last if len(set(last)) == len(last) else list(trial.values)
    texts = [hide(short(value))[:NAMED] for value in trial.values.values()]
    return f"{trial.number}: {', '.join(map(' '.join, zip(keys, texts, strict=True)))}"


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
                "values": hide_in(trial.values),
                "metric": trial.metric,
                "metrics": trial.metrics,
                "state": trial.state,
                "run": base.shown(trial.run),
                "error": hide(trial.error) or None,
            }
            for trial in ordered
        ],
    }

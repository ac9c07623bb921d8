"""Runs a sweep: its trials, each an ordinary run that is resumed where it stands, and what becomes of each."""

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dp_ray.checks import check_targets
from dp_ray.cli_errors import show_error
from dp_ray.driver import Options
from dp_ray.errors import ClusterError, Error, JobError, RunInterrupted
from dp_ray.job import Job
from dp_ray.monitor.console import Console
from dp_ray.results.short import relative
from dp_ray.rundir.claim import read_claim, with_full_init_from, with_shards_of_run
from dp_ray.rundir.files import RESULT, damage_told, is_finished, read_json
from dp_ray.storage import Storage
from dp_ray.sweeps.definition import Definition, Picked
from dp_ray.sweeps.lanes import Lane, Say, Stop, opened, run_side_by_side
from dp_ray.sweeps.record import Record, Trial, numbers, remove_sweep
from dp_ray.sweeps.shown import runs_to_compare
from dp_ray.system.environment import environment

Suggest = Callable[[Definition, int, int, Sequence[Trial]], Picked]


@dataclass(frozen=True)
class How:
    """How to run a sweep, as opposed to what it is: flags of the command line."""

    flags: Mapping[str, Any]  # those of a run: address, quiet, verbose
    parallel: int | None = None
    fail_fast: bool = False
    overwrite: bool = False
    suggest: Suggest | None = None


def check_jobs(jobs: Sequence[Job]) -> None:
    """Check the targets and devices of trials before anything runs; raises JobError that names the key at fault."""
    for job in jobs:
        with contextlib.redirect_stdout(sys.stderr), environment(job.env):
            check_targets(job.for_task())


def check_places(record: Record, base: Storage) -> None:
    """Raise JobError if the place of a trial that has not begun holds something that is not this sweep's."""
    known = {trial.number for trial in record.trials if trial.state != "waiting"}
    for number in range(1, record.definition.count + 1):
        run = base.child(record.definition.run_name(number))
        if number not in known and not run.is_empty():
            raise JobError(
                f"{run}: trial {number} would run there, and it is not empty; give the sweep another --name"
            )


class Sweep:
    """A sweep that runs: which trial is next, and what becomes of each; several threads may run trials."""

    def __init__(self, record: Record, base: Storage, how: How, say: Say) -> None:
        self.stop = Stop()
        self._record = record
        self._base = base
        self._definition = record.definition
        self._how = how
        self._say = say
        self._left = [trial for trial in record.trials if trial.state != "done"]
        self._draws = threading.Lock()

    @property
    def num_left(self) -> int:
        """How many trials are still to run."""
        return len(self._left) + max(0, self._definition.count - len(self._record.trials))

    def work(self, lane: Lane) -> None:
        """Run trials in a lane until none is left, or until the sweep shall stop."""
        while (trial := self._next()) is not None:
            self._run(trial, lane)

    def _next(self) -> Trial | None:
        """The next trial, which the record says is running; None if there is none."""
        with self._draws:
            if self.stop.is_asked:
                return None
            trial = self._left.pop(0) if self._left else self._drawn()
            if trial is not None:
                self._record.put(replace(trial, state="running", error=""))
            return trial

    def _drawn(self) -> Trial | None:
        """A new trial of a search; None if there are enough."""
        before = self._record.trials
        if self._how.suggest is None or len(before) >= self._definition.count:
            return None
        number = len(before) + 1
        return Trial(number, self._how.suggest(self._definition, self._seed, number, before))

    @property
    def _seed(self) -> int:
        return self._definition.job(1, next(iter(self._definition.probes()))).seed

    def _run(self, trial: Trial, lane: Lane) -> None:
        """Run a trial to its end, or take over what its finished run has measured."""
        told = ", ".join(f"{key}={value}" for key, value in self._definition.values(trial.picked).items())
        try:
            job = self._definition.job(trial.number, trial.picked)
            metrics = self._measured(job)
            if metrics is None:
                self._say(f"trial {trial.number} of {self._definition.count}: {told}")
                metrics = lane.execute(job).metrics
            self._ended(trial, metrics)
        except KeyboardInterrupt:
            self._record.put(replace(trial, state="interrupted"))
            raise
        except ClusterError:
            self._record.put(replace(trial, state="interrupted"))
            raise
        except Error as error:
            self._failed(trial, error)

    def _measured(self, job: Job) -> dict[str, float] | None:
        """The metrics of a trial whose run has finished although the record does not say so; else None."""
        run = self._base.child(job.run_name)
        asked = with_shards_of_run(with_full_init_from(job.for_task()), self._base)
        if not is_finished(run) or not asked.has_fingerprint(read_claim(run).get("fingerprint")):
            return None
        with damage_told(f"{run}/{RESULT}"):
            return numbers(read_json(run, RESULT)["metrics"])

    def _ended(self, trial: Trial, metrics: dict[str, float]) -> None:
        done = replace(trial, state="done", metrics=metrics, error="")
        self._record.put(done)
        metric = self._definition.metric
        if metric is not None and metric not in metrics:
            self._say(
                f"trial {trial.number}: its run has not measured {metric}, but {', '.join(metrics) or 'nothing'}"
            )

    def _failed(self, trial: Trial, error: Error) -> None:
        if self.stop.is_at_once:
            self._record.put(replace(trial, state="interrupted"))
            return
        self._record.put(replace(trial, state="failed", error=f"{type(error).__name__}: {error}"))
        Console(self._definition.name).say(f"trial {trial.number} failed:")
        show_error(error, bool(self._how.flags.get("verbose")))
        if self._how.fail_fast:
            self.stop.is_asked = True


def run_sweep(record: Record, base: Storage, how: How) -> None:
    """Run the trials of a sweep that are not done; those that fail are told, and the others go on.

    At the end, write the page that compares their runs. Raises RunInterrupted if Ctrl-C or SIGTERM stopped the sweep,
    and ClusterError if no Ray answers or a session has ended.
    """
    definition, say = record.definition, Console(record.definition.name, how.flags["quiet"]).say
    jobs = [definition.job(1, picked) for picked in definition.probes()]
    sweep = Sweep(record, base, how, say)
    with contextlib.ExitStack() as until_end:
        if not how.overwrite:
            until_end.enter_context(record.held(say))
        try:
            with opened(jobs, sweep.num_left, Options(**how.flags), how.parallel, say) as lanes:
                if how.overwrite:  # not before there are workers for what takes its place
                    remove_sweep(record.folder, base, jobs, say)
                    check_places(record, base)  # else it is done before the workers start
                    until_end.enter_context(record.held(say))
                run_side_by_side(lanes, sweep.work, sweep.stop)
        except KeyboardInterrupt as stopped:
            if not record.is_over:
                raise RunInterrupted(_stop_message(record, how.overwrite)) from stopped
        _write_page(record, base, say)


def _stop_message(record: Record, is_overwriting: bool) -> str:
    done = sum(trial.state == "done" for trial in record.trials)
    again = "run it again without --overwrite to go on" if is_overwriting else "run the same command to go on"
    return f"interrupted: {done} of {record.definition.count} trials are done; {again}"


def _write_page(record: Record, base: Storage, say: Say) -> None:
    """Write the page of the sweep; a page that cannot be made is told of, and fails no sweep."""
    try:
        from dp_ray.report.save import save_comparison  # not before: a sweep does not wait for it at its start

        if runs := runs_to_compare(record, base):
            say(f"page: {relative(save_comparison(runs, record.folder))}")
    except Exception as error:  # whatever it is, the runs stand
        say(f"no page of the sweep: {type(error).__name__}: {error}")

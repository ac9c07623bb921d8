"""Run a sweep: its trials, each an ordinary run that is resumed where it stands. Begin at `run_sweep`.

The trials run on the workers of sessions, as many side by side as there is room for, or in this process.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial

from dp_ray import Result
from dp_ray.driver.checks import check_targets
from dp_ray.driver.run import Options, execute, name_submitted_job
from dp_ray.errors import STOP_COMMAND, ClusterError, Error, JobError, RunInterrupted, error_report
from dp_ray.job.job import Job
from dp_ray.monitor.console import Console
from dp_ray.records import damage_told
from dp_ray.rundir.files import RESULT, RESULT_JSON, RUN, SweepTrial
from dp_ray.rundir.settled import finished_run
from dp_ray.storage import Storage
from dp_ray.sweeps.record import SweepRecord, remove_sweep, value_name
from dp_ray.system.process import environment
from dp_ray.system.threads import ask_others, planned_stops
from dp_ray.text import harmless, relative

Say = Callable[[str], None]
LOOK_SECONDS = 0.3
COMPARED = 50  # runs on the page, the best ones: each is a curve in each chart


@dataclass(frozen=True)
class Lane:
    """A place for one job at a time: `execute` runs it to its end, `abort` ends the workers on which it runs."""

    execute: Callable[[Job], Result]
    abort: Callable[[], None]


@contextmanager
def opened(jobs: Sequence[Job], count: int, options: Options, parallel: int | None, say: Say) -> Iterator[list[Lane]]:
    """Open lanes for `count` jobs such as these: `parallel` of them, or as many as there are free resources for.

    Raises JobError if the jobs cannot share workers, or run in this process and shall run side by side.
    """
    on_ray = [job for job in jobs if job.max_workers > 0]
    is_here = len(on_ray) < len(jobs)
    if is_here and parallel not in (None, 1):
        raise JobError(f"--parallel {parallel}: with workers: 0 the trials run in this process, one after another")
    if not on_ray:
        yield [Lane(lambda job: execute(job, options), lambda: None)]
        return
    from dp_ray.driver.sessions import Session, keys_for  # imports Ray, which `workers: 0` does not need

    keys, wanted = keys_for(on_ray), 1 if is_here or count == 1 else parallel and min(parallel, count)
    with ExitStack() as closing:
        sessions = [closing.enter_context(Session(keys, options, at_a_time=wanted))]
        fits = sessions[0].at_a_time or 1
        if wanted is not None and fits < wanted:
            say(f"there is room for {fits} of {wanted} trials at a time")
        sessions += [closing.enter_context(Session(keys, options)) for _ in range(min(fits, count) - 1)]
        try:
            yield [Lane(partial(session.execute, options=options), session.abort) for session in sessions]
        finally:
            for session in sessions:
                session.abort()  # no job runs now, and the end of the connection frees their resources


@dataclass
class Stop:
    """A request to stop: running trials stop after their step, or at once, and no other one begins."""

    is_asked: bool = False
    is_at_once: bool = False
    by: list[str] = field(default_factory=list)  # who has asked, in their order; none has where a trial failed

    def ask(self, by: str) -> bool:
        """Ask for it, as a signal does; return False if it was asked for before."""
        self.by.append(by)
        is_first, self.is_asked = not self.is_asked, True
        return is_first

    def join(self, stopped: KeyboardInterrupt) -> None:
        """Ask for it if nobody has: `dp-ray stop` has stopped the run of one trial."""
        if not self.is_asked:
            self.is_asked = True
            self.by += getattr(stopped, "by", ()) or [STOP_COMMAND]

    def pass_on(self) -> None:
        """Ask the jobs of other threads, if it is asked for; to be called again, until each runs a step."""
        if self.is_asked:
            ask_others(self.by[0] if self.by else "SIGTERM")


def run_side_by_side(lanes: Sequence[Lane], work: Callable[[Lane], None], stop: Stop) -> None:
    """Call `work` for each lane: for one in this thread, for several in threads of their own.

    A signal asks the trials to stop after their step; a second one ends their workers at once.
    Raises KeyboardInterrupt if one came, and the first error of the threads, both after all have ended.
    """
    if len(lanes) == 1:
        with planned_stops(stop.ask):  # between two trials: each has handlers of its own
            work(lanes[0])
        if stop.by:
            raise KeyboardInterrupt
        return
    errors: list[BaseException] = []
    # The threads are not joined: Python 3.11 takes a thread for ended whose join is interrupted.
    ends = [Future[None]() for _ in lanes]

    def work_in(lane: Lane, end: Future[None]) -> None:
        try:
            work(lane)
        except KeyboardInterrupt as stopped:
            stop.join(stopped)
        except BaseException as error:  # raised when all have ended
            errors.append(error)
            stop.is_asked = True
        finally:
            end.set_result(None)

    try:
        with planned_stops(stop.ask):
            for place in zip(lanes, ends, strict=True):
                threading.Thread(target=work_in, args=place, name="trials", daemon=True).start()
            while wait(ends, LOOK_SECONDS).not_done:
                stop.pass_on()
    except KeyboardInterrupt:
        stop.is_asked = stop.is_at_once = True
        stop.pass_on()
        for lane in lanes:
            lane.abort()
        wait(ends)
        raise
    if errors:
        raise errors[0]
    if stop.by:
        raise KeyboardInterrupt


def check_jobs(jobs: Sequence[Job]) -> None:
    """Check the targets and devices of trials before anything runs; raise JobError that names the key at fault."""
    for job in jobs:
        with redirect_stdout(sys.stderr), environment(job.env):
            check_targets(job.for_task())


def check_places(record: SweepRecord, base: Storage) -> None:
    """Raise JobError if the place of a trial that has not begun holds something that is not this sweep's."""
    known = {trial.number for trial in record.trials if trial.state != "waiting"}
    for number in range(1, record.definition.count + 1):
        run = base.child(record.definition.run_name(number))
        if number not in known and not run.is_empty():
            raise JobError(
                f"{run}: trial {number} would run there, and it is not empty; give the sweep another --name"
            )


@dataclass
class RunningSweep:
    """A sweep that runs: which trial is next, and what becomes of each; several threads may run trials."""

    record: SweepRecord
    options: Options
    say: Say
    fail_fast: bool = False  # stop after the first trial that fails
    stop: Stop = field(default_factory=Stop)
    draws: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.left = [trial for trial in self.record.trials if trial.state != "done"]

    def work(self, lane: Lane) -> None:
        """Run trials in a lane until none is left, or until the sweep shall stop."""
        while (trial := self._next()) is not None:
            try:
                self._run(trial, lane)
            except (KeyboardInterrupt, ClusterError):  # the same command goes on with it
                self.record.put(replace(trial, state="interrupted"))
                raise
            except Error as error:
                self._failed(trial, error)

    def _next(self) -> SweepTrial | None:
        """Return the next trial, which the record says is running; None if there is none."""
        definition = self.record.definition
        with self.draws:
            if self.stop.is_asked:
                return None
            before = self.record.trials
            if self.left:
                trial = self.left.pop(0)
            elif definition.search is not None and len(before) < definition.count:
                from dp_ray.sweeps.search import suggested  # imports optuna, an extra

                number = len(before) + 1
                trial = definition.trial(number, suggested(definition, definition.first.seed, number, before))
            else:
                return None
            # Within the lock: the next draw of another thread counts this trial.
            trial = replace(trial, state="running", error="")
            self.record.put(trial)
            return trial

    def _run(self, trial: SweepTrial, lane: Lane) -> None:
        """Run a trial to its end, if the run has not finished before the record could say so; keep its metrics."""
        definition, metric = self.record.definition, self.record.definition.metric
        job = definition.job(trial.number, trial.picked)
        if (run := finished_run(job)) is None:
            values = ", ".join(f"{key}={value}" for key, value in trial.values.items())
            self.say(f"trial {trial.number} of {definition.count}: {values}")
            run = lane.execute(job).storage()
        with damage_told(f"{run}/{RESULT}"):
            measured = RESULT_JSON.read(run)["metrics"]
            metrics = {name: None if value is None else float(value) for name, value in measured.items()}
        self.record.put(replace(trial, state="done", metrics=metrics))
        if metric is not None and metric not in metrics:
            self.say(
                f"trial {trial.number}: its run has not measured {metric}, but {', '.join(metrics) or 'nothing'}"
            )

    def _failed(self, trial: SweepTrial, error: Error) -> None:
        if self.stop.is_at_once:
            self.record.put(replace(trial, state="interrupted"))
            return
        self.record.put(replace(trial, state="failed", error=f"{type(error).__name__}: {error}"))
        Console(self.record.definition.name).say(f"trial {trial.number} failed:")
        print(harmless(error_report(error, self.options.verbose)), file=sys.stderr)
        if self.fail_fast:
            self.stop.is_asked = True


def run_sweep(
    record: SweepRecord, base: Storage, options: Options, parallel: int | None, fail_fast: bool, overwrite: bool
) -> None:
    """Run the trials of a sweep that are not done; a failed trial gets a line, and the others go on.

    The options are those of each run: address, quiet, verbose; `parallel` trials run at a time, None: as many as fit.
    At the end, write the page that compares their runs. Raises RunInterrupted if a signal or a request stopped it,
    and ClusterError if no Ray answers or a session has ended.
    """
    definition, say = record.definition, Console(record.definition.name, options.quiet).say
    name_submitted_job(definition.name, str(base))  # before its first trial gives its own
    jobs = [definition.job(1, picked) for picked in definition.probes()]
    sweep = RunningSweep(record, options, say, fail_fast)
    num_left = max(definition.count, len(record.trials)) - record.num_done
    with ExitStack() as until_end:
        if not overwrite:
            until_end.enter_context(record.held(say))
        try:
            with opened(jobs, num_left, options, parallel, say) as lanes:
                if overwrite:  # not before there are workers for what takes its place
                    remove_sweep(record, base, jobs, say)
                    check_places(record, base)  # else it is done before the workers start
                    until_end.enter_context(record.held(say))
                run_side_by_side(lanes, sweep.work, sweep.stop)
        except KeyboardInterrupt as stopped:
            if not record.is_over:
                again = "run it again without --overwrite" if overwrite else "run the same command"
                raise RunInterrupted(
                    f"interrupted: {record.num_done} of {definition.count} trials are done; {again} to go on",
                    sweep.stop.by or getattr(stopped, "by", ()),
                ) from stopped
        _write_page(record, base, say)


def _write_page(record: SweepRecord, base: Storage, say: Say) -> None:
    """Write the page of the sweep; a page that cannot be made gets a line, and fails no sweep."""
    try:
        # Not before: a sweep does not wait for them at its start.
        from dp_ray.report.comparison import Trials, save_comparison

        compared = [trial for trial in record.best_first if base.child(trial.run).exists(RUN)][:COMPARED]
        if compared:
            trials = Trials(
                record.definition.name, list(map(value_name, compared)), *record.rows(base), record.has_best
            )
            place = save_comparison([base.child(trial.run) for trial in compared], record.folder, trials)
            say(f"page: {relative(place)}")
    except Exception as error:  # whatever it is, the runs stand
        say(f"no page of the sweep: {type(error).__name__}: {error}")

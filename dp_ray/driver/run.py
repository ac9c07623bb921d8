"""Runs a job: claims its run directory, starts its workers, follows them, and proves that their files are whole.

What will run, worked out before anything is started or written.

Has the workers of a run with `shards: auto` find its number of shards, before the run itself.

Sets up the monitor of a run directory; it continues the reports and incidents of the run's earlier drivers.
"""

import contextlib
import dataclasses
import functools
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dp_ray.cluster.ray_version import check_ray
from dp_ray.driver.checks import check_targets
from dp_ray.driver.finish import result_of, save_unfinished, summary_of, time_lines
from dp_ray.driver.in_process import ONE_AT_A_TIME, run_in_process, with_own_model, with_own_objects
from dp_ray.driver.planning import dataset_rows, make_plan, taken_over
from dp_ray.engine.votes import StopRequested
from dp_ray.engine.world import World
from dp_ray.errors import Error, JobError, RunInterrupted, WorkerError, shorten
from dp_ray.job.files import job_from
from dp_ray.job.job import Job
from dp_ray.monitor.console import Console
from dp_ray.monitor.faults import Fault, parse_faults
from dp_ray.monitor.monitor import Monitor, Writer, progress_noted
from dp_ray.outputs.files import prove_outputs
from dp_ray.outputs.parts import reading
from dp_ray.plan.costs import Plan, table
from dp_ray.plan.split import Done, Range, Split
from dp_ray.results.result import Result
from dp_ray.results.text import relative
from dp_ray.rundir import ledger
from dp_ray.rundir.checkpoint import CHECKPOINTS, steps_of
from dp_ray.rundir.claim import (
    RENEW_SECONDS,
    TELL_SECONDS,
    RunDir,
    base_storage,
    check_ours,
    claim,
    held,
    keep_shards,
    last_end,
    stop_message,
    wait_until_free,
    with_full_init_from,
    with_shards_of_run,
)
from dp_ray.rundir.files import BEFORE_RETRY, SHAPES, recorded_about
from dp_ray.rundir.history import HISTORY, RECENT, RecentHistory, merge_history
from dp_ray.rundir.incidents import INCIDENTS
from dp_ray.rundir.lease import Lease, take_request
from dp_ray.rundir.ledger import FILES, PARTS
from dp_ray.rundir.listing import PROGRESS
from dp_ray.rundir.quarantine import QUARANTINE, has_set_aside, merge_quarantine, positions_set_aside
from dp_ray.rundir.start import LINKS, first_step
from dp_ray.steps.reports import REPORTS, ReportFile, read_journal, read_spans
from dp_ray.steps.shapes import Seen, ShardSpan
from dp_ray.storage import Storage
from dp_ray.system.process import environment
from dp_ray.system.threads import planned_stops, repeated
from dp_ray.trackers.feed import RunTrackers
from dp_ray.trackers.process import check_installed
from dp_ray.trackers.tensorboard import TensorBoardWriter


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A job as it will run, with the shards of the run that it resumes; its plan, and the faults to inject."""

    job: Job
    plan: Plan
    faults: tuple[Fault, ...]

    def cut_as(self, job: Job) -> "Prepared":
        """The same, with this job's number of shards."""
        return Prepared(job, make_plan(job, self.plan.rows), self.faults)


def prepare(job: Job, console: Console, overwrite: bool = False, inject: str = "") -> Prepared:
    """Work out what will run, before anything is started or written; raises an Error if the job cannot run."""
    job = job.for_task()
    check_installed(job.trackers or ())
    faults = parse_faults(inject)
    if faults and job.max_workers == 0:
        raise JobError("--inject: workers is 0, so the job runs in the driver's process; set workers to at least 1")
    if job.max_workers > 0:
        check_ray()
    asked = with_full_init_from(job)
    job = asked if overwrite else with_shards_of_run(asked, base_storage(asked))
    building = console.if_slow("building the dataset")
    with ONE_AT_A_TIME, contextlib.redirect_stdout(sys.stderr), environment(job.env), building:
        check_targets(job)  # stdout is kept free of what user code prints
        plan = make_plan(job, dataset_rows(job), taken_over(asked, job))
    if job.max_workers == 0:
        job = with_own_model(job)
    return Prepared(job, plan, faults)


def resumption_lines(prepared: Prepared, claimed: RunDir, killed: Lease | None) -> Iterator[str]:
    """Lines for the user of a resumed run; `killed` is the lease of its last driver, if that was killed."""
    if not claimed.is_resumed:
        return
    split = prepared.plan.split
    if claimed.lengths:
        yield f"continues to step {split.total_steps} ({claimed.lengths})"
    if end := last_end(prepared.job, split, claimed.storage, killed):
        yield f"the last driver was {end.what}"


def with_found_shards(
    job: Job, plan: Plan, claimed: RunDir, console: Console, on_ray: Callable[[Monitor], None]
) -> Job:
    """The job with the number of shards that its workers find; `on_ray` runs it on them, followed by the monitor.

    What happens to them meanwhile is told, and not kept in the run's directory.
    """
    monitor = Monitor(job, plan.split, ReportFile(io.BytesIO()), (), console, shapes=False)
    try:
        with console.live(monitor.progress):
            if job.max_workers == 0:
                run_in_process(with_own_objects(job), claimed, monitor, plan.rows)
            else:
                on_ray(monitor)
    finally:
        monitor.close()
    found = monitor.task_messages.shards_found
    if found is None:
        raise WorkerError("shards: auto: the workers ended without a number of shards; run the job again")
    return job.model_copy(update={"shards": found})


@contextmanager
def monitoring(
    job: Job, split: Split, claimed: RunDir, console: Console, shapes: bool, trackers: RunTrackers
) -> Iterator[Monitor]:
    """A monitor for the block; when the block ends, also by an error, the file of shape reports is complete."""
    error: BaseException | None = None
    reported = _reported(job, claimed.storage)
    with claimed.storage.writing(SHAPES) as stream:
        writers = _writers(job, claimed.storage, trackers)
        monitor = Monitor(job, split, ReportFile(stream), writers, console, shapes, claimed)
        monitor.shape_reports.restore(reported)
        try:
            with console.live(monitor.progress), progress_noted(claimed.storage, monitor.progress):
                yield monitor
        except BaseException as raised:
            error = raised
        monitor.close()
    claimed.storage.child(REPORTS).remove()
    if error is not None:
        raise error


def _writers(job: Job, run: Storage, trackers: RunTrackers) -> Iterator[Writer]:
    """What writes the rows of the history, besides the workers."""
    if job.trackers is None or "tensorboard" in job.trackers:
        yield TensorBoardWriter(run)
    yield RecentHistory(run)
    yield trackers


def _reported(job: Job, run: Storage) -> list[tuple[World, Seen, ShardSpan]]:
    """The shape reports of earlier attempts, only of steps and shards whose work is kept."""
    done = Done([*ledger.done_ranges(ledger.committed(run)), *_trained(job, run)])
    spans = read_journal(run.child(REPORTS), done)
    if run.exists(SHAPES):
        with reading(run, SHAPES) as file:
            spans += read_spans(file, done)
    return sorted(spans, key=lambda one: one[2].first_step)


def _trained(job: Job, run: Storage) -> list[Range]:
    """The steps before the newest checkpoint, from which a training resumes."""
    steps = steps_of(run.child(CHECKPOINTS)) if job.task == "train" else []
    return [Range(0, steps[-1], 0, job.num_shards)] if steps else []


PAGE_SECONDS = 1.0  # how often it is asked whether to import what the page needs


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run a job, as opposed to what the job is: the flags of the command line."""

    address: str | None = None
    overwrite: bool = False
    shapes: bool = False
    inject: str = ""
    quiet: bool = False
    verbose: bool = False
    resume: bool = False  # the caller says that the Python objects are those of the run


def run(job: Job | str | os.PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Run a job to its end and return its result.

    `job` is a Job, the path of a job file, or None. Keywords set or override the job's keys, with Python objects in
    place of targets. `address`, `overwrite`, `shapes`, `inject`, `quiet` and `verbose` are the command line's flags
    of the same name. A run of Python objects needs `resume=True` to be resumed: objects cannot be compared, so the
    caller says that they are the same. Without a `name`, a run from Python is named by its time.
    Raises an Error of dp_ray.errors, and RunInterrupted if SIGINT or SIGTERM stopped the run.
    """
    options = options_of(keys)
    with ShortErrors(options.verbose):
        return execute(job_from(job, keys), options)


def options_of(keys: dict[str, Any]) -> Options:
    """Take the options out of the keywords of `run`, and leave the job's keys."""
    names = {field.name for field in dataclasses.fields(Options)}
    if not isinstance(keys.get("resume", False), bool):
        names.remove("resume")  # a path, as in other libraries: the job rejects that key with a hint
    return Options(**{name: keys.pop(name) for name in names & keys.keys()})


class ShortErrors:
    """Within the block, errors of dp_ray show no inner frames of dp_ray, unless `verbose`."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._verbose or error is None:
            return
        if isinstance(error, Error):
            shorten(error)
        elif isinstance(error, RunInterrupted):
            error.__cause__, error.__suppress_context__, error.__traceback__ = None, True, None


OnRay = Callable[[Prepared, RunDir, Monitor, Console], None]


def execute(
    job: Job, options: Options, on_ray: OnRay | None = None, again: Callable[[Split, Storage], None] | None = None
) -> Result:
    """Run a job to its end and return its result; the run directory keeps the result, also after a failure.

    `on_ray` runs the workers, by default new ones. `again` makes a finished prediction one that is to be resumed.
    """
    started = time.monotonic()
    console = Console(job.run_name, options.quiet)
    prepared = prepare(job, console, options.overwrite, options.inject)
    base = base_storage(prepared.job)
    killed = wait_until_free(base.child(job.run_name), console.say)
    if prepared.job.finds_shards and not options.overwrite:  # whoever was waited for may have found the number
        prepared = prepared.cut_as(with_shards_of_run(prepared.job, base))
    job, plan = prepared.job, prepared.plan
    reopen = again and functools.partial(again, plan.split)
    with contextlib.ExitStack() as until_end:
        workers = on_ray or _on_own_workers(job, options, console, until_end)
        claimed = claim(job, base, options.overwrite, plan.rows, plan.split.total_steps, options.resume, reopen)
        for line in resumption_lines(prepared, claimed, killed):
            console.say(line)
        execution = Execution(prepared, claimed, options, console, started, workers, on_ray is not None)
        until_end.enter_context(held(claimed, lambda: execution.steps_done))
        try:
            return execution.run()
        finally:
            execution.write_page()


def _on_own_workers(job: Job, options: Options, console: Console, until_end: contextlib.ExitStack) -> OnRay:
    """What runs jobs on workers that the first one starts.

    Raises an Error if a job that replaces another run has no Ray on which it could run: before that run is deleted.
    """

    @functools.cache
    def workers() -> Any:
        from dp_ray.cluster.workers import OwnWorkers  # imports Ray, which `workers: 0` does not need

        return until_end.enter_context(OwnWorkers(options.address, options.verbose))

    def on_ray(prepared: Prepared, claimed: RunDir, monitor: Monitor, console: Console) -> None:
        job, rows = prepared.job, prepared.plan.rows
        workers().run(job, claimed, rows, monitor, console, prepared.faults)

    if options.overwrite and job.max_workers > 0:
        with console.if_slow("looking for the cluster"):
            workers().check(job)
    return on_ray


class Execution:
    """The run of a prepared job in a run directory that this driver has claimed."""

    def __init__(
        self,
        prepared: Prepared,
        claimed: RunDir,
        options: Options,
        console: Console,
        started: float,
        on_ray: OnRay,
        is_in_session: bool,
    ) -> None:
        self._prepared = prepared
        self._claimed = claimed
        self._storage = claimed.storage
        self._options = options
        self._console = console
        self._started = started
        self._is_in_session = is_in_session
        self._on_ray = on_ray
        self._monitor: Monitor | None = None
        self._trackers: RunTrackers | None = None

    @property
    def _job(self) -> Job:
        return self._prepared.job

    @property
    def _split(self) -> Split:
        return self._prepared.plan.split

    @property
    def steps_done(self) -> int:
        """How many steps all workers have reported as done."""
        return self._monitor.progress.step if self._monitor else 0

    def run(self) -> Result:
        """Run the job to its end; its result is kept, also if the run is interrupted or fails."""
        self._say_what_runs()
        self._storage.remove_unfinished(recursive=True)
        try:
            if self._job.finds_shards:
                self._find_shards()
            # Within this block only: what removes unfinished files would remove the one that is being written.
            told = table(self._prepared.plan), self._job.max_workers == 0
            with (
                planned_stops(self._ask_to_stop) as stop,
                recorded_about(self._storage, *told),
                repeated("stop requests", self._look_seconds, lambda: self._heed_request(stop)),
            ):
                self._follow()
                check_ours(self._claimed)
                self._merge()
        except (KeyboardInterrupt, StopRequested) as stopped:
            interrupted = RunInterrupted(stop_message(self._job, self._storage, self._split, self._options.overwrite))
            self._keep_unfinished("interrupted", interrupted)
            raise interrupted from (None if isinstance(stopped, StopRequested) else stopped)
        except BaseException as error:
            self._keep_unfinished("failed", error)
            raise
        return self._finish()

    def _say_what_runs(self) -> None:
        where = relative(str(self._storage))
        self._console.say(f"{'resuming in' if self._claimed.is_resumed else 'run directory'} {where}")
        for line in self._prepared.plan.remarks:
            self._console.say(line)

    @property
    def _look_seconds(self) -> float:
        """How often it is looked for a request to stop: an object store counts each look."""
        return RENEW_SECONDS if self._storage.is_atomic else TELL_SECONDS

    def _heed_request(self, stop: Callable[[], object]) -> None:
        """Stop the run if `dp-ray stop` asks for it; asked again, it stops after its step all the same."""
        if by := take_request(self._storage, self._claimed.token):
            self._console.say(f"{by} asks to stop")
            planned = self._monitor.planned_stop if self._monitor else None
            if planned is not None:
                planned.asker = "dp-ray stop"
            if planned is None or not planned.is_asked:
                stop()

    def _ask_to_stop(self, signal_name: str) -> bool:
        return self._monitor is not None and self._monitor.ask_to_stop(signal_name)

    def _find_shards(self) -> None:
        """Have the workers find the number of shards, and make it the run's."""
        with planned_stops(self._ask_to_stop):
            plan, claimed = self._prepared.plan, self._claimed
            job = with_found_shards(self._job, plan, claimed, self._console, self._on_workers)
        keep_shards(claimed, job)
        self._prepared = self._prepared.cut_as(job)

    def _on_workers(self, monitor: Monitor) -> None:
        self._on_ray(self._prepared, self._claimed, monitor, self._console)

    def _follow(self) -> None:
        """Run the workers to their end, followed by a monitor."""
        job, prepared = self._job, self._prepared
        self._trackers = RunTrackers(job, self._storage, self._console.say)
        with monitoring(
            job, self._split, self._claimed, self._console, self._options.shapes, self._trackers
        ) as monitor:
            self._monitor = monitor
            if job.max_workers == 0:
                run_in_process(job, self._claimed, monitor, prepared.plan.rows)
            else:
                with repeated("page", PAGE_SECONDS, self._import_page):
                    self._on_workers(monitor)

    def _import_page(self) -> None:
        """Once the workers run, import what the page needs: this process has little to do until they end."""
        if self.steps_done:
            with contextlib.suppress(Exception):  # whoever writes the page tells
                from dp_ray.report import page  # noqa: F401

    def _merge(self) -> None:
        """Prove that the outputs are whole, or merge the pieces of the history."""
        split, run = self._split, self._storage
        if self._job.task == "predict":
            prove_outputs(run, split.rows_kept, positions_set_aside(run))
        elif self._job.task == "train":
            ended = self._monitor.task_messages.end_of(split.total_steps) if self._monitor else split.total_steps
            merge_history(run.child(HISTORY), run, ended, first_step(run))
        if self._job.on_error is not None or has_set_aside(run):
            merge_quarantine(run, self._carried)

    @property
    def _carried(self) -> Sequence[str]:
        """The keys of the items of which a prediction carries values."""
        return (self._job.outputs.carry or ()) if self._job.task == "predict" else ()

    def _result(self, status: str, error: BaseException | None = None) -> Result:
        of_run = self._job, self._split, self._claimed, self._monitor, self._started
        return result_of(*of_run, status, error, self._is_in_session)

    def _keep_unfinished(self, status: str, error: BaseException) -> None:
        check_ours(self._claimed)
        result = self._result(status, error)
        save_unfinished(result, self._storage, self._split, self._monitor, self._carried)
        self._end_trackers(status, result)

    def _finish(self) -> Result:
        """Save the result of a finished run, and remove the files that only an unfinished run needs."""
        result = self._result("done")
        result.save(self._storage)
        # What `dp-ray retry` needs of a prediction that has set samples aside stays.
        is_to_retry = result.task == "predict" and result.quarantined > 0
        for folder in (PARTS, HISTORY, QUARANTINE, LINKS, *[FILES] * (not is_to_retry)):
            self._storage.child(folder).remove()
        for name in (INCIDENTS, RECENT, PROGRESS, BEFORE_RETRY, *[ledger.LEDGER] * (not is_to_retry)):
            self._storage.delete(name)
        self._storage.remove_unfinished(recursive=True)
        for line in time_lines(result):
            self._console.say(line)
        self._console.say(summary_of(result, self._claimed.is_resumed))
        self._end_trackers("done", result)
        return result

    def _end_trackers(self, status: str, result: Result) -> None:
        if self._trackers is not None:
            self._trackers.finish(status, result.metrics)

    def write_page(self) -> None:
        """Write the page of the run; a page that cannot be made is told of, and fails no run."""
        try:
            from dp_ray.report.page import (
                REPORT,  # not before: a run does not wait for it at its start
                write_page,  # not before: a run does not wait for it at its start
            )

            write_page(self._storage)
            self._console.say(f"its page: {relative(str(self._storage))}/{REPORT}")
        except Exception as error:  # whatever it is, the run's result stands
            self._console.say(f"no page of the run: {type(error).__name__}: {error}")

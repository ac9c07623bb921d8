"""Run a job: prepare it, claim its run directory, start and follow its workers, prove that their files are whole.

`run` is the public function, `execute` what all ways to run a job share, and an `Execution` one run, step by step.
`Workers` are who runs it: `own_workers` gives those of a single job, a session has others.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dp_ray.cluster.kinds import Workers, own_workers
from dp_ray.driver.finish import clear, last_line, merge, result_of, save_unfinished, time_lines
from dp_ray.driver.planning import Prepared, prepare
from dp_ray.errors import ClusterError, Error, RunInterrupted, StorageError, WorkerError, shorten
from dp_ray.job.files import job_from
from dp_ray.job.job import Job
from dp_ray.messages import StopRequested
from dp_ray.monitor.console import Console
from dp_ray.monitor.monitor import Monitor, Writer, progress_noted
from dp_ray.plan.costs import plan_table
from dp_ray.plan.split import Split
from dp_ray.process.modes import script_modes
from dp_ray.results.result import Result
from dp_ray.rundir.claim import Replace, Resume, RunDir, Wanted, check_claim, claim, keep_shards
from dp_ray.rundir.files import recorded_about
from dp_ray.rundir.history import RECENT_SECONDS, RecentHistory
from dp_ray.rundir.lease import RENEW_SECONDS, TELL_SECONDS, held, take_request, wait_until_free
from dp_ray.rundir.replaced import ReplacedRun
from dp_ray.rundir.settled import run_of, settled
from dp_ray.rundir.unfinished import last_end, stop_message
from dp_ray.storage import Storage
from dp_ray.system.imports import replaced_in_modules
from dp_ray.system.threads import is_done, planned_stops, raise_put_off, repeated
from dp_ray.text import listed, relative

if TYPE_CHECKING:
    from dp_ray.cluster.connect import EarlyConnection
    from dp_ray.trackers.process import RunTrackers


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
    # No flags:
    brief: bool = False  # the run is but a means to an end, so that its epochs need few lines
    connection: "EarlyConnection | None" = None  # which the command line makes while it imports torch


def run(job: Job | str | os.PathLike[str] | None = None, /, **keys: Any) -> Result:
    """Run a job to its end and return its result.

    `job` is a Job, the path of a job file, or None. Keywords set or override the job's keys, with Python objects in
    place of targets. `address`, `overwrite`, `shapes`, `inject`, `quiet` and `verbose` are the command line's flags
    of the same name. A class or function of a module is the same as its name. A run of other Python objects needs
    `resume=True` to be resumed: they cannot be compared, so the caller says that they are the same. Without a `name`,
    a run from Python is named by its time.
    Raises an Error of dp_ray.errors, and RunInterrupted if a signal (SIGINT, SIGTERM, SIGUSR2) or `dp-ray stop`
    stopped the run. The `exit_status` of either is what the program should end with, for its launcher.

    >>> import dp_ray, torch
    >>> rows = torch.utils.data.TensorDataset(torch.arange(6.0)[:, None], torch.arange(6.0)[:, None])
    >>> result = dp_ray.run(
    ...     task="train",
    ...     model=torch.nn.Linear(1, 1),
    ...     dataset=rows,
    ...     batch_size=2,
    ...     loss=torch.nn.MSELoss,
    ...     optimizer={"target": torch.optim.SGD, "args": {"lr": 0.01}},
    ...     epochs=2,
    ...     workers=0,
    ...     quiet=True,
    ... )
    >>> result.status, result.total_steps, sorted(result.weights)
    ('done', 6, ['bias', 'weight'])
    """
    options = options_of(keys)
    with ShortErrors(options.verbose):
        return execute(job_from(job, keys), options)


def options_of(keys: dict[str, Any]) -> Options:
    """Take the options out of the keywords of `run`, and leave the job's keys."""
    names = {field.name for field in dataclasses.fields(Options)} - {"brief", "connection"}
    if not isinstance(keys.get("resume", False), bool):
        names.remove("resume")  # a path, as in other libraries: the job rejects that key with a hint
    return Options(**{name: keys.pop(name) for name in names & keys.keys()})


@dataclasses.dataclass(frozen=True)
class ShortErrors:
    """A block out of which errors of dp_ray show no inner frames of dp_ray, unless `verbose`.

    It is a class because `contextlib.contextmanager` would set the traceback of the error back.
    """

    verbose: bool

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.verbose or error is None:
            return
        if isinstance(error, Error):
            shorten(error)
        elif isinstance(error, RunInterrupted):
            error.__cause__ = error.__traceback__ = None
            error.__suppress_context__ = True


def execute(
    job: Job,
    options: Options,
    workers: Workers | None = None,
    reopen: Callable[[Split, Storage], None] | None = None,
) -> Result:
    """Run a job to its end and return its result; the run directory keeps the result, also after a failure.

    By default the `workers` are the run's own, and end with it. `reopen` makes a finished prediction one that is to
    be resumed.
    """
    raise_put_off()
    started = time.monotonic()
    console = Console(job.run_name, options.quiet, options.brief)
    prepared, run = prepare(job, console, options.overwrite, options.inject), run_of(job)
    killed, replaced = wait_until_free(run, console.say), ReplacedRun(run)
    if replaced.exists:
        console.say(f"{relative(str(run))}: {replaced.settle(killed.step if killed else 0)}")
        prepared, killed = prepare(job, console, options.overwrite, options.inject), None
    if prepared.job.finds_shards and not options.overwrite:  # the driver before may have found the number meanwhile
        prepared = prepared.cut_as(settled(prepared.job))
    if workers is None:
        own = own_workers(prepared.job, options.address, options.verbose, console, options.connection)
        opened: contextlib.AbstractContextManager[Workers] = contextlib.closing(own)
    else:
        opened = contextlib.nullcontext(workers)
    # What this run replaces is put back or removed last: until its workers have ended, they may still write.
    with contextlib.ExitStack() as after_workers, opened as workers:
        prepared = dataclasses.replace(prepared, job=workers.accept(prepared.job, options.overwrite))
        job, plan = prepared.job, prepared.plan
        steps = plan.split.total_steps
        asked = {"overwrite": options.overwrite, "resume": options.resume, "is_reopened": reopen is not None}
        wanted = Wanted(job, plan.rows, steps, **asked, modes=script_modes(), classes=prepared.classes)
        decision = check_claim(run, wanted)
        claimed = claim(run, wanted, decision, reopen and functools.partial(reopen, plan.split))
        name_submitted_job(run.name, str(run.parent))
        if decision == Replace(is_asked=False):
            console.say("replaces the run of this name, which had ended before it kept a step")
        if isinstance(decision, Resume) and decision.lengths:
            console.say(f"continues to step {steps} ({decision.lengths})")
        if claimed.is_resumed and (end := last_end(claimed.storage, job.task, plan.split, killed)):
            console.say(f"the last driver was {end.what}")
        execution = Execution(prepared, claimed, options, console, started, workers)
        after_workers.callback(execution.end_replaced)
        after_workers.callback(execution.leave_trackers)
        with held(claimed.storage, claimed.token, lambda: claimed.is_ours, lambda: execution.steps_done):
            try:
                return execution.run()
            finally:
                execution.write_page()


def name_submitted_job(name: str, storage: str) -> None:
    """In a submitted Ray job, have Ray keep the name and the storage of the run or sweep, by which one finds it."""
    with contextlib.suppress(ClusterError):  # `workers: 0` runs with any Ray, and with none
        from dp_ray.cluster.internals.variables import JOB_CONFIG

        if JOB_CONFIG in os.environ:
            from dp_ray.cluster import connect  # imports Ray

            connect.name_ray_job(name, storage)


PAGE_SECONDS = 1.0  # between two looks at whether to import what the page needs


@dataclasses.dataclass
class Execution:
    """The run of a prepared job in a run directory that this driver has claimed."""

    prepared: Prepared
    claimed: RunDir
    options: Options
    console: Console
    started: float
    workers: Workers
    monitor: Monitor | None = None
    trackers: "RunTrackers | None" = None
    asked: list[str] = dataclasses.field(default_factory=list)  # who has asked to stop before there was a monitor

    @property
    def steps_done(self) -> int:
        """The number of steps that all workers have reported as done."""
        return self.monitor.progress.step if self.monitor else 0

    def run(self) -> Result:
        """Run the job to its end; its result is kept, also if the run is interrupted or fails."""
        storage = self.claimed.storage
        self.console.say(f"{'resuming in' if self.claimed.is_resumed else 'run directory'} {relative(str(storage))}")
        for line in self.prepared.plan.remarks:
            self.console.say(line)
        if not self.workers.is_here and (replaced := replaced_in_modules()):
            self.console.say(
                f"the script has replaced {listed(replaced)}; workers import modules as they are: replace it in a "
                "module that the job names, such as the model's"
            )
        storage.remove_unfinished(recursive=True)
        try:
            look_seconds = RENEW_SECONDS if storage.is_atomic else TELL_SECONDS  # an object store counts each look
            with planned_stops(self._ask_to_stop) as stop:
                if self.prepared.job.finds_shards:
                    self._find_shards()
                with (
                    # Within this block only: what removes unfinished files would remove the one that it writes.
                    recorded_about(storage, plan_table(self.prepared.plan), self.workers.is_here),
                    repeated("stop requests", look_seconds, lambda: self._look(stop)),
                ):
                    self._follow_workers()
                    self.claimed.check_ours()
                    merge(self.prepared.job, self.prepared.plan.split, storage, self.monitor)
        except (KeyboardInterrupt, StopRequested) as stopped:
            job, split = self.prepared.job, self.prepared.plan.split
            is_new = self.options.overwrite and not self._is_undone
            asked = [*self.asked, *(self.monitor.planned_stop.by if self.monitor else ())]
            interrupted = RunInterrupted(stop_message(job, storage, split, is_new), asked)
            self._keep_unfinished(interrupted)
            raise interrupted from (None if isinstance(stopped, StopRequested) else stopped)
        except BaseException as error:
            self._keep_unfinished(error)
            raise
        return self._finish()

    def _find_shards(self) -> None:
        """Have the workers find the number of shards, and make it the run's.

        A monitor shows what happens to them meanwhile; nothing of that is kept in the run's directory.
        """
        prepared, job, split = self.prepared, self.prepared.job, self.prepared.plan.split
        monitor = Monitor(job, split, (), self.console, shapes=False)
        try:
            with self.console.live(monitor.progress):
                self.workers.run(job, self.claimed, prepared.plan.rows, monitor, prepared.faults)
        finally:
            monitor.close()
            self.asked += monitor.planned_stop.by
        shards = monitor.shards_found
        if shards is None:
            raise WorkerError("shards: auto: the workers ended without a number of shards; run the job again")
        job = job.model_copy(update={"shards": shards})
        keep_shards(self.claimed, job)
        self.prepared = prepared.cut_as(job)

    def _follow_workers(self) -> None:
        """Run the workers to their end, followed by a monitor."""
        prepared, job = self.prepared, self.prepared.job
        if job.trackers != []:
            from dp_ray.trackers.process import RunTrackers

            self.trackers = RunTrackers(job.trackers, self.claimed.storage, job.env, self.console.say)
        tracked = self.trackers.writers if self.trackers is not None else []
        # Where the job's own code runs, an import would take its time.
        page = contextlib.nullcontext() if self.workers.is_here else repeated("page", PAGE_SECONDS, self._import_page)
        with followed(prepared, self.claimed, self.console, self.options.shapes, tracked) as monitor, page:
            self.monitor = monitor
            self.workers.run(job, self.claimed, prepared.plan.rows, monitor, prepared.faults)

    def _ask_to_stop(self, by: str) -> bool:
        if self.monitor is None:
            self.asked.append(by)
            return False
        return self.monitor.ask_to_stop(by)

    @property
    def _waiting(self) -> ReplacedRun | None:
        """The run that was here before, while it waits aside to be put back or removed."""
        replaced = self.claimed.replaced
        return replaced if replaced is not None and replaced.exists else None

    @property
    def _is_undone(self) -> bool:
        """Whether this run has not begun, so that the one that it replaces is put back at its end."""
        return (waiting := self._waiting) is not None and waiting.returns(self.steps_done)

    def end_replaced(self) -> None:
        """Put the run that this one replaces back, if this one has not begun, or remove it."""
        try:
            if waiting := self._waiting:
                self.claimed.check_ours()
                self.console.say(f"{relative(str(self.claimed.storage))}: {waiting.settle(self.steps_done)}")
        except StorageError as error:
            self.console.say(str(error))

    def _look(self, stop: Callable[[str], object]) -> None:
        """Stop the run if `dp-ray stop` asks for it; asked twice, it stops after its step all the same.

        Once a step is done, remove the run that this one replaces.
        """
        if request := take_request(self.claimed.storage, self.claimed.token):
            self.console.say(f"{request.by} asks to stop")
            planned = self.monitor.planned_stop if self.monitor else None
            if planned is not None and planned.is_asked:
                planned.by.append(request.name)
            else:
                stop(request.name)
        if self.steps_done and (waiting := self._waiting):
            waiting.discard()

    def _import_page(self) -> None:
        """Once the workers run, import what the page needs: this process has little to do until they end."""
        if self.steps_done:
            with contextlib.suppress(Exception):  # `write_page` says why
                from dp_ray.report import page  # noqa: F401

    def _result(self, error: BaseException | None = None) -> Result:
        job, split = self.prepared.job, self.prepared.plan.split
        return result_of(job, split, self.claimed, self.monitor, self.started, error)

    def _keep_unfinished(self, error: BaseException) -> None:
        self.claimed.check_ours()  # raises if another driver has claimed the run meanwhile: its files must stay
        result = self._result(error)
        save_unfinished(result, self.claimed.storage, self.prepared.plan.split, self.monitor, self.prepared.job)
        self._end_trackers(result)

    def _finish(self) -> Result:
        """Save the result of a finished run, clear its directory, and say what became of it."""
        storage, result = self.claimed.storage, self._result()
        result.save(storage)  # the run is done: a crash after this line only leaves files that nothing needs
        is_done()
        if waiting := self._waiting:
            waiting.discard()
        clear(storage, keeps_ledger=result.task == "predict" and result.quarantined > 0)
        for line in time_lines(result):
            self.console.say(line)
        for fault in self.prepared.faults:
            if self.monitor is not None and str(fault) not in self.monitor.faults_injected:
                self.console.say(
                    f"fault injection: {fault} never came: no such worker was there then, or no such step"
                )
        self.console.say(last_line(result, self.claimed.is_resumed, self.prepared.plan.split.is_cut_short))
        self._end_trackers(result)
        return result

    def _end_trackers(self, result: Result) -> None:
        if self.trackers is not None:
            self.trackers.finish(result.status)

    def leave_trackers(self) -> None:
        """End the processes of trackers that still run: this driver has lost the run to another one."""
        if self.trackers is not None:
            self.trackers.close()

    def write_page(self) -> None:
        """Write the page of the run; a page that cannot be made has a line, and fails no run."""
        if self._is_undone:
            return
        try:
            # Not before: a run does not wait for this import at its start.
            from dp_ray.report.page import REPORT, write_page

            write_page(self.claimed.storage)
            self.console.say(f"its page: {relative(str(self.claimed.storage))}/{REPORT}")
        except Exception as error:  # whatever it is, the run's result stands
            self.console.say(f"no page of the run: {type(error).__name__}: {error}")


@contextmanager
def followed(
    prepared: Prepared, claimed: RunDir, console: Console, shapes: bool, tracked: Sequence[Writer]
) -> Iterator[Monitor]:
    """Follow a run with a monitor, which continues the reports and incidents of the run's earlier drivers.

    The history's rows also go to the writers of its trackers.
    When the block ends, also by an error, the file of shape reports is complete.
    """
    job, run = prepared.job, claimed.storage
    recent = RecentHistory(run, is_followed=bool(set(job.trackers or ()) - {"tensorboard"}))
    monitor = Monitor(job, prepared.plan.split, [*tracked, recent], console, shapes, claimed)
    try:
        saved = repeated("recent history", RECENT_SECONDS, recent.save_if_due)
        with console.live(monitor.progress), progress_noted(run, monitor.progress), saved:
            yield monitor
    finally:
        monitor.close()

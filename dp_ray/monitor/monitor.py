"""What writes the rows of a training's history as they arrive.

The workers' shape reports: put in order, written, and printed if the user asks for it; and their steps' times.

Takes in what a task sends besides its shape reports: notes, its history, the metrics of an evaluation.

The driver's side of the channel: follows the workers, shows their progress, and keeps the first error.

Wraps what a task sends into a message; apart from the messages, since it needs the type of shape reports.

Feeds the workers' messages to the monitor, in a thread of its own.

Notes a run's progress in its directory while it runs, for `dp-ray watch` and `dp-ray list`.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from dp_ray.engine.clock import Flops
from dp_ray.engine.world import World
from dp_ray.errors import StorageError
from dp_ray.job.job import Job
from dp_ray.monitor.attempts import (
    Attempt,
    Attempts,
    Hangs,
    Interruptions,
    JobEnd,
    NodeControl,
    PlannedStop,
    interruption_of,
)
from dp_ray.monitor.console import Console, Losses, Progressed
from dp_ray.monitor.messages import (
    HERE,
    Beat,
    Failed,
    FaultInjected,
    Finished,
    GaveUp,
    Interrupted,
    Message,
    Printed,
    Shapes,
    Started,
    Starting,
    TaskMessage,
    Waits,
    WorkerReady,
)
from dp_ray.monitor.watchdog import LongWaits
from dp_ray.plan.split import Split
from dp_ray.rundir.incidents import IncidentLog
from dp_ray.rundir.listing import PROGRESS
from dp_ray.steps.reports import Collector, Journal, ReportColumns, ReportFile
from dp_ray.steps.shapes import Keep, Report, Seen, ShardSpan, decode_sizes, shape_lines
from dp_ray.steps.times import Logged, StepTimeWriter
from dp_ray.storage import Storage
from dp_ray.system.threads import repeated
from dp_ray.tasks.hooks import Measured, Note, ShardsFound, StoppedEarly, WorkerTimes
from dp_ray.text import counted, json_text


class Writer(Protocol):
    """Takes rows of the history; a repeated step replaces all rows from that step on."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take some rows."""

    def close(self) -> None:
        """Write what is left, when no more rows come."""


class Writers:
    """Several writers as one."""

    def __init__(self, writers: Iterable[Writer]) -> None:
        self._writers = list(writers)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Give the rows to each writer."""
        for writer in self._writers:
            writer.add(rows)

    def close(self) -> None:
        """Close each writer."""
        for writer in self._writers:
            writer.close()


class ShapeReports:
    """Takes in shape reports; calls `on_steps` with the number of steps done by all workers, and the new rows."""

    def __init__(
        self,
        file: ReportFile,
        journal: Journal | None,
        times: StepTimeWriter | None,
        console: Console,
        prints: bool,
        batch_dim: int,
        on_steps: Callable[[int, int], None],
    ) -> None:
        self._file = file
        self._journal = journal
        self._times = times
        self._must_keep = False
        self._console = console
        self._prints = prints
        self._batch_dim = batch_dim
        self._on_steps = on_steps
        self._stdout = sys.stdout
        self._collector = Collector(self._on_rows)
        self._decoded: dict[int, tuple[Any, Any]] = {}

    def restore(self, spans: Sequence[tuple[World, Seen, ShardSpan]]) -> None:
        """Take in the reports that a resumed run has of its finished steps."""
        self._collector.restore(spans)

    def begin(self, worlds: Sequence[World], attempt: int) -> None:
        """Begin an attempt of the run with these workers; attempts count from 0."""
        self._collector.begin(worlds)
        if self._times:
            self._times.begin(attempt)

    def take(self, report: Report) -> int:
        """Take in a report; return the number of rows in it."""
        self._collector.take(report)
        if self._times and report.times is not None:
            self._times.add(report.world, report.times)
        return sum(self._collector.rows_of(report.world.rank, span) for span in report.spans)

    def keep(self) -> None:
        """Write all reports to the journal at the next `emit`."""
        self._must_keep = True

    def emit(self) -> None:
        """Pass on the steps that all workers have finished; write the journal if `keep` asked for it, and times."""
        self._collector.emit()
        if self._times:
            self._times.tick()
        if self._must_keep and self._journal:
            self._must_keep = False
            self._journal.save(self._collector)

    def close(self) -> None:
        """Pass on all reports, also those of unfinished steps, and finish the file."""
        self._collector.emit()
        self._on_steps = lambda step, rows: None  # the steps that are left are not done
        self._collector.close()
        self._file.close()
        if self._times:
            self._times.close()

    def _on_rows(self, collector: Collector, rows: ReportColumns) -> None:
        block = self._file.write(collector, rows)
        if self._journal:
            self._journal.add(block)
        self._on_steps(int(rows.step[-1]) + 1, _num_rows(collector, rows))
        if self._prints:
            self._print(self._lines(collector, rows))

    def _print(self, lines: Iterator[str]) -> None:
        """Print lines to stdout; a closed pipe, as with `| head`, ends the printing but not the job."""
        try:
            for line in lines:
                print(line, file=self._stdout)
            self._stdout.flush()
        except BrokenPipeError:
            self._prints = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())
            self._console.say("stdout was closed, no more shapes are printed")

    def _lines(self, collector: Collector, rows: ReportColumns) -> Iterator[str]:
        numbered = zip(rows.step.tolist(), rows.seen.tolist(), strict=True)
        for _, pieces in groupby(numbered, key=lambda pair: pair[0]):
            yield from shape_lines([self._sizes(collector, seen) for _, seen in pieces], self._batch_dim)

    def _sizes(self, collector: Collector, number: int) -> tuple[Any, Any]:
        if number not in self._decoded:
            seen = collector.seen[number]
            self._decoded[number] = decode_sizes(seen.input_size), decode_sizes(seen.output_size)
        return self._decoded[number]


def _num_rows(collector: Collector, rows: ReportColumns) -> int:
    """The number of the dataset's rows in these reports."""
    counts = np.bincount(rows.seen).tolist()
    return sum(count * collector.seen[number].rows for number, count in enumerate(counts))


class TaskMessages:
    """Takes in what a task sends.

    `metrics` are the last that an evaluation measured, `times` those of the workers' loops, by rank; `flops`
    the operations of a row, if the job asks for them; `shards_found` the number that `shards: auto` has found.
    `stopped_early` says why a training ended before its last step.
    """

    def __init__(
        self, reports: ShapeReports, writer: Writer, progress: Progressed, console: Console, run_dir: str
    ) -> None:
        self.metrics: dict[str, float] = {}
        self.times: dict[int, dict[str, float]] = {}
        self.flops: Flops | None = None
        self.shards_found: int | None = None
        self.stopped_early: StoppedEarly | None = None
        self._reports = reports
        self._writer = writer
        self._progress = progress
        self._console = console
        self._losses = Losses(console, run_dir)

    def end_of(self, steps: int) -> int:
        """How many steps a finished training has: all `steps`, or fewer if it stopped early."""
        return steps if self.stopped_early is None else self.stopped_early.step

    def begin(self) -> None:
        """Forget what an attempt told at its end: another one begins."""
        self.times.clear()
        self.stopped_early = None

    def take(self, what: Any) -> None:
        """Process what a task sent."""
        match what:
            case Note(text=text):
                self._console.say(text)
            case Keep():
                self._reports.keep()
            case Measured(metrics=metrics):
                self.metrics = metrics
            case WorkerTimes(rank=rank, seconds=seconds):
                self.times[rank] = seconds
            case StoppedEarly():
                self.stopped_early = what
                self._console.say(what.text)
            case Flops():
                self.flops = what
            case ShardsFound(shards=shards):
                self.shards_found = shards
            case Logged(rows=rows):
                self._log(rows)

    def _log(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show and write rows of the history."""
        self._progress.last = rows[-1]
        self._writer.add(rows)
        for row in rows:
            self._losses.say(row)

    def close(self) -> None:
        """Write what is left of the history, when no more rows come."""
        self._losses.end()
        self._writer.close()


class Monitor:
    """Takes in the workers' messages; one thread calls `take`, in the order of arrival."""

    def __init__(
        self,
        job: Job,
        split: Split,
        file: ReportFile,
        writer: Writer,
        console: Console,
        shapes: bool,
        save_incidents: Callable[[IncidentLog], None] = lambda incidents: None,
        incidents: IncidentLog | None = None,
        journal: Journal | None = None,
        times: StepTimeWriter | None = None,
        run_dir: str = "RUN_DIR",
    ) -> None:
        self.node_control = NodeControl()
        self.failed: Failed | None = None
        self.end = JobEnd()
        self.progress = Progressed(job.run_name, split.total_steps, split.total_rows)
        self.planned_stop = PlannedStop(job.task != "evaluate", console)  # an evaluation keeps nothing
        self._attempts = Attempts()
        self._interruptions = Interruptions(incidents or IncidentLog(), console, save_incidents)
        self._console = console
        self.waits = LongWaits(job, self._attempts, self.progress, console.say)
        self._hangs = Hangs(job.timeouts.step, job.retries, console)
        self._reports = ShapeReports(file, journal, times, console, shapes, job.batch_dim, self._on_steps)
        self.task_messages = TaskMessages(self._reports, writer, self.progress, console, run_dir)

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that have begun, in order."""
        return self._attempts.begun

    @property
    def incidents(self) -> IncidentLog:
        """The log of the run's incidents so far."""
        return self._interruptions.log

    def restore(self, spans: Sequence[tuple[World, Seen, ShardSpan]]) -> None:
        """Take in the shape reports that a resumed run has of its finished steps."""
        self._reports.restore(spans)

    def take(self, message: Message) -> None:
        """Process a message."""
        match message:
            case WorkerReady():
                self._worker_ready(message)
            case Shapes():
                self._shapes(message)
            case TaskMessage(what=what):
                self.task_messages.take(what)
            case Printed(world=world, lines=lines):
                for line in lines:
                    self._console.printed(world, line)
            case Starting(what=what):
                self.begin(what)
            case Started():
                self._started(message)
            case Beat(attempt=attempt):
                if self._attempts.is_current(attempt):
                    self._hangs.take(message)
            case Interrupted():
                self._interrupted(message)
            case Waits(what=what):
                self._console.say(what)
            case FaultInjected():
                self._fault_injected(message)
            case Finished():
                self.end.finish(self._attempts.finish(message))
            case GaveUp():
                self.end.give_up(message)
            case Failed():
                if self.failed is None or self.failed.is_lost_peer:  # which only follows from another worker's end
                    self.failed = message

    def begin(self, what: str) -> None:
        """Show `what` as the current phase, before the first step."""
        self.progress.begin(what)
        self._console.progress(self.progress, at_once=True)

    def tick(self) -> None:
        """Pass on complete steps, show the progress, and check for workers that hang."""
        self._reports.emit()
        self._console.progress(self.progress)
        self._hangs.check(self.node_control)

    def ask_to_stop(self, signal_name: str = "") -> bool:
        """Ask the run to stop after its current step and keep it; return whether it will.

        It cannot before the first step, during an interruption, in an evaluation, which keeps nothing, or if it was
        asked before. A signal handler calls this.
        """
        runs_a_step = self._attempts.runs_a_step and not self.incidents.is_interrupted
        return self.planned_stop.ask(self.node_control, runs_a_step, signal_name)

    def close(self) -> None:
        """Finish the shape reports and the history; workers can no longer be asked to stop."""
        self.planned_stop.is_closed = True
        self._reports.close()
        self.task_messages.close()

    def _worker_ready(self, worker: WorkerReady) -> None:
        """Begin an attempt once all of its workers are ready."""
        workers = self._attempts.take(worker)
        if not workers:
            return
        self.failed = None
        self.task_messages.begin()
        self._hangs.watch(workers)
        self._interruptions.begin(len(workers))
        worlds = [one.world for one in workers]
        self._console.say(_where(worlds, is_here=worker.attempt == HERE))
        self._reports.begin(worlds, len(self.incidents.world_sizes) - 1)
        self.progress.start(worlds)
        for shapes in self._attempts.kept():
            self._shapes(shapes)

    def _shapes(self, shapes: Shapes) -> None:
        if self._attempts.is_current(shapes.attempt):
            self.progress.take(shapes.report, self._reports.take(shapes.report))
        else:
            self._attempts.keep(shapes)

    def _on_steps(self, step: int, rows: int) -> None:
        self._interruptions.moved()
        self.progress.advance(step, rows)

    def _started(self, message: Started) -> None:
        """Note that a worker is about to run its first step; the attempt's first one ends an interruption."""
        if self._attempts.is_current(message.attempt):
            self._hangs.start(message.rank, message.step)
        if self._attempts.is_first_step(message.attempt):
            self.progress.run(message.step)
            self._interruptions.resume(message.step)

    def _interrupted(self, message: Interrupted) -> None:
        lost, hung = self._attempts.workers(message.ranks), self._hangs.end(message.ranks)
        self._attempts.interrupt()
        self.failed = None
        self._interruptions.interrupt(interruption_of(message, lost, hung, self.progress.step, self.node_control))

    def _fault_injected(self, message: FaultInjected) -> None:
        self._console.say(f"fault injection: {message.what}, by {message.world}")
        if message.is_the_drivers:
            os.kill(os.getpid(), signal.SIGKILL)


def _where(worlds: Sequence[World], is_here: bool) -> str:
    """Where workers run: `2 workers on 1 node (cpu)`, or `in this process (cpu)`."""
    places = f"{counted(len(worlds), 'worker')} on {counted(len({world.node for world in worlds}), 'node')}"
    return (
        f"{'in this process' if is_here else places} ({', '.join(sorted({str(world.device) for world in worlds}))})"
    )


def message_of(attempt: str, what: Any) -> Message:
    """Wrap what a task sends into a message that names its attempt."""
    return Shapes(attempt, what) if isinstance(what, Report) else TaskMessage(attempt, what)


INTERRUPT_SECONDS = 10.0


@contextmanager
def listening(
    monitor: Monitor, receive: Callable[[bool], list[Message]], abort: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Feed the monitor in the background; when the block ends, all messages sent by then are taken in.

    `receive` gives the messages that have arrived; if its argument is True, it waits a moment for the first.

    If the monitor fails, as on a full disk, the block is aborted, and interrupted too if it runs on the main thread.
    The failure is then raised.
    """
    listener = Listener(monitor, receive, abort)
    try:
        listener.start()
        yield
    finally:
        listener.finish()
        if listener.failure is not None:
            raise listener.failure


class Listener(threading.Thread):
    """Feeds the monitor until it is told to finish; `failure` is what the monitor raised."""

    def __init__(self, monitor: Monitor, receive: Callable[[bool], list[Message]], abort: Callable[[], None]) -> None:
        super().__init__(name="monitor", daemon=True)
        self.failure: BaseException | None = None
        self._monitor = monitor
        self._receive = receive
        self._abort = abort
        self._ended = threading.Event()
        self._caller = threading.current_thread()

    def run(self) -> None:
        """Take in messages, also the last ones; if the monitor fails, abort the caller's block."""
        try:
            self._listen()
        except BaseException as error:
            self.failure = error
            self._monitor.planned_stop.is_closed = True
            self._interrupt()

    def finish(self) -> None:
        """Let the thread take in the last messages, and wait for it; its interrupt may arrive only here."""
        self._ended.set()
        while self.is_alive():
            try:
                self.join()
            except KeyboardInterrupt:
                if self.failure is None:
                    raise

    def _listen(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.is_set() or self._monitor.end.has_come
            for message in self._receive(not is_last):
                self._monitor.take(message)
            self._monitor.tick()

    def _interrupt(self) -> None:
        while not self._ended.is_set():
            self._abort()
            if self._caller is threading.main_thread():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self._ended.wait(INTERRUPT_SECONDS)  # a signal just before the block begins to wait is lost: repeat it


SECONDS = {False: 1.0, True: 5.0}  # between two writes: on a disk, on an object store
NO_METRIC = {"step", "epoch", "learning_rate", "gradient_norm", "rows", "rows_per_second", "data_wait_seconds"}


@contextmanager
def progress_noted(run: Storage, progress: Progressed) -> Iterator[None]:
    """Write `progress.json` every few seconds while the block runs, if anything has changed, and at its end."""
    write = _writer(run, progress)
    try:
        with repeated("progress", SECONDS[run.is_atomic], write):
            yield
    finally:
        write()


def _writer(run: Storage, progress: Progressed) -> Callable[[], None]:
    written: dict[str, Any] = {}

    def write() -> None:
        nonlocal written
        found = noted(progress)
        with suppress(StorageError):  # it only informs: what must be written raises the error
            if found != written:
                run.write_text(PROGRESS, json_text({**found, "at": time.time()}) + "\n")
                written = found

    return write


def noted(progress: Progressed) -> dict[str, Any]:
    """The progress as JSON values: steps, rows, rate, phase, the last metrics, each worker's place, rows and time."""
    found = {name: getattr(progress, name) for name in ("step", "steps", "rows", "rows_in_all", "phase")}
    metrics = {name: value for name, value in progress.last.items() if name not in NO_METRIC and value is not None}
    return {
        **found,
        "rows_per_second": float(f"{progress.rows_per_second:.3g}"),
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        "workers": [_worker(progress, rank) for rank in sorted(progress.workers)],
    }


def _worker(progress: Progressed, rank: int) -> dict[str, Any]:
    world, rows = progress.workers[rank]
    seconds = progress.seconds.get(rank)
    milliseconds = None if seconds is None else round(1e3 * math.fsum(seconds), 3)
    return {"rank": rank, "node": world.node, "device": str(world.device), "rows": rows, "ms": milliseconds}

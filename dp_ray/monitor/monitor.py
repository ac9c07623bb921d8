"""Follow the workers: take in their messages, show the progress, and keep the first error.

`Monitor.take` dispatches on a message; `listening` feeds it the messages of a channel, in a thread of its own.
`progress_noted` writes the progress to the run's directory, for `dp-ray watch` and `dp-ray list`.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import pyarrow as pa

from dp_ray import messages
from dp_ray.engine.clock import Flops
from dp_ray.errors import StorageError
from dp_ray.job.job import Job
from dp_ray.monitor import attempts
from dp_ray.monitor.console import Console, Losses, Progress
from dp_ray.plan.history import is_measured
from dp_ray.plan.split import Split
from dp_ray.rundir.claim import RunDir
from dp_ray.rundir.files import FLIGHT_RECORDER, NCCL_RECORD
from dp_ray.rundir.incidents import INCIDENTS_JSON, IncidentLog, Level
from dp_ray.rundir.listing import PROGRESS_JSON
from dp_ray.storage import Storage
from dp_ray.system.threads import repeated
from dp_ray.tables import numbers, reading
from dp_ray.telemetry.reports import ReportTables, report_files
from dp_ray.telemetry.shapes import decode_sizes, shape_lines
from dp_ray.text import counted, relative


class Writer(Protocol):
    """Takes rows of the history; a repeated step replaces all rows from that step on."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take some rows."""

    def close(self) -> None:
        """Write what is left, when no more rows come."""


class Monitor:
    """Takes in the workers' messages; one thread calls `take`, in the order of arrival.

    `run` is the run's directory, which keeps incidents and what the workers report; without one they are only shown.
    `shapes` has the shapes of each step printed. The `writers` get the rows of the history.
    """

    def __init__(
        self,
        job: Job,
        split: Split,
        writers: Iterable[Writer],
        console: Console,
        shapes: bool,
        run: RunDir | None = None,
    ) -> None:
        self._nodes = attempts.NodeControl()
        self.failed: messages.Failed | None = None
        self.end = attempts.JobEnd()
        self.attempts = attempts.Attempts()
        self.progress = Progress(job.run_name, split.total_steps, split.total_rows)
        self.planned_stop = attempts.PlannedStop(job.task != "evaluate", console)  # an evaluation keeps nothing
        self._storage = storage = run.storage if run else None
        log = INCIDENTS_JSON.read(run.storage) if run and run.is_resumed else IncidentLog()
        self.incidents = attempts.Incidents(log, console, storage)
        self._console = console
        self.waits = attempts.LongWaits(job, self.attempts.num_ready, lambda: self.progress.phase, console.say)
        self._numerics = attempts.KeptNumerics(job, storage, console)
        self._hangs = attempts.Hangs(job.timeouts.step, job.retries, console)
        self._losses = Losses(console, relative(str(storage)) if storage else "RUN_DIR")
        self._writers = list(writers)
        self.metrics: dict[str, float] = {}  # the last that an evaluation measured
        self.times: dict[int, dict[str, float]] = {}  # of the workers' loops, by rank
        self.flops: Flops | None = None  # of a row, if the job asks for them
        self.shards_found: int | None = None  # by `shards: auto`
        self.faults_injected: set[str] = set()
        self.stopped_early: messages.StoppedEarly | None = None  # why a training ended before its last step
        self._split, self._trains = split, job.task == "train"
        # That runs in the newest attempt, or ran last in the one before.
        self._step = log.interruptions[-1].step if log.interruptions else 0
        self._through: dict[int, int] = {}  # the last step that each worker of the attempt has finished, by rank
        self._reports = ReportTables(storage, split.total_steps) if storage else None
        self._must_keep = False
        self._shape_lines = ShapeLines(console, job.batch_dim, storage) if shapes else None

    def take_control(self, nodes: attempts.NodeControl) -> None:
        """Control the workers by `nodes` from now on: which ones run the job is known only once it begins there."""
        self._nodes = nodes

    def take(self, message: messages.Message) -> None:
        """Process a message."""
        match message:
            case messages.WorkerReady():
                self._worker_ready(message)
            case messages.Computes(attempt=attempt, kinds=kinds):
                self._numerics.take(attempt, kinds)
            case messages.Report():
                self._report(message)
            case messages.Keep():
                self._must_keep = True
            case messages.Note(text=text) | messages.Waits(what=text):
                self._console.say(text)
            case messages.Logged(rows=rows):
                self.progress.last = rows[-1]
                for writer in self._writers:
                    writer.add(rows)
                self._losses.say(rows)
            case messages.Measured(metrics=metrics):
                self.metrics = metrics
            case messages.WorkerTimes(rank=rank, seconds=seconds):
                self.times[rank] = seconds
            case messages.FlopsCounted(flops=flops):
                self.flops = flops
            case messages.ShardsFound(shards=shards):
                self.shards_found = shards
            case messages.StoppedEarly():
                self.stopped_early = message
                self._console.say(message.text)
            case messages.Printed(world=world, lines=lines):
                for line in lines:
                    self._console.printed(world, line)
            case messages.Starting(what=what):
                self.begin(what)
            case messages.Started(attempt=attempt, rank=rank, step=step, reads=why):
                if self.attempts.is_current(attempt):
                    self._hangs.watchdog.start(rank, step)
                if self.attempts.is_first_step(attempt):
                    self._numerics.begin(attempt, step)
                    self.progress.run(step)
                    self._step = step
                    self.incidents.resume(step, why)
            case messages.Beat(attempt=attempt):
                if self.attempts.is_current(attempt):
                    self._hangs.watchdog.take(message)
            case messages.Interrupted():
                self._interrupted(message)
            case messages.FaultInjected(what=what, world=world):
                self.faults_injected.add(what)
                self._console.say(f"fault injection: {what}, by {world}")
                if message.is_the_drivers:
                    os.kill(os.getpid(), signal.SIGKILL)
            case messages.Finished():
                self.end.finish(self.attempts.finish(message))
            case messages.GaveUp():
                self.end.give_up(message)
            case messages.Failed():
                if self.failed is None or self.failed.is_lost_peer:  # which only follows from another worker's end
                    self.failed = message

    def _interrupted(self, message: messages.Interrupted) -> None:
        """Note that the workers are being replaced, and because of which of them."""
        # If NCCL or the user has ended a worker that was late, why is known only from what it told before.
        message = replace(message, what=message.what + self._hangs.watchdog.found)
        message = attempts.without_survivors(message, self._ended_by_nccl(message.ranks))
        survives = message.level is not Level.RESTART
        lost, hung = self.attempts.workers(message.ranks), self._hangs.end(message.ranks, survives)
        self.attempts.interrupt()
        self.failed = None  # the next attempt may succeed
        self._advance()  # by reports that came with the message
        if self._trains:  # else workers are not equally far
            self._step = max(self._step, message.step)
        by = attempts.interruption_of(message, lost, hung, self._step, self._nodes)
        self.incidents.interrupt(by)

    def _ended_by_nccl(self, ranks: tuple[int, ...]) -> set[int]:
        """Return the ranks among these whose processes have left what NCCL writes before it ends one."""
        left: list[str] = []
        if self._storage is not None and len(ranks) > 1:
            with suppress(StorageError):
                left = self._storage.child(FLIGHT_RECORDER).names()
        workers = self.attempts.workers(ranks)
        return {ready.world.rank for ready in workers if NCCL_RECORD.format(ready.attempt, ready.world.rank) in left}

    def _worker_ready(self, worker: messages.WorkerReady) -> None:
        """Begin an attempt once all of its workers are ready."""
        workers = self.attempts.take(worker)
        if not workers:
            return
        self.failed = self.stopped_early = None
        self.times.clear()
        self._hangs.watch(workers)
        self.incidents.begin(len(workers))
        worlds = [worker.world for worker in workers]
        nodes = {world.node for world in worlds}
        devices = ", ".join(sorted({str(world.device) for world in worlds}))
        where = f"{counted(len(worlds), 'worker')} on {counted(len(nodes), 'node')}"
        self._console.say(f"{'in this process' if worker.attempt == messages.HERE else where} ({devices})")
        self._through = {world.rank: -1 for world in worlds}
        if self._reports:
            self._reports.begin(len(self.incidents.log.world_sizes) - 1)
        self.progress.start(worlds)
        for report in self.attempts.take_early():
            self._report(report)

    def _report(self, report: messages.Report) -> None:
        if not self.attempts.is_current(report.attempt):
            self.attempts.hold_early(report)
            return
        self._through[report.world.rank] = report.through
        rows = 0
        if report.shapes is not None:
            rows = int(numbers(report.shapes["rows"]).sum())
            if self._shape_lines:
                self._shape_lines.add(report.shapes)
        self.progress.take(report, rows)
        if self._reports:
            self._reports.add(report)

    def begin(self, what: str) -> None:
        """Show `what` as the current phase, before the first step."""
        self.progress.begin(what)
        self._console.progress(self.progress, at_once=True)

    def tick(self) -> None:
        """Take in the steps that all workers have finished, show the progress, and check for workers that hang."""
        self._advance()
        if self._must_keep and self._reports:  # once for all workers that have asked for it
            self._reports.keep()
        self._must_keep = False
        self._console.progress(self.progress)
        self._hangs.check(self._nodes)

    def _advance(self) -> None:
        done, before = 1 + min(self._through.values(), default=-1), self.progress.step
        if done > self._step:
            self._step, self.incidents.advanced_at = done, time.monotonic()
        if done > before:  # else a later attempt repeats steps
            self.progress.advance(done, self._split.rows_of(done) - self._split.rows_of(before))
            if self._shape_lines:
                self._shape_lines.print(done)

    def ask_to_stop(self, by: str) -> bool:
        """Ask the run to stop after its current step and keep it; return whether it will.

        It cannot before the first step, while all workers start again, in an evaluation, which keeps nothing, or if
        it was asked before. A signal handler calls this.
        """
        log = self.incidents.log
        runs_a_step = self.attempts.runs_a_step
        if log.is_interrupted:  # what survivors hold is to be kept, also while they go from one view to the next
            runs_a_step = self.attempts.has_run_a_step and log.interruptions[-1].survives
        return self.planned_stop.ask(self._nodes, runs_a_step, by)

    def close(self) -> None:
        """Finish the shape reports, also of unfinished steps, and the history; workers cannot be asked to stop."""
        self.planned_stop.is_closed = True
        self._advance()
        if self._shape_lines:
            self._shape_lines.print()
        self._losses.end()
        for writer in self._writers:
            writer.close()
        if self._reports:  # last: it raises an error if the storage fails
            self._reports.close()


class ShapeLines:
    """Prints the lines of `--shapes`: each step once, when all workers have finished it."""

    def __init__(self, console: Console, batch_dim: int, run: Storage | None) -> None:
        self._console, self._batch_dim = console, batch_dim
        self._decode = cache(decode_sizes)
        self._stdout = sys.stdout
        self._next = 0  # the first step that is not printed
        self._sizes: dict[int, dict[int, tuple[Any, Any]]] = {}  # inputs and outputs, by step and shard
        for file in report_files(run) if run else ():  # those of earlier drivers
            with reading(*file) as parquet:
                for batch in parquet.iter_batches():
                    self.add(batch)

    def add(self, shapes: pa.Table | pa.RecordBatch) -> None:
        """Add shards that a worker has run."""
        for row in shapes.to_pylist():
            if row["step"] >= self._next:
                sizes = self._decode(row["input_size"]), self._decode(row["output_size"])
                self._sizes.setdefault(row["step"], {})[row["shard"]] = sizes

    def print(self, end: int | None = None) -> None:
        """Print the steps before `end`, by default all that have been added.

        A closed pipe, as with `| head`, ends the printing but not the job.
        """
        end = 1 + max(self._sizes, default=-1) if end is None else end
        try:
            for step in range(self._next, end):
                if shards := self._sizes.pop(step, {}):  # else the run began after the step
                    lines = shape_lines([shards[shard] for shard in sorted(shards)], self._batch_dim)
                    print(*lines, sep="\n", file=self._stdout)
            self._next = max(self._next, end)
            self._stdout.flush()
        except BrokenPipeError:
            self._next = sys.maxsize
            # Python flushes stdout when it exits, and would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())
            self._console.say("stdout was closed, no more shapes are printed")


INTERRUPT_SECONDS = 10.0


@contextmanager
def listening(
    monitor: Monitor, receive: Callable[[bool], list[messages.Message]], abort: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Feed the monitor in a thread; when the block ends, all messages sent by then are taken in.

    `receive` gives the messages that have arrived; if its argument is True, it waits a moment for the first.

    If the monitor fails, as on a full disk, the block is aborted, and interrupted too if it runs on the main thread.
    The failure is then raised.
    """
    has_ended, failures, caller = threading.Event(), list[BaseException](), threading.current_thread()

    def listen() -> None:
        is_last = False
        try:
            while not is_last:
                # Looked at before the messages are fetched: so what was sent before the end is still taken in.
                is_last = has_ended.is_set() or monitor.end.has_come.is_set()
                for message in receive(not is_last):
                    monitor.take(message)
                monitor.tick()
        except BaseException as error:
            failures.append(error)
            monitor.planned_stop.is_closed = True
            while not has_ended.is_set():
                abort()
                if caller is threading.main_thread():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                has_ended.wait(INTERRUPT_SECONDS)  # a signal just before the block waits is lost: repeat it

    thread = threading.Thread(target=listen, name="monitor", daemon=True)
    try:
        thread.start()
        yield
    finally:
        has_ended.set()
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt:  # that of the thread may arrive only here
                if not failures:
                    raise
        if failures:
            raise failures[0]


WRITE_SECONDS = {False: 1.0, True: 5.0}  # between two writes: on a disk, on an object store


@contextmanager
def progress_noted(run: Storage, progress: Progress) -> Iterator[None]:
    """Write `progress.json` at once, every few seconds while the block runs if it has changed, and at its end."""
    written: dict[str, Any] = {}

    def write() -> None:
        nonlocal written
        values = progress_values(progress)
        if values != written and PROGRESS_JSON.write(run, {**values, "at": time.time()}):
            written = values

    write()
    try:
        with repeated("progress", WRITE_SECONDS[run.is_atomic], write):
            yield
    finally:
        write()


def progress_values(progress: Progress) -> dict[str, Any]:
    """Return the progress as JSON values: steps, rows, rate, phase, metrics, each worker's place, rows and time."""
    counts = {name: getattr(progress, name) for name in ("step", "steps", "rows", "rows_in_all", "phase")}
    metrics = {name: value for name, value in progress.last.items() if is_measured(name) and value is not None}
    workers = []
    for rank in sorted(progress.workers):
        world, rows = progress.workers[rank]
        seconds = progress.seconds.get(rank)
        ms = None if seconds is None else round(1e3 * math.fsum(seconds), 3)
        workers.append({"rank": rank, "node": world.node, "device": str(world.device), "rows": rows, "ms": ms})
    return {
        **counts,
        "rows_per_second": float(f"{progress.rows_per_second:.3g}"),
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        "workers": workers,
    }

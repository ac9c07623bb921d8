"""The driver's side of the channel: orders the shape reports, shows progress, remembers the first error."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dp_ray import errors
from dp_ray.errors import WorkerError
from dp_ray.job import Job
from dp_ray.monitor.console import Console, Progressed
from dp_ray.monitor.messages import (
    Beat,
    Failed,
    FaultInjected,
    Interrupted,
    Message,
    Printed,
    Shapes,
    Started,
    Starting,
    Told,
    Waits,
    WorkerReady,
)
from dp_ray.monitor.tensorboard import TensorBoardWriter
from dp_ray.monitor.watchdog import Hang, Watchdog
from dp_ray.plan.split import Split
from dp_ray.replica.world import World
from dp_ray.results.history import Logged
from dp_ray.results.shape_journal import Journal
from dp_ray.results.shape_recorder import Keep, Run
from dp_ray.results.shape_reports import Collector, ReportFile, Rows
from dp_ray.results.shapes import Seen, decode_sizes, shape_lines
from dp_ray.results.shown import measured
from dp_ray.rundir.incidents import IncidentLog, Interruption
from dp_ray.secrets import hide
from dp_ray.task.notices import Measured, Note

INTERRUPT_SECONDS = 10.0


@dataclass(frozen=True)
class Attempt:
    """The workers that one start of the job had."""

    hellos: tuple[WorkerReady, ...]


class NodeControl:
    """What the driver can do to a worker, and ask of a node, that is somewhere else. Here: nothing."""

    def kill(self, hello: WorkerReady) -> None:
        """End a worker that hangs."""

    def is_gone(self, node_id: str) -> bool:
        """Whether a node does not answer any more."""
        return False

    def stop(self) -> None:
        """Ask all workers to stop after the step that they are in, for good."""


class Monitor:
    """Takes in what workers tell: one thread calls `take`, in the order of arrival."""

    def __init__(
        self,
        job: Job,
        split: Split,
        file: ReportFile,
        tensorboard: TensorBoardWriter,
        console: Console,
        shapes: bool,
        save_incidents: Callable[[IncidentLog], None] = lambda incidents: None,
        incidents: IncidentLog | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.attempts: list[Attempt] = []
        self.incidents = incidents or IncidentLog()
        self.node_control = NodeControl()
        self._save_incidents = save_incidents
        self._watchdog = Watchdog(None, ())
        self._hang: Hang | None = None
        self._hung: set[tuple[int, tuple[int, ...]]] = set()
        self._hangs_left = job.retries
        self._moved = time.monotonic()
        self.failed: Failed | None = None
        self.is_stopping = False
        self.is_deaf = False  # nobody listens to the workers any more, so none can be asked for anything
        self._said_nan = False
        self.metrics: dict[str, float] = {}
        self._job = job
        self._file = file
        self._journal = journal
        self._must_keep = False
        self._tensorboard = tensorboard
        self._console = console
        self._print_shapes = shapes
        self._stdout = sys.stdout
        self._collector = Collector(self._on_rows)
        self.progress = Progressed(job.run_name, split.total_steps, split.total_rows)
        self._begun: set[str] = set()
        self._gathering: dict[str, dict[int, WorkerReady]] = {}
        self._early: dict[str, list[Shapes]] = {}
        self._current: str | None = None
        self._decoded: dict[int, tuple[Any, Any]] = {}

    def restore(self, runs: Sequence[tuple[World, Seen, Run]]) -> None:
        """What the run that is carried on had reported of the steps that it finished."""
        self._collector.restore(runs)

    def take(self, message: Message) -> None:
        if isinstance(message, WorkerReady):
            self._worker_ready(message)
        elif isinstance(message, Shapes):
            self._shapes(message)
        elif isinstance(message, Told):
            self._told(message.what)
        elif isinstance(message, Printed):
            for line in message.lines:
                self._console.printed(message.world, line)
        elif isinstance(message, Starting):
            self.begin(message.what)
        elif isinstance(message, Started):
            self._started(message)
        elif isinstance(message, Beat):
            if message.attempt == self._current:
                self._watchdog.take(message)
        elif isinstance(message, Interrupted):
            self._interrupted(message)
        elif isinstance(message, Waits):
            self._console.say(message.what)
        elif isinstance(message, FaultInjected):
            self._fault_injected(message)
        elif self.failed is None or self.failed.kind == WorkerError.__name__:
            self.failed = message  # the first that is no consequence of another worker's end

    def begin(self, what: str) -> None:
        """This goes on from now on, before there is a step."""
        self.progress.begin(what)
        self._console.progress(self.progress, at_once=True)

    def _told(self, what: Any) -> None:
        if isinstance(what, Note):
            self._console.say(what.text)
        elif isinstance(what, Keep):
            self._must_keep = True
        elif isinstance(what, Measured):
            self.metrics = what.metrics
        elif isinstance(what, Logged):
            self.progress.last = what.rows[-1]
            self._tensorboard.add(what.rows)
            for row in what.rows:
                self._say_row(row)

    def _say_row(self, row: dict[str, Any]) -> None:
        """What was measured at an epoch's end or by an evaluation, and the first loss that is no number."""
        told = measured({name: one for name, one in row.items() if name == "epoch_loss" or name.startswith("eval_")})
        if told:
            values = ", ".join(f"{name} {value}" for name, value in told.items())
            self._console.say(f"epoch {row['epoch']}, step {row['step']}: {values}")
        if not math.isfinite(row["loss"]) and not self._said_nan:
            self._said_nan = True
            self._console.say(f"the loss of step {row['step']} is {row['loss']}")

    def tick(self) -> None:
        """Pass on what is complete, show it, and look for a worker that hangs."""
        self._collector.emit()
        if self._must_keep and self._journal:
            self._must_keep = False
            self._journal.save(self._collector)
        self._console.progress(self.progress)
        if hang := self._watchdog.hang():
            self._on_hang(hang)

    def _on_hang(self, hang: Hang) -> None:
        """Replace the workers that hang; WorkerError where that was no use, or is not wanted."""
        what = (hang.step, hang.ranks)
        if what in self._hung or self._hangs_left == 0:
            again = " again" if what in self._hung else ""
            raise WorkerError(f"hangs{again}: {hang} (timeouts.step is {self._job.timeouts.step:g})")
        self._console.say(f"hangs, and is replaced: {hang}")
        self._hung.add(what)
        self._hangs_left -= 1
        self._hang = hang
        for hello in hang.hellos:
            self.node_control.kill(hello)

    def _started(self, message: Started) -> None:
        """A worker of an attempt is about to run its first step; the first to do so ends an interruption."""
        if message.attempt == self._current:
            self._watchdog.start(message.rank, message.step)
        if message.attempt in self._begun:
            return
        self._begun.add(message.attempt)
        self.progress.run(message.step)
        if self.incidents.is_interrupted:
            is_known = self.incidents.interruptions[-1].kind != "driver"
            seconds = round(time.monotonic() - self._moved, 1) if is_known else None
            self.incidents = self.incidents.resumed(message.step, seconds)
            self._console.say(self.incidents.interruptions[-1].resumption)
            self._save_incidents(self.incidents)

    def _interrupted(self, message: Interrupted) -> None:
        hellos = {hello.world.rank: hello for hello in self.attempts[-1].hellos} if self.attempts else {}
        lost = [hellos[rank] for rank in message.ranks if rank in hellos]
        kind, what = message.kind, message.what
        if kind == "worker" and any(self.node_control.is_gone(hello.node_id) for hello in lost):
            kind = "node"
        if self._hang is not None and set(self._hang.ranks) & set(message.ranks):
            kind, what = "hang", str(self._hang).splitlines()[0]
        self._hang = self.failed = None
        self._watchdog = Watchdog(None, ())  # until there are new workers
        nodes = tuple(sorted({hello.world.node for hello in lost}))
        self.interrupt(Interruption(kind, what, self.progress.step, message.ranks, nodes))

    def interrupt(self, by: Interruption) -> None:
        """The workers are being replaced."""
        self.incidents = self.incidents.interrupted(by)
        self._console.say(f"interrupted, {by}")
        self._save_incidents(self.incidents)

    def ask_to_stop(self) -> bool:
        """Have the run stop after the step that it is in, which is kept; False where there is no such step.

        So it is before the first step, in an evaluation, which keeps nothing, and where this was asked before.
        It is called by a signal handler: what may wait is done in a thread.
        """
        runs_a_step = self._current in self._begun and not self.incidents.is_interrupted
        if self.is_deaf or self.is_stopping or not runs_a_step or self._job.task == "evaluate":
            return False
        self.is_stopping = True
        threading.Thread(target=self._stop, name="planned stop", daemon=True).start()
        return True

    def _stop(self) -> None:
        self.node_control.stop()
        says = "stops after this step, which is kept; once more leaves at once"
        self._console.say(says)

    def _fault_injected(self, message: FaultInjected) -> None:
        self._console.say(f"rehearsal: {message.what}, by {message.world}")
        if message.is_the_drivers:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self.is_deaf = True
        self._collector.close()
        self._file.close()
        self._tensorboard.close()

    def _worker_ready(self, hello: WorkerReady) -> None:
        """An attempt begins when all of its workers have said hello."""
        here = self._gathering.setdefault(hello.attempt, {})
        here[hello.world.rank] = hello
        if len(here) < hello.world.world_size:
            return
        hellos = tuple(here[rank] for rank in sorted(here))
        self.attempts.append(Attempt(hellos))
        self._current = hello.attempt
        self.failed = None
        self._watchdog = Watchdog(self._job.timeouts.step, hellos)
        self.incidents = self.incidents.begun(len(hellos))
        self._save_incidents(self.incidents)
        worlds = [one.world for one in hellos]
        where = f"{counted(len(worlds), 'worker')} on {counted(len({world.node for world in worlds}), 'node')}"
        devices = ", ".join(sorted({str(world.device) for world in worlds}))
        self._console.say(f"{where} ({devices})")
        self._collector.begin(worlds)
        self.progress.start(worlds)
        for shapes in self._early.pop(hello.attempt, []):
            self._shapes(shapes)

    def _shapes(self, shapes: Shapes) -> None:
        if shapes.attempt != self._current:
            self._early.setdefault(shapes.attempt, []).append(shapes)
            return
        report = shapes.report
        self._collector.take(report)
        rows = sum(self._collector.rows_of(report.world.rank, run) for run in report.runs)
        self.progress.add(report.world.rank, rows)

    def _on_rows(self, collector: Collector, rows: Rows) -> None:
        block = self._file.write(collector, rows)
        if self._journal:
            self._journal.add(block)
        self._moved = time.monotonic()
        self.progress.advance(
            int(rows.step[-1]) + 1, sum(collector.seen[number].rows for number in rows.seen.tolist())
        )
        if self._print_shapes:
            self._print(self._lines(collector, rows))

    def _print(self, lines: Iterator[str]) -> None:
        """A reader that has seen enough, as in `| head`, ends the printing and not the job."""
        try:
            for line in lines:
                print(line, file=self._stdout)
            self._stdout.flush()
        except BrokenPipeError:
            self._print_shapes = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())
            self._console.say("stdout was closed, no more shapes are printed")

    def _lines(self, collector: Collector, rows: Rows) -> Iterator[str]:
        numbered = zip(rows.step.tolist(), rows.seen.tolist(), strict=True)
        for _, pieces in groupby(numbered, key=lambda pair: pair[0]):
            yield from shape_lines([self._sizes(collector, seen) for _, seen in pieces], self._job.batch_dim)

    def _sizes(self, collector: Collector, number: int) -> tuple[Any, Any]:
        if number not in self._decoded:
            seen = collector.seen[number]
            self._decoded[number] = decode_sizes(seen.input_size), decode_sizes(seen.output_size)
        return self._decoded[number]


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def error_of(failed: Failed, is_verbose: bool = False) -> errors.Error:
    """The error that a worker told, with its rank, its node and its traceback: of a mistake the user's frames alone.

    What dp_ray does not know as a mistake of the user's has all frames.
    """
    kind = getattr(errors, failed.kind, None)
    cls = kind if isinstance(kind, type) and issubclass(kind, errors.Error) else errors.Error
    error = cls(f"{failed.world}: {failed.text}")
    if note := failed.traceback if is_verbose or not failed.kind else failed.frames:
        error.add_note(hide(note))
    return error


@contextmanager
def listening(
    monitor: Monitor, drain: Callable[[], list[Message]], abort: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Feed the monitor in the background; when the block ends, what has been sent by then is taken in.

    Where that fails, as on a full disk, the block is interrupted, or off the main thread aborted, and the failure
    raised.
    """
    ended = threading.Event()
    trouble: list[BaseException] = []
    caller = threading.current_thread()

    def listen() -> None:
        try:
            while True:
                last = ended.is_set()
                for message in drain():
                    monitor.take(message)
                monitor.tick()
                if last:
                    return
        except BaseException as error:
            trouble.append(error)
            monitor.is_deaf = True
            while not ended.is_set():
                abort()
                if caller is threading.main_thread():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                ended.wait(INTERRUPT_SECONDS)  # one that comes just before the block begins to wait goes unheard

    thread = threading.Thread(target=listen, name="monitor", daemon=True)
    try:
        thread.start()
        yield
    finally:
        ended.set()
        _join(thread, trouble)
        if trouble:
            raise trouble[0]


def _join(thread: threading.Thread, trouble: list[BaseException]) -> None:
    """Wait for the thread, whose own interrupt may arrive only here."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            if not trouble:
                raise

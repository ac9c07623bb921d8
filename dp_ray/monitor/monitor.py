"""The driver's side of the channel: follows the workers, shows their progress, and keeps the first error."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dp_ray.job import Job
from dp_ray.monitor.attempts import Attempt, Attempts
from dp_ray.monitor.console import Console, Progressed
from dp_ray.monitor.hangs import Hangs, NodeControl
from dp_ray.monitor.interruptions import Interruptions
from dp_ray.monitor.losses import Losses
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
    TaskMessage,
    Waits,
    WorkerReady,
)
from dp_ray.monitor.shapes import ShapeReports
from dp_ray.monitor.tensorboard import TensorBoardWriter
from dp_ray.plan.split import Split
from dp_ray.replica.world import World
from dp_ray.results.history import Logged
from dp_ray.results.shape_journal import Journal
from dp_ray.results.shape_recorder import Keep, ShardSpan
from dp_ray.results.shape_reports import ReportFile
from dp_ray.results.shapes import Seen
from dp_ray.rundir.incidents import IncidentKind, IncidentLog, Interruption
from dp_ray.task.notices import Measured, Note
from dp_ray.text import counted


class Monitor:
    """Takes in the workers' messages; one thread calls `take`, in the order of arrival."""

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
        self.node_control = NodeControl()
        self.failed: Failed | None = None
        self.is_stopping = False
        self.stopped_by = ""  # the name of the last signal
        self.is_deaf = False  # messages are no longer read, so workers cannot be asked to stop
        self.metrics: dict[str, float] = {}
        self.progress = Progressed(job.run_name, split.total_steps, split.total_rows)
        self._task = job.task
        self._attempts = Attempts()
        self._interruptions = Interruptions(incidents or IncidentLog(), console, save_incidents)
        self._console = console
        self._tensorboard = tensorboard
        self._losses = Losses(console)
        self._hangs = Hangs(job.timeouts.step, job.retries, console)
        self._reports = ShapeReports(file, journal, console, shapes, job.batch_dim, self._on_steps)

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
                self._task_message(what)
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
            case Failed():
                if self.failed is None or self.failed.is_lost_peer:
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

    @property
    def steps_done(self) -> int:
        """How many steps all workers have reported as done."""
        return self.progress.step

    def ask_to_stop(self, signal_name: str = "") -> bool:
        """Ask the run to stop after its current step and keep it; return whether it will.

        It cannot before the first step, during an interruption, in an evaluation, which keeps nothing, or if it was
        asked before. A signal handler calls this, so all that may block runs in a thread.
        """
        self.stopped_by = signal_name
        runs_a_step = self._attempts.runs_a_step and not self.incidents.is_interrupted
        if self.is_deaf or self.is_stopping or not runs_a_step or self._task == "evaluate":
            return False
        self.is_stopping = True
        threading.Thread(target=self._stop, name="planned stop", daemon=True).start()
        return True

    def _stop(self) -> None:
        self.node_control.stop()
        self._console.say("stopping after this step, which is kept; a second Ctrl-C or SIGTERM ends the run at once")

    def close(self) -> None:
        """Finish the shape reports and TensorBoard's files; workers can no longer be asked to stop."""
        self.is_deaf = True
        self._reports.close()
        self._tensorboard.close()

    def _task_message(self, what: Any) -> None:
        match what:
            case Note(text=text):
                self._console.say(text)
            case Keep():
                self._reports.keep()
            case Measured(metrics=metrics):
                self.metrics = metrics
            case Logged(rows=rows):
                self.progress.last = rows[-1]
                self._tensorboard.add(rows)
                for row in rows:
                    self._losses.say(row)

    def _worker_ready(self, worker: WorkerReady) -> None:
        """Begin an attempt once all of its workers are ready."""
        workers = self._attempts.take(worker)
        if not workers:
            return
        self.failed = None
        self._hangs.watch(workers)
        self._interruptions.begin(len(workers))
        worlds = [one.world for one in workers]
        self._console.say(_where(worlds))
        self._reports.begin(worlds)
        self.progress.start(worlds)
        for shapes in self._attempts.kept():
            self._shapes(shapes)

    def _shapes(self, shapes: Shapes) -> None:
        if self._attempts.is_current(shapes.attempt):
            self.progress.add(shapes.report.world.rank, self._reports.take(shapes.report))
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
        lost = self._attempts.workers(message.ranks)
        kind, what = message.kind, message.what
        if kind is IncidentKind.WORKER and any(self.node_control.is_gone(one.node_id) for one in lost):
            kind = IncidentKind.NODE
        if hung := self._hangs.end(message.ranks):
            kind, what = IncidentKind.HANG, hung
        self.failed = None
        nodes = tuple(sorted({one.world.node for one in lost}))
        self._interruptions.interrupt(Interruption(kind, what, self.progress.step, message.ranks, nodes))

    def _fault_injected(self, message: FaultInjected) -> None:
        self._console.say(f"fault injection: {message.what}, by {message.world}")
        if message.is_the_drivers:
            os.kill(os.getpid(), signal.SIGKILL)


def _where(worlds: Sequence[World]) -> str:
    """Where workers run: `2 workers on 1 node (cpu)`."""
    places = f"{counted(len(worlds), 'worker')} on {counted(len({world.node for world in worlds}), 'node')}"
    return f"{places} ({', '.join(sorted({str(world.device) for world in worlds}))})"

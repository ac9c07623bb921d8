"""The driver's side of the channel: follows the workers, shows their progress, and keeps the first error."""

import os
import signal
from collections.abc import Callable, Sequence

from dp_ray.job import Job
from dp_ray.monitor.attempts import Attempt, Attempts
from dp_ray.monitor.console import Console, Progressed
from dp_ray.monitor.hangs import Hangs, NodeControl
from dp_ray.monitor.interruptions import Interruptions, interruption_of
from dp_ray.monitor.job_end import JobEnd
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
from dp_ray.monitor.planned_stop import PlannedStop
from dp_ray.monitor.shapes import ShapeReports
from dp_ray.monitor.task_messages import TaskMessages
from dp_ray.monitor.writers import Writer
from dp_ray.plan.split import Split
from dp_ray.replica.world import World
from dp_ray.results.shape_journal import Journal
from dp_ray.results.shape_recorder import ShardSpan
from dp_ray.results.shape_reports import ReportFile
from dp_ray.results.shapes import Seen
from dp_ray.results.step_time_files import StepTimeWriter
from dp_ray.rundir.incidents import IncidentLog
from dp_ray.text import counted


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

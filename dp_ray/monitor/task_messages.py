"""Takes in what a task sends besides its shape reports: notes, its history, the metrics of an evaluation."""

from collections.abc import Sequence
from typing import Any

from dp_ray.monitor.console import Console, Progressed
from dp_ray.monitor.losses import Losses
from dp_ray.monitor.shapes import ShapeReports
from dp_ray.monitor.writers import Writer
from dp_ray.replica.flops import Flops
from dp_ray.results.history import Logged
from dp_ray.results.shape_recorder import Keep
from dp_ray.task.notices import Measured, Note, ShardsFound, StoppedEarly, WorkerTimes


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

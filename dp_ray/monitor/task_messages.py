"""Takes in what a task sends besides its shape reports: notes, its history, the metrics of an evaluation."""

from collections.abc import Sequence
from typing import Any

from dp_ray.monitor.console import Console, Progressed
from dp_ray.monitor.losses import Losses
from dp_ray.monitor.recent import RecentHistory
from dp_ray.monitor.shapes import ShapeReports
from dp_ray.monitor.writers import Writer
from dp_ray.results.history import Logged
from dp_ray.results.shape_recorder import Keep
from dp_ray.task.notices import Measured, Note, WorkerTimes


class TaskMessages:
    """Takes in what a task sends.

    `metrics` are the last that an evaluation measured, `times` those of the workers' loops, by rank.
    """

    def __init__(
        self,
        reports: ShapeReports,
        tensorboard: Writer,
        progress: Progressed,
        console: Console,
        recent: RecentHistory | None = None,
    ) -> None:
        self.metrics: dict[str, float] = {}
        self.times: dict[int, dict[str, float]] = {}
        self._reports = reports
        self._tensorboard = tensorboard
        self._recent = recent
        self._progress = progress
        self._console = console
        self._losses = Losses(console)

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
            case Logged(rows=rows):
                self._log(rows)

    def _log(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show and write rows of the history."""
        self._progress.last = rows[-1]
        self._tensorboard.add(rows)
        if self._recent is not None:
            self._recent.add(rows)
        for row in rows:
            self._losses.say(row)

    def close(self) -> None:
        """Finish TensorBoard's files, and keep the rows of the history that no checkpoint has."""
        self._tensorboard.close()
        if self._recent is not None:
            self._recent.save()

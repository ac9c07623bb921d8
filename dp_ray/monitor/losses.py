"""Prints a training's losses and metrics on the console."""

import math
import time
from typing import Any

from dp_ray.monitor.console import LINE_SECONDS, Console
from dp_ray.results.short import measured
from dp_ray.text import replay_command

ALL_UP_TO = 20  # lines; after them, one every LINE_SECONDS at most, and the last one


class Losses:
    """Prints an epoch's loss, an evaluation's metrics, and the first loss that is NaN or infinite.

    Of many short epochs not each has a line. A loss that is not finite is told with the command that shows its
    rows, when it is seen and at the end; `run_dir` is for that command.
    """

    def __init__(self, console: Console, run_dir: str) -> None:
        self._console = console
        self._run_dir = run_dir
        self._not_finite: tuple[int, float] | None = None
        self._last = -1
        self._lines = 0
        self._told = 0.0
        self._untold = ""  # the newest line, if it was not printed

    def say(self, row: dict[str, Any]) -> None:
        """Print the values of interest in a row of the history, if there are any."""
        told = measured({name: one for name, one in row.items() if name == "epoch_loss" or name.startswith("eval_")})
        if told:
            values = ", ".join(f"{name} {value}" for name, value in told.items())
            self._tell(f"epoch {row['epoch']}, step {row['step']}: {values}")
        self._last = row["step"]
        if not math.isfinite(row["loss"]) and row["rows"] and self._not_finite is None:
            self._not_finite = row["step"], row["loss"]
            self._warn()

    def end(self) -> None:
        """At the run's end, print its last line, and repeat what was said of a loss, unless nothing came after it."""
        if self._untold:
            self._console.say(self._untold)
        if self._not_finite is not None and self._last > self._not_finite[0]:
            self._warn()

    def _tell(self, line: str) -> None:
        if self._lines >= ALL_UP_TO and time.monotonic() - self._told < LINE_SECONDS:
            self._untold = line
            return
        self._console.say(line)
        self._lines, self._told, self._untold = self._lines + 1, time.monotonic(), ""

    def _warn(self) -> None:
        assert self._not_finite is not None
        step, loss = self._not_finite
        self._console.say(f"warning: the loss of step {step} is {loss}: {replay_command(self._run_dir, step)}")

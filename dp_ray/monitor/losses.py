"""Prints a training's losses and metrics on the console."""

import math
from typing import Any

from dp_ray.monitor.console import Console
from dp_ray.results.short import measured
from dp_ray.text import replay_command


class Losses:
    """Prints an epoch's loss, an evaluation's metrics, and the first loss that is NaN or infinite.

    The latter with the command that shows its rows, when it is seen and at the end; `run_dir` is for that command.
    """

    def __init__(self, console: Console, run_dir: str) -> None:
        self._console = console
        self._run_dir = run_dir
        self._not_finite: tuple[int, float] | None = None
        self._last = -1

    def say(self, row: dict[str, Any]) -> None:
        """Print the values of interest in a row of the history, if there are any."""
        told = measured({name: one for name, one in row.items() if name == "epoch_loss" or name.startswith("eval_")})
        if told:
            values = ", ".join(f"{name} {value}" for name, value in told.items())
            self._console.say(f"epoch {row['epoch']}, step {row['step']}: {values}")
        self._last = row["step"]
        if not math.isfinite(row["loss"]) and row["rows"] and self._not_finite is None:
            self._not_finite = row["step"], row["loss"]
            self._warn()

    def end(self) -> None:
        """At the run's end, repeat what was said of a loss, unless nothing came after it."""
        if self._not_finite is not None and self._last > self._not_finite[0]:
            self._warn()

    def _warn(self) -> None:
        assert self._not_finite is not None
        step, loss = self._not_finite
        self._console.say(f"warning: the loss of step {step} is {loss}: {replay_command(self._run_dir, step)}")

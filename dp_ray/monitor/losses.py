"""Prints a training's losses and metrics on the console."""

import math
from typing import Any

from dp_ray.monitor.console import Console
from dp_ray.results.short import measured


class Losses:
    """Prints an epoch's loss, an evaluation's metrics, and the first loss that is NaN or infinite."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said_nan = False

    def say(self, row: dict[str, Any]) -> None:
        """Print the values of interest in a row of the history, if there are any."""
        told = measured({name: one for name, one in row.items() if name == "epoch_loss" or name.startswith("eval_")})
        if told:
            values = ", ".join(f"{name} {value}" for name, value in told.items())
            self._console.say(f"epoch {row['epoch']}, step {row['step']}: {values}")
        if not math.isfinite(row["loss"]) and not self._said_nan:
            self._said_nan = True
            self._console.say(f"the loss of step {row['step']} is {row['loss']}")

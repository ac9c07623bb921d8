"""What a task sends while it runs, besides its shape reports."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from dp_ray.replica.world import World
from dp_ray.text import counted

Send = Callable[[Any], None]


class Note(NamedTuple):
    """A line for the user."""

    text: str


class StoppedEarly(NamedTuple):
    """The training has ended before its last step: `column` did not improve on `best` in `times` measurements.

    `step` steps are done. `best` is None if the column was never a number.
    """

    step: int
    column: str
    mode: str
    min_delta: float
    best: float | None
    times: int

    @property
    def text(self) -> str:
        """The reason, in a line."""
        each = "epoch" if self.column == "epoch_loss" else "evaluation"
        did = "was never a number" if self.best is None else f"did not improve on {self.best:.6g}"
        return f"stopped early at step {self.step}: {self.column} {did} in {counted(self.times, each)}"

    def to_json(self) -> dict[str, Any]:
        """The values for `result.json`."""
        best = self.best if self.best is not None and math.isfinite(self.best) else None
        values = self._replace(best=best)._asdict()
        return {"step": values.pop("step"), "metric": values.pop("column"), **values, "text": self.text}


class WorkerTimes(NamedTuple):
    """Where the time of a worker's loop went, in seconds by name; sent at the loop's end."""

    rank: int
    seconds: dict[str, float]


class Measured(NamedTuple):
    """The metrics of an evaluation, over the whole dataset."""

    metrics: dict[str, float]


class ShardsFound(NamedTuple):
    """The number of shards that `shards: auto` has found: the first that fits on all workers; sent by rank 0."""

    shards: int


def telling(world: World, send: Send) -> Callable[[str], None]:
    """What sends a line for the user, on rank 0 alone: the other ranks would repeat it."""

    def tell(text: str) -> None:
        if world.rank == 0:
            send(Note(text))

    return tell

"""What a task sends while it runs, besides its shape reports."""

from collections.abc import Callable
from typing import Any, NamedTuple

Send = Callable[[Any], None]


class Note(NamedTuple):
    """A line for the user."""

    text: str


class WorkerTimes(NamedTuple):
    """Where the time of a worker's loop went, in seconds by name; sent at the loop's end."""

    rank: int
    seconds: dict[str, float]


class Measured(NamedTuple):
    """The metrics of an evaluation, over the whole dataset."""

    metrics: dict[str, float]

"""What a task sends while it runs, besides its shape reports."""

from collections.abc import Callable
from typing import Any, NamedTuple

from dp_ray.replica.world import World

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


class ShardsFound(NamedTuple):
    """The number of shards that `shards: auto` has found: the first that fits on all workers; sent by rank 0."""

    shards: int


def telling(world: World, send: Send) -> Callable[[str], None]:
    """What sends a line for the user, on rank 0 alone: the other ranks would repeat it."""

    def tell(text: str) -> None:
        if world.rank == 0:
            send(Note(text))

    return tell

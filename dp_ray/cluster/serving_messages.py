"""What the driver and a worker that serves say to each other, beside the messages of `tasks/wire.py`.

Both sides import this, but it imports nothing of Ray.
"""

from typing import Any, NamedTuple

from dp_ray.tasks.wire import WorkerPlace


class Serves(NamedTuple):
    """A worker says by the channel that it will serve, before it asks for a view. Its `handle` takes messages.

    It is the process of this `name`, in this `slot` of those that were started.
    """

    name: str
    slot: int
    place: WorkerPlace
    handle: Any


class LeaveView(NamedTuple):
    """Leave the process group of the view of this number, and ask the channel for the next view.

    The answer comes first. A worker that is in a later view stays there: it has left already, for a caller that was
    interrupted before it had learned of the later one.
    """

    view: int


class HasFormed(NamedTuple):
    """Say why the group of the view of this number could not be formed; None if it was."""

    view: int

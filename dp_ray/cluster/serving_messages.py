"""What the driver and a worker that serves say to each other, beside the messages of `tasks/wire.py`.

Both sides import this, but it imports nothing of Ray.
"""

import pickle
from typing import Any, NamedTuple

import numpy as np

from dp_ray.engine.ship import IN_LINE_BYTES
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


def framed(value: Any) -> Any:
    """Return a value as bytes, or as a list of bytes and large arrays, which Ray ships in little time.

    Its classes must be ones that can be imported.
    """
    large: list[Any] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_LINE_BYTES:
            return True
        large.append(np.frombuffer(raw, np.uint8))
        return False

    head = pickle.dumps(value, 5, buffer_callback=is_small)
    return [head, *large] if large else head


def unframed(given: Any) -> Any:
    """Return the value that was framed; its large arrays must not be written to."""
    if isinstance(given, bytes):
        return pickle.loads(given)
    return pickle.loads(given[0], buffers=given[1:])

"""What the driver and a worker that serves say to each other, beside the messages of `tasks/wire.py`.

Both sides import this, but it imports nothing of Ray.
"""

import pickle
from typing import Any, NamedTuple

import numpy as np

from dp_ray.engine.world import World
from dp_ray.tasks.wire import IN_LINE_BYTES, WorkerPlace


class Serves(NamedTuple):
    """A worker says by the channel that it serves; `num_workers` do or will. Its `handle` takes messages."""

    rank: int
    num_workers: int
    place: WorkerPlace
    handle: Any


class LeaveGroup(NamedTuple):
    """Leave the process group. So it is known, before another one is formed, who is there."""


class JoinGroup(NamedTuple):
    """Form a process group; the answer is why it could not be formed, None if it was."""

    attempt: str
    world: World
    backend: str
    local_world_size: int


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

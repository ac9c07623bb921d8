"""The channel from the workers to the driver: an actor beside the driver that holds messages until it reads them.

Messages pass through as bytes, so the actor's process imports neither torch nor a user's modules.
"""

import asyncio
import pickle
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

HOLD_SECONDS = 0.25


class Inbox:
    """The actor's body."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._arrived = asyncio.Event()

    async def put(self, message: bytes) -> None:
        self._messages.append(message)
        self._arrived.set()

    async def drain(self) -> list[bytes]:
        """All messages since the last call; waits a moment for the first one."""
        if not self._messages:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), HOLD_SECONDS)
            except TimeoutError:
                return []
        messages, self._messages = self._messages, []
        return messages


def open_inbox() -> Any:
    """An Inbox on the driver's node; it ends with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Inbox).options(num_cpus=0, scheduling_strategy=here, max_concurrency=1000)
    return actor.remote()


def tell(inbox: Any, message: Any, wait: bool = True) -> None:
    """Send a message; with `wait` it has arrived when this returns."""
    sent = inbox.put.remote(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
    if wait:
        ray.get(sent)


def drain(inbox: Any) -> list[Any]:
    """The messages that have arrived, decoded; waits up to HOLD_SECONDS for one."""
    return [pickle.loads(message) for message in ray.get(inbox.drain.remote())]

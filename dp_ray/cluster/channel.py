"""The channel between workers and driver: an actor on the driver's node that holds messages until the driver reads.

Messages are bytes to the actor, so its process imports neither torch nor the user's modules.
"""

import asyncio
import pickle
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dp_ray.cluster.requests import NOTHING, Ask, Request

HOLD_SECONDS = 0.25


class Channel:
    """The actor: it holds the workers' messages, the current request, and who has ended."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._arrived = asyncio.Event()
        self._request = NOTHING
        self._fired: set[int] = set()
        self._ended: dict[str, set[int]] = {}
        self._all_ended = asyncio.Condition()

    async def put(self, message: bytes) -> Ask:
        """Take in a message; the answer is what the workers are asked to do now."""
        self._messages.append(message)
        self._arrived.set()
        return self._request.ask

    async def receive(self) -> list[bytes]:
        """All messages since the last call; waits up to HOLD_SECONDS for the first one."""
        if not self._messages:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), HOLD_SECONDS)
            except TimeoutError:
                return []
        messages, self._messages = self._messages, []
        return messages

    async def request(self, request: Request) -> None:
        """Replace the current request; Ask.END is final, and no later request replaces it."""
        if self._request.ask is not Ask.END:
            self._request = request

    async def requested(self) -> Request:
        """The current request: what the workers are asked to do, and why."""
        return self._request

    async def fire(self, fault: int) -> bool:
        """Whether a fault is still to be injected: true on the first call only."""
        is_first = fault not in self._fired
        self._fired.add(fault)
        return is_first

    async def end(self, attempt: str, rank: int, world_size: int, wait: bool) -> None:
        """Note that a worker has nothing left to run or keep; with `wait`, wait for the attempt's other workers."""
        async with self._all_ended:
            self._ended.setdefault(attempt, set()).add(rank)
            self._all_ended.notify_all()
            if wait:
                await self._all_ended.wait_for(lambda: len(self._ended[attempt]) == world_size)


def open_channel(workers: int = 1) -> Any:
    """Start a Channel on the driver's node, which all `workers` may call at once; it ends with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Channel).options(num_cpus=0, scheduling_strategy=here, max_concurrency=1000 + 2 * workers)
    return actor.remote()


def encoded(message: Any) -> bytes:
    """A message as the bytes that `Channel.put` takes."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def send(channel: Any, message: Any, wait: bool = True) -> None:
    """Send a message; with `wait`, return only once it has arrived."""
    sent = channel.put.remote(encoded(message))
    if wait:
        ray.get(sent)


def receive(channel: Any) -> list[Any]:
    """The messages that have arrived, decoded; waits up to HOLD_SECONDS for one."""
    return [pickle.loads(message) for message in ray.get(channel.receive.remote())]

"""The channel between workers and driver: an actor beside the driver that holds messages until it reads them.

Messages pass through as bytes, so the actor's process imports neither torch nor a user's modules.
"""

import asyncio
import pickle
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

HOLD_SECONDS = 0.25
END = "end"  # the order to stop between two steps and not to start anew: no later order takes its place


class Channel:
    """The actor's body."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._arrived = asyncio.Event()
        self._order: tuple[str, str] = ("", "")
        self._fired: set[int] = set()
        self._ended: dict[str, set[int]] = {}
        self._all_ended = asyncio.Condition()

    async def put(self, message: bytes) -> str:
        """Take a message in; what the workers are asked to do now is the answer."""
        self._messages.append(message)
        self._arrived.set()
        return self._order[0]

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

    async def order(self, what: str, why: str) -> None:
        """Ask the workers, from now on, to `save`, `stop` or END between two steps; or, with "", for nothing."""
        if self._order[0] != END:
            self._order = what, why

    async def ordered(self) -> tuple[str, str]:
        """What the workers are asked to do, and why."""
        return self._order

    async def fire(self, fault: int) -> bool:
        """Whether a fault is still to be brought about: true once."""
        is_first = fault not in self._fired
        self._fired.add(fault)
        return is_first

    async def end(self, attempt: str, rank: int, world_size: int, wait: bool) -> None:
        """A worker has nothing left to run or to keep; with `wait`, until this holds for all."""
        async with self._all_ended:
            self._ended.setdefault(attempt, set()).add(rank)
            self._all_ended.notify_all()
            if wait:
                await self._all_ended.wait_for(lambda: len(self._ended[attempt]) == world_size)


def open_channel(workers: int = 1) -> Any:
    """An Inbox on the driver's node, which may be called by all `workers` at once; it ends with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Channel).options(num_cpus=0, scheduling_strategy=here, max_concurrency=1000 + 2 * workers)
    return actor.remote()


def encoded(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def tell(channel: Any, message: Any, wait: bool = True) -> None:
    """Send a message; with `wait` it has arrived when this returns."""
    sent = channel.put.remote(encoded(message))
    if wait:
        ray.get(sent)


def drain(channel: Any) -> list[Any]:
    """The messages that have arrived, decoded; waits up to HOLD_SECONDS for one."""
    return [pickle.loads(message) for message in ray.get(channel.drain.remote())]

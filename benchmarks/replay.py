"""What many workers send to the driver, replayed by few processes."""

import asyncio
import pickle
from typing import Any

from dp_ray.engine.world import World
from dp_ray.messages import Message, Report, Sizes, WorkerReady
from dp_ray.telemetry.shapes import report_interval, shape_table

MANY = 4_096  # workers
STEPS_A_SECOND = 50
STEPS_IN_A_REPORT = round(STEPS_A_SECOND * report_interval(MANY))
IN_FLIGHT = 64
ATTEMPT = "replay"


class Replay:
    """An actor that stands for some ranks of `world_size`; its messages are made before it is asked for them."""

    def __init__(self, world_size: int, ranks: range, steps: int) -> None:
        worlds = [World(rank, world_size) for rank in ranks]
        self.in_flight = min(IN_FLIGHT, len(ranks))  # a worker waits for its message before it sends the next
        self.ready_messages = [_packed(WorkerReady(ATTEMPT, world, 0, ())) for world in worlds]
        self.reports = [
            _packed(_report(world, first)) for first in range(0, steps, STEPS_IN_A_REPORT) for world in worlds
        ]

    async def ready(self, channel: Any) -> None:
        await self._put(channel, self.ready_messages)

    async def send(self, channel: Any) -> None:
        await self._put(channel, self.reports)

    async def _put(self, channel: Any, messages: list[bytes]) -> None:
        for first in range(0, len(messages), self.in_flight):
            await asyncio.gather(*(channel.put.remote(item) for item in messages[first : first + self.in_flight]))


def _packed(message: Message) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def _report(world: World, first_step: int) -> Report:
    """One shard a step, alike in all steps."""
    end, sizes = first_step + STEPS_IN_A_REPORT, Sizes("[4, 5]", "[4, 2]", 4)
    shapes = shape_table(world, [(step, world.rank, sizes, 0.1) for step in range(first_step, end)])
    return Report(world, end - 1, shapes, attempt=ATTEMPT)

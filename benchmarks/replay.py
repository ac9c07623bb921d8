"""What many workers send to the driver, replayed by few processes."""

import asyncio
import pickle
from typing import Any

import numpy as np

from dp_ray.engine.world import World
from dp_ray.messages import Message, Report, ShardSpan, Sizes, WorkerReady
from dp_ray.telemetry.shapes import report_interval

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
    """One shard a step, alike in all steps; only the first report has to say what it looked like."""
    seen = {0: Sizes("[4, 5]", "[4, 2]", 4)} if first_step == 0 else {}
    times = np.full(STEPS_IN_A_REPORT, 0.1, np.float32)
    span = ShardSpan(first_step, STEPS_IN_A_REPORT, world.rank, 0, times)
    return Report(world, first_step + STEPS_IN_A_REPORT - 1, seen, [span], attempt=ATTEMPT)

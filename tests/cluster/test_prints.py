"""What user code prints on a worker, told under the rank that it had; the channel's class, without Ray."""

import asyncio
import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dp_ray.cluster.channel import Channel
from dp_ray.cluster.prints import forwarded_prints
from dp_ray.engine.world import World


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The channel's class in a thread's loop, called as Ray calls an actor."""
    loop, here = asyncio.new_event_loop(), Channel()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def put(*args: Any, **named: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(here.put(*args, **named), loop)

    def received() -> list[Any]:
        return [pickle.loads(one) for one in asyncio.run_coroutine_threadsafe(here.receive(), loop).result()]

    monkeypatch.setattr(ray, "get", lambda sent: sent.result())
    yield SimpleNamespace(put=SimpleNamespace(remote=put), received=received)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_line_is_told_under_the_rank_that_its_worker_has_as_it_is_printed(channel: Any) -> None:
    with forwarded_prints(channel, 0, False, World(2, 3)) as lines:
        print("as rank 2")
        lines.move(World(1, 2))
        print("as rank 1\nand again")
        lines.move(World(0, 2))
        lines.move(World(2, 3))
        print("as rank 2, later", end="")
    told = [(one.world.rank, line) for one in channel.received() for line in one.lines]
    assert told == [(2, "as rank 2"), (1, "as rank 1"), (1, "and again"), (2, "as rank 2, later")]

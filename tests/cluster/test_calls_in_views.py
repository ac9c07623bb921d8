"""What a worker that serves parallel modules hears by its heartbeat: when it leaves its view, and whom it tells."""

import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dp_ray.cluster import heartbeat
from dp_ray.cluster.channel import Ask, WorkerConfig
from dp_ray.cluster.internals.train_worker import messages
from dp_ray.engine.world import World
from dp_ray.messages import Beat, MayLeave
from dp_ray.storage import Storage
from tests.support.within import within


class Channel:
    """Takes what a worker sends; each beat is answered by `asks`."""

    def __init__(self, asks: Ask) -> None:
        self.asks, self.told = asks, list[Any]()
        self.put = self

    def remote(self, sent: bytes, *_: Any, **__: Any) -> Ask:
        message = pickle.loads(sent)
        if not isinstance(message, Beat):
            self.told.append(message)
        return self.asks


@pytest.fixture
def on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=None))
    monkeypatch.setattr(heartbeat, "beat_interval", lambda _: 0.01)
    monkeypatch.setattr(heartbeat, "cut_groups", lambda: None)


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.usefixtures("on_ray")
def test_that_others_come_is_told_once_also_if_it_is_heard_while_the_group_forms(is_early: bool) -> None:
    channel = Channel(Ask.LEAVE if is_early else Ask.NOTHING)
    with heartbeat.Heartbeat(WorkerConfig(channel, False), "a-1-1", World(1, 2), Storage(""), None) as worker:
        assert within(60, lambda: worker.is_to_rejoin is is_early)
        calls = worker.take_calls()
        messages.put(("call", messages))  # type: ignore[arg-type]
        assert next(calls)[0] == "call"
        channel.asks = Ask.LEAVE
        assert within(60, lambda: MayLeave("a-1-1") in channel.told)
        time.sleep(0.1)  # more beats
        assert channel.told == [MayLeave("a-1-1")]
        channel.asks = Ask.LEAVE_NOW
        assert list(calls) == [], "of a broken view it leaves at once"

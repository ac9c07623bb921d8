"""What Ray Train's controller is told to do after a failure, and what the driver hears; the channel without Ray."""

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dp_ray.cluster import policies
from dp_ray.cluster.channel import STOP, Channel, Terms
from dp_ray.cluster.decisions import Restart, StartFailed, StartTrouble, WorkersFailed
from dp_ray.cluster.membership import Left, Member
from dp_ray.cluster.policies import RestartPolicy
from dp_ray.messages import Ending, GaveUp, Interrupted, Note, WorkerExit
from dp_ray.rundir.incidents import IncidentKind

KILLED = "its process was killed"


class Played:
    """A channel in this process, called as the actor is, in one event loop; a call is its own answer."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner, self.there = runner, Channel()

    def play(self, play: Callable[[Channel], Coroutine[Any, Any, None]]) -> None:
        self._runner.run(play(self.there))

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.there, name)
        return SimpleNamespace(remote=lambda *args, **named: self._runner.run(call(*args, **named)))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    with asyncio.Runner() as runner:
        yield Played(runner)


def told(channel: Played) -> list[Any]:
    return [pickle.loads(message) for message in channel.receive.remote(wait=False)]


def died(*slots: int) -> WorkersFailed:
    return WorkersFailed({}, dict.fromkeys(slots, KILLED))


def in_views(retries: int = 3) -> Callable[[Channel], Coroutine[Any, Any, None]]:
    """Begin a job that has lost the worker in slot 0, so that those in slots 1 and 2 have the ranks 0 and 1."""

    async def play(channel: Channel) -> None:
        await channel.begin(Terms(1, 3, retries=retries, outlives=retries), [])
        for names, lost in (("abc", False), ("bc", True)):
            members = [Member(name, "abc".index(name)) for name in names]
            await asyncio.gather(*(channel.ask(1, "group", member, 2, lost, 3) for member in members))
            if not lost:
                await channel.lose(1, (0,), KILLED)

    return play


def test_where_nobody_is_left_the_lost_are_named_by_their_ranks_in_the_view(channel: Played) -> None:
    """The worker in slot 0 is new, and took no part yet."""
    channel.play(in_views())
    assert told(channel) == [Left((0,), KILLED)]
    assert RestartPolicy(channel).on_failure(died(0, 1, 2)) is Restart.RESTART
    (message,) = told(channel)
    assert isinstance(message, Interrupted) and message.ranks == (0, 1)


def test_a_job_that_is_given_up_names_ranks_of_its_view(channel: Played) -> None:
    channel.play(in_views(retries=0))
    told(channel)
    assert RestartPolicy(channel).on_failure(died(1)) is Restart.RESTART
    assert told(channel) == [GaveUp({0: KILLED})]


def test_survivors_go_on_to_keep_what_they_hold_where_the_user_stops_the_run(channel: Played) -> None:
    """Nobody comes for the lost one. Once all have left to stop, nobody could go on."""
    channel.play(in_views())
    channel.request.remote(STOP)
    told(channel)
    policy = RestartPolicy(channel)
    assert policy.on_failure(died(2)) is Restart.REPLACE
    assert told(channel) == [Left((1,), KILLED)]
    assert policy.with_room({2: "node"}) == set()
    assert channel.ask.remote(1, "group", Member("b", 1), 4, True, 3) is not None
    assert channel.end.remote(3, 0, 1, False, True) is False
    assert policy.on_failure(died(1)) is Restart.RESTART
    assert [type(message) for message in told(channel)] == [GaveUp]


@pytest.mark.parametrize(("keeps", "do"), [(True, Restart.RESTART), (False, Restart.REPLACE)])
def test_who_is_lost_after_all_have_left_to_stop_is_not_waited_for(channel: Played, keeps: bool, do: Restart) -> None:
    channel.play(in_views())
    channel.request.remote(STOP)

    async def leave(there: Channel) -> None:
        assert await asyncio.gather(*(there.end(2, rank, 2, False, keeps) for rank in (0, 1))) == [not keeps] * 2

    channel.play(leave)
    assert RestartPolicy(channel).on_failure(died(2)) is do


def test_a_run_that_needs_all_its_workers_ends_where_one_is_lost_as_it_stops(channel: Played) -> None:
    channel.play(in_views())
    channel.there._terms = replace(channel.there._terms, needs_all=True)
    channel.request.remote(STOP)
    told(channel)
    assert RestartPolicy(channel).on_failure(died(2)) is Restart.RESTART
    assert [type(message) for message in told(channel)] == [GaveUp]


def test_a_loss_of_who_takes_no_part_leaves_a_job_alone_whose_workers_restart(channel: Played) -> None:
    """As one of a single worker, among the workers of a session."""
    channel.begin.remote(Terms(1, 1, retries=0), [])
    channel.next_job.remote(0, "group", 0, 3)
    policy = RestartPolicy(channel)
    for slot in (2, 1):
        assert policy.on_failure(died(slot)) is Restart.REPLACE
        (note,) = told(channel)
        assert isinstance(note, Note) and note.text.startswith("a worker that took no part is lost")
    assert policy.on_failure(StartFailed(StartTrouble.LOST, KILLED)) is Restart.REPLACE
    policy.on_more(died(1))
    policy.on_more(WorkersFailed({0: WorkerExit(Ending.RAISED, "oh", True)}, {1: KILLED}))
    assert told(channel) == [], "what waits to be replaced is known, and the rest is told when all start again"
    assert policy.on_failure(died(0)) is Restart.RESTART
    assert told(channel) == [GaveUp({0: KILLED})]


def test_of_all_that_were_lost_those_of_the_job_are_named(channel: Played) -> None:
    for retries in (0, 1):
        channel.begin.remote(Terms(1 + retries, 2, retries=retries), [])
        assert RestartPolicy(channel).on_failure(died(1, 2)) is Restart.RESTART
        (message,) = told(channel)
        assert message == (Interrupted(IncidentKind.WORKER, KILLED, (1,)) if retries else GaveUp({1: KILLED}))


def test_with_gpus_all_start_again_and_no_rank_of_the_job_is_named(channel: Played) -> None:
    channel.there._keeps_idle = False
    channel.begin.remote(Terms(1, 1, retries=0), [])
    assert RestartPolicy(channel).on_failure(died(2)) is Restart.RESTART
    (message,) = told(channel)
    assert isinstance(message, Interrupted)
    assert (message.ranks, message.what) == ((), f"a worker that the job does not take was lost: {KILLED}")


@pytest.mark.parametrize(("needs_all", "others"), [(False, "go on without it"), (True, "wait for it")])
def test_where_no_node_has_room_it_is_said_once_what_the_others_do(
    channel: Played, monkeypatch: pytest.MonkeyPatch, needs_all: bool, others: str
) -> None:
    monkeypatch.setattr(policies, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(policies, "draining_nodes", set)
    monkeypatch.setattr(ray, "nodes", list)
    channel.play(in_views())
    channel.there._terms = replace(channel.there._terms, needs_all=needs_all)
    policy = RestartPolicy(channel)
    assert policy.on_failure(died(2)) is Restart.REPLACE
    told(channel)
    assert policy.with_room({2: "node"}) == policy.with_room({2: "node"}) == set()
    assert [note.text for note in told(channel)] == [f"no node has room for another worker now: the others {others}"]

"""What Ray Train's controller is told to do after a failure, and what the driver hears; the channel without Ray."""

import asyncio
import pickle
from typing import Any

import pytest
import ray

from dp_ray.cluster.channel import Channel, Terms
from dp_ray.cluster.decisions import Restart, StartFailed, StartTrouble, WorkersFailed
from dp_ray.cluster.membership import Left, Member
from dp_ray.cluster.policies import RestartPolicy
from dp_ray.messages import Ending, GaveUp, Interrupted, Note, WorkerExit
from dp_ray.rundir.incidents import IncidentKind
from tests.cluster.test_scaling_decision import Handle

KILLED = "its process was killed"


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Channel:
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    return Channel()


def told(channel: Channel) -> list[Any]:
    return [pickle.loads(message) for message in asyncio.run(channel.receive(wait=False))]


def died(*slots: int) -> WorkersFailed:
    return WorkersFailed({}, dict.fromkeys(slots, KILLED))


async def in_views(channel: Channel, retries: int = 3) -> None:
    """Begin a job that has lost the worker in slot 0, so that those in slots 1 and 2 have the ranks 0 and 1."""
    await channel.begin(Terms(1, 3, retries=retries, goes_on=True), [])
    for names, lost in (("abc", False), ("bc", True)):
        members = [Member(name, "abc".index(name)) for name in names]
        await asyncio.gather(*(channel.ask(1, "group", member, 2, lost, 3) for member in members))
        if not lost:
            await channel.lose(1, (0,), KILLED)


def test_where_nobody_is_left_the_lost_are_named_by_their_ranks_in_the_view(channel: Channel) -> None:
    """The worker in slot 0 is new, and took no part yet."""
    asyncio.run(in_views(channel))
    assert told(channel) == [Left((0,), KILLED)]
    assert RestartPolicy(Handle(channel)).on_failure(died(0, 1, 2)) is Restart.RESTART
    (message,) = told(channel)
    assert isinstance(message, Interrupted) and message.ranks == (0, 1)


def test_a_job_that_is_given_up_names_ranks_of_its_view(channel: Channel) -> None:
    asyncio.run(in_views(channel, retries=0))
    told(channel)
    assert RestartPolicy(Handle(channel)).on_failure(died(1)) is Restart.RESTART
    assert told(channel) == [GaveUp({0: KILLED})]


def test_a_loss_of_who_takes_no_part_leaves_a_job_alone_whose_workers_restart(channel: Channel) -> None:
    """As one of a single worker, among the workers of a session."""
    asyncio.run(channel.begin(Terms(1, 1, retries=0), []))
    asyncio.run(channel.next_job(0, "group", 0, 3))
    policy = RestartPolicy(Handle(channel), keeps_idle=True)
    for slot in (2, 1):
        assert policy.on_failure(died(slot)) is Restart.REPLACE
        (note,) = told(channel)
        assert isinstance(note, Note) and note.text.startswith("a worker that took no part is lost")
    assert policy.on_failure(StartFailed(StartTrouble.LOST, KILLED)) is Restart.REPLACE
    assert policy.on_more(died(1)) is Restart.REPLACE
    assert policy.on_more(WorkersFailed({0: WorkerExit(Ending.RAISED, "oh", True)}, {1: KILLED})) is None
    assert told(channel) == [note]
    assert policy.on_failure(died(0)) is Restart.RESTART
    assert told(channel) == [GaveUp({0: KILLED})]


def test_of_all_that_were_lost_those_of_the_job_are_named(channel: Channel) -> None:
    for retries in (0, 1):
        asyncio.run(channel.begin(Terms(1 + retries, 2, retries=retries), []))
        assert RestartPolicy(Handle(channel), keeps_idle=True).on_failure(died(1, 2)) is Restart.RESTART
        (message,) = told(channel)
        assert message == (Interrupted(IncidentKind.WORKER, KILLED, (1,)) if retries else GaveUp({1: KILLED}))


def test_with_gpus_all_start_again_and_no_rank_of_the_job_is_named(channel: Channel) -> None:
    asyncio.run(channel.begin(Terms(1, 1, retries=0), []))
    assert RestartPolicy(Handle(channel)).on_failure(died(2)) is Restart.RESTART
    (message,) = told(channel)
    assert isinstance(message, Interrupted)
    assert (message.ranks, message.what) == ((), f"a worker that the job does not take was lost: {KILLED}")

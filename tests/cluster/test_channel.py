"""The channel hands jobs to workers, one after another; the actor's class, without Ray."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from dp_ray.cluster.channel import NOTHING, STOP, Ask, Channel, Request, Terms
from dp_ray.cluster.membership import Member, View

RESIZE = Request(Ask.RESTART, "there is room for more")


def played(play: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(play, 10))


async def soon(waiting: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """The task of a call that is waiting by now."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def test_a_worker_waits_for_the_job_after_its_last_one() -> None:
    async def play() -> None:
        channel = Channel()
        first = await soon(channel.next_job(0))
        assert not first.done()
        await channel.begin(Terms(1, 2), ["one"])
        assert await first == (Terms(1, 2), ["one"])
        second = await soon(channel.next_job(1))
        await channel.finish(1)
        assert not second.done()
        await channel.begin(Terms(2, 2), ["two"])
        assert await second == (Terms(2, 2), ["two"])

    played(play())


def test_workers_that_start_during_a_job_join_it_and_after_it_wait() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(7, 2), ["job"])
        assert await channel.next_job(0) == (Terms(7, 2), ["job"])
        await channel.give_up(7, b"gave up")
        assert not (await soon(channel.next_job(0))).done()
        assert await channel.receive() == [b"gave up"]

    played(play())


def test_workers_may_have_a_last_word_once_their_job_has_finished() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 2), [])
        await channel.finish(1)
        await channel.put(b"finished", 1)
        assert await channel.receive(wait=False) == [b"finished"]
        await channel.put(b"late", 1)
        await channel.begin(Terms(2, 2), [])
        await channel.put(b"too late", 1)
        assert await channel.receive(wait=False) == []

    played(play())


def test_a_job_that_has_ended_is_not_given_up() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 2), [])
        await channel.finish(1)
        await channel.give_up(1, b"late")
        assert await channel.receive(wait=False) == []

    played(play())


def test_idle_workers_leave_for_others_and_at_the_end_but_not_during_a_job() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 1), [])
        third = await soon(channel.next_job(1))  # a worker that the job does not need
        await channel.request(RESIZE)
        assert not third.done(), "it would end the group under the job's workers"
        await channel.finish(1)
        assert await third is Ask.RESTART
        await channel.request(NOTHING)
        last = await soon(channel.next_job(1))
        await channel.close()
        assert await last is Ask.STOP

    played(play())


def test_a_users_stop_holds_for_one_job_only() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 1), [])
        await channel.request(STOP, 1)
        await channel.request(RESIZE)
        assert (await channel.state())[0] == STOP, "the user's stop is final"
        await channel.finish(1)
        assert (await channel.state())[0] == NOTHING
        await channel.begin(Terms(2, 1), [])
        await channel.request(STOP, 1)
        assert (await channel.state())[0] == NOTHING, "a late stop of the last job"

    played(play())


def test_a_job_gets_no_messages_of_the_idle_time_but_how_far_the_start_is() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.put(b"a worker was lost while idle")
        await channel.put_phase(b"starting 2 workers")
        await channel.begin(Terms(1, 2), [])
        assert await channel.receive() == [b"starting 2 workers"]
        await channel.next_job(0)
        await channel.finish(1)
        await channel.begin(Terms(2, 2), [])
        assert await channel.receive(wait=False) == []

    played(play())


def test_workers_of_a_job_that_was_given_up_reach_no_other_job() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 1), ["one"])
        assert await channel.next_job(0, "old") == (Terms(1, 1), ["one"])
        await channel.give_up(1, b"gave up")
        assert await channel.receive() == [b"gave up"]
        await channel.begin(Terms(2, 2), ["two"])
        await channel.put(b"late", 1)
        assert await channel.receive(wait=False) == []
        old = await soon(channel.next_job(1, "old"))
        assert not old.done(), "this worker is about to be ended"
        assert await channel.next_job(0, "new") == (Terms(2, 2), ["two"])
        await channel.put(b"of the second job", 2)
        assert await channel.receive() == [b"of the second job"]
        await channel.close()
        assert await old is Ask.STOP

    played(play())


def test_workers_meet_at_the_store_of_their_own_attempt() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 1), [])
        assert isinstance(await channel.ask(1, "group", Member("a", 0), -1, False, 1), View)
        waiting = await soon(channel.store("b", 1, 60.0))
        await channel.set_store("a", "host", 1)
        assert not waiting.done()
        await channel.set_store("b", "host", 2)
        assert await waiting == ("host", 2)
        assert await channel.store("c", 1, 0.01) is None, "rank 0 stands still"
        await channel.set_store("c", "host", 3)
        assert await channel.store("c", 1, 0.01) == ("host", 3)

    played(play())


def test_who_listens_is_woken_by_the_end() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 2), [b"keys"])
        await channel.receive()
        listening = await soon(channel.receive())
        await channel.finish(1)
        assert await listening == []

    played(play())


def test_what_workers_compute_on_is_told_to_the_next_ones_of_their_job_alone() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 2), [])
        await channel.learn(1, kind="one kind")
        await channel.learn(1, avoided=("b",))
        await channel.learn(1, avoided=("b", "c"))
        await channel.learn(1, broken=("a",))
        of_job = Terms(1, 2, kind="one kind", avoided=("b", "c"), broken=("a",))
        assert await channel.next_job(0) == (of_job, []) and (await channel.state())[1] == of_job
        await channel.finish(1)
        await channel.learn(1, avoided=("d",))
        await channel.learn(1, broken=("d",))
        await channel.begin(Terms(2, 2), [])
        await channel.learn(1, kind="late")
        assert (await channel.state())[1] == Terms(2, 2)

    played(play())


def test_a_further_worker_gets_no_job_that_takes_no_more_and_the_next_one_waits_for_it() -> None:
    async def play() -> None:
        channel = Channel()
        alone, shrinks, all_of_three = Terms(1, 3), Terms(2, 3, outlives=3.0), Terms(3, 3)
        await channel.begin(alone, [])
        assert [await channel.next_job(0, "group", slot, 2) for slot in (0, 1)] == [(alone, [])] * 2
        further = await soon(channel.next_job(0, "group", 2, 3))
        assert not further.done()
        await channel.finish(1)
        await channel.begin(shrinks, [])
        assert await further == (shrinks, [])
        assert await channel.next_job(0, "group", 3, 4) == (shrinks, [])
        await channel.finish(2)
        await channel.begin(all_of_three, [])
        first = [await soon(channel.ask(3, "group", Member(name, at), -1, False, 2)) for at, name in enumerate("ab")]
        assert not any(one.done() for one in first)
        view = await channel.ask(3, "group", Member("c", 2), -1, False, 3)
        assert isinstance(view, View) and len(view.members) == 3, "of four, since it takes three"
        assert await asyncio.gather(*first) == [view] * 2

    played(play())

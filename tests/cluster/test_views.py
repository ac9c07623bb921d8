"""The channel makes views for a job whose workers go on where others are lost; the actor's class, without Ray."""

import asyncio
import math
import pickle
from collections.abc import Coroutine
from typing import Any

import pytest

from dp_ray.cluster import channel as module
from dp_ray.cluster.channel import OUT, STOP, Ask, Channel, Terms
from dp_ray.cluster.membership import Left, Loss, Member, View
from tests.cluster.test_channel import played, soon

A, B, C = (Member(name, slot, "node") for slot, name in enumerate("abc"))
NEW = Member("new", 1, "node")


def asks(
    channel: Channel, member: Member, progress: int = -1, lost: bool = False
) -> Coroutine[Any, Any, View | str | None]:
    return channel.ask(1, "group", member, progress, lost, 3)


def members_of(view: Any) -> tuple[Member, ...]:
    assert isinstance(view, View)
    return view.members


async def begun(**terms: Any) -> Channel:
    """A channel whose job runs in its first view."""
    channel = Channel()
    await channel.begin(Terms(**{"number": 1, "workers": 3, "outlives": 3, **terms}), ["job"])
    views = await asyncio.gather(*(asks(channel, member) for member in (C, A, B)))
    assert [members_of(view) for view in views] == [(A, B, C)] * 3
    return channel


async def told(channel: Channel) -> list[Any]:
    """What the driver hears, but for beats."""
    return [pickle.loads(message) for message in await channel.receive(wait=False) if message]


async def beat(channel: Channel, member: Member, view: int) -> Ask:
    return await channel.put(b"", 1, view, member.name)


def test_rows_of_a_worker_that_was_left_out_are_not_taken_for_newer_ones() -> None:
    async def play() -> None:
        channel = await begun()
        await channel.put(pickle.dumps("rows"), 1, name=B.name)
        await channel.exclude(1, B.name, "silent")
        await channel.put(pickle.dumps("late rows"), 1, name=B.name)
        await channel.put(pickle.dumps("rows of another"), 1, name=A.name)
        assert [message for message in await told(channel) if isinstance(message, str)] == ["rows", "rows of another"]

    played(play())


def test_survivors_get_the_next_view_once_all_that_live_have_asked() -> None:
    async def play() -> None:
        channel = await begun()
        assert await beat(channel, A, 1) is Ask.NOTHING
        first = await soon(asks(channel, A, 6, lost=True))
        assert await beat(channel, C, 1) is Ask.LEAVE_NOW
        assert not first.done()
        second = await soon(asks(channel, C, 8, lost=True))
        assert not second.done(), "nobody knows that the third one is dead"
        assert await channel.survey(1, (1,)) == Loss((1,), 1)
        await channel.lose(1, (1,), "killed")
        assert await first == await second == View(2, (A, C))
        assert await beat(channel, B, 1) is Ask.END
        assert await asks(channel, B, 8) == OUT

    played(play())


def test_a_newcomer_is_taken_in_after_a_step_of_all() -> None:
    async def play() -> None:
        channel = await begun()
        await channel.lose(1, (1,), "killed")
        await asyncio.gather(asks(channel, A, 2, lost=True), asks(channel, C, 2, lost=True))
        newcomer = await soon(asks(channel, NEW))
        assert await beat(channel, A, 2) is Ask.LEAVE
        kept = await soon(channel.end(2, 0, 2, False, False))
        assert not kept.done()
        assert await channel.end(2, 1, 2, False, False) and await kept
        views = await asyncio.gather(asks(channel, C, 4), asks(channel, A, 4))
        assert [members_of(view) for view in [*views, await newcomer]] == [(A, C, NEW)] * 3

    played(play())


@pytest.mark.parametrize("is_kept", [True, False])
def test_all_of_a_view_stop_for_the_user_only_if_rank_0_has_kept_the_work(is_kept: bool) -> None:
    async def play() -> None:
        channel = await begun()
        await channel.request(STOP)
        assert await beat(channel, A, 1) is Ask.STOP
        answers = await asyncio.gather(*(channel.end(1, rank, 3, False, is_kept or rank > 0) for rank in (2, 0, 1)))
        assert answers == [not is_kept] * 3

    played(play())


def test_all_that_waits_ends_when_the_view_breaks() -> None:
    async def play() -> None:
        channel = await begun()
        through = await soon(channel.end(1, 0, 3, True))
        leaves = await soon(channel.end(1, 1, 3, False, True))
        store = await soon(channel.store("attempt", 1, 60.0))
        await channel.lose(1, (2,), "killed")
        assert await through is True and await leaves is True and await store is None

    played(play())


@pytest.mark.parametrize("leaves_first", [True, False])
def test_who_waits_for_the_end_goes_on_with_those_that_left_for_a_newcomer(leaves_first: bool) -> None:
    async def play() -> None:
        channel = await begun()
        leaving, ending = channel.end(1, 0, 3, False, False), channel.end(1, 1, 3, True)
        first, second = (leaving, ending) if leaves_first else (ending, leaving)
        waits = [await soon(first), await soon(second)]
        assert not any(each.done() for each in waits), "the third one is at work yet"
        assert await channel.end(1, 2, 3, not leaves_first) is True
        assert await asyncio.gather(*waits) == [True, True]
        views = await asyncio.gather(*(asks(channel, member, 8) for member in (A, B, C)))
        assert views == [View(2, (A, B, C))] * 3

    played(play())


def test_nobody_goes_on_after_all_were_through_or_are_dead() -> None:
    async def play() -> None:
        channel = await begun()
        assert await asyncio.gather(*(channel.end(1, rank, 3, True) for rank in range(3))) == [False] * 3
        assert await channel.survey(1, (1,)) is None, "the others may have left"
        other = await begun()
        assert await other.survey(1, (0, 1, 2)) is None
        assert await other.survey(1, (7,)) == Loss((), 0)

    played(play())


def test_an_asking_worker_hears_that_the_job_has_ended() -> None:
    async def play() -> None:
        channel = await begun()
        newcomer = await soon(asks(channel, NEW))
        await channel.finish(1)
        assert await newcomer is None

    played(play())


def test_workers_that_were_all_started_anew_begin_anew_and_the_old_ones_are_out() -> None:
    async def play() -> None:
        channel = await begun()
        assert await channel.has_views(1, "group") and not await channel.has_views(1, "later")
        old = await soon(asks(channel, A, 4, lost=True))
        view = await channel.ask(1, "later", Member("x", 0), -1, False, 1)
        assert isinstance(view, View) and view.number == 1
        assert await old == OUT
        assert await asks(channel, C, 4) == OUT

    played(play())


@pytest.mark.parametrize("ends", ["all started anew", "another job"])
def test_who_waited_in_vain_says_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """The call of a worker that was killed while it waited goes on in the channel."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)

    async def play() -> None:
        channel = await begun()
        old = await soon(asks(channel, A, 4, lost=True))
        if ends == "another job":
            await channel.begin(Terms(2, 3, outlives=3), ["job"])
        else:
            assert await channel.ask(1, "later", Member("x", 0), -1, False, 1) is not None
        assert await old == (None if ends == "another job" else OUT)
        assert await told(channel) == []

    played(play())


def test_a_member_without_a_sign_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)

    async def play() -> None:
        channel = await begun()
        first = await soon(asks(channel, A, 6, lost=True))
        channel._heard[B.name] -= 10.0
        while not await channel.is_out(B.name):
            assert await beat(channel, C, 1) is Ask.LEAVE_NOW
            await asyncio.sleep(0.02)
        assert not first.done(), "one that computes gives signs"
        assert await asks(channel, C, 6, lost=True) == View(2, (A, C))

    played(play())


def test_a_member_that_computes_for_longer_than_a_step_may_take_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives signs all the while, and is told to end its process then."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)

    async def play() -> None:
        channel = await begun(rejoin=60.0, step=0.5)
        asking = [await soon(asks(channel, member, 6, lost=True)) for member in (A, C)]
        while not all(one.done() for one in asking):
            assert await beat(channel, B, 1) in (Ask.LEAVE_NOW, Ask.END)
            await asyncio.sleep(0.05)
        assert [await one for one in asking] == [View(2, (A, C))] * 2
        assert await beat(channel, B, 1) is Ask.END and await channel.is_out(B.name)
        assert not await channel.is_out(A.name)

    played(play())


def test_a_job_that_needs_all_its_workers_has_no_view_of_fewer() -> None:
    async def play() -> None:
        channel = await begun(needs_all=True)
        await channel.lose(1, (1,), "killed")
        asking = [await soon(asks(channel, member, 6, lost=True)) for member in (A, C)]
        assert not any(one.done() for one in asking)
        newcomer = await soon(asks(channel, NEW))
        assert [await one for one in [*asking, newcomer]] == [View(2, (A, C, NEW))] * 3

    played(play())


async def next_view(channel: Channel, *members: Member) -> View | str | None:
    views = await asyncio.gather(*(asks(channel, member, 6, lost=True) for member in members))
    assert views == views[:1] * len(views)
    return views[0]


@pytest.mark.parametrize("dies", ["after", "before the next view", "before"])
def test_a_silent_member_is_told_once_however_it_ends(monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    """One that hangs has been silent for long when it is killed, so that the others may leave it out before."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)

    async def play() -> None:
        channel = await begun()
        silent, killed = Left((1,), "it gave no sign for 10 s (timeouts.rejoin)"), Left((1,), "killed")
        channel._heard[B.name] -= 10.0
        if dies == "before":
            await channel.lose(1, (1,), "killed")
        elif dies == "before the next view":
            assert await beat(channel, C, 1) is Ask.NOTHING
            first = await soon(asks(channel, A, 6, lost=True))
            while not await channel.is_out(B.name):
                assert await beat(channel, C, 1) is Ask.LEAVE_NOW
                await asyncio.sleep(0.02)
            assert await told(channel) == [silent]
            assert not first.done()
            assert await channel.survey(1, (1,)) == Loss((), 1, has_excluded=True)
            await channel.lose(1, (1,), "killed")
            assert not first.done() and await asks(channel, C, 6, lost=True) == await first
        if dies != "before the next view":
            assert await next_view(channel, A, C) == View(2, (A, C))
            assert await told(channel) == [killed if dies == "before" else silent]
        assert await channel.survey(1, (1,)) == Loss((), 1, has_excluded=dies == "after")
        await channel.lose(1, (1,), "killed")
        assert await told(channel) == []
        assert await beat(channel, B, 1) is Ask.END and await asks(channel, B, 6, lost=True) == OUT
        assert await told(channel) == []

    played(play())


def test_one_that_computes_for_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)

    async def play() -> None:
        channel = await begun(rejoin=60.0, step=0.2)
        assert await next_view(channel, A, C) == View(2, (A, C))
        assert await told(channel) == [Left((1,), "it did not leave its step within 0.2 s (timeouts.step)")]

    played(play())


def test_a_drained_member_is_told_when_it_leaves() -> None:
    async def play() -> None:
        channel = Channel()
        await channel.begin(Terms(1, 3, outlives=3), ["job"])
        members = [Member(name, slot, f"node {name}") for slot, name in enumerate("abc")]
        await asyncio.gather(*(asks(channel, member) for member in members))
        await channel.drain(1, ("node b", "node c"), "drained")
        await channel.drain(1, ("node b", "node c"), "drained")  # Ray tells of it as long as it lasts
        assert await told(channel) == []
        await channel.lose(1, (2,), "killed")
        assert await told(channel) == [Left((2,), "killed")]
        views = await asyncio.gather(*(asks(channel, member, 4) for member in members[:2]))
        assert views == [View(2, (members[0],)), OUT]
        assert await told(channel) == [Left((1,), "drained", is_planned=True)]

    played(play())


def test_a_newcomer_that_dies_before_its_first_view_is_no_loss() -> None:
    async def play() -> None:
        channel = await begun()
        await channel.lose(1, (1,), "killed")
        assert await next_view(channel, A, C) == View(2, (A, C))
        newcomer = await soon(asks(channel, NEW))
        assert len(await told(channel)) == 1
        assert await channel.survey(1, (1,)) == Loss((), 1)
        await channel.lose(1, (1,), "killed as it starts")
        assert await newcomer == OUT and await told(channel) == []

    played(play())


def test_another_process_in_the_place_of_a_member_is_a_loss() -> None:
    async def play() -> None:
        channel = await begun()
        newcomer = await soon(asks(channel, NEW))
        assert await next_view(channel, A, C) == await newcomer == View(2, (A, C, NEW))
        assert await told(channel) == [Left((1,), "another process is in its place")]

    played(play())


def test_who_dies_after_all_were_through_and_took_no_part_restarts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)

    async def play() -> None:
        channel = await begun()
        channel._heard[B.name] -= 10.0
        assert await next_view(channel, A, C) == View(2, (A, C))
        assert await asyncio.gather(*(channel.end(2, rank, 2, True) for rank in range(2))) == [False] * 2
        assert await channel.survey(1, (1,)) == Loss((), 1, has_excluded=True)
        assert await channel.survey(1, (0,)) is None

    played(play())


async def started(**terms: Any) -> Channel:
    """A channel of three idle workers, and then a job for them; none has asked yet for a view of it."""
    channel = Channel()
    idle = [await soon(channel.next_job(0, "group", member.slot, 3)) for member in (A, B, C)]
    if "lost" in terms:
        slots = terms.pop("lost")
        assert await channel.survey(0, slots) == Loss((), 0)
        await channel.lose(0, slots, "killed")
    await channel.begin(Terms(**{"number": 1, "workers": 3, "outlives": 3, **terms}), ["job"])
    assert [(await each)[0].number for each in idle] == [1] * 3
    return channel


def test_a_job_begins_with_those_that_live_and_takes_in_who_comes_for_the_one_lost_while_idle() -> None:
    async def play() -> None:
        channel = await started(lost=(1,))
        assert await channel.lost() == {1}
        views = await asyncio.gather(asks(channel, C), asks(channel, A))
        assert list(views) == [View(1, (A, C))] * 2
        await channel.next_job(0, "group", 1, 3)
        newcomer = await soon(asks(channel, NEW))
        assert await beat(channel, A, 1) is Ask.LEAVE and not newcomer.done()
        views = await asyncio.gather(asks(channel, C, 4), asks(channel, A, 4))
        assert list(views) == [await newcomer] * 2 and views[0] == View(2, (A, C, NEW))

    played(play())


def test_who_comes_before_the_others_have_asked_is_waited_for() -> None:
    async def play() -> None:
        channel = await started(lost=(1,))
        await channel.next_job(0, "group", 1, 3)
        first, second = await soon(asks(channel, NEW)), await soon(asks(channel, C))
        assert not first.done() and not second.done()
        assert await asks(channel, A) == await first == await second == View(1, (A, NEW, C))

    played(play())


def test_workers_that_must_be_all_wait_for_who_comes() -> None:
    async def play() -> None:
        channel = await started(lost=(1,), needs_all=True)
        first, second = await soon(asks(channel, A)), await soon(asks(channel, C))
        assert not first.done() and not second.done()
        assert await asks(channel, NEW) == await first == await second

    played(play())


def test_workers_that_are_lost_before_the_first_view_are_not_waited_for() -> None:
    async def play() -> None:
        channel = await started()
        first, second = await soon(asks(channel, A)), await soon(asks(channel, C))
        assert not first.done() and not second.done()
        assert await channel.survey(1, (1,)) == Loss((), 1)
        await channel.lose(1, (1,), "killed")
        assert await first == await second == View(1, (A, C))
        assert await channel.survey(1, (0, 2)) is None, "nobody is left"

    played(play())


def test_idle_workers_of_whom_none_is_left_start_again_and_others_are_not_mended() -> None:
    async def play() -> None:
        channel = await started()
        await channel.finish(1)
        await channel.lose(0, (0,), "killed")
        assert await channel.survey(0, (1,)) == Loss((), 0)
        await channel.lose(0, (1,), "killed")
        assert await channel.survey(0, (2,)) is None
        await soon(channel.next_job(0, "another group", 0, 3))
        assert await channel.lost() == set()

    played(play())


def test_those_that_serve_leave_a_view_that_is_broken_up_or_ends() -> None:
    async def play() -> None:
        channel = await started(outlives=math.inf)
        await asyncio.gather(asks(channel, A), asks(channel, B), asks(channel, C))
        await channel.exclude(1, B.name, "it has ended")
        assert await channel.gone(1, ["a", "b", "c"]) == {"b"}
        assert await beat(channel, A, 1) is Ask.LEAVE_NOW
        assert await next_view(channel, A, C) == View(2, (A, C))
        await channel.break_up(1, 1)
        assert await beat(channel, A, 2) is Ask.NOTHING, "that view is over"
        await channel.break_up(1, 2)
        assert await beat(channel, A, 2) is Ask.LEAVE_NOW
        assert await next_view(channel, A, C) == View(3, (A, C))
        last = await soon(asks(channel, A))
        channel._heard[A.name] -= 10.0
        assert await channel.gone(1, ["a", "c"]) == set(), "it gives no sign while it waits for a view"
        await channel.finish(1)
        assert await beat(channel, C, 3) is Ask.LEAVE_NOW
        assert await last is None

    played(play())


def test_workers_whose_groups_fail_again_and_again_end() -> None:
    """As where a firewall stands between two nodes: each of them lives, and reaches the driver."""

    async def play() -> None:
        channel = await begun()
        for number in range(2, module.VIEWS + 2):
            views = await asyncio.gather(*(asks(channel, member, lost=True) for member in (A, B, C)))
            assert {view.number for view in views if isinstance(view, View)} == {number}
        ends = await asyncio.gather(*(asks(channel, member, lost=True) for member in (A, B, C)))
        assert len(set(ends)) == 1 and "connections failed in 8 process groups" in str(ends[0])
        channel._viewed_at -= module.SHORT_SECONDS + 1
        views = await asyncio.gather(*(asks(channel, member, lost=True) for member in (A, B, C)))
        assert all(isinstance(view, View) for view in views), "connections of a view that held for long have worked"

    played(play())


def test_one_that_serves_and_gives_no_sign_is_left_out_while_its_answer_is_waited_for() -> None:
    """Nobody has left the view by then: the others have answered, or wait for it in a collective."""

    async def play() -> None:
        channel = await started(outlives=math.inf)
        await asyncio.gather(asks(channel, A), asks(channel, B), asks(channel, C))
        assert await channel.gone(1, ["b", "c"]) == set()
        channel._heard[B.name] -= 10.0
        assert await beat(channel, C, 1) is Ask.NOTHING
        assert await channel.gone(1, ["c"]) == set(), "only whose answer is waited for"
        assert await channel.gone(1, ["b", "c"]) == {"b"}
        assert await told(channel) == [Left((1,), "it gave no sign for 10 s (timeouts.rejoin)")]
        assert await beat(channel, A, 1) is Ask.LEAVE_NOW and await beat(channel, B, 1) is Ask.END
        assert await next_view(channel, A, C) == View(2, (A, C))

    played(play())


@pytest.mark.parametrize("outlives", [3, math.inf])
def test_an_idle_worker_that_stands_still_is_not_waited_for_and_comes_later(
    monkeypatch: pytest.MonkeyPatch, outlives: float
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)

    async def play() -> None:
        channel = await started(outlives=outlives)
        for slot in (0, 2):
            await channel.has_job(slot)
        first = [await soon(asks(channel, member)) for member in (A, C)]
        assert not any(each.done() for each in first), "it may still come"
        channel._given = {slot: at - 10.0 for slot, at in channel._given.items()}
        assert [await each for each in first] == [View(1, (A, C))] * 2
        await channel.has_job(1)
        newcomer = await soon(asks(channel, B))
        assert await beat(channel, A, 1) is Ask.LEAVE and not newcomer.done()
        views = await asyncio.gather(asks(channel, C, 4), asks(channel, A, 4))
        assert list(views) == [await newcomer] * 2 and views[0] == View(2, (A, C, B))

    played(play())


def test_where_all_are_to_end_with_a_lost_one_nobody_survives_it_but_who_takes_no_part_may_be_lost() -> None:
    async def play() -> None:
        channel = await begun(outlives=None, workers=3)
        assert await channel.survey(1, (1,)) is None
        assert await channel.survey(1, (3,)) == Loss((), 0), "of a session of more workers"
        waits = await started(outlives=None, workers=2)
        assert await waits.survey(1, (1,)) is None and await waits.survey(1, (2,)) == Loss((), 1)
        gpus = Channel(keeps_idle=False)
        await soon(gpus.next_job(0, "group", 0, 3))
        assert await gpus.survey(0, (1,)) is None

    played(play())


def test_those_that_are_to_end_together_leave_together_though_some_are_through() -> None:
    """As a prediction's workers where the user stops it: each stops by itself."""

    async def play() -> None:
        channel = await begun(outlives=None)
        await channel.request(STOP)
        ends = await asyncio.gather(*(channel.end(1, rank, 3, rank == 2) for rank in range(3)))
        assert ends == [False] * 3

    played(play())


def test_workers_that_must_be_all_end_where_one_that_was_idle_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)

    async def play() -> None:
        channel = await started(outlives=None)
        for slot in (0, 2):
            await channel.has_job(slot)
        first = [await soon(asks(channel, member)) for member in (A, C)]
        channel._given = {slot: at - 60.0 for slot, at in channel._given.items()}
        assert [await each for each in first] == ["another worker has not taken the job for 60 s"] * 2

    played(play())

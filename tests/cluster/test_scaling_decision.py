"""How many workers to start, and when to ask them to stop: the decision, without Ray and without a clock."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.cluster import policies
from dp_ray.cluster.channel import Ask, Channel, Terms
from dp_ray.cluster.decisions import (
    GROW_AFTER_SECONDS,
    REPLACE_SECONDS,
    SETTLE_SECONDS,
    Idle,
    LastCount,
    Resize,
    Running,
    WorkerDemand,
    decide_scaling,
    is_worth_a_look,
)

WANTED = WorkerDemand(2, 4, {"CPU": 1.0}, "PACK", None, can_stop=True, capacity_seconds=60.0)
NOW = 1000.0


def idle(capacity: int, idle_capacity: int, waited: float = 0.0, **keys: Any) -> Idle:
    """A job of 2 to 4 workers that waits for `waited` seconds."""
    state: dict[str, Any] = {"has_started": False, "may_hold": False, "autoscales": False, "said": NOW, **keys}
    wanted = state.pop("wanted", WANTED)
    return Idle(wanted, capacity, idle_capacity, num_nodes=3, waiting_since=NOW - waited, **state)


@pytest.mark.parametrize(
    ("snapshot", "do", "workers"),
    [
        # As many as there is room for, at once where that is all, else when it has settled.
        (idle(4, 4), Resize.START, 4),
        (idle(2, 2), Resize.START, 2),
        (idle(3, 4), Resize.WAIT, 0),
        (idle(3, 4, SETTLE_SECONDS), Resize.WAIT, 0),
        (idle(3, 4, SETTLE_SECONDS + 0.1), Resize.START, 3),
        (
            idle(2, 1),
            Resize.START,
            2,
        ),  # capacity that is held by ours counts, idle or not
        # Our own last workers may hold capacity until they are told to make way.
        (idle(1, 4, 2 * SETTLE_SECONDS, may_hold=True), Resize.WAIT, 0),
        (idle(1, 4, 2 * SETTLE_SECONDS + 0.1, may_hold=True), Resize.START, 2),
        (idle(1, 4, 2 * SETTLE_SECONDS + 0.1, may_hold=False), Resize.WAIT, 0),
        (idle(1, 1, 2 * SETTLE_SECONDS + 0.1, may_hold=True), Resize.WAIT, 0),
        # Given up only where workers ran before, nobody adds nodes, and the job has a limit.
        (idle(1, 1, 60.0, has_started=True), Resize.WAIT, 0),
        (idle(1, 1, 60.1, has_started=True), Resize.GIVE_UP, 0),
        (idle(1, 1, 60.1, has_started=False), Resize.WAIT, 0),
        (idle(1, 1, 60.1, has_started=True, autoscales=True), Resize.WAIT, 0),
        (idle(1, 2, 60.1, has_started=True), Resize.WAIT, 0),
        (
            idle(1, 1, 9e9, has_started=True, wanted=replace(WANTED, capacity_seconds=None)),
            Resize.WAIT,
            0,
        ),
    ],
)
def test_while_no_workers_run(snapshot: Idle, do: Resize, workers: int) -> None:
    decision = decide_scaling(snapshot, NOW)
    assert (decision.do, decision.num_workers) == (do, workers)


def test_what_is_waited_for_is_said_once_in_a_wait() -> None:
    assert decide_scaling(idle(1, 1, 40.0, said=NOW - 40), NOW).text == ""
    few = decide_scaling(idle(1, 1, 5.0, said=NOW - 6), NOW)
    assert few.text == "2 workers need 2 CPU; 3 nodes have room for 1: waiting"
    held = decide_scaling(idle(1, 3, said=float("-inf")), NOW)
    assert held.text == "2 workers need 2 CPU; other jobs hold them: waiting"


def test_giving_up_says_what_is_missing_and_what_to_do() -> None:
    assert decide_scaling(idle(1, 1, 61.0, has_started=True), NOW).text == (
        "2 workers need 2 CPU (1 CPU each); 3 nodes have room for 1, and no more came in 60 s (timeouts.capacity); "
        "run the job again when there are more nodes, or with fewer workers: it resumes"
    )


def running(workers: int, capacity: int | None, seen: tuple[int, float] = (0, 0.0), **keys: Any) -> Running:
    """`workers` of 2 to 4 that have run for long; `seen` is the capacity seen before, and how long ago."""
    wanted, ran = keys.pop("wanted", WANTED), keys.pop("ran", 60.0)
    return Running(wanted, workers, NOW - ran, LastCount(seen[0], NOW - seen[1]), capacity=capacity, **keys)


LONG = SETTLE_SECONDS + 0.1


@pytest.mark.parametrize(
    ("snapshot", "do", "ask"),
    [
        # Growth: there must be room for more, for a while, and the workers must have run for a while.
        (running(3, 4, (4, LONG)), Resize.ASK, Ask.RESTART),
        (running(3, 4, (4, SETTLE_SECONDS)), Resize.GO_ON, None),
        (running(2, 4, (3, LONG)), Resize.GO_ON, None),
        (running(3, 3, (3, LONG)), Resize.GO_ON, None),
        (running(3, 2, (3, LONG)), Resize.GO_ON, None),
        (running(4, None, (4, LONG)), Resize.GO_ON, None),
        (running(3, None, (4, LONG), ran=GROW_AFTER_SECONDS - 0.1), Resize.GO_ON, None),
        (
            running(3, 4, (4, LONG), wanted=replace(WANTED, can_stop=False)),
            Resize.GO_ON,
            None,
        ),
        # Where workers are lost and the others go on, others come in their places; else all start again, much later.
        (running(3, 4, (4, LONG), num_lost=1), Resize.GO_ON, None),
        (running(3, 4, (4, REPLACE_SECONDS), num_lost=1), Resize.GO_ON, None),
        (running(3, 4, (4, REPLACE_SECONDS + 0.1), num_lost=1), Resize.ASK, Ask.RESTART),
        # Where those that run take others in, none stops, but for room that is not for the places of lost ones.
        (running(3, 4, (4, LONG), takes_more=True), Resize.GROW, None),
        (running(3, 4, (4, SETTLE_SECONDS), takes_more=True), Resize.GO_ON, None),
        (running(2, 4, (4, LONG), takes_more=True, starts_fail=True), Resize.GO_ON, None),
        (running(2, 4, (4, REPLACE_SECONDS), takes_more=True, num_lost=1), Resize.GO_ON, None),
        (running(2, 4, (4, REPLACE_SECONDS + 0.1), takes_more=True, num_lost=1), Resize.GROW, None),
        (running(3, 4, (4, REPLACE_SECONDS + 0.1), takes_more=True, num_lost=1), Resize.ASK, Ask.RESTART),
        # Not where these were lost as they started: so would all others be.
        (
            running(3, 4, (4, REPLACE_SECONDS + 0.1), num_lost=1, starts_fail=True),
            Resize.GO_ON,
            None,
        ),
        # Drain: those leave whose nodes are drained, if others can go on; whatever room there is.
        (running(4, 1, draining=("10.0.0.2",), num_staying=1), Resize.LEAVE, None),
        # Else stop where enough capacity is left, else keep what is done; at once, however young the workers are.
        (running(4, 3, draining=("10.0.0.2",), ran=0.0), Resize.ASK, Ask.RESTART),
        (running(4, 2, draining=("10.0.0.2",)), Resize.ASK, Ask.RESTART),
        (running(4, 1, draining=("10.0.0.2",)), Resize.ASK, Ask.SAVE),
        (
            running(4, 3, draining=("10.0.0.2",), wanted=replace(WANTED, can_stop=False)),
            Resize.ASK,
            Ask.SAVE,
        ),
    ],
)
def test_while_workers_run(snapshot: Running, do: Resize, ask: Ask | None) -> None:
    decision = decide_scaling(snapshot, NOW)
    assert decision.do is do
    assert (decision.request.ask if decision.request else None) is ask


def test_room_counts_from_when_workers_were_lost_last() -> None:
    """Others have come in their places meanwhile: they were as many as wanted."""
    seen, now = LastCount(0, 0.0), NOW
    for num_lost in [1] * 40 + [0] + [1] * 40:
        found = running(4 - num_lost, 4, num_lost=num_lost)
        decision = decide_scaling(replace(found, last_count=seen), now)
        assert decision.do is Resize.GO_ON
        seen, now = decision.last_count or seen, now + 1.0


class Handle:
    """A channel in this process, called as the actor is; a call is its own answer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._channel, name)
        return SimpleNamespace(remote=lambda *args, **named: asyncio.run(call(*args, **named)))


def test_workers_lost_as_they_start_end_the_growth_of_their_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    found: list[Running] = []
    monkeypatch.setattr(policies, "draining_nodes", set)
    monkeypatch.setattr(policies, "lose_cut_off", lambda *_: None)
    monkeypatch.setattr(policies, "is_worth_a_look", lambda running, _: found.append(running))
    handle = Handle(Channel())
    restarts = policies.RestartPolicy(handle)
    for number, is_told in ((1, True), (2, False)):
        handle.begin.remote(Terms(number, 3, outlives=3), [])
        restarts._look_at(handle.state.remote()[1])
        for _ in range(policies.REPLACING_STARTS if is_told else 1):
            restarts.count_failed_start("its process was killed")
        policies.ElasticScalingPolicy(WANTED, handle).while_running(["a", "b"], 0.0, 1)
        assert found.pop().starts_fail is is_told


def test_the_order_says_why() -> None:
    grown = decide_scaling(running(3, 4, (4, LONG)), NOW).request
    drained = decide_scaling(running(4, 3, draining=("10.0.0.2", "10.0.0.3")), NOW).request
    assert grown is not None and not grown.drains and grown.text == "there is room for 4 workers"
    assert drained is not None and drained.drains and drained.text == "Ray drains 10.0.0.2, 10.0.0.3"


@pytest.mark.parametrize(("num_lost", "capacity", "grows_to"), [(0, 3, 3), (0, 4, 4), (1, 3, 4), (1, 4, 4)])
def test_a_job_grows_to_no_more_than_it_wants_with_those_that_are_lost(
    num_lost: int, capacity: int, grows_to: int
) -> None:
    """Others come in the places of the lost ones, maybe later."""
    seen = capacity, REPLACE_SECONDS + 0.1
    decision = decide_scaling(running(2, capacity, seen, takes_more=True, num_lost=num_lost), NOW)
    assert (decision.do, decision.num_workers) == (Resize.GROW, grows_to)
    assert decision.last_count == LastCount(0, NOW), "what has no room after all is not tried at once again"


MOMENTS = st.floats(0, 200)
WANTEDS = st.builds(
    lambda least, more, can_stop, limit: WorkerDemand(
        least, least + more, {"CPU": 1.0}, "PACK", None, can_stop=can_stop, capacity_seconds=limit
    ),
    st.integers(1, 5),
    st.integers(0, 5),
    st.booleans(),
    st.none() | st.floats(0, 100),
)


@st.composite
def idles(draw: st.DrawFn) -> Idle:
    """Any snapshot while no workers run; nowhere is room for more than the job wants."""
    wanted = draw(WANTEDS)
    capacities = st.integers(0, wanted.max_workers)
    started, may_hold, autoscales = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    nodes = draw(st.integers(0, 9))
    return Idle(wanted, draw(capacities), draw(capacities), nodes, started, may_hold, autoscales, draw(MOMENTS))


@given(idles(), st.floats(0, 400))
def test_a_start_is_never_of_fewer_or_more_than_wanted_nor_without_capacity(snapshot: Idle, waited: float) -> None:
    decision = decide_scaling(snapshot, snapshot.waiting_since + waited)
    wanted = snapshot.wanted
    if decision.do is Resize.START:
        assert wanted.min_workers <= decision.num_workers <= wanted.max_workers
        assert decision.num_workers <= max(snapshot.capacity, snapshot.idle_capacity)
        assert decision.num_workers in (snapshot.capacity, wanted.min_workers)
    else:
        assert decision.num_workers == 0
        assert decision.do in (Resize.WAIT, Resize.GIVE_UP)
        assert snapshot.capacity < wanted.min_workers or waited <= SETTLE_SECONDS


@given(idles(), st.floats(0, 400))
def test_a_job_is_given_up_only_where_waiting_is_hopeless(snapshot: Idle, waited: float) -> None:
    decision = decide_scaling(snapshot, snapshot.waiting_since + waited)
    hopeless = (
        snapshot.has_started and not snapshot.autoscales and snapshot.idle_capacity < snapshot.wanted.min_workers
    )
    limit = snapshot.wanted.capacity_seconds
    lacks = snapshot.capacity < snapshot.wanted.min_workers
    # The moment itself may fall either way: `waited` is a difference of two sums.
    if decision.do is Resize.GIVE_UP:
        assert hopeless and lacks and limit is not None and waited >= limit - 1e-6
    elif hopeless and lacks and limit is not None:
        assert waited <= limit + 1e-6


@st.composite
def runnings(draw: st.DrawFn) -> Running:
    """Any snapshot while workers run, with the capacity counted."""
    wanted = draw(WANTEDS)
    capacities = st.integers(0, wanted.max_workers)
    workers = draw(st.integers(wanted.min_workers, wanted.max_workers))
    draining = tuple(draw(st.lists(st.sampled_from(["10.0.0.1", "10.0.0.2"]), max_size=2, unique=True)))
    seen = LastCount(draw(capacities), draw(MOMENTS))
    takes_more = draw(st.booleans())
    return Running(wanted, workers, draw(MOMENTS), seen, draining, draw(capacities), takes_more=takes_more)


@given(runnings(), st.floats(0, 400))
def test_workers_stop_only_for_something_better(snapshot: Running, now: float) -> None:
    decision = decide_scaling(snapshot, now)
    request, wanted = decision.request, snapshot.wanted
    assert (request is None) == (decision.do in (Resize.GO_ON, Resize.GROW))
    if decision.do is Resize.GROW:
        assert snapshot.takes_more and wanted.can_stop
        assert snapshot.num_workers < decision.num_workers <= min(wanted.max_workers, snapshot.capacity or 0)
    if request is not None and request.ask is Ask.RESTART:
        assert wanted.can_stop
        assert snapshot.capacity is not None and snapshot.capacity >= wanted.min_workers, "what stops can start again"
        assert request.drains or snapshot.capacity > snapshot.num_workers
    assert (request is not None and request.drains) == bool(snapshot.draining)


@given(runnings(), st.floats(0, 400))
def test_where_a_look_is_not_worth_it_the_capacity_does_not_matter(snapshot: Running, now: float) -> None:
    if not is_worth_a_look(snapshot, now):
        assert decide_scaling(snapshot, now) == decide_scaling(replace(snapshot, capacity=None), now)
        assert decide_scaling(snapshot, now).do is Resize.GO_ON


@given(runnings(), st.lists(st.integers(0, 10), min_size=1, max_size=30))
def test_growth_waits_until_the_capacity_has_stayed_the_same(start: Running, capacities: list[int]) -> None:
    """A look a second, as the policy does: only capacity that stayed for SETTLE_SECONDS has workers stop."""
    seen, same = start.last_count, 0
    for second, capacity in enumerate(capacities):
        now = 300.0 + second
        same = same + 1 if second and capacity == capacities[second - 1] else 0
        snapshot = replace(start, draining=(), capacity=capacity, last_count=seen if second else LastCount(-1, now))
        decision = decide_scaling(snapshot, now)
        seen = decision.last_count or seen
        if decision.do in (Resize.ASK, Resize.GROW):
            assert same > SETTLE_SECONDS

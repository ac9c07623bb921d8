"""Whether workers that failed are started anew: the decision, without Ray and without a clock."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.cluster.requests import NOTHING, STOP, Ask, Request, Why
from dp_ray.cluster.restart_decision import (
    DEATH_SECONDS,
    Decision,
    Do,
    Memory,
    Reason,
    Snapshot,
    StartFailed,
    StartTrouble,
    WorkersFailed,
    decide,
)
from dp_ray.monitor.messages import Ending, Interrupted, Waits, WorkerExit
from dp_ray.rundir.incidents import IncidentKind

NOW = 1000.0
GROWTH = Request(Ask.RESTART, Why.GROWTH, "there is room for 3 workers")
DRAIN = Request(Ask.RESTART, Why.DRAIN, "Ray drains 10.0.0.2")


def ended(kind: Ending, text: str = "oh", has_progressed: bool = True) -> WorkerExit:
    return WorkerExit(kind, text, has_progressed)


def failed(died: dict[int, str] | None = None, **kinds: int) -> WorkersFailed:
    """Workers that died, and one that ended in each of these ways: `raised=1` is rank 1."""
    return WorkersFailed({rank: ended(Ending[kind.upper()]) for kind, rank in kinds.items()}, died or {})


def decision_of(
    failure: Any, request: Request = NOTHING, retries: int = 2, now: float = NOW, **memory: Any
) -> Decision:
    return decide(Snapshot(failure, request, Memory(retries, **memory)), now)


SEEN = frozenset({"raised oh"})
NO_CAPACITY = StartFailed(StartTrouble.NO_CAPACITY, "a timeout")
LOST = StartFailed(StartTrouble.LOST, "its node was lost")
ERROR = StartFailed(StartTrouble.ERROR, "no such package")


@pytest.mark.parametrize(
    ("failure", "keys", "do", "reason", "told", "left"),
    [
        # A death explains all that the other workers say.
        (failed({1: "killed"}, lost_peer=0), {}, Do.RESTART, Reason.DIED, (IncidentKind.WORKER, "killed", (1,)), 1),
        (failed({1: "killed"}, raised=0), {}, Do.RESTART, Reason.DIED, (IncidentKind.WORKER, "killed", (1,)), 1),
        (failed({0: "b", 2: "a"}), {}, Do.RESTART, Reason.DIED, (IncidentKind.WORKER, "a; b", (0, 2)), 1),
        (failed({0: "a", 2: "a"}), {}, Do.RESTART, Reason.DIED, (IncidentKind.WORKER, "a", (0, 2)), 1),
        (failed({1: "killed"}), {"retries": 0}, Do.GIVE_UP, Reason.NO_RETRIES, None, 0),
        # A lost peer may be a death that Ray does not see yet; where none comes, it was the network.
        (failed(lost_peer=0), {}, Do.WAIT, Reason.DEATH_TO_COME, None, 2),
        (failed(lost_peer=0), {"lost_peer_since": NOW - 2.9}, Do.WAIT, Reason.DEATH_TO_COME, None, 2),
        (
            failed(lost_peer=0),
            {"lost_peer_since": NOW - DEATH_SECONDS},
            Do.RESTART,
            Reason.LOST_PEER,
            (IncidentKind.NETWORK, "oh", (0,)),
            1,
        ),
        # An error of user code: once, if the worker had come some way.
        (failed(raised=1), {}, Do.RESTART, Reason.ERROR, (IncidentKind.ERROR, "oh", (1,)), 1),
        (failed(raised=1, lost_peer=0), {}, Do.RESTART, Reason.ERROR, (IncidentKind.ERROR, "oh", (1,)), 1),
        (failed(raised=1), {"seen": SEEN}, Do.GIVE_UP, Reason.CAME_BACK, None, 2),
        (failed(raised=1), {"retries": 0}, Do.GIVE_UP, Reason.NO_RETRIES, None, 0),
        (failed(mistaken=1, raised=0), {}, Do.GIVE_UP, Reason.MISTAKE, None, 2),
        (WorkersFailed({0: ended(Ending.RAISED, "oh", False)}, {}), {}, Do.GIVE_UP, Reason.NO_PROGRESS, None, 2),
        # Workers that stopped as they were asked cost no retry.
        (
            failed(stopped=0),
            {"request": GROWTH, "retries": 0},
            Do.RESTART,
            Reason.RESIZED,
            (IncidentKind.RESIZE, "there is room for 3 workers", ()),
            0,
        ),
        (
            failed(stopped=0),
            {"request": DRAIN, "retries": 0},
            Do.RESTART,
            Reason.DRAINED,
            (IncidentKind.PREEMPTION, "Ray drains 10.0.0.2", ()),
            0,
        ),
        (
            failed(stopped=0, lost_peer=1),
            {"request": DRAIN},
            Do.RESTART,
            Reason.DRAINED,
            (IncidentKind.PREEMPTION, DRAIN.text, ()),
            2,
        ),
        (
            failed(stopped=0, raised=1),
            {"request": DRAIN},
            Do.RESTART,
            Reason.ERROR,
            (IncidentKind.ERROR, "oh", (1,)),
            1,
        ),
        # A start that failed.
        (
            LOST,
            {},
            Do.RESTART,
            Reason.START_LOST,
            (IncidentKind.WORKER, f"the workers could not be started: {LOST.cause}", ()),
            1,
        ),
        (LOST, {"retries": 0}, Do.GIVE_UP, Reason.NO_RETRIES, None, 0),
        (ERROR, {}, Do.GIVE_UP, Reason.START_ERROR, None, 2),
        # The user stops the run.
        (failed(stopped=0), {"request": STOP}, Do.GIVE_UP, Reason.USER_STOPS, None, 2),
        (failed({0: "killed"}), {"request": STOP}, Do.GIVE_UP, Reason.USER_STOPS, None, 2),
        (NO_CAPACITY, {"request": STOP}, Do.GIVE_UP, Reason.USER_STOPS, None, 2),
    ],
)
def test_what_becomes_of_a_failure(
    failure: Any, keys: dict[str, Any], do: Do, reason: Reason, told: tuple[Any, ...] | None, left: int
) -> None:
    decision = decision_of(failure, **keys)
    assert (decision.do, decision.reason) == (do, reason)
    assert decision.message == (None if told is None else Interrupted(*told))
    assert decision.memory.retries == left


def test_capacity_that_was_taken_is_waited_for_without_a_retry() -> None:
    decision = decision_of(NO_CAPACITY, retries=0)
    assert (decision.do, decision.reason) == (Do.RESTART, Reason.NO_CAPACITY)
    assert isinstance(decision.message, Waits)


def test_a_word_in_an_order_decides_nothing() -> None:
    """The reason is the enum, whatever the text says."""
    request = Request(Ask.RESTART, Why.GROWTH, "there is room, for nobody drains anything")
    assert decision_of(failed(stopped=0), request).reason is Reason.RESIZED


def test_the_same_error_with_another_id_is_the_same_error() -> None:
    first = decision_of(WorkersFailed({0: ended(Ending.RAISED, f"object {'a1' * 16} is gone")}, {}))
    again = decide(
        Snapshot(WorkersFailed({1: ended(Ending.RAISED, f"object {'b2' * 16} is gone")}, {}), NOTHING, first.memory),
        NOW,
    )
    other = decide(Snapshot(WorkersFailed({1: ended(Ending.RAISED, "another")}, {}), NOTHING, first.memory), NOW)
    assert (again.reason, other.reason) == (Reason.CAME_BACK, Reason.ERROR)


def test_a_death_that_comes_late_ends_the_wait() -> None:
    waiting = decision_of(failed(lost_peer=0))
    assert waiting.memory.lost_peer_since == NOW
    later = decide(Snapshot(failed({1: "killed"}, lost_peer=0), NOTHING, waiting.memory), NOW + 1)
    assert later.reason is Reason.DIED
    assert later.memory.lost_peer_since is None, "the next loss waits anew"


def test_every_reason_is_a_sentence_of_its_own() -> None:
    assert len({reason.value for reason in Reason}) == len(list(Reason))
    assert all(" " in reason.value for reason in Reason)


EXITS = st.builds(WorkerExit, st.sampled_from(Ending), st.sampled_from(["a", "b\nc", ""]), st.booleans())
WORKERS = st.dictionaries(st.integers(0, 5), EXITS | st.sampled_from(["killed", "lost"]), min_size=1).map(
    lambda given: WorkersFailed(
        {rank: one for rank, one in given.items() if isinstance(one, WorkerExit)},
        {rank: one for rank, one in given.items() if isinstance(one, str)},
    )
)
STARTS = st.builds(StartFailed, st.sampled_from(StartTrouble), st.text())
ORDERS = st.sampled_from([NOTHING, GROWTH, DRAIN, STOP])


@pytest.mark.slow
@given(WORKERS | STARTS, ORDERS, st.integers(0, 3), st.floats(0, 100))
def test_a_loss_costs_a_retry_and_a_plan_none(failure: Any, request: Request, retries: int, now: float) -> None:
    decision = decide(Snapshot(failure, request, Memory(retries)), now)
    spent = retries - decision.memory.retries
    planned = decision.reason in (Reason.DRAINED, Reason.RESIZED, Reason.NO_CAPACITY)
    assert spent == (1 if decision.do is Do.RESTART and not planned else 0)
    assert (decision.message is None) == (decision.do is not Do.RESTART), "what is started anew is told"
    if request.ask is Ask.STOP:
        assert decision.reason is Reason.USER_STOPS


@pytest.mark.slow
@given(st.lists(st.tuples(WORKERS | STARTS, ORDERS), max_size=30), st.integers(0, 3))
def test_a_job_ends_after_so_many_losses(history: list[tuple[Any, Request]], retries: int) -> None:
    """However failures come, one in ten seconds: more than `retries` losses are never survived."""
    memory, losses = Memory(retries), 0
    for number, (failure, request) in enumerate(history):
        decision = decide(Snapshot(failure, request, memory), 10.0 * number)
        memory = decision.memory
        assert memory.retries >= 0
        if decision.do is Do.GIVE_UP:
            return
        losses += decision.reason in (Reason.DIED, Reason.LOST_PEER, Reason.ERROR, Reason.START_LOST)
    assert losses <= retries

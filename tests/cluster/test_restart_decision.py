"""Whether workers that failed are started anew: the decision, without Ray and without a clock."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.cluster.channel import NOTHING, STOP, Ask, Request
from dp_ray.cluster.decisions import (
    DEATH_SECONDS,
    Memory,
    Restart,
    RestartDecision,
    Snapshot,
    StartFailed,
    StartTrouble,
    WorkersFailed,
    decide_restart,
)
from dp_ray.messages import Ending, Interrupted, Waits, WorkerExit
from dp_ray.rundir.incidents import IncidentKind

NOW = 1000.0
RANKS = {rank: rank for rank in range(6)}
GROWTH = Request(Ask.RESTART, "there is room for 3 workers")
DRAIN = Request(Ask.RESTART, "Ray drains 10.0.0.2", drains=True)


def ended(kind: Ending, text: str = "oh", has_progressed: bool = True) -> WorkerExit:
    return WorkerExit(kind, text, has_progressed)


def failed(died: dict[int, str] | None = None, **kinds: int) -> WorkersFailed:
    """Workers that died, and one that ended in each of these ways: `raised=1` is rank 1."""
    return WorkersFailed({rank: ended(Ending[kind.upper()]) for kind, rank in kinds.items()}, died or {})


def decision_of(
    failure: Any, request: Request = NOTHING, retries: int = 2, now: float = NOW, **memory: Any
) -> RestartDecision:
    return decide_restart(Snapshot(failure, request, Memory(retries, **memory), ranks=RANKS), now)


SEEN = frozenset({"raised oh"})
NO_MEMORY_AT_START = WorkersFailed({1: ended(Ending.OUT_OF_MEMORY, "CUDA out of memory", has_progressed=False)}, {})
NO_CAPACITY = StartFailed(StartTrouble.NO_CAPACITY, "a timeout")
LOST = StartFailed(StartTrouble.LOST, "its node was lost")
ERROR = StartFailed(StartTrouble.ERROR, "no such package")


@pytest.mark.parametrize(
    ("failure", "keys", "do", "told", "left"),
    [
        # A death explains all that the other workers say.
        (
            failed({1: "killed"}, lost_peer=0),
            {},
            Restart.RESTART,
            (IncidentKind.WORKER, "killed", (1,)),
            1,
        ),
        (
            failed({1: "killed"}, raised=0),
            {},
            Restart.RESTART,
            (IncidentKind.WORKER, "killed", (1,)),
            1,
        ),
        (failed({0: "b", 2: "a"}), {}, Restart.RESTART, (IncidentKind.WORKER, "a; b", (0, 2)), 1),
        (failed({0: "a", 2: "a"}), {}, Restart.RESTART, (IncidentKind.WORKER, "a", (0, 2)), 1),
        (failed({1: "killed"}), {"retries": 0}, Restart.GIVE_UP, None, 0),
        # A lost peer may be a death that Ray does not see yet; where none comes, it was the network.
        (failed(lost_peer=0), {}, Restart.WAIT, None, 2),
        (failed(lost_peer=0), {"lost_peer_since": NOW - 2.9}, Restart.WAIT, None, 2),
        (
            failed(lost_peer=0),
            {"lost_peer_since": NOW - DEATH_SECONDS},
            Restart.RESTART,
            (IncidentKind.NETWORK, "oh", (0,)),
            1,
        ),
        # An error of user code: once, if the worker had come some way.
        (failed(raised=1), {}, Restart.RESTART, (IncidentKind.ERROR, "oh", (1,)), 1),
        (
            failed(raised=1, lost_peer=0),
            {},
            Restart.RESTART,
            (IncidentKind.ERROR, "oh", (1,)),
            1,
        ),
        (failed(raised=1), {"seen": SEEN}, Restart.GIVE_UP, None, 2),
        # Right after a restart, a GPU may still hold the memory of the workers before.
        (NO_MEMORY_AT_START, {}, Restart.GIVE_UP, None, 2),
        (
            NO_MEMORY_AT_START,
            {"has_restarted": True},
            Restart.RESTART,
            (IncidentKind.ERROR, "CUDA out of memory", (1,)),
            1,
        ),
        (
            NO_MEMORY_AT_START,
            {"has_restarted": True, "seen": frozenset({"out of memory at the start"})},
            Restart.GIVE_UP,
            None,
            2,
        ),
        (
            WorkersFailed({1: ended(Ending.RAISED, has_progressed=False)}, {}),
            {"has_restarted": True},
            Restart.GIVE_UP,
            None,
            2,
        ),
        (failed(raised=1), {"retries": 0}, Restart.GIVE_UP, None, 0),
        (failed(mistaken=1, raised=0), {}, Restart.GIVE_UP, None, 2),
        (
            WorkersFailed({0: ended(Ending.RAISED, "oh", False)}, {}),
            {},
            Restart.GIVE_UP,
            None,
            2,
        ),
        # Workers that stopped as they were asked cost no retry.
        (
            failed(stopped=0),
            {"request": GROWTH, "retries": 0},
            Restart.RESTART,
            (IncidentKind.RESIZE, "there is room for 3 workers", ()),
            0,
        ),
        (
            failed(stopped=0),
            {"request": DRAIN, "retries": 0},
            Restart.RESTART,
            (IncidentKind.PREEMPTION, "Ray drains 10.0.0.2", ()),
            0,
        ),
        (
            failed(stopped=0, lost_peer=1),
            {"request": DRAIN},
            Restart.RESTART,
            (IncidentKind.PREEMPTION, DRAIN.text, ()),
            2,
        ),
        (
            failed(stopped=0, raised=1),
            {"request": DRAIN},
            Restart.RESTART,
            (IncidentKind.ERROR, "oh", (1,)),
            1,
        ),
        # Workers of another kind came: the job goes on without them, and no retry is taken.
        (
            failed(other_kind=0, lost_peer=1),
            {"retries": 0},
            Restart.RESTART,
            (IncidentKind.RESIZE, "oh", ()),
            0,
        ),
        (
            failed({1: "killed"}, other_kind=0),
            {},
            Restart.RESTART,
            (IncidentKind.WORKER, "killed", (1,)),
            1,
        ),
        # A start that failed.
        (
            LOST,
            {},
            Restart.RESTART,
            (IncidentKind.WORKER, f"the workers could not be started: {LOST.cause}", ()),
            1,
        ),
        (LOST, {"retries": 0}, Restart.GIVE_UP, None, 0),
        (ERROR, {}, Restart.GIVE_UP, None, 2),
        # The user stops the run.
        (failed(stopped=0), {"request": STOP}, Restart.GIVE_UP, None, 2),
        (failed({0: "killed"}), {"request": STOP}, Restart.GIVE_UP, None, 2),
        (NO_CAPACITY, {"request": STOP}, Restart.GIVE_UP, None, 2),
    ],
)
def test_what_becomes_of_a_failure(
    failure: Any, keys: dict[str, Any], do: Restart, told: tuple[Any, ...] | None, left: int
) -> None:
    decision = decision_of(failure, **keys)
    assert decision.do is do
    assert decision.message == (None if told is None else Interrupted(*told))
    assert decision.memory.retries == left


def test_capacity_that_was_taken_is_waited_for_without_a_retry() -> None:
    decision = decision_of(NO_CAPACITY, retries=0)
    assert decision.do is Restart.RESTART
    assert isinstance(decision.message, Waits)


def test_a_word_in_an_order_decides_nothing() -> None:
    """The reason is the enum, whatever the text says."""
    request = Request(Ask.RESTART, "there is room, for nobody drains anything")
    message = decision_of(failed(stopped=0), request).message
    assert isinstance(message, Interrupted) and message.kind is IncidentKind.RESIZE


def test_the_same_error_with_another_id_is_the_same_error() -> None:
    first = decision_of(WorkersFailed({0: ended(Ending.RAISED, f"object {'a1' * 16} is gone")}, {}))
    again = decide_restart(
        Snapshot(WorkersFailed({1: ended(Ending.RAISED, f"object {'b2' * 16} is gone")}, {}), NOTHING, first.memory),
        NOW,
    )
    other = decide_restart(
        Snapshot(WorkersFailed({1: ended(Ending.RAISED, "another")}, {}), NOTHING, first.memory), NOW
    )
    assert (again.do, other.do) == (Restart.GIVE_UP, Restart.RESTART)


def test_a_death_that_comes_late_ends_the_wait() -> None:
    waiting = decision_of(failed(lost_peer=0))
    assert waiting.memory.lost_peer_since == NOW
    later = decide_restart(
        Snapshot(failed({1: "killed"}, lost_peer=0), NOTHING, waiting.memory, ranks=RANKS), NOW + 1
    )
    assert later.message == Interrupted(IncidentKind.WORKER, "killed", (1,))
    assert later.memory.lost_peer_since is None, "the next loss waits anew"


EXITS = st.builds(WorkerExit, st.sampled_from(Ending), st.sampled_from(["a", "b\nc", ""]), st.booleans())
WORKERS = st.dictionaries(st.integers(0, 5), EXITS | st.sampled_from(["killed", "lost"]), min_size=1).map(
    lambda given: WorkersFailed(
        {rank: one for rank, one in given.items() if isinstance(one, WorkerExit)},
        {rank: one for rank, one in given.items() if isinstance(one, str)},
    )
)
STARTS = st.builds(StartFailed, st.sampled_from(StartTrouble), st.text())
ORDERS = st.sampled_from([NOTHING, GROWTH, DRAIN, STOP])


def is_loss(decision: RestartDecision) -> bool:
    """Whether all start again after something that was not planned."""
    kinds = (IncidentKind.WORKER, IncidentKind.NETWORK, IncidentKind.ERROR)
    return isinstance(decision.message, Interrupted) and decision.message.kind in kinds


@pytest.mark.slow
@given(WORKERS | STARTS, ORDERS, st.integers(0, 3), st.floats(0, 100))
def test_a_loss_costs_a_retry_and_a_plan_none(failure: Any, request: Request, retries: int, now: float) -> None:
    decision = decide_restart(Snapshot(failure, request, Memory(retries)), now)
    spent = retries - decision.memory.retries
    assert spent == is_loss(decision)
    assert (decision.message is None) == (decision.do is not Restart.RESTART), "what is started anew is told"
    if request.ask is Ask.STOP:
        assert decision.do is Restart.GIVE_UP


@pytest.mark.slow
@given(st.lists(st.tuples(WORKERS | STARTS, ORDERS), max_size=30), st.integers(0, 3))
def test_a_job_ends_after_so_many_losses(history: list[tuple[Any, Request]], retries: int) -> None:
    """However failures come, one in ten seconds: more than `retries` losses are never survived."""
    memory, losses = Memory(retries), 0
    for number, (failure, request) in enumerate(history):
        decision = decide_restart(Snapshot(failure, request, memory), 10.0 * number)
        memory = decision.memory
        assert memory.retries >= 0
        if decision.do is Restart.GIVE_UP:
            return
        losses += is_loss(decision)
    assert losses <= retries

"""Views of workers: every interleaving of deaths, silences and newcomers of three, and drawn ones of four."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dp_ray.cluster.membership import Leave, Left, Loss, Member, Membership, Phase, Place, View
from dp_ray.tasks.held import most_finished
from tests.support.chance import examples
from tests.support.views import FAULTS, Broken, Model, Worker

BUDGETS = [{"kill": 2}, {"kill": 1, "come": 1}, {"silence": 1, "kill": 1}, {"drain": 2, "kill": 1}]


@contextmanager
def without_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def explored(model: Model, budget: dict[str, int]) -> int:
    """Go every way from the model, with so many faults of each kind; return the number of states."""
    seen = set()
    left: list[tuple[Model, dict[str, int]]] = [(model, budget)]
    with without_collections():  # of all states again and again: half of the time
        while left:
            here, faults = left.pop()
            for event in here.events(tuple(kind for kind, number in faults.items() if number)):
                there = here.copied()
                there.do(event)
                rest = {kind: number - (kind == event[0]) for kind, number in faults.items()}
                key = there.key(), *rest.values()
                if key not in seen:
                    seen.add(key)
                    left.append((there, rest))
    return len(seen)


@pytest.mark.full
@pytest.mark.parametrize("budget", BUDGETS, ids="-".join)
def test_three_workers_in_every_interleaving(budget: dict[str, int]) -> None:
    steps = 2 if "drain" in budget else 3  # else it takes long
    assert explored(Model(3, steps), budget) > 20_000


@pytest.mark.full(but=["3-budget0"])
@pytest.mark.parametrize(
    ("workers", "budget"), [(3, {"kill": 1, "keep": 1}), (2, {"kill": 2, "come": 1, "keep": 1, "look": 1})]
)
def test_each_row_is_in_the_history_once(workers: int, budget: dict[str, int]) -> None:
    assert explored(Model(workers, 3), budget) > 1_000


def all_of_three(workers: int) -> Membership:
    return Membership(workers, least=workers)


def test_a_job_that_needs_all_its_workers_waits_for_the_newcomer() -> None:
    assert explored(Model(3, 3, all_of_three), {"kill": 1, "come": 1}) > 3_000
    assert explored(Model(3, 2, all_of_three), {"kill": 1, "drain": 1}) > 1_000


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_four_workers_over_three_steps_come_to_the_end(data: st.DataObject) -> None:
    model, chance = Model(4, 3), data.draw(st.randoms(use_true_random=False))
    for _ in range(data.draw(st.integers(0, 120))):
        events = model.events(FAULTS)
        if not events:
            break
        faults = [event for event in events if event[0] in FAULTS]
        others = [event for event in events if event[0] not in FAULTS]
        model.do(chance.choice(faults if faults and (not others or chance.random() < 0.1) else others))
    for _ in range(1000):  # without another fault
        if model.is_over():
            break
        model.do(chance.choice(model.events()))
    assert model.is_over()
    finished = [worker for worker in model.workers if worker.state == "done"]
    assert all(worker.steps == 3 for worker in finished)
    out = all(worker.is_dead or worker.state == "excluded" for worker in model.workers)
    assert finished or out


class WaitsForNobody(Membership):
    """Makes a view of those that have asked, whoever else may be at work."""

    def awaited(self) -> list[Member]:
        return []


class NeverSaysNow(Membership):
    def asks(self, number: int) -> Leave:
        return Leave.NOT if super().asks(number) is Leave.NOW else super().asks(number)


class TakesTheDeadForAlive(Membership):
    def lose(self, slots: Any, why: str = "") -> tuple[int, ...]:
        return ()


class TakesTheExcluded(Membership):
    def ask(self, member: Member, progress: int, has_lost_peer: bool = False) -> bool:
        self._gone.discard(member.name)
        return super().ask(member, progress, has_lost_peer)


class TellsOfNobodyExcluded(Membership):
    def exclude(self, names: Any, why: str = "") -> None:
        super().exclude(names, why)
        self._left = ()


class TellsOfWhoAsksAgain(Membership):
    def ask(self, member: Member, progress: int, has_lost_peer: bool = False) -> bool:
        rank = self.view.rank(member.name)
        if self.is_gone(member.name) and rank is not None:
            self._left += (Left((rank,), "asks again"),)
        return super().ask(member, progress, has_lost_peer)


class TellsOfADrainAtOnce(Membership):
    """The members may be lost, or have to stay, before they leave."""

    def drain(self, node_ids: Any, why: str = "") -> None:
        super().drain(node_ids, why)
        drained = self.drained()
        ranks = tuple(rank for rank, member in enumerate(self.view.members) if member in drained)
        self._left += (Left(ranks, why, is_planned=True),) if ranks else ()


class NeedsNobody(Membership):
    def settle(self) -> View | None:
        self.least = 1
        view = super().settle()
        self.least = self.expected
        return view


class RanksBySlot(Membership):
    def settle(self) -> View | None:
        self._since.clear()
        return super().settle()


class LeavesOutAtOnce(Membership):
    """Those on drained nodes leave for good, whatever the others have finished."""

    def settle(self) -> View | None:
        self._finished = dict.fromkeys(self._finished, 0)
        return super().settle()


@pytest.mark.full(but=["NeverSaysNow-budget2-nothing happens", "TellsOfNobodyExcluded-budget7-nobody is told"])
@pytest.mark.parametrize(
    ("make", "budget", "says"),
    [
        (LeavesOutAtOnce, {"drain": 1, "kill": 1}, "leaves for good with a step"),
        (WaitsForNobody, {"kill": 1}, "not left the one before|runs again|nobody is told"),
        (NeverSaysNow, {"silence": 1, "kill": 1}, "nothing happens"),
        (TakesTheDeadForAlive, {"kill": 1}, "nothing happens"),
        (TakesTheExcluded, {"silence": 1, "kill": 1}, "gone on without it before"),
        (lambda workers: NeedsNobody(workers, least=workers), {"kill": 1}, "fewer workers than the job needs"),
        (RanksBySlot, {"kill": 1, "come": 1}, "rank 0 lives"),
        (TellsOfNobodyExcluded, {"silence": 1, "kill": 1}, "nobody is told"),
        (TellsOfWhoAsksAgain, {"silence": 1, "kill": 1}, "told twice"),
        (TellsOfADrainAtOnce, {"drain": 1, "kill": 1}, "told to have left that takes part"),
    ],
)
def test_a_membership_that_breaks_a_rule_is_found(make: Any, budget: dict[str, int], says: str) -> None:
    with pytest.raises(Broken, match=says):
        explored(Model(3, 2, make), budget)


def test_a_state_that_is_not_the_newest_is_found() -> None:
    def rank_0(progress: Sequence[int]) -> int | None:
        return 0 if progress[0] >= 0 else most_finished(progress)

    with pytest.raises(Broken, match=r"a step that another one has finished|runs again"):
        explored(Model(3, 2, level=rank_0), {"kill": 1})


class HoldsRowsAtRank0(Model):
    def holds_rows(self, is_first: bool) -> bool:
        return is_first


class GetsNoRows(Model):
    def got(self, worker: Worker, sent: frozenset[int]) -> frozenset[int]:
        return worker.rows


class NeverDrops(Model):
    def dropped(self, worker: Worker) -> frozenset[int]:
        return worker.rows


class DropsTooMuch(Model):
    def dropped(self, worker: Worker) -> frozenset[int]:
        end = max((end for _, end in self.pieces), default=0)
        return frozenset(step for step in worker.rows if step >= end)


class RemovesNothing(Model):
    def left(self, worker: Worker) -> frozenset[tuple[int, int]]:
        return self.pieces


@pytest.mark.parametrize(
    ("model", "budget"),
    [
        (HoldsRowsAtRank0, {"kill": 1}),
        (GetsNoRows, {"kill": 2, "come": 1}),
        (NeverDrops, {"kill": 1, "keep": 1}),
        (DropsTooMuch, {"kill": 1, "keep": 1, "look": 1}),
        (RemovesNothing, {"kill": 1, "keep": 1}),
    ],
)
def test_a_history_without_each_row_once_is_found(model: type[Model], budget: dict[str, int]) -> None:
    with pytest.raises(Broken, match="row is missing in the history, or is there twice"):
        explored(model(2, 2), budget)


def test_a_newcomer_that_does_not_get_the_others_state_is_found() -> None:
    class NewcomersAreAhead(Model):
        def levelled(self, worker: Worker, steps: int) -> int:
            return steps + 2 * (worker.level < 0 and steps > 0)

    with pytest.raises(Broken, match="differ by more than a step"):
        explored(NewcomersAreAhead(3, 3), {"kill": 1, "come": 1})


def test_ranks_go_node_by_node_and_the_oldest_first() -> None:
    membership = Membership(4)
    for slot, node in enumerate("aabb"):
        membership.ask(Member(f"w{slot}", slot, node), -1)
    view = membership.settle()
    assert view is not None and [member.slot for member in view.members] == [0, 1, 2, 3]
    assert view.place("w2") == Place(2, 4, 0, 2, 1)
    assert membership.lose([0]) == (0,)
    assert membership.phase is Phase.BREAKING
    for slot in (1, 2, 3):
        membership.ask(Member(f"w{slot}", slot, "aabb"[slot]), 5, has_lost_peer=True)
    assert [member.slot for member in (membership.settle() or View()).members] == [1, 2, 3]
    membership.ask(Member("new", 0, "a"), -1)
    assert membership.phase == Phase.PLANNED and membership.asks(2) is Leave.AFTER_A_STEP  # type: ignore[comparison-overlap]
    for slot in (1, 2, 3):
        assert membership.settle() is None
        membership.ask(Member(f"w{slot}", slot, "aabb"[slot]), 9)
    assert [member.name for member in (membership.settle() or View()).members] == ["w1", "new", "w2", "w3"]
    assert membership.asks(2) is Leave.NOW and membership.asks(3) is Leave.NOT


def test_losses_count_while_no_step_is_finished() -> None:
    membership = Membership(3)
    for slot in range(3):
        membership.ask(Member(str(slot), slot), -1)
    membership.settle()
    membership.lose([2])
    assert membership.losses == 1
    for slot in (0, 1):
        membership.ask(Member(str(slot), slot), 4, has_lost_peer=True)
    membership.settle()
    assert (membership.losses, membership.idle_views) == (1, 0)
    assert membership.loss_of([1]) == Loss((1,), 2), "the second worker in a row, and no step between"
    membership.reach(7)
    assert membership.loss_of([1]) == Loss((1,), 1)
    membership.lose([1])
    membership.ask(Member("0", 0), 7, has_lost_peer=True)
    membership.settle()
    assert (membership.losses, membership.idle_views) == (1, 0)


def test_a_loss_tells_the_progress_of_its_view_which_may_repeat_steps() -> None:
    """The rest of how far workers are is for the count of losses."""
    membership = Membership(2)
    both = [Member(name, slot) for slot, name in enumerate("ab")]
    for member in both:
        membership.ask(member, -1)
    membership.settle()
    membership.reach(2 * 30 - 1, 1)  # the beat of a worker in step 30
    membership.lose([1])
    assert [left.progress for left in membership.take_left()] == [59]
    membership.ask(both[0], 60, has_lost_peer=True)
    membership.ask(Member("new", 1), -1)
    membership.settle()
    membership.reach(2 * 30 - 1, 1)  # a late one
    membership.reach(2 * 28 - 1, 2)
    membership.lose([1])
    assert [left.progress for left in membership.take_left()] == [55]
    assert membership.progress == 60


def test_several_that_are_lost_of_one_view_count_once() -> None:
    membership = Membership(4)
    for slot in range(4):
        membership.ask(Member(str(slot), slot), -1)
    membership.settle()
    membership.lose([1])
    assert membership.loss_of([2]) == Loss((2,), 1)
    membership.lose([2])
    for slot in (0, 3):
        membership.ask(Member(str(slot), slot), -1, has_lost_peer=True)
    membership.settle()
    assert (membership.losses, membership.idle_views) == (1, 2)


def test_groups_that_fail_with_nobody_lost_are_counted_until_a_step_is_finished() -> None:
    membership = Membership(2)
    pair = Member("a", 0), Member("b", 1)

    def fails(progress: int, *losing: Member) -> int:
        for member in pair:
            membership.ask(member, progress, has_lost_peer=not losing or member in losing)
        membership.settle()
        return membership.failed_views

    assert fails(-1) == 0, "it is the first one"
    assert [fails(-1, pair[0]), fails(-1), fails(-1, pair[1])] == [1, 2, 3]
    assert fails(3) == 0
    assert fails(3) == 1
    membership.lose([1])
    membership.ask(pair[0], 3, has_lost_peer=True)
    membership.settle()
    assert membership.failed_views == 0


def test_those_on_a_drained_node_leave_for_good_after_a_step() -> None:
    membership = Membership(3)
    members = [Member(name, slot, node) for slot, (name, node) in enumerate(zip("abc", "xyy", strict=True))]
    for member in members:
        membership.ask(member, -1)
    membership.settle()
    membership.drain(["x"])
    assert membership.asks(1) is Leave.AFTER_A_STEP
    for member in members:
        assert membership.settle() is None
        assert membership.ask(member, 4)
    assert membership.settle() == View(2, tuple(members[1:]))
    assert membership.losses == 0 and not membership.is_asking("a")
    assert not membership.ask(Member("d", 0, "x"), -1), "another one on that node"
    assert membership.ask(Member("e", 0, "z"), -1)
    membership.drain(["y", "z"])
    assert membership.drained() == [], "nobody would go on"


def test_the_first_of_those_that_have_finished_most_gives_its_state() -> None:
    assert most_finished([3, 4, -1, 4]) == 1
    assert most_finished([-1, -1]) is None

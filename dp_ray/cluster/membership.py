"""Who works together on a job: begin at `Membership`. It is pure, and knows neither Ray nor torch.

Workers that form one process group are a view. The channel makes views, one after another: a worker asks to take
part, and gets the next view once all that live have asked. Where a member is lost, its view breaks, and the others
leave it at once; where a newcomer asks, they leave it together after a step.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


@dataclass(frozen=True)
class Member:
    """A worker's process: `name` is its own alone, `slot` its number among those that were started."""

    name: str
    slot: int
    node_id: str = ""


@dataclass(frozen=True)
class View:
    """The workers of one process group, in the order of their ranks; views are numbered from 1."""

    number: int = 0
    members: tuple[Member, ...] = ()

    def rank(self, name: str) -> int | None:
        """Return the rank of the process of this name; None if it does not take part."""
        return next((rank for rank, member in enumerate(self.members) if member.name == name), None)

    def place(self, name: str) -> "Place":
        """Return the place of a member."""
        rank = self.rank(name)
        assert rank is not None
        node_ids = [member.node_id for member in self.members]
        here, nodes = node_ids[rank], list(dict.fromkeys(node_ids))
        return Place(rank, len(node_ids), node_ids[:rank].count(here), node_ids.count(here), nodes.index(here))


@dataclass(frozen=True)
class Place:
    """The place of a worker among all of its view, and among those of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


@dataclass(frozen=True)
class Loss:
    """Members that are lost: their ranks, and how often some were since a step was finished, now too.

    `has_excluded` says that among the lost processes is one that took part until it was excluded.
    """

    ranks: tuple[int, ...]
    losses: int
    has_excluded: bool = False


@dataclass(frozen=True)
class Left:
    """Members that take part no more, which is told once: their ranks in the view that they leave, and why.

    They were lost or excluded, or `is_planned`: they leave after a step, since their nodes are taken away.
    `progress` is the most that a worker was known to have finished in the view.
    """

    ranks: tuple[int, ...]
    why: str
    is_planned: bool = False
    progress: int = field(default=-1, compare=False)


class Phase(Enum):
    """The state of a membership."""

    BEGINNING = auto()  # the first view waits for its workers
    SETTLED = auto()
    PLANNED = auto()  # all members are to leave their view together, after a step
    BREAKING = auto()  # all members are to leave their view at once


class Leave(Enum):
    """What a member of a view is asked to do."""

    NOT = auto()
    AFTER_A_STEP = auto()
    NOW = auto()


@dataclass(eq=False)
class Membership:
    """The views of the workers that were started together, and of those that were started in their places.

    The first view has `expected` workers, and each later one at least `least`. A process that was lost or excluded
    takes part no more, even if it lives: another one may be in its place. `losses` counts the views that members were
    lost of, one after another, between which no step was finished. However a member leaves, `take_left` has it once.
    """

    expected: int
    least: int = 1
    view: View = View()
    phase: Phase = Phase.BEGINNING
    losses: int = 0
    _asking: dict[str, Member] = field(default_factory=dict)
    _finished: dict[str, int] = field(default_factory=dict)  # the progress of each of these
    _since: dict[str, int] = field(default_factory=dict)  # the number of the first view of each process, by its name
    _gone: set[str] = field(default_factory=set)
    _excluded: frozenset[int] = frozenset()  # the slots of those whose processes may live
    _drained: Mapping[str, str] = field(default_factory=dict)  # why nodes will be taken away, by their ids
    _left: tuple[Left, ...] = ()  # since the last `take_left`
    progress: int = -1  # the most that a worker is known to have finished
    _in_view: int = -1  # the same in this view, which may repeat steps
    idle_views: int = 0  # made since a step was finished
    failed_views: int = 0  # of these, the last ones whose group has failed though no member was lost
    _settled_at: int = -1  # the progress when a view was last made
    _has_lost: bool = False  # whether the view has lost a member
    _has_failed: bool = False  # whether a member says that it has lost a peer

    def ask(self, member: Member, progress: int, has_lost_peer: bool = False) -> bool:
        """Take in that a worker asks for a view; return whether it may have one.

        `progress` counts what it has finished, -1: it is a newcomer. A member that `has_lost_peer` breaks its view.
        """
        if member.name in self._gone:
            return False
        before = {each.name for each in self._known() if each.slot == member.slot} - {member.name}
        self._leave_out(before, "another process is in its place")
        self._excluded -= {member.slot}
        is_newcomer = self.view.rank(member.name) is None
        self.reach(progress, 0 if is_newcomer else self.view.number)
        if is_newcomer and member.node_id in self._drained and self.view.members:
            return False
        self._asking[member.name], self._finished[member.name] = member, progress
        if has_lost_peer and not is_newcomer:
            self.phase, self._has_failed = Phase.BREAKING, True
        elif self.phase is Phase.SETTLED:
            self.phase = Phase.PLANNED
        return True

    def lose(self, slots: Collection[int], why: str = "") -> tuple[int, ...]:
        """Take in that the processes in these slots have died; return their ranks in the view."""
        self._excluded -= frozenset(slots)
        return self._leave_out({member.name for member in self._known() if member.slot in slots}, why)

    def exclude(self, names: Collection[str], why: str = "") -> None:
        """Go on without members that have given no sign for long, and may live."""
        self._excluded |= {member.slot for member in self.view.members if member.name in names}
        self._leave_out(set(names), why)

    def take_left(self) -> tuple[Left, ...]:
        """Return who has left for good since the last call."""
        left, self._left = self._left, ()
        return left

    def reach(self, progress: int, view: int = 0) -> None:
        """Take in that a worker has finished so much, in the view of this number if it is in one."""
        self.progress = max(self.progress, progress)
        if view == self.view.number:
            self._in_view = max(self._in_view, progress)

    def drain(self, node_ids: Collection[str], why: str = "") -> None:
        """Have the members on these nodes leave after a step, for good; the others go on, if there are any."""
        self._drained = {**self._drained, **dict.fromkeys(node_ids, why)}
        if self.phase is Phase.SETTLED and self.drained():
            self.phase = Phase.PLANNED

    def drained(self) -> list[Member]:
        """Return the members on nodes that are drained; none if too few are on others."""
        here = [member for member in self.view.members if member.name not in self._gone]
        drained = [member for member in here if member.node_id in self._drained]
        return drained if len(here) - len(drained) >= self.least else []

    def break_up(self) -> None:
        """Have all members leave their view at once."""
        self.phase = Phase.BREAKING

    def _leave_out(self, names: set[str], why: str) -> tuple[int, ...]:
        ranks = self._leave(names, why)
        if ranks:
            self.losses, self._has_lost = self._losses_with_one(), True
            self.phase = Phase.BREAKING
        return ranks

    def _leave(self, names: Collection[str], why: str, is_planned: bool = False) -> tuple[int, ...]:
        """Go on without these processes; return the ranks of those that have not left before."""
        leaving = set(names) - self._gone
        ranks = tuple(rank for rank, member in enumerate(self.view.members) if member.name in leaving)
        self._gone |= leaving
        self._asking = {name: each for name, each in self._asking.items() if name not in leaving}
        if ranks:
            self._left += (Left(ranks, why, is_planned, self._in_view),)
        return ranks

    def _losses_with_one(self) -> int:
        if self._has_lost:
            return self.losses
        return 1 + (self.losses if self.progress <= self._settled_at else 0)

    def _known(self) -> list[Member]:
        return [*self.view.members, *self._asking.values()]

    def is_asking(self, name: str) -> bool:
        """Return whether the process of this name waits for a view."""
        return name in self._asking

    def is_gone(self, name: str) -> bool:
        """Return whether the process of this name was lost or excluded."""
        return name in self._gone

    def loss_of(self, slots: Collection[int]) -> Loss | None:
        """Return what the loss of the processes in these slots would be; None if no other one lives."""
        living = [member for member in self._known() if member.name not in self._gone]
        if all(member.slot in slots for member in living):
            return None
        ranks = tuple(self.ranks(slots).values())
        losses = self._losses_with_one() if ranks else self.losses
        return Loss(ranks, losses, not self._excluded.isdisjoint(slots))

    def ranks(self, slots: Collection[int]) -> dict[int, int]:
        """Return the ranks of the view's members in these slots, by their slots, but for those that are gone."""
        here = enumerate(self.view.members)
        return {member.slot: rank for rank, member in here if member.slot in slots and member.name not in self._gone}

    def awaited(self) -> list[Member]:
        """Return the members without whose asking there is no next view."""
        return [each for each in self.view.members if each.name not in self._gone and each.name not in self._asking]

    def settle(self) -> View | None:
        """Make the next view and return it, if all that live have asked; else None.

        The nodes come by their oldest member, within a node the oldest first. So rank 0 stays if it lives.
        """
        if self.phase is Phase.SETTLED or self.awaited():
            return None
        if len(self._asking) < (self.expected if self.phase is Phase.BEGINNING else self.least):
            return None
        number = self.view.number + 1
        leaving = {name: each.node_id for name, each in self._asking.items() if each.node_id in self._drained}
        staying = self._asking.keys() - leaving.keys()
        has_newest = max(self._finished[name] for name in self._asking) in {self._finished[name] for name in staying}
        if has_newest and len(staying) >= self.least:
            for why in dict.fromkeys(self._drained.values()):  # else they have what no other one has, and stay
                names = [name for name, node_id in leaving.items() if self._drained[node_id] == why]
                self._leave(names, why, is_planned=True)
        by_age = sorted(self._asking.values(), key=lambda each: (self._since.get(each.name, number), each.slot))
        nodes = list(dict.fromkeys(member.node_id for member in by_age))
        members = sorted(by_age, key=lambda each: nodes.index(each.node_id))
        self._since = {member.name: self._since.get(member.name, number) for member in members}
        self.view, self._asking, self._finished = View(number, tuple(members)), {}, {}
        self.phase = Phase.PLANNED if self.drained() else Phase.SETTLED
        is_idle = self.progress <= self._settled_at
        self.idle_views = self.idle_views + 1 if is_idle else 0
        self.failed_views = self.failed_views + 1 if is_idle and self._has_failed and not self._has_lost else 0
        self._settled_at, self._has_lost, self._has_failed, self._in_view = self.progress, False, False, -1
        return self.view

    def asks(self, number: int) -> Leave:
        """Return what the members of the view of this number are asked to do; one of no view, 0, is asked nothing."""
        if number == 0:
            return Leave.NOT
        if number < self.view.number or self.phase is Phase.BREAKING:
            return Leave.NOW
        return Leave.AFTER_A_STEP if self.phase is Phase.PLANNED else Leave.NOT

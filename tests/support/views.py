"""A model of workers that train in views: each event is one of theirs, of the channel's, or a fault.

Each slot is a node of its own. A view's collectives are numbered: the first one levels the state, each later one is a
step. A worker goes into a collective, and comes out of it once all members have gone into it; or it fails, since a
member is gone. Rank 0 writes the history's rows in pieces, by their first step and that after the last one: all hold
the rows that no piece may hold yet.
"""

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar

from dp_ray.cluster.membership import Leave, Member, Membership, Phase, View
from dp_ray.tasks.held import most_finished

T = TypeVar("T")
Event = tuple[str, int]
FAULTS = ("kill", "silence", "come", "drain", "keep", "look")  # and that pieces are written, and rows dropped


@dataclass
class Worker:
    slot: int
    state: str = "fresh"  # asking, in, writing, leaving, ending, done, excluded
    is_dead: bool = False
    is_silent: bool = False
    is_told: bool = False  # its death, to the channel
    is_replaced: bool = False
    view: int = 0
    out_of: int = 0  # collectives of the view that it has come out of
    is_in: bool = False  # one
    level: int = -1  # its steps when it went into the first collective of its view
    steps: int = -1
    rows: frozenset[int] = frozenset()  # the steps whose rows it holds
    sent: frozenset[int] = frozenset()  # those when it went into the first collective of its view
    unwritten: frozenset[int] = frozenset()  # those that it is to write, as rank 0
    ran: dict[int, int] = field(default_factory=dict)  # the view of each step that it has finished


OF_A_WORKER = attrgetter(*(field.name for field in fields(Worker) if field.name != "ran"))


def copied(here: T) -> T:
    """A copy of an object, with the same attributes; `copy.copy` takes four times as long, and 400,000 are made."""
    there = object.__new__(type(here))
    there.__dict__.update(here.__dict__)
    return there


def node(worker: Worker) -> str:
    return f"node {worker.slot}"


class Broken(AssertionError):
    """An invariant does not hold."""


class Model:
    """`make` makes the membership; `level` chooses the rank whose state all get."""

    def __init__(self, workers: int, steps: int, make: Any = Membership, level: Any = most_finished) -> None:
        self.steps = steps
        self.membership = make(workers)
        self.level = level
        self.workers = [Worker(slot) for slot in range(workers)]
        self.out: frozenset[int] = frozenset()  # the places of those that were excluded
        self.views: dict[int, tuple[int, ...]] = {}  # the members, by their places in `workers`
        self.votes: set[tuple[int, int]] = set()  # the view and number of collectives with which all leave
        self.ended: set[tuple[int, int]] = set()  # the view and place of workers that have nothing left to do in it
        self.pieces: frozenset[tuple[int, int]] = frozenset()  # of the history
        self.writes = 0  # the newest view whose rank 0 writes
        self.told: dict[int, str] = {}  # why members have left for good, by their places

    def copied(self) -> "Model":
        other = copied(self)
        other.membership = copied(self.membership)
        for name in ("_asking", "_finished", "_since", "_gone"):
            setattr(other.membership, name, getattr(self.membership, name).copy())
        other.workers = list(map(copied, self.workers))
        for worker in other.workers:
            worker.ran = worker.ran.copy()
        other.views, other.votes, other.ended = self.views.copy(), self.votes.copy(), self.ended.copy()
        other.told = self.told.copy()
        return other

    def key(self) -> Any:
        known = self.membership
        workers = tuple((*OF_A_WORKER(worker), *sorted(worker.ran.items())) for worker in self.workers)
        asking, gone = frozenset(known._asking), (frozenset(known._gone), frozenset(known._drained))
        ended = frozenset(self.votes), frozenset(self.ended), frozenset(self.told)
        return workers, known.phase, known.view.number, asking, gone, self.pieces, self.writes, *ended

    # Events.

    def events(self, faults: tuple[str, ...] = ()) -> list[Event]:
        """All that may happen now, with these kinds of faults."""
        found: list[Event] = []
        for number, worker in enumerate(self.workers):
            if worker.is_dead:
                if not worker.is_told:
                    found.append(("tell", number))
                elif not worker.is_replaced and "come" in faults:
                    found.append(("come", number))
                continue
            if worker.state in ("done", "excluded"):
                continue
            if self.views:  # before the first view, all start again
                found += [("kill", number)] if "kill" in faults else []
                found += (
                    [("drain", number)] if "drain" in faults and node(worker) not in self.membership._drained else []
                )
            if worker.is_silent:
                if self.membership.phase is Phase.BREAKING and str(number) in self._awaited():
                    found.append(("exclude", number))
                found.append(("wake", number))
                continue
            if "silence" in faults and worker.state == "in":
                found.append(("silence", number))
            if worker.state == "in" and worker.out_of:
                writes = number == self.views[worker.view][0]
                found += [("keep", number)] if writes and not worker.is_in and "keep" in faults else []
                found += [("look", number)] if not writes and "look" in faults else []
            found += [(kind, number) for kind in self._own(worker)]
        return found

    def _own(self, worker: Worker) -> list[str]:
        if worker.state == "fresh":
            return ["ask"]
        if worker.state == "asking":
            return []
        if worker.state == "writing":
            return ["write"]
        members = [self.workers[number] for number in self.views[worker.view]]
        must_leave = self.membership.asks(worker.view) is Leave.NOW
        if worker.state in ("leaving", "ending"):
            if all((worker.view, number) in self.ended for number in self.views[worker.view]):
                return ["leave" if worker.state == "leaving" else "end"]
            return ["fail"] if must_leave else []
        if not worker.is_in:
            return ["fail"] if must_leave else ["go in"]
        found = []
        at = worker.out_of
        if all(one.view == worker.view and (one.out_of > at or (one.out_of == at and one.is_in)) for one in members):
            found.append("come out")
        if must_leave or any(one.is_dead or one.view != worker.view for one in members):
            found.append("fail")
        return found

    def _awaited(self) -> list[str]:
        return [member.name for member in self.membership.awaited()]

    def do(self, event: Event) -> None:
        """Have it happen; raises Broken if an invariant does not hold after it."""
        kind, number = event
        worker = self.workers[number]
        if kind == "kill":
            worker.is_dead = True
        elif kind == "tell":
            worker.is_told = True
            self.membership.lose([worker.slot], "died")
        elif kind == "drain":
            self.membership.drain([node(worker)], "drained")
        elif kind == "come":
            worker.is_replaced = True
            self.workers.append(Worker(worker.slot))
        elif kind in ("silence", "wake"):
            worker.is_silent = kind == "silence"
        elif kind == "exclude":
            self.out |= {number}
            self.membership.exclude([str(number)], "silent")
        elif kind == "go in":
            worker.is_in = True
            if worker.out_of == 0:
                worker.level, worker.sent = worker.steps, worker.rows
            elif self.membership.asks(worker.view) is Leave.AFTER_A_STEP:
                self.votes.add((worker.view, worker.out_of))
        elif kind in ("keep", "write"):
            self._write(number, worker)
        elif kind == "look":
            worker.rows = self.dropped(worker)
        elif kind == "end":
            worker.state = "done"
            if sorted(step for piece in self.pieces for step in range(*piece)) != list(range(self.steps)):
                raise Broken("a step's row is missing in the history, or is there twice")
        elif kind == "come out":
            self._come_out(number, worker)
        else:  # asks for a view
            self._ask(number, worker, has_lost_peer=kind == "fail")
        self._settle()
        self._check()

    def _ask(self, number: int, worker: Worker, has_lost_peer: bool) -> None:
        worker.state, worker.view, worker.is_in, worker.out_of = "asking", 0, False, 0
        if not self.membership.ask(Member(str(number), worker.slot, node(worker)), worker.steps, has_lost_peer):
            worker.state = "excluded"

    def _settle(self) -> None:
        before, view = self.membership.view, self.membership.settle()
        if view is not None:
            self.views[view.number] = tuple(int(member.name) for member in view.members)
        self._tell(before)
        if view is None:
            return
        members = self.views[view.number]
        if before.members and (first := int(before.members[0].name)) in members and members[0] != first:
            raise Broken("rank 0 lives, and has another rank")
        if len(members) < self.membership.least and before.members:
            raise Broken("a view has fewer workers than the job needs")
        for number in members:
            worker = self.workers[number]
            if worker.is_told or number in self.out:
                raise Broken("a worker is in a view, and the others have gone on without it before")
            if worker.state != "asking" and not worker.is_dead:
                raise Broken("a worker is in a view, and has not left the one before")
            worker.state, worker.view, worker.out_of, worker.is_in = "in", view.number, 0, False
        if set(self.views.get(before.number, ())) - set(members) - self.told.keys():
            raise Broken("a member leaves, and nobody is told")
        for number, worker in enumerate(self.workers):
            if worker.state != "asking" or worker.is_dead or number in members:
                continue
            worker.state = "excluded"
            if worker.steps > max(self.workers[one].steps for one in members):
                raise Broken("a worker leaves for good with a step that no other one has finished")

    def _tell(self, before: View) -> None:
        """Take in which members of the view before are told to have left, each once."""
        members = self.views.get(before.number, ())
        for left in self.membership.take_left():
            for rank in left.ranks:
                number = members[rank]
                if number in self.told:
                    raise Broken("a member that leaves is told twice")
                if left.is_planned and str(number) not in self.membership._gone:
                    raise Broken("a member is told to have left that takes part")
                self.told[number] = left.why

    def _come_out(self, number: int, worker: Worker) -> None:
        members = self.views[worker.view]
        if worker.out_of == 0:
            told = [self.workers[one].level for one in members]
            source = self.level(told)
            worker.steps = self.levelled(worker, max(0, told[source] if source is not None else 0))
            if worker.steps < max(told):
                raise Broken("a worker goes on without a step that another one has finished")
            if source is not None and worker.level < told[source]:
                worker.rows = self.got(worker, self.workers[members[source]].sent)
            if number == members[0]:
                self.writes = worker.view
                self.pieces = self.left(worker)
                worker.unwritten = worker.rows = self.dropped(worker)
        else:
            for one in self.workers:
                if self._counts(one) and worker.view != one.ran.get(worker.steps, worker.view):
                    raise Broken("a step runs again that a worker has finished which lives")
            worker.ran[worker.steps] = worker.view
            if self.holds_rows(number == members[0]):
                worker.rows |= {worker.steps}
            worker.unwritten |= {worker.steps} if number == members[0] else set()
            worker.steps += 1
        if worker.steps >= self.steps:
            worker.state = "writing" if number == members[0] else "ending"
        elif (worker.view, worker.out_of) in self.votes:
            worker.state = "leaving"
        if worker.state in ("ending", "leaving"):
            self.ended.add((worker.view, number))
        worker.out_of += 1
        worker.is_in = False

    def _write(self, number: int, worker: Worker) -> None:
        if worker.view < self.writes:  # it is refused
            self._ask(number, worker, has_lost_peer=True)
            return
        if rows := worker.unwritten:
            piece = min(rows), max(rows) + 1
            assert rows == set(range(*piece))
            self.pieces |= {piece}
        worker.unwritten = frozenset()
        if worker.state == "writing":
            worker.state = "ending"
            self.ended.add((worker.view, number))

    def holds_rows(self, is_first: bool) -> bool:
        """Return whether a worker holds the rows of the steps that it finishes."""
        return True

    def got(self, worker: Worker, sent: frozenset[int]) -> frozenset[int]:
        """Return the rows of a worker that has got another one's state with these."""
        return sent

    def left(self, worker: Worker) -> frozenset[tuple[int, int]]:
        """Return the pieces that are left where a worker becomes rank 0: those with later steps are removed."""
        return frozenset(piece for piece in self.pieces if piece[1] <= worker.steps)

    def dropped(self, worker: Worker) -> frozenset[int]:
        """Return the rows of a worker that has dropped those in pieces: none that may be removed."""
        end = max((end for _, end in self.pieces if end <= worker.steps), default=0)
        return frozenset(step for step in worker.rows if step >= end)

    def levelled(self, worker: Worker, steps: int) -> int:
        """Return the steps of a worker that has got a state of so many."""
        return steps

    def _counts(self, worker: Worker) -> bool:
        is_gone = str(self.workers.index(worker)) in self.membership._gone
        return not worker.is_dead and not is_gone and worker.state != "excluded"

    def _check(self) -> None:
        members = [self.workers[number] for number in self.views.get(self.membership.view.number, ())]
        level = [one.steps for one in members if one.view == self.membership.view.number and one.out_of]
        if level and max(level) - min(level) > 1:
            raise Broken("two members of a view differ by more than a step")
        waits = self.membership.least > 1 and any(one.is_told and not one.is_replaced for one in self.workers)
        if not self.is_over() and not self.events() and not waits:
            raise Broken("nothing happens any more, and workers live that have not come to the end")

    def is_over(self) -> bool:
        """Whether all that live have come to the end or are out; who asks then is told that the job is over."""
        states = {worker.state for worker in self.workers if not worker.is_dead}
        return states <= {"excluded"} or ("done" in states and states <= {"done", "excluded", "asking"})

"""How many workers to start, and when to stop them to resize: a pure decision, which knows no Ray.

`decide` takes all facts as one value and returns what to do and the reason. `scaling.py` looks at the cluster and
calls it for Ray Train's controller.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from dp_ray.cluster.requests import Ask, Request, Why
from dp_ray.cluster.resources import Resources, capacity_for, text_of, times

SETTLE_SECONDS = 3.0  # the capacity must stay the same for this long before workers start, or stop to grow
GROW_AFTER_SECONDS = 10.0  # of running, before workers stop to grow: a restart costs time
SAY_SECONDS = 30.0  # between two lines that say what the run waits for


@dataclass(frozen=True)
class Wanted:
    """What the session asks of the cluster.

    `each` are one worker's resources; `capacity_seconds` is the session's `timeouts.capacity`; `can_stop` says
    whether the job that runs keeps work to resume from.
    """

    min_workers: int
    max_workers: int
    each: Resources
    placement: str
    accelerator_type: str | None
    capacity_seconds: float | None
    can_stop: bool = True

    def of_job(self, workers: int, can_stop: bool) -> "Wanted":
        """What a job that takes so many of a session's workers asks for: it gains nothing from more."""
        most = min(self.max_workers, workers)
        return replace(self, min_workers=min(self.min_workers, most), max_workers=most, can_stop=can_stop)

    def capacity(self, nodes: list[dict[str, float]]) -> int:
        """How many workers fit on nodes with these resources, at most `max_workers`."""
        return min(self.max_workers, capacity_for(self.each, nodes, self.placement, self.accelerator_type))


@dataclass(frozen=True)
class Idle:
    """All facts of a decision while no workers run.

    `capacity` is the number of workers that fit now, on what is free or what the last workers held.
    `idle_capacity` is the number that would fit if the `num_nodes` nodes were idle. `has_started`: there were workers
    before. `may_hold`: the last workers may still hold their capacity. `autoscales`: an autoscaler may add
    nodes.
    """

    wanted: Wanted
    capacity: int
    idle_capacity: int
    num_nodes: int
    has_started: bool
    may_hold: bool
    autoscales: bool
    waiting_since: float
    said: float = float("-inf")


@dataclass(frozen=True)
class LastCount:
    """The capacity for workers at the last count, and the time since which it counts as settled, in seconds."""

    capacity: int
    since: float


@dataclass(frozen=True)
class Running:
    """All facts of a decision while workers run.

    `draining` are the addresses of our workers' nodes that are about to be taken away. `capacity` is the number of
    workers that fit, including those that run; None if it was not counted (see `is_worth_a_look`).
    """

    wanted: Wanted
    num_workers: int
    started: float
    last_count: LastCount
    draining: tuple[str, ...] = ()
    capacity: int | None = None


class Do(Enum):
    """What to do about the number of workers."""

    START = auto()
    WAIT = auto()
    GIVE_UP = auto()
    GO_ON = auto()
    ASK = auto()


class Reason(Enum):
    """Why workers are started, delayed, left alone, or asked to save or stop."""

    ALL_CAPACITY = "all that the nodes have is free"
    SETTLED = "what is free has stayed so for a while"
    OWN_HOLD = "our own last workers may hold what is not free"
    SETTLING = "more may become free in a moment"
    TOO_FEW_NODES = "the nodes have too little room"
    OTHERS_HOLD = "others hold the room"
    TIMED_OUT = "no nodes came in the time that the job allows"
    AS_WANTED = "as many workers run as there can be"
    TOO_YOUNG = "the workers have not run for long enough to be replaced"
    NO_MORE_CAPACITY = "there is room for no more workers"
    MUST_NOT_STOP = "the task keeps nothing from which it could go on"
    DRAIN = Why.DRAIN.value
    GROWTH = Why.GROWTH.value


@dataclass(frozen=True)
class Decision:
    """What to do, and why.

    `num_workers` is the number to start, `request` what to ask of the workers, `text` a line for the user,
    `last_count` the count to remember.
    """

    do: Do
    reason: Reason
    num_workers: int = 0
    request: Request | None = None
    text: str = ""
    last_count: LastCount | None = None


def decide(snapshot: Idle | Running, now: float) -> Decision:
    """What to do about the number of workers; `now` is in seconds, on the same clock as the snapshot's times."""
    return _start_or_wait(snapshot, now) if isinstance(snapshot, Idle) else _ask_or_go_on(snapshot, now)


def _start_or_wait(idle: Idle, now: float) -> Decision:
    """Start as many workers as fit, once all capacity is free or the capacity has settled; else wait.

    If the last workers may still hold their capacity, start the minimum after a while.
    """
    wanted, waited = idle.wanted, now - idle.waiting_since
    if idle.capacity >= wanted.min_workers:
        if idle.capacity == max(wanted.min_workers, idle.idle_capacity):
            return Decision(Do.START, Reason.ALL_CAPACITY, idle.capacity)
        if waited > SETTLE_SECONDS:
            return Decision(Do.START, Reason.SETTLED, idle.capacity)
    if idle.may_hold and idle.idle_capacity >= wanted.min_workers and waited > 2 * SETTLE_SECONDS:
        return Decision(Do.START, Reason.OWN_HOLD, wanted.min_workers)
    if idle.capacity >= wanted.min_workers:
        return Decision(Do.WAIT, Reason.SETTLING)
    return _lack_capacity(idle, now)


def _lack_capacity(idle: Idle, now: float) -> Decision:
    """Wait for capacity and say so now and then; give up if the session had workers and no nodes came in time."""
    wanted = idle.wanted
    needs = f"{wanted.min_workers} workers need {times(wanted.each, wanted.min_workers)}"
    fits = idle.idle_capacity >= wanted.min_workers
    who = "other jobs hold them" if fits else f"{idle.num_nodes} nodes have room for {idle.idle_capacity}"
    if not fits and _is_too_late(idle, now):
        return Decision(
            Do.GIVE_UP,
            Reason.TIMED_OUT,
            text=f"{needs} ({text_of(wanted.each)} each); {who}, and no more came in {wanted.capacity_seconds:g} s "
            "(timeouts.capacity); run the job again when there are more nodes, or with fewer workers: it resumes",
        )
    text = f"{needs}; {who}: waiting" if now - idle.said > SAY_SECONDS else ""
    return Decision(Do.WAIT, Reason.OTHERS_HOLD if fits else Reason.TOO_FEW_NODES, text=text)


def _is_too_late(idle: Idle, now: float) -> bool:
    limit = idle.wanted.capacity_seconds
    may_give_up = idle.has_started and not idle.autoscales and limit is not None
    return may_give_up and now - idle.waiting_since > (limit or 0.0)


def is_worth_a_look(running: Running, now: float) -> bool:
    """Whether counting the capacity could change the decision; the count asks all nodes, so it is not free."""
    return bool(running.draining) or _why_not_to_grow(running, now) is None


def _why_not_to_grow(running: Running, now: float) -> Reason | None:
    if running.num_workers >= running.wanted.max_workers:
        return Reason.AS_WANTED
    return Reason.TOO_YOUNG if now - running.started < GROW_AFTER_SECONDS else None


def _ask_or_go_on(running: Running, now: float) -> Decision:
    """Ask the workers to save or to stop if their nodes drain, or to stop if there is room for more."""
    if running.draining:
        return _on_drain(running)
    if why := _why_not_to_grow(running, now):
        return Decision(Do.GO_ON, why)
    capacity = running.capacity or 0
    if capacity <= running.num_workers:
        return Decision(Do.GO_ON, Reason.NO_MORE_CAPACITY, last_count=LastCount(capacity, now))
    if capacity != running.last_count.capacity:
        return Decision(Do.GO_ON, Reason.SETTLING, last_count=LastCount(capacity, now))
    if now - running.last_count.since <= SETTLE_SECONDS:
        return Decision(Do.GO_ON, Reason.SETTLING)
    if not running.wanted.can_stop:
        return Decision(Do.GO_ON, Reason.MUST_NOT_STOP)
    return Decision(
        Do.ASK, Reason.GROWTH, request=Request(Ask.RESTART, Why.GROWTH, f"there is room for {capacity} workers")
    )


def _on_drain(running: Running) -> Decision:
    """Stop if the run can resume at once on the remaining capacity; else save, and run on while the nodes last."""
    can_go_on = (running.capacity or 0) >= running.wanted.min_workers and running.wanted.can_stop
    text = f"Ray drains {', '.join(running.draining)}"
    return Decision(Do.ASK, Reason.DRAIN, request=Request(Ask.RESTART if can_go_on else Ask.SAVE, Why.DRAIN, text))

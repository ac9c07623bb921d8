"""Decide how many workers to start, when to resize, and whether to restart: pure functions, which know no Ray.

`decide_scaling` and `decide_restart` take all facts as one value. They return what to do, and for a restart also
what to report and to remember. `policies.py` collects the facts for Ray Train's controller.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeVar

from dp_ray.cluster.channel import IDLE, Ask, Request, Terms
from dp_ray.cluster.membership import Loss
from dp_ray.cluster.resources import Resources, capacity_for, resources_text, times
from dp_ray.messages import Ending, Interrupted, Note, Waits, WorkerExit
from dp_ray.rundir.incidents import IncidentKind
from dp_ray.text import counted

T = TypeVar("T")
SETTLE_SECONDS = 3.0  # the capacity must stay the same for this long before workers start
GROW_AFTER_SECONDS = 10.0  # of running, before more workers are started: that costs time
REPLACE_SECONDS = 60.0  # of room for lost workers, before all are started again for it: it comes without that, mostly


@dataclass(frozen=True)
class WorkerDemand:
    """The workers that a session wants of the cluster.

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

    def of_job(self, workers: int, can_stop: bool) -> "WorkerDemand":
        """Return the same for a job that takes so many of the session's workers: it gains nothing from more."""
        most = min(self.max_workers, workers)
        return replace(self, min_workers=min(self.min_workers, most), max_workers=most, can_stop=can_stop)

    def capacity(self, nodes: list[dict[str, float]]) -> int:
        """Return how many workers fit on nodes with these resources, at most `max_workers`."""
        return min(self.max_workers, capacity_for(self.each, nodes, self.placement, self.accelerator_type))


@dataclass(frozen=True)
class Idle:
    """All facts of a decision while no workers run.

    `capacity` is the number of workers that fit now, on what is free or what the last workers held.
    `idle_capacity` is the number that would fit if the `num_nodes` nodes were idle. `has_started`: there were workers
    before. `may_hold`: the last workers may still hold their capacity. `autoscales`: an autoscaler may add
    nodes.
    """

    wanted: WorkerDemand
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
    workers that fit, including those that run; None if it was not counted (see `is_worth_a_look`). `num_lost` of
    those that were started are lost, and the others go on. `num_staying` can go on without those on draining nodes.
    With `takes_more`, further workers join those that run; else all start again for them. With `starts_fail`, workers
    in the places of lost ones, or further ones, were lost as they started, again and again.
    """

    wanted: WorkerDemand
    num_workers: int
    started: float
    last_count: LastCount
    draining: tuple[str, ...] = ()
    capacity: int | None = None
    num_lost: int = 0
    num_staying: int = 0
    takes_more: bool = False
    starts_fail: bool = False


class Resize(Enum):
    """An action on the number of workers."""

    START = auto()
    WAIT = auto()
    GIVE_UP = auto()
    GO_ON = auto()
    ASK = auto()
    LEAVE = auto()  # those on draining nodes, and the others go on
    GROW = auto()  # further ones start, and the others go on


@dataclass(frozen=True)
class ScalingDecision:
    """A decision on the number of workers.

    `num_workers` is the number to start; to grow, that of all with the lost ones. `request` is what to ask of the
    workers, `text` a line for the user, `last_count` the count to remember.
    """

    do: Resize
    num_workers: int = 0
    request: Request | None = None
    text: str = ""
    last_count: LastCount | None = None


def decide_scaling(snapshot: Idle | Running, now: float) -> ScalingDecision:
    """Decide on the number of workers; `now` is in seconds, on the same clock as the snapshot's times."""
    return _start_or_wait(snapshot, now) if isinstance(snapshot, Idle) else _ask_or_go_on(snapshot, now)


def _start_or_wait(idle: Idle, now: float) -> ScalingDecision:
    """Start as many workers as fit, once all capacity is free or the capacity has settled; else wait.

    If the last workers may still hold their capacity, start the minimum after a while.
    """
    wanted, waited = idle.wanted, now - idle.waiting_since
    if idle.capacity >= wanted.min_workers:
        is_all = idle.capacity == max(wanted.min_workers, idle.idle_capacity)
        if is_all or waited > SETTLE_SECONDS:
            return ScalingDecision(Resize.START, idle.capacity)
        return ScalingDecision(Resize.WAIT)
    if idle.may_hold and idle.idle_capacity >= wanted.min_workers and waited > 2 * SETTLE_SECONDS:
        return ScalingDecision(Resize.START, wanted.min_workers)
    return _lack_capacity(idle, now)


def _lack_capacity(idle: Idle, now: float) -> ScalingDecision:
    """Wait for capacity, and give up if the session had workers and no nodes came in time.

    A wait is said once here; the driver says more of a long one.
    """
    wanted = idle.wanted
    need = f"{counted(wanted.min_workers, 'worker')} {'needs' if wanted.min_workers == 1 else 'need'}"
    needs = f"{need} {times(wanted.each, wanted.min_workers)}"
    fits = idle.idle_capacity >= wanted.min_workers
    nodes = f"{counted(idle.num_nodes, 'node')} {'has' if idle.num_nodes == 1 else 'have'}"
    who = "other jobs hold them" if fits else f"{nodes} room for {idle.idle_capacity}"
    limit = wanted.capacity_seconds
    may_give_up = idle.has_started and not idle.autoscales and limit is not None
    if not fits and may_give_up and now - idle.waiting_since > (limit or 0.0):
        return ScalingDecision(
            Resize.GIVE_UP,
            text=f"{needs} ({resources_text(wanted.each)} each); {who}, and no more came in {limit:g} s "
            "(timeouts.capacity); run the job again when there are more nodes, or with fewer workers: it resumes",
        )
    text = f"{needs}; {who}: waiting" if idle.said < idle.waiting_since else ""
    return ScalingDecision(Resize.WAIT, text=text)


def is_worth_a_look(running: Running, now: float) -> bool:
    """Return whether counting the capacity could change the decision; the count asks all nodes, so it is not free."""
    return bool(running.draining) or _may_grow(running, now)


def _may_grow(running: Running, now: float) -> bool:
    is_old = now - running.started >= GROW_AFTER_SECONDS
    return running.num_workers < running.wanted.max_workers and not running.starts_fail and is_old


def _ask_or_go_on(running: Running, now: float) -> ScalingDecision:
    """Ask the workers to save, leave or stop if their nodes drain; start more, or have all stop, if there is room."""
    if running.draining:
        text = f"Ray drains {', '.join(running.draining)}"
        if running.num_staying:
            return ScalingDecision(Resize.LEAVE, text=text)
        # Stop if the run can resume at once on the remaining capacity; else save, and run on while the nodes last.
        can_go_on = (running.capacity or 0) >= running.wanted.min_workers and running.wanted.can_stop
        request = Request(Ask.RESTART if can_go_on else Ask.SAVE, text, drains=True)
        return ScalingDecision(Resize.ASK, request=request)
    if not _may_grow(running, now):
        return ScalingDecision(Resize.GO_ON, last_count=LastCount(0, now))  # what was seen before is over
    capacity = running.capacity or 0
    if capacity <= running.num_workers or capacity != running.last_count.capacity:
        return ScalingDecision(Resize.GO_ON, last_count=LastCount(capacity, now))
    settles = now - running.last_count.since <= (REPLACE_SECONDS if running.num_lost else SETTLE_SECONDS)
    if settles or not running.wanted.can_stop:
        return ScalingDecision(Resize.GO_ON)
    text = f"there is room for {counted(capacity, 'worker')}"
    num_started = running.num_workers + running.num_lost
    num_slots = min(running.wanted.max_workers, capacity + running.num_lost)
    if running.takes_more and num_slots > num_started:  # else there is room, but not in the places of lost ones
        return ScalingDecision(Resize.GROW, num_slots, text=text, last_count=LastCount(0, now))
    return ScalingDecision(Resize.ASK, request=Request(Ask.RESTART, text))


DEATH_SECONDS = 3.0  # Ray sees a worker's death at most this much later than its peers


class StartTrouble(Enum):
    """The kind of a failed start."""

    NO_CAPACITY = auto()
    LOST = auto()
    ERROR = auto()


@dataclass(frozen=True)
class StartFailed:
    """A start of workers that failed; `cause` says why in a line."""

    trouble: StartTrouble
    cause: str


@dataclass(frozen=True)
class WorkersFailed:
    """Failed workers by rank: those that reported how they ended, and those that died, with the cause in a line."""

    ended: Mapping[int, WorkerExit]
    died: Mapping[int, str]

    def of(self, ending: Ending) -> dict[int, WorkerExit]:
        """Return the workers that ended in this way, by rank."""
        return {rank: end for rank, end in self.ended.items() if end.kind is ending}

    def without(self, ranks: Collection[int]) -> "WorkersFailed":
        """Return the failure without these workers."""
        ended = {rank: end for rank, end in self.ended.items() if rank not in ranks}
        return WorkersFailed(ended, {rank: why for rank, why in self.died.items() if rank not in ranks})


@dataclass(frozen=True)
class Memory:
    """The memory of failures: retries left, errors seen, and since when a lost peer's death is awaited.

    `has_restarted` says that other workers ran before those that failed.
    """

    retries: int
    seen: frozenset[str] = frozenset()
    lost_peer_since: float | None = None
    has_restarted: bool = False


@dataclass(frozen=True)
class Snapshot:
    """All facts of a decision: what failed, what the workers were asked to do, and what is remembered.

    `ranks` has the ranks in the `job` of workers that failed, by their numbers here; those that take no part have
    none. `loss` is what the loss is to those that are left, None if nobody goes on. `replaces` says that what failed
    to start were workers in the places of lost ones.
    """

    failure: StartFailed | WorkersFailed
    request: Request
    memory: Memory
    job: Terms = IDLE
    ranks: Mapping[int, int] = field(default_factory=dict)
    loss: Loss | None = None
    replaces: bool = False

    def by_rank(self, failed: Mapping[int, T]) -> dict[int, T]:
        """Return what is said of failed workers by their ranks in the job, without those that take no part."""
        return dict(sorted((self.ranks[slot], said) for slot, said in failed.items() if slot in self.ranks))

    @property
    def is_exceeded(self) -> bool:
        """Whether more workers were lost, with no step between, than the others are to outlive."""
        return self.loss is not None and self.job.outlives is not None and self.loss.losses > self.job.outlives

    @property
    def others_go_on(self) -> bool:
        """Whether the others go on in their processes.

        They do so where the user stops the run too: what they hold is kept after a step.
        """
        stops, failure = self.request.ask is Ask.STOP and self.job.needs_all, self.failure
        if isinstance(failure, StartFailed):
            return self.replaces and not stops
        if self.loss is None or self.is_exceeded or (stops and self.loss.ranks):
            return False
        # After an error of a survivor all end; a worker that serves is lost alone.
        return not self.job.has_steps or len(failure.of(Ending.LOST_PEER)) == len(failure.ended)


class Restart(Enum):
    """An action on failed workers. If none has survived, REPLACE is RESTART."""

    RESTART = auto()  # them and the survivors
    GIVE_UP = auto()
    WAIT = auto()
    REPLACE = auto()  # them alone


@dataclass(frozen=True)
class RestartDecision:
    """A decision on failed workers, the message to the driver, and what to remember."""

    do: Restart
    memory: Memory
    message: Interrupted | Waits | Note | None = None


def decide_restart(snapshot: Snapshot, now: float) -> RestartDecision:
    """Decide whether to restart the workers: up to `retries` times after losses and new errors that may be transient.

    Where others go on, losses cost no retry, but for too many of them one after another: then none is left. Workers
    that stopped because they were asked to, or beside workers of another kind, cost none. `now` is in seconds, on any
    clock.
    """
    if snapshot.others_go_on:
        return RestartDecision(Restart.REPLACE, snapshot.memory)
    memory = replace(snapshot.memory, retries=0) if snapshot.is_exceeded else snapshot.memory
    decision = _all_restart(replace(snapshot, memory=memory), now)
    if snapshot.job.outlives is not None and isinstance(decision.message, Interrupted):
        return replace(decision, message=replace(decision.message, why=_why_all_restart(snapshot.failure)))
    return decision


def _all_restart(snapshot: Snapshot, now: float) -> RestartDecision:
    failure, memory = snapshot.failure, snapshot.memory
    if snapshot.request.ask is Ask.STOP:
        return RestartDecision(Restart.GIVE_UP, memory)
    if isinstance(failure, StartFailed):
        return _after_start(failure, memory)
    if not failure.died and len(failure.of(Ending.LOST_PEER)) == len(failure.ended):
        since = now if memory.lost_peer_since is None else memory.lost_peer_since
        if now - since < DEATH_SECONDS:  # a worker often reports a lost peer before Ray does
            return RestartDecision(Restart.WAIT, replace(memory, lost_peer_since=since))
    memory = replace(memory, lost_peer_since=None)
    if failure.died and not failure.ended and min(failure.died) >= snapshot.job.workers > 0:
        what = f"a worker that the job does not take was lost: {_each(failure.died.values())}"
        message = Interrupted(IncidentKind.WORKER, what, ())
        return RestartDecision(Restart.RESTART, memory, message)
    return _after_run(failure, snapshot, memory)


def _after_run(failure: WorkersFailed, snapshot: Snapshot, memory: Memory) -> RestartDecision:
    """Decide by the first cause: a death explains its peers' errors; an error of user code explains lost peers."""
    if failure.died:
        ranks = tuple(snapshot.by_rank(failure.died))
        return _retry(memory, Interrupted(IncidentKind.WORKER, _each(failure.died.values()), ranks))
    for ending in (Ending.MISTAKEN, Ending.BROKEN_GPU, Ending.RAISED, Ending.OUT_OF_MEMORY):
        if raised := failure.of(ending):
            first = min(raised)
            return _after_error(raised[first], tuple(snapshot.by_rank({first: raised[first]})), memory)
    if others := failure.of(Ending.OTHER_KIND):
        told = Interrupted(IncidentKind.RESIZE, others[min(others)].first_line, ())
        return RestartDecision(Restart.RESTART, memory, told)
    if failure.of(Ending.STOPPED):
        kind = IncidentKind.PREEMPTION if snapshot.request.drains else IncidentKind.RESIZE
        return RestartDecision(Restart.RESTART, memory, Interrupted(kind, snapshot.request.text, ()))
    ranks = tuple(snapshot.by_rank(failure.ended))
    return _retry(memory, Interrupted(IncidentKind.NETWORK, what_failed(failure), ranks))


def _after_error(error: WorkerExit, ranks: tuple[int, ...], memory: Memory) -> RestartDecision:
    if error.kind is Ending.MISTAKEN:
        return RestartDecision(Restart.GIVE_UP, memory)
    identity = re.sub(r"[0-9a-f]{32}", "", f"{error.kind} {error.text}")  # without ids that differ each time
    is_broken = error.kind is Ending.BROKEN_GPU  # which says nothing of the workers that come
    if not error.has_progressed and not is_broken:
        # A GPU may hold the memory of the workers that ran before for a moment yet; but not for two starts.
        if error.kind is not Ending.OUT_OF_MEMORY or not memory.has_restarted:
            return RestartDecision(Restart.GIVE_UP, memory)
        identity = f"{error.kind} at the start"
    if identity in memory.seen:
        return RestartDecision(Restart.GIVE_UP, memory)
    memory = replace(memory, seen=memory.seen | {identity})
    return _retry(memory, Interrupted(IncidentKind.ERROR, error.first_line, ranks))


def _after_start(failure: StartFailed, memory: Memory) -> RestartDecision:
    """Decide after a failed start: no capacity, workers that died meanwhile, or an error."""
    match failure.trouble:
        case StartTrouble.NO_CAPACITY:  # another job took it: the next start waits for capacity
            message = Waits("the free resources were taken, or no node has enough of them for a worker: waiting")
            return RestartDecision(Restart.RESTART, memory, message)
        case StartTrouble.LOST:
            what = f"the workers could not be started: {failure.cause}"
            return _retry(memory, Interrupted(IncidentKind.WORKER, what, ()))
        case StartTrouble.ERROR:
            return RestartDecision(Restart.GIVE_UP, memory)


def _why_all_restart(failure: WorkersFailed | StartFailed) -> str:
    """Say why no survivors go on, though the job would have them do so."""
    if isinstance(failure, StartFailed):
        return "no worker is left"
    if failure.of(Ending.STOPPED):
        return "all workers were to stop"
    if len(failure.of(Ending.LOST_PEER)) < len(failure.ended):
        return "a worker has raised an error"
    return "no worker is left that can go on"


def what_failed(failure: WorkersFailed) -> str:
    """Say in a line how workers have failed."""
    return _each([*failure.died.values(), *(end.first_line for end in failure.ended.values())])


def _retry(memory: Memory, message: Interrupted) -> RestartDecision:
    if memory.retries == 0:
        return RestartDecision(Restart.GIVE_UP, memory)
    return RestartDecision(Restart.RESTART, replace(memory, retries=memory.retries - 1), message)


def _each(causes: Iterable[str]) -> str:
    return "; ".join(sorted(set(causes)))

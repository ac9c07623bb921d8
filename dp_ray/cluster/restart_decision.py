"""Whether to restart failed workers: a pure decision, which knows no Ray.

`decide` takes all facts as one value, a Snapshot. It returns what to do, the reason, what to report to the driver,
and what to remember. `restarts.py` calls it for Ray Train's controller.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from dp_ray.cluster.requests import Ask, Request, Why
from dp_ray.monitor.messages import Ending, Interrupted, Waits, WorkerExit
from dp_ray.rundir.incidents import IncidentKind

DEATH_SECONDS = 3.0  # Ray sees a worker's death at most this much later than its peers


class StartTrouble(Enum):
    """Why workers could not be started."""

    NO_CAPACITY = auto()
    LOST = auto()
    ERROR = auto()


@dataclass(frozen=True)
class StartFailed:
    """Workers could not be started; `cause` says why in a line."""

    trouble: StartTrouble
    cause: str


@dataclass(frozen=True)
class WorkersFailed:
    """Failed workers by rank: those that reported how they ended, and those that died, with the cause in a line."""

    ended: Mapping[int, WorkerExit]
    died: Mapping[int, str]

    def of(self, ending: Ending) -> dict[int, WorkerExit]:
        """The workers that ended in this way, by rank."""
        return {rank: one for rank, one in self.ended.items() if one.kind is ending}


@dataclass(frozen=True)
class Memory:
    """What is remembered of failures: retries left, errors seen, and since when a lost peer's death is awaited."""

    retries: int
    seen: frozenset[str] = frozenset()
    lost_peer_since: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """All facts of a decision: what failed, what the workers were asked to do, and what is remembered.

    `num_workers` says how many of a session's workers the job takes, the first ones; None: all.
    """

    failure: StartFailed | WorkersFailed
    request: Request
    memory: Memory
    num_workers: int | None = None


class Do(Enum):
    """What to do about the failed workers."""

    RESTART = auto()
    GIVE_UP = auto()
    WAIT = auto()


class Reason(Enum):
    """Why the workers are restarted, or are not."""

    USER_STOPS = "the user stops the run"
    DEATH_TO_COME = "workers lost a peer, whose death Ray may see in a moment"
    DIED = "processes of workers died"
    IDLE_DIED = "processes of workers died that the job does not take"
    LOST_PEER = "workers lost a peer that lives: the network failed"
    MISTAKE = "an error that never passes"
    NO_PROGRESS = "an error before the worker had done a step"
    CAME_BACK = "an error that came back"
    ERROR = "an error that may pass"
    DRAINED = "workers stopped, since their nodes are taken away"
    RESIZED = "workers stopped, so that there can be more or fewer"
    NO_CAPACITY = "the capacity for the workers was taken meanwhile"
    START_LOST = "workers were lost while they started"
    START_ERROR = "the workers cannot be started"
    NO_RETRIES = "all retries are used up"


@dataclass(frozen=True)
class Decision:
    """What to do, why, what to report to the driver, and what to remember."""

    do: Do
    reason: Reason
    memory: Memory
    message: Interrupted | Waits | None = None


def decide(snapshot: Snapshot, now: float) -> Decision:
    """Whether to restart the workers: up to `retries` times after a loss, or after a new error that may be transient.

    Workers that stopped because they were asked to cost no retry. `now` is in seconds, on any clock.
    """
    failure, memory = snapshot.failure, snapshot.memory
    if snapshot.request.ask is Ask.STOP:
        return Decision(Do.GIVE_UP, Reason.USER_STOPS, memory)
    if isinstance(failure, StartFailed):
        return _after_start(failure, memory)
    if not failure.died and len(failure.of(Ending.LOST_PEER)) == len(failure.ended):
        since = now if memory.lost_peer_since is None else memory.lost_peer_since
        if now - since < DEATH_SECONDS:  # a worker often reports a lost peer before Ray does
            return Decision(Do.WAIT, Reason.DEATH_TO_COME, replace(memory, lost_peer_since=since))
    memory = replace(memory, lost_peer_since=None)
    if failure.died and not failure.ended and min(failure.died) >= (snapshot.num_workers or 0) > 0:
        message = Interrupted(IncidentKind.WORKER, _each(failure.died.values()), tuple(failure.died))
        return Decision(Do.RESTART, Reason.IDLE_DIED, memory, message)
    return _after_run(failure, snapshot.request, memory)


def _after_run(failure: WorkersFailed, request: Request, memory: Memory) -> Decision:
    """Decide by the first cause: a death explains its peers' errors; an error of user code explains lost peers."""
    if failure.died:
        return _retry(
            memory, Reason.DIED, Interrupted(IncidentKind.WORKER, _each(failure.died.values()), tuple(failure.died))
        )
    for ending in (Ending.MISTAKEN, Ending.RAISED):
        if raised := failure.of(ending):
            return _after_error(*min(raised.items()), memory)
    if failure.of(Ending.STOPPED):
        is_drained = request.why is Why.DRAIN
        kind = IncidentKind.PREEMPTION if is_drained else IncidentKind.RESIZE
        reason = Reason.DRAINED if is_drained else Reason.RESIZED
        return Decision(Do.RESTART, reason, memory, Interrupted(kind, request.text, ()))
    what = _each(one.first_line for one in failure.ended.values())
    return _retry(memory, Reason.LOST_PEER, Interrupted(IncidentKind.NETWORK, what, tuple(failure.ended)))


def _after_error(rank: int, error: WorkerExit, memory: Memory) -> Decision:
    if error.kind is Ending.MISTAKEN:
        return Decision(Do.GIVE_UP, Reason.MISTAKE, memory)
    if not error.has_progressed:
        return Decision(Do.GIVE_UP, Reason.NO_PROGRESS, memory)
    if (which := _identity(error)) in memory.seen:
        return Decision(Do.GIVE_UP, Reason.CAME_BACK, memory)
    memory = replace(memory, seen=memory.seen | {which})
    return _retry(memory, Reason.ERROR, Interrupted(IncidentKind.ERROR, error.first_line, (rank,)))


def _after_start(failure: StartFailed, memory: Memory) -> Decision:
    """Decide after a failed start: no capacity, workers that died meanwhile, or an error."""
    match failure.trouble:
        case StartTrouble.NO_CAPACITY:  # another job took it: the next start waits for capacity
            message = Waits("the free resources were taken, or no node has enough of them for a worker: waiting")
            return Decision(Do.RESTART, Reason.NO_CAPACITY, memory, message)
        case StartTrouble.LOST:
            what = f"the workers could not be started: {failure.cause}"
            return _retry(memory, Reason.START_LOST, Interrupted(IncidentKind.WORKER, what, ()))
        case StartTrouble.ERROR:
            return Decision(Do.GIVE_UP, Reason.START_ERROR, memory)


def _retry(memory: Memory, reason: Reason, message: Interrupted) -> Decision:
    if memory.retries == 0:
        return Decision(Do.GIVE_UP, Reason.NO_RETRIES, memory)
    return Decision(Do.RESTART, reason, replace(memory, retries=memory.retries - 1), message)


def _identity(error: WorkerExit) -> str:
    """What identifies an error that comes back: its kind and text, without ids that differ each time."""
    return re.sub(r"[0-9a-f]{32}", "", f"{error.kind} {error.text}")


def _each(causes: Iterable[str]) -> str:
    return "; ".join(sorted(set(causes)))

"""What a driver knows of its workers: attempts, waits for them, their end, hangs, incidents, and the user's stop.

An attempt begins when all of its workers are ready. The driver follows the newest one only.
"""

import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from dp_ray.errors import WorkerError
from dp_ray.job.job import Job
from dp_ray.job.keys import WorkerKeys
from dp_ray.messages import Finished, GaveUp, Interrupted, Report, WorkerReady
from dp_ray.monitor.console import Console
from dp_ray.monitor.watchdog import Hang, Watchdog
from dp_ray.rundir.files import keep_computed
from dp_ray.rundir.incidents import INCIDENTS_JSON, IncidentKind, IncidentLog, Interruption
from dp_ray.rundir.numerics import Kind, change_between
from dp_ray.storage import Storage
from dp_ray.text import listed


@dataclass(eq=False)
class Attempts:
    """All attempts so far, each with its workers in the order of their ranks, and the state of the newest."""

    begun: list[tuple[WorkerReady, ...]] = field(default_factory=list)
    is_awaited: bool = True  # whether no attempt has all of its workers
    _current: str | None = None
    _newest: str | None = None  # the attempt whose worker was the last to become ready
    _stepping: set[str] = field(default_factory=set)  # attempts of which a worker has begun a step
    _gathering: dict[str, dict[int, WorkerReady]] = field(default_factory=dict)  # ready workers, by attempt and rank
    _early: dict[str, list[Report]] = field(default_factory=dict)
    _finished: dict[str, dict[int, Finished]] = field(default_factory=dict)

    def take(self, worker: WorkerReady) -> tuple[WorkerReady, ...]:
        """Add a ready worker; return all of its attempt's workers if it is the last one, else none."""
        here = self._gathering.setdefault(worker.attempt, {})
        self._newest = worker.attempt
        here[worker.world.rank] = worker
        if len(here) < worker.world.world_size:
            return ()
        workers = tuple(here[rank] for rank in sorted(here))
        self.begun.append(workers)
        self._current = worker.attempt
        self.is_awaited = False
        return workers

    def interrupt(self) -> None:
        """Note that the newest attempt has ended, so that the next one's workers are waited for."""
        self.is_awaited = True
        self._newest = None

    def num_ready(self) -> int | None:
        """Return how many workers of the attempt to come are ready; None if none is to come."""
        if not self.is_awaited:
            return None
        return len(self.ready)

    @property
    def ready(self) -> tuple[WorkerReady, ...]:
        """The workers that are ready of the attempt of which one was the last to become so."""
        return () if self._newest is None else tuple(self._gathering[self._newest].values())

    @property
    def is_whole(self) -> bool:
        """Whether these are all of their attempt."""
        return self._newest is not None and self.is_current(self._newest)

    def is_current(self, attempt: str) -> bool:
        """Return whether this is the newest attempt that has begun."""
        return attempt == self._current

    def is_first_step(self, attempt: str) -> bool:
        """Note that a worker begins to step; return whether it is the first of its attempt."""
        is_first = attempt not in self._stepping
        self._stepping.add(attempt)
        return is_first

    @property
    def runs_a_step(self) -> bool:
        """Whether the newest attempt has begun to step."""
        return self._current in self._stepping

    @property
    def has_run_a_step(self) -> bool:
        """Whether an attempt of this driver has begun to step."""
        return bool(self._stepping)

    def hold_early(self, report: Report) -> None:
        """Hold a report of an attempt until all of its workers are ready."""
        self._early.setdefault(report.attempt, []).append(report)

    def take_early(self) -> list[Report]:
        """Return the newest attempt's reports that arrived before it began; once."""
        return self._early.pop(self._current or "", [])

    def workers(self, ranks: tuple[int, ...]) -> list[WorkerReady]:
        """Return the newest attempt's workers with these ranks."""
        newest = {worker.world.rank: worker for worker in self.begun[-1]} if self.begun else {}
        return [newest[rank] for rank in ranks if rank in newest]

    def finish(self, message: Finished) -> tuple[Finished, ...]:
        """Note that a worker has left the job; return how the newest attempt's workers have, once all have."""
        self._finished.setdefault(message.attempt, {})[message.rank] = message
        here = self._finished.get(self._current or "", {})
        return tuple(here.values()) if self.begun and len(here) == len(self.begun[-1]) else ()


SAY_AFTER = (10.0, 60.0, 300.0)  # seconds of a wait; from then on every REPEAT_SECONDS
REPEAT_SECONDS = 600.0


@dataclass(eq=False)
class LongWaits:
    """Counts the seconds of each wait for workers, and says a line of a long one.

    `num_ready` tells how many are ready of those that are awaited, None while none are.
    """

    keys: WorkerKeys
    num_ready: Callable[[], int | None]
    phase: Callable[[], str]
    say: Callable[[str], object]
    _since: float | None = None
    _lines: int = 0

    def look(self, cluster: Callable[[], str]) -> None:
        """Say a line if the wait has become that long; `cluster` says what the workers need, and what is free.

        Another thread than the one that feeds the monitor may call it: that one may itself wait for Ray.
        """
        now, num_ready = time.monotonic(), self.num_ready()
        if num_ready is None or self._since is None:
            self._since = None if num_ready is None else now
            self._lines = 0
            return
        more = self._lines - len(SAY_AFTER)
        due = SAY_AFTER[self._lines] if more < 0 else SAY_AFTER[-1] + (more + 1) * REPEAT_SECONDS
        if now - self._since >= due:
            self._lines += 1
            least, most = self.keys.min_workers, self.keys.max_workers
            workers = f"{most}" if least == most else f"{least} to {most}"
            ready = f"{num_ready} of {workers} are ready{cluster()}"
            so_far = f"{now - self._since:.0f} s so far"
            self.say(f"waiting for workers, {so_far}: {ready}; now: {self.phase()}")


@dataclass
class JobEnd:
    """The end of the workers' part of a job: all workers have left it, it was given up, or they are gone.

    `has_come` is set once no worker will report any more. `finished` says how all workers have left the job.
    """

    has_come: threading.Event = field(default_factory=threading.Event)
    finished: tuple[Finished, ...] = ()
    gave_up: GaveUp | None = None

    def finish(self, finished: tuple[Finished, ...]) -> None:
        """Note how all workers of the newest attempt have left the job; empty if some have not."""
        self.finished = finished
        if finished:
            self.has_come.set()

    def give_up(self, message: GaveUp) -> None:
        """Note that Ray Train's controller gives the job up."""
        self.gave_up = message
        self.has_come.set()


class NodeControl:
    """Control of workers and nodes elsewhere; this base class, for a run without workers, does nothing."""

    def kill(self, worker: WorkerReady) -> None:
        """Kill a worker that hangs."""

    def is_gone(self, node_id: str) -> bool:
        """Return whether a node no longer answers."""
        return False

    def stop(self) -> None:
        """Ask all workers to stop after their current step, for good."""


@dataclass(eq=False)
class Hangs:
    """A watchdog of each attempt in turn, which has hanging workers replaced as often as `retries` allows.

    `limit` is the seconds allowed for one step; None: no limit.
    """

    limit: float | None
    retries: int
    console: Console
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(None, ()))
    _killed: Hang | None = None
    _untold: set[int] = field(default_factory=set)  # of its ranks, those whose loss no message has told
    _earlier: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)  # step and ranks of each hang

    def watch(self, workers: tuple[WorkerReady, ...]) -> None:
        """Watch the workers of a new attempt."""
        self.watchdog = Watchdog(self.limit, workers)
        self._untold = set()

    def check(self, control: NodeControl) -> None:
        """Kill the workers that hang, so that they are replaced.

        Raises WorkerError if the same ranks hang in the same step again, or if no retries are left; and ModelError if
        the loops of workers make other calls.
        """
        self.watchdog.check_calls()
        hang = self.watchdog.hang()
        if hang is None:
            return
        # The same ranks in the same step hang for a reason that no retry takes away, such as a deadlock in user code.
        is_repeated = (hang.step, hang.ranks) in self._earlier
        if is_repeated or self.retries == 0:
            again = " again" if is_repeated else ""
            raise WorkerError(f"hangs{again}: {hang} (timeouts.step is {self.limit:g})")
        self.console.say(f"hangs, and is replaced: {hang}")
        self._earlier.add((hang.step, hang.ranks))
        self.retries -= 1
        self._killed, self._untold = hang, set(hang.ranks)
        for worker in hang.workers:
            control.kill(worker)

    def end(self, lost: tuple[int, ...], survives: bool = False) -> str:
        """End the attempt, which lost these ranks; return how they hung, or "" if they did not hang.

        If the others go on, `survives`, each of those that hung may be told in a message of its own.
        """
        has_hung = not self._untold.isdisjoint(lost)
        self._untold = self._untold - set(lost) if survives else set()
        self.watchdog = Watchdog(None, ())  # watches nothing until the next attempt begins
        return str(self._killed).splitlines()[0] if has_hung else ""


@dataclass(eq=False)
class Incidents:
    """The log of a run's incidents: printed on the console, and saved in the run's directory if there is one."""

    log: IncidentLog
    console: Console
    run: Storage | None
    advanced_at: float = field(default_factory=time.monotonic)  # when all workers had finished the newest step

    def begin(self, num_workers: int) -> None:
        """Record that an attempt begins."""
        self.log = self.log.begun(num_workers)
        self._save()

    def interrupt(self, by: Interruption) -> None:
        """Record that the workers are being replaced."""
        self.log = self.log.interrupted(by)
        self.console.say(f"interrupted, {by}")
        self._save()

    def resume(self, step: int, why: str = "") -> None:
        """Record that an attempt's first step begins, which ends the interruption before it.

        `why` says why survivors go on from a checkpoint, and not from memory.
        """
        if not self.log.is_interrupted:
            return
        # After a driver that ended, this process has not seen the last step, so it cannot tell how long ago that was.
        is_known = self.log.interruptions[-1].kind is not IncidentKind.DRIVER
        seconds = round(time.monotonic() - self.advanced_at, 1) if is_known else None
        self.log = self.log.resumed(step, seconds, why)
        self.console.say(self.log.interruptions[-1].resumption)
        self._save()

    def _save(self) -> None:
        if self.run is not None:
            INCIDENTS_JSON.write(self.run, self.log)


@dataclass(eq=False)
class KeptNumerics:
    """Keeps what each attempt computes on, and says if a bitwise run goes on where its bits may differ."""

    job: Job
    run: Storage | None
    console: Console
    _told: dict[str, list[Kind]] = field(default_factory=dict)  # by attempts that have not begun to step

    def take(self, attempt: str, kinds: list[Kind]) -> None:
        """Take in what the workers of an attempt compute on."""
        self._told[attempt] = kinds

    def begin(self, attempt: str, step: int) -> None:
        """Note that an attempt begins with this step: so it computes, and what it computes on is kept."""
        kinds = self._told.pop(attempt, None)
        if kinds is None or self.run is None:
            return
        before = keep_computed(self.run, step, kinds)
        is_resumed = step > 0 or self.job.task == "predict"  # whose first step may be left, and others done
        if self.job.bitwise and is_resumed and (differs := change_between(before, kinds)):
            self.console.say(f"goes on where other bits are computed than before: {differs}")


def without_survivors(message: Interrupted, ended_by_nccl: Collection[int]) -> Interrupted:
    """Return the message with only those ranks that were lost first, if NCCL has ended the others' processes.

    It does so where a peer is lost: with SIGABRT, so that a survivor looks as lost as its peer.
    """
    first = tuple(rank for rank in message.ranks if rank not in ended_by_nccl)
    if message.kind is not IncidentKind.WORKER or not first or first == message.ranks:
        return message
    others = [rank for rank in message.ranks if rank in ended_by_nccl]
    who = f"rank{'s' if len(others) > 1 else ''} {listed(others)}"
    return replace(message, ranks=first, what=f"{message.what} (NCCL then ended {who}, whose peer was lost)")


def interruption_of(
    message: Interrupted, lost: Sequence[WorkerReady], hung: str, step: int, control: NodeControl
) -> Interruption:
    """Return the interruption after `step` that lost these workers; `hung` says how they hung, "" if they did not.

    If the node of a lost worker does not answer, the node was lost. An error of user code may come before the last
    reports, and name a later step.
    """
    kind, what = message.kind, message.what
    if kind is IncidentKind.ERROR and (named := re.match(r"step (\d+)\b", what)):
        step = max(step, int(named[1]))
    if kind is IncidentKind.WORKER and any(control.is_gone(worker.node_id) for worker in lost):
        kind = IncidentKind.NODE
    if hung:
        kind, what = IncidentKind.HANG, hung
    nodes = tuple(sorted({worker.world.node for worker in lost}))
    return Interruption(kind, what, step, message.ranks, nodes, level=message.level, why=message.why)


@dataclass
class PlannedStop:
    """A stop that the user asks for, after the current step and with the work kept, which `can_keep` allows."""

    can_keep: bool
    console: Console
    is_asked: bool = False
    by: list[str] = field(default_factory=list)  # who has asked, in their order: signals' names, and requests
    is_closed: bool = False  # messages are no longer read, so workers cannot be asked to stop

    def ask(self, control: NodeControl, runs_a_step: bool, by: str) -> bool:
        """Ask the workers to stop after their current step; return whether they will.

        They cannot if no step runs, if the task keeps nothing, or if they were asked before. A signal handler calls
        this, so all that may block runs in a thread.
        """
        self.by.append(by)
        if self.is_closed or self.is_asked or not runs_a_step or not self.can_keep:
            return False
        self.is_asked = True
        threading.Thread(target=self._stop, args=(control,), name="planned stop", daemon=True).start()
        return True

    def _stop(self, control: NodeControl) -> None:
        control.stop()
        self.console.say("stopping after this step, which is kept; a second Ctrl-C or SIGTERM ends the run at once")

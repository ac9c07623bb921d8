"""The attempts of a run, of which the driver follows the newest; one begins when all of its workers are ready.

How the workers' part of a job ends.

Workers that hang: found by the watchdog, named, and replaced as often as `retries` allows.

The incidents of a run: printed on the console, and kept in its log.

A stop that the user asks for: after the current step, with the work kept.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dp_ray.errors import WorkerError
from dp_ray.monitor.console import Console
from dp_ray.monitor.messages import Beat, Finished, GaveUp, Interrupted, Shapes, WorkerReady
from dp_ray.monitor.watchdog import Hang, Watchdog
from dp_ray.rundir.incidents import IncidentKind, IncidentLog, Interruption


@dataclass(frozen=True)
class Attempt:
    """The workers of one attempt."""

    workers: tuple[WorkerReady, ...]


class Attempts:
    """All attempts so far, and the state of the newest."""

    def __init__(self) -> None:
        self.begun: list[Attempt] = []
        self._current: str | None = None
        self._newest: str | None = None  # the attempt whose worker was the last to become ready
        self.is_awaited = True  # whether no attempt has all of its workers
        self._stepping: set[str] = set()
        self._gathering: dict[str, dict[int, WorkerReady]] = {}
        self._early: dict[str, list[Shapes]] = {}
        self._finished: dict[str, dict[int, Finished]] = {}

    def take(self, worker: WorkerReady) -> tuple[WorkerReady, ...]:
        """Add a ready worker; return all of its attempt's workers if it is the last one, else none."""
        here = self._gathering.setdefault(worker.attempt, {})
        self._newest = worker.attempt
        here[worker.world.rank] = worker
        if len(here) < worker.world.world_size:
            return ()
        workers = tuple(here[rank] for rank in sorted(here))
        self.begun.append(Attempt(workers))
        self._current = worker.attempt
        self.is_awaited = False
        return workers

    def interrupt(self) -> None:
        """Note that the newest attempt has ended, so that the next one's workers are waited for."""
        self.is_awaited, self._newest = True, None

    @property
    def num_ready(self) -> int:
        """How many workers of the attempt to come are ready."""
        return len(self._gathering[self._newest]) if self._newest is not None else 0

    def is_current(self, attempt: str) -> bool:
        """Whether this is the newest attempt that has begun."""
        return attempt == self._current

    def is_first_step(self, attempt: str) -> bool:
        """Whether no worker of the attempt has begun a step before this call; true once."""
        is_first = attempt not in self._stepping
        self._stepping.add(attempt)
        return is_first

    @property
    def runs_a_step(self) -> bool:
        """Whether the newest attempt has begun to step."""
        return self._current in self._stepping

    def keep(self, shapes: Shapes) -> None:
        """Hold a report of an attempt until all of its workers are ready."""
        self._early.setdefault(shapes.attempt, []).append(shapes)

    def kept(self) -> list[Shapes]:
        """Take the newest attempt's reports that arrived before it began."""
        return self._early.pop(self._current or "", [])

    def workers(self, ranks: tuple[int, ...]) -> list[WorkerReady]:
        """The newest attempt's workers with these ranks."""
        newest = {one.world.rank: one for one in self.begun[-1].workers} if self.begun else {}
        return [newest[rank] for rank in ranks if rank in newest]

    def finish(self, message: Finished) -> tuple[Finished, ...]:
        """Note that a worker has left the job; return how the newest attempt's workers have, once all have."""
        self._finished.setdefault(message.attempt, {})[message.rank] = message
        here = self._finished.get(self._current or "", {})
        return tuple(here.values()) if self.begun and len(here) == len(self.begun[-1].workers) else ()


class JobEnd:
    """Whether the workers' part of a job has ended: all workers have left it, it was given up, or they are gone."""

    def __init__(self) -> None:
        self.finished: tuple[Finished, ...] = ()
        self.gave_up: GaveUp | None = None
        self._has_come = threading.Event()

    @property
    def has_come(self) -> bool:
        """Whether the end has come."""
        return self._has_come.is_set()

    def wait(self) -> None:
        """Wait for the end."""
        self._has_come.wait()

    def come(self) -> None:
        """Note that no worker will report any more."""
        self._has_come.set()

    def finish(self, finished: tuple[Finished, ...]) -> None:
        """Note how all workers of the newest attempt have left the job; none: some have not."""
        self.finished = finished
        if finished:
            self.come()

    def give_up(self, message: GaveUp) -> None:
        """Note that the job is given up."""
        self.gave_up = message
        self.come()


class NodeControl:
    """What the driver can do to workers and nodes elsewhere; this base class does nothing."""

    def kill(self, worker: WorkerReady) -> None:
        """Kill a worker that hangs."""

    def is_gone(self, node_id: str) -> bool:
        """Whether a node no longer answers."""
        return False

    def stop(self) -> None:
        """Ask all workers to stop after their current step, for good."""


class Hangs:
    """Watches the workers of each attempt in turn; `limit` is the seconds allowed for one step, None: no limit."""

    def __init__(self, limit: float | None, retries: int, console: Console) -> None:
        self._limit = limit
        self._retries = retries
        self._console = console
        self._watchdog = Watchdog(None, ())
        self._killed: Hang | None = None
        self._before: set[tuple[int, tuple[int, ...]]] = set()

    def watch(self, workers: tuple[WorkerReady, ...]) -> None:
        """Watch the workers of a new attempt."""
        self._watchdog = Watchdog(self._limit, workers)

    def start(self, rank: int, step: int) -> None:
        """Note that a worker is about to run its first step."""
        self._watchdog.start(rank, step)

    def take(self, beat: Beat) -> None:
        """Take in a worker's beat."""
        self._watchdog.take(beat)

    def check(self, control: NodeControl) -> None:
        """Kill the workers that hang, so that they are replaced.

        Raises WorkerError if the same ranks hang in the same step again, or if no retries are left.
        """
        hang = self._watchdog.hang()
        if hang is None:
            return
        what = (hang.step, hang.ranks)
        if what in self._before or self._retries == 0:
            again = " again" if what in self._before else ""
            raise WorkerError(f"hangs{again}: {hang} (timeouts.step is {self._limit:g})")
        self._console.say(f"hangs, and is replaced: {hang}")
        self._before.add(what)
        self._retries -= 1
        self._killed = hang
        for worker in hang.workers:
            control.kill(worker)

    def end(self, lost: tuple[int, ...]) -> str:
        """End the attempt, which lost these ranks; return how they hung, or "" if they did not hang."""
        killed, self._killed = self._killed, None
        self._watchdog = Watchdog(None, ())  # watches nothing until the next attempt begins
        return str(killed).splitlines()[0] if killed is not None and set(killed.ranks) & set(lost) else ""


class Interruptions:
    """Adds to the log of a run's incidents, and calls `save` with the log after each change."""

    def __init__(self, log: IncidentLog, console: Console, save: Callable[[IncidentLog], None]) -> None:
        self.log = log
        self._console = console
        self._save = save
        self._moved = time.monotonic()

    def begin(self, num_workers: int) -> None:
        """Record that an attempt begins."""
        self.log = self.log.begun(num_workers)
        self._save(self.log)

    def moved(self) -> None:
        """Note the time at which all workers have finished a step."""
        self._moved = time.monotonic()

    def interrupt(self, by: Interruption) -> None:
        """Record that the workers are being replaced."""
        self.log = self.log.interrupted(by)
        self._console.say(f"interrupted, {by}")
        self._save(self.log)

    def resume(self, step: int) -> None:
        """Record that an attempt's first step begins, which ends the interruption before it."""
        if not self.log.is_interrupted:
            return
        is_known = self.log.interruptions[-1].kind is not IncidentKind.DRIVER
        seconds = round(time.monotonic() - self._moved, 1) if is_known else None
        self.log = self.log.resumed(step, seconds)
        self._console.say(self.log.interruptions[-1].resumption)
        self._save(self.log)


def interruption_of(
    message: Interrupted, lost: Sequence[WorkerReady], hung: str, step: int, control: NodeControl
) -> Interruption:
    """The interruption after `step` that lost these workers; `hung` says how they hung, "" if they did not.

    If the node of a lost worker does not answer, the node was lost. An error of user code may come before the last
    reports, and name a later step.
    """
    kind, what = message.kind, message.what
    if kind is IncidentKind.ERROR and (named := re.match(r"step (\d+)\b", what)):
        step = max(step, int(named[1]))
    if kind is IncidentKind.WORKER and any(control.is_gone(one.node_id) for one in lost):
        kind = IncidentKind.NODE
    if hung:
        kind, what = IncidentKind.HANG, hung
    return Interruption(kind, what, step, message.ranks, tuple(sorted({one.world.node for one in lost})))


class PlannedStop:
    """Whether the user asked the run to stop, by which signal, and whether the workers can still be asked."""

    def __init__(self, can_keep: bool, console: Console) -> None:
        self.is_asked = False
        self.by = ""  # the name of the last signal, or the asker
        self.asker = ""  # what asks by way of a signal
        self.is_closed = False  # messages are no longer read, so workers cannot be asked to stop
        self._can_keep = can_keep
        self._console = console

    def ask(self, control: NodeControl, runs_a_step: bool, signal_name: str) -> bool:
        """Ask the workers to stop after their current step; return whether they will.

        They cannot if no step runs, if the task keeps nothing, or if they were asked before. A signal handler calls
        this, so all that may block runs in a thread.
        """
        self.by = self.asker or signal_name
        if self.is_closed or self.is_asked or not runs_a_step or not self._can_keep:
            return False
        self.is_asked = True
        threading.Thread(target=self._stop, args=(control,), name="planned stop", daemon=True).start()
        return True

    def _stop(self, control: NodeControl) -> None:
        control.stop()
        self._console.say("stopping after this step, which is kept; a second Ctrl-C or SIGTERM ends the run at once")

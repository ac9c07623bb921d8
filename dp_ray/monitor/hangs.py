"""Workers that hang: found by the watchdog, named, and replaced as often as `retries` allows."""

from dp_ray.errors import WorkerError
from dp_ray.monitor.console import Console
from dp_ray.monitor.messages import Beat, WorkerReady
from dp_ray.monitor.watchdog import Hang, Watchdog


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

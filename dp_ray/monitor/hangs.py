"""Workers that hang: found by the watchdog, named, and replaced as often as `retries` allows."""

from dp_ray.errors import WorkerError
from dp_ray.monitor.console import Console
from dp_ray.monitor.messages import Beat, WorkerReady
from dp_ray.monitor.watchdog import Hang, Watchdog


class NodeControl:
    """What the driver can do to a worker, and ask of a node, that is somewhere else. Here: nothing."""

    def kill(self, worker: WorkerReady) -> None:
        """End a worker that hangs."""

    def is_gone(self, node_id: str) -> bool:
        """Whether a node does not answer any more."""
        return False

    def stop(self) -> None:
        """Ask all workers to stop after the step that they are in, for good."""


class Hangs:
    """Watches one attempt's workers after the other; `limit` is in seconds in one step, None: for ever."""

    def __init__(self, limit: float | None, retries: int, console: Console) -> None:
        self._limit = limit
        self._retries = retries
        self._console = console
        self._watchdog = Watchdog(None, ())
        self._killed: Hang | None = None
        self._before: set[tuple[int, tuple[int, ...]]] = set()

    def watch(self, workers: tuple[WorkerReady, ...]) -> None:
        """An attempt begins."""
        self._watchdog = Watchdog(self._limit, workers)

    def start(self, rank: int, step: int) -> None:
        """A worker is about to run its first step."""
        self._watchdog.start(rank, step)

    def take(self, beat: Beat) -> None:
        self._watchdog.take(beat)

    def check(self, control: NodeControl) -> None:
        """Kill the workers that hang, to be replaced; WorkerError where that was no use, or is not wanted."""
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
        """The attempt is over, since it lost these ranks; how they hung, if that is why."""
        killed, self._killed = self._killed, None
        self._watchdog = Watchdog(None, ())  # until there are new workers
        return str(killed).splitlines()[0] if killed is not None and set(killed.ranks) & set(lost) else ""

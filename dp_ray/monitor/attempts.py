"""The attempts of a run, of which the driver follows the newest; one begins when all of its workers are ready."""

from dataclasses import dataclass

from dp_ray.monitor.messages import Finished, Shapes, WorkerReady


@dataclass(frozen=True)
class Attempt:
    """The workers of one attempt."""

    workers: tuple[WorkerReady, ...]


class Attempts:
    """All attempts so far, and the state of the newest."""

    def __init__(self) -> None:
        self.begun: list[Attempt] = []
        self._current: str | None = None
        self._stepping: set[str] = set()
        self._gathering: dict[str, dict[int, WorkerReady]] = {}
        self._early: dict[str, list[Shapes]] = {}
        self._finished: dict[str, dict[int, Finished]] = {}

    def take(self, worker: WorkerReady) -> tuple[WorkerReady, ...]:
        """Add a ready worker; return all of its attempt's workers if it is the last one, else none."""
        here = self._gathering.setdefault(worker.attempt, {})
        here[worker.world.rank] = worker
        if len(here) < worker.world.world_size:
            return ()
        workers = tuple(here[rank] for rank in sorted(here))
        self.begun.append(Attempt(workers))
        self._current = worker.attempt
        return workers

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

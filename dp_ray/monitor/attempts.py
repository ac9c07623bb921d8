"""Which attempt of the job the driver follows: one begins when all of its workers are ready."""

from dataclasses import dataclass

from dp_ray.monitor.messages import Shapes, WorkerReady


@dataclass(frozen=True)
class Attempt:
    """The workers that one start of the job had."""

    workers: tuple[WorkerReady, ...]


class Attempts:
    """All attempts so far, and what is known of the newest."""

    def __init__(self) -> None:
        self.begun: list[Attempt] = []
        self._current: str | None = None
        self._stepping: set[str] = set()
        self._gathering: dict[str, dict[int, WorkerReady]] = {}
        self._early: dict[str, list[Shapes]] = {}

    def take(self, worker: WorkerReady) -> tuple[WorkerReady, ...]:
        """The workers of the attempt that begins with this one; none where others are still to come."""
        here = self._gathering.setdefault(worker.attempt, {})
        here[worker.world.rank] = worker
        if len(here) < worker.world.world_size:
            return ()
        workers = tuple(here[rank] for rank in sorted(here))
        self.begun.append(Attempt(workers))
        self._current = worker.attempt
        return workers

    def is_current(self, attempt: str) -> bool:
        return attempt == self._current

    def is_first_step(self, attempt: str) -> bool:
        """Whether this is the first worker of an attempt that is about to run a step."""
        is_first = attempt not in self._stepping
        self._stepping.add(attempt)
        return is_first

    @property
    def runs_a_step(self) -> bool:
        """Whether the newest attempt has begun to step."""
        return self._current in self._stepping

    def keep(self, shapes: Shapes) -> None:
        """A report of an attempt of which not all workers are ready."""
        self._early.setdefault(shapes.attempt, []).append(shapes)

    def kept(self) -> list[Shapes]:
        """The reports of the newest attempt that came before it began."""
        return self._early.pop(self._current or "", [])

    def workers(self, ranks: tuple[int, ...]) -> list[WorkerReady]:
        """Those of the newest attempt's workers that have these ranks."""
        newest = {one.world.rank: one for one in self.begun[-1].workers} if self.begun else {}
        return [newest[rank] for rank in ranks if rank in newest]

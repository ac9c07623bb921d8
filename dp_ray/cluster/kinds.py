"""The kinds of workers: those of a run's or a module's own, those of a session, and this process itself.

All are `Workers`, which run jobs and serve parallel modules. `own_workers` gives what a single job or a module that
names no session has: with `workers: 0` this process, and then nothing of Ray is imported.
"""

from collections.abc import Hashable, Mapping
from pickle import Pickler
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dp_ray.job.keys import WorkerKeys
from dp_ray.monitor.console import Console

if TYPE_CHECKING:  # what jobs need: modules are served without it
    from dp_ray.cluster.connect import EarlyConnection
    from dp_ray.job.job import Job
    from dp_ray.monitor.faults import Faults
    from dp_ray.monitor.monitor import Monitor
    from dp_ray.rundir.claim import RunDir


class Serving(Protocol):
    """Workers while they serve parallel modules."""

    keys: WorkerKeys
    each: Mapping[str, float]  # what a worker takes
    pickler: ClassVar[type[Pickler]]  # its class of what goes to the workers: that of Ray, or PicklerHere

    def ready(self) -> list[Any]:
        """Return the workers that are there, each a ServingWorker, in the order of their ranks in one process group.

        Others have come in the place of lost ones, or will be returned once they have.
        """

    def ask(self, messages: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the answers to messages; that of a member that is gone is `Lost`."""

    def keep_one_kind(self) -> None:
        """Take no worker from now on that computes otherwise than those that are there."""

    def close(self) -> None:
        """End the workers if they are there for this alone, else only their serving."""


class Workers(Protocol):
    """Workers of one kind.

    With `is_here` the job's own code runs in this process, which it may fork. Parallel modules share the workers that
    serve for one of their `owners`: the first one is the kind's own. `most` is how many there are, None if they start
    when they are asked for.
    """

    is_here: ClassVar[bool]

    @property
    def owners(self) -> tuple[Hashable, ...]: ...

    @property
    def most(self) -> int | None: ...

    def accept(self, job: "Job", replaces: bool) -> "Job":
        """Return the job as these workers run it; `replaces` says that another run is deleted for it.

        Raises an Error if they cannot run it, as far as that is known before anything is deleted or written.
        """

    def run(
        self, job: "Job", claimed: "RunDir", rows: Mapping[str, int], monitor: "Monitor", faults: "Faults" = ()
    ) -> None:
        """Run an accepted job to its end, which the monitor follows; `rows` are the lengths of its datasets.

        A job with `shards: auto` only finds its number of shards; with that number, another one follows it.
        Raises StopRequested if the user stopped the job, else the error that ended it.
        """

    def serve(self, keys: WorkerKeys) -> Serving:
        """Have them serve parallel modules; raises JobError or ClusterError if they cannot be started."""

    def close(self) -> None:
        """End what was started for these workers."""


def own_workers(
    keys: WorkerKeys, address: str | None, verbose: bool, console: Console, early: "EarlyConnection | None" = None
) -> Workers:
    """Return the workers of a single job, or of modules that name no session.

    `early` is a connection that has begun for this alone.
    """
    if keys.max_workers == 0:
        from dp_ray.monitor.in_process import InProcess

        return InProcess()
    from dp_ray.cluster.own import OwnWorkers

    return OwnWorkers(address, verbose, console, early)

"""The workers of a single run, or of parallel modules that name no session."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dp_ray.cluster.connect import (
    AWAIT_SECONDS,
    EarlyConnection,
    connected,
    connected_early,
    is_connected,
    what_begins,
    what_is_awaited,
    worker_resources,
)
from dp_ray.job.keys import WorkerKeys
from dp_ray.monitor.console import Console
from dp_ray.system.process import own_folder
from dp_ray.system.threads import if_longer

if TYPE_CHECKING:
    from dp_ray.cluster.serving import RayServing
    from dp_ray.cluster.workers import StartedWorkers
    from dp_ray.job.job import Job
    from dp_ray.monitor.faults import Faults
    from dp_ray.monitor.monitor import Monitor
    from dp_ray.rundir.claim import RunDir

OF_PROCESS = "process"  # the owner of workers that no session has


@dataclass(eq=False)
class OwnWorkers:
    """Workers that start with a run's first job, and end with its last one; or with what they serve, or by `close`.

    Before a run with `shards: auto` goes a job that finds its shards.
    """

    is_here: ClassVar[bool] = False
    owners: ClassVar[tuple[str]] = (OF_PROCESS,)
    most: ClassVar[None] = None
    address: str | None
    verbose: bool
    console: Console
    early: EarlyConnection | None = None  # a connection that has begun for these workers alone
    _open: ExitStack = field(default_factory=ExitStack)
    _is_own: bool | None = None  # whether the connection is; None before there is one
    _workers: "StartedWorkers | None" = None

    def accept(self, job: "Job", replaces: bool) -> "Job":
        """Return the job. One that replaces a run, or asks for GPUs, connects first.

        Raises an Error if no Ray answers to it, or if it can never run there.
        """
        if replaces or job.asks_for_gpus:
            from dp_ray.cluster.workers import check_can_be_shipped, check_can_run

            with self.console.if_slow("looking for the cluster"):
                check_can_be_shipped(job)
                self._connect(job)
                check_can_run(job, worker_resources(job))
        return job

    def run(
        self, job: "Job", claimed: "RunDir", rows: Mapping[str, int], monitor: "Monitor", faults: "Faults" = ()
    ) -> None:
        """Run a job to its end.

        Raises StopRequested if the user stopped the run, else the error that ended it.
        """
        with ExitStack() as until_end:
            until_end.callback(self.close)
            if self._workers is None:
                if self._is_own is None:  # else `accept` has done it
                    from dp_ray.cluster.workers import check_can_be_shipped

                    check_can_be_shipped(job)
                    if self.early is None:  # else there is nothing to wait for
                        monitor.begin(what_begins(self.address))
                workers = self._start(job)
                monitor.begin("starting Ray Train")
            else:
                workers = self._workers
                monitor.begin("waiting for the workers")
            workers.run(job, claimed, rows, monitor, faults, is_last=not job.finds_shards)
            if job.finds_shards:
                until_end.pop_all()

    def serve(self, keys: WorkerKeys) -> "RayServing":
        """Start workers that serve parallel modules until that is closed.

        Raises JobError or ClusterError if they cannot be started.
        """
        with ExitStack() as until_end:
            until_end.callback(self.close)
            if not is_connected():
                early = connected_early(keys, self.address, self.verbose)
                self.early = self._open.enter_context(early)
            from dp_ray.cluster.serving import RayServing  # here: while Ray starts

            serving = RayServing(self._start(keys), keys, self.console.say, self.close, is_last=True)
            until_end.pop_all()
        return serving

    def _start(self, keys: WorkerKeys) -> "StartedWorkers":
        from dp_ray.cluster.workers import CLOSE_SECONDS, start_workers  # while Ray starts: it imports Ray Train

        is_own = self._connect(keys)
        folder = self._open.enter_context(own_folder())
        self._workers = start_workers(keys, folder, is_own, self.verbose, self.console.say)
        self._open.callback(self._workers.close, 0 if is_own else CLOSE_SECONDS)  # an own connection ends them
        return self._workers

    def _connect(self, keys: WorkerKeys) -> bool:
        """Connect, if that is not done; return whether the connection ends with these workers."""
        if self._is_own is None:
            self._is_own = self.early is not None or not is_connected()
            with if_longer(AWAIT_SECONDS, lambda: self.console.say(what_is_awaited(self.address))):
                self._open.enter_context(self.early or connected(keys, self.address, self.verbose))
        return self._is_own

    def close(self) -> None:
        """End the workers, and the connection if it is theirs."""
        try:
            self._open.close()
        finally:
            self.early = self._is_own = self._workers = None

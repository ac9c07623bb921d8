"""Whether Ray Train's controller restarts workers after some were lost or raised; `restart_decision` decides."""

import time
from typing import Any

import ray
from ray.train import FailureConfig

from dp_ray.cluster.channel import encoded, send
from dp_ray.cluster.ray_internals.train import WorkerRestarts
from dp_ray.cluster.requests import IDLE
from dp_ray.cluster.restart_decision import Do, Memory, Snapshot, StartFailed, WorkersFailed, decide
from dp_ray.monitor.messages import GaveUp


class RestartPolicy(WorkerRestarts):
    """Remembers a job's earlier failures, and reports each decision to the driver."""

    def __init__(self, config: FailureConfig, channel: Any) -> None:
        super().__init__(config)
        self._channel = channel
        self._job = IDLE
        self._memory = Memory(IDLE.retries)

    def on_failure(self, failure: WorkersFailed | StartFailed) -> Do:
        """Decide what to do after a failure, and report the decision to the driver.

        If a job is given up, the workers are started anew for the next one.
        """
        request, job = ray.get(self._channel.state.remote())
        if job.number != self._job.number:
            self._job, self._memory = job, Memory(job.retries)
        decision = decide(Snapshot(failure, request, self._memory, job.workers or None), time.monotonic())
        self._memory = decision.memory
        if decision.message is not None:
            send(self._channel, decision.message)
        if decision.do is Do.GIVE_UP and job.number and isinstance(failure, WorkersFailed):
            ray.get(self._channel.give_up.remote(job.number, encoded(GaveUp(failure.died))))
            return Do.GIVE_UP if job.is_last else Do.RESTART
        return decision.do

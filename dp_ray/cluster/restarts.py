"""Whether Ray Train's controller restarts workers after some were lost or raised; `restart_decision` decides."""

import time
from typing import Any

import ray
from ray.train import FailureConfig

from dp_ray.cluster.channel import send
from dp_ray.cluster.ray_internals.train import WorkerRestarts
from dp_ray.cluster.restart_decision import Do, Memory, Snapshot, StartFailed, WorkersFailed, decide


class RestartPolicy(WorkerRestarts):
    """Remembers earlier failures, and reports each decision to the driver."""

    def __init__(self, config: FailureConfig, retries: int, channel: Any) -> None:
        super().__init__(config)
        self._memory = Memory(retries)
        self._channel = channel

    def on_failure(self, failure: WorkersFailed | StartFailed) -> Do:
        """Decide what to do after a failure, and report the decision to the driver."""
        request = ray.get(self._channel.requested.remote())
        decision = decide(Snapshot(failure, request, self._memory), time.monotonic())
        self._memory = decision.memory
        if decision.message is not None:
            send(self._channel, decision.message)
        return decision.do

"""What the driver does to workers and nodes elsewhere, by way of Ray."""

import contextlib
import os
import signal
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dp_ray.cluster.requests import STOP
from dp_ray.cluster.scaling import answers_at
from dp_ray.monitor.hangs import NodeControl
from dp_ray.monitor.messages import WorkerReady


class RayNodeControl(NodeControl):
    """Node control by way of Ray."""

    def __init__(self, channel: Any, number: int) -> None:
        self._channel = channel
        self._number = number  # of the job

    def stop(self) -> None:
        """Ask all workers to stop for good, by way of the channel."""
        with contextlib.suppress(ray.exceptions.RayError):  # the run has ended already
            ray.get(self._channel.request.remote(STOP, self._number))

    def kill(self, worker: WorkerReady) -> None:
        """Kill a worker's process, by a Ray task on its node; this does not wait for it."""
        there = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
        ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(worker.pid)

    def is_gone(self, node_id: str) -> bool:
        """Whether a node is not alive by Ray's list, or does not take a connection."""
        return not any(node["NodeID"] == node_id and node["Alive"] and answers_at(node) for node in ray.nodes())


def end_process(pid: int) -> None:
    """Kill a worker's process on this node."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

"""Fault injection: real signals to real processes at given steps, for tests and for users."""

import os
import signal
import subprocess

import psutil
import ray

from dp_ray.cluster.ray_internals.core import drain_this_node, raylet_of_this_worker
from dp_ray.errors import ClusterError, JobError
from dp_ray.monitor.faults import Fault


def bring_about(fault: Fault, driver_node: str) -> None:
    """Inject a fault into this worker or its node; a fault of the driver does nothing here, the driver ends itself.

    Raises JobError if the driver runs on the node, and ClusterError if Ray refuses to drain it.
    """
    if fault.what == "worker" and fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.what == "worker":
        _pause(fault.seconds)
    elif fault.what == "node":
        if ray.get_runtime_context().get_node_id() == driver_node:
            raise JobError(f"--inject '{fault}': the driver runs on that node; name another node")
        _kill_node() if fault.action == "kill" else _drain_node(fault.seconds)


def _pause(seconds: float | None) -> None:
    pid = os.getpid()
    if seconds is not None:
        line = ["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"]
        subprocess.Popen(line, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.kill(pid, signal.SIGSTOP)


def _kill_node() -> None:
    """Kill every process of the node's Ray at once, this one last."""
    raylet, here = raylet_of_this_worker(), psutil.Process()
    family = [*raylet.children(recursive=True), raylet]
    for process in sorted(family, key=lambda one: one == here):
        process.kill()


def _drain_node(seconds: float | None) -> None:
    """Tell Ray that the node will be taken away, as a cloud's notice does."""
    if refusal := drain_this_node(seconds):
        raise ClusterError(f"--inject: Ray does not drain the node: {refusal}")

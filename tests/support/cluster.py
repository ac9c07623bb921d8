"""The Ray cluster of a test session: where it is, how it is started and ended."""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

import dp_ray
import dp_ray.driver.run

ROOT = Path(__file__).resolve().parents[2]


# Of `ray start`: no process for each CPU with the first driver; none would ever be used, since jobs ship their code.
# Nor do processes wait 0.25 s at their end to tell a dashboard of their tasks.
SELDOM = {"REPORTER_UPDATE_INTERVAL_MS": "60000"}  # of an agent, which looks at each process of its node every 5 s
# Nor does a node wait a second where its object store is not there yet.
SETTINGS = {"prestart_worker_first_driver": False, "task_events_report_interval_ms": 0}
SOON = {"raylet_client_connect_timeout_milliseconds": 10, "raylet_client_num_connect_attempts": 1000}
SYSTEM_CONFIG = json.dumps({**SETTINGS, **SOON})


@dataclass(frozen=True)
class Cluster:
    """A started Ray: its address for drivers, that of its dashboard for jobs, and the folder of its own files."""

    address: str
    dashboard: str
    folder: Path


def ours() -> str:
    """The environment variable of all processes of this process's cluster: of those of xdist each has one."""
    return f"DP_RAY_TESTS_{os.getpid()}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, f"Ray ended with status {process.returncode}"
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on port {port} after {seconds} s")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a `ray start --block` with all that it started; fail where something stays."""
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    family = [*root.children(recursive=True), root]
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    _, alive = psutil.wait_procs(family, timeout=2)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end meanwhile
            one.kill()
    _, alive = psutil.wait_procs(alive, timeout=15)
    assert not alive, f"these processes stay: {alive}"


Run = Callable[..., dp_ray.Result]

"""Faults on purpose, for tests and for users' rehearsals: real signals to real processes at given steps."""

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass

import psutil
import ray
from ray.core.generated import autoscaler_pb2

from dp_ray.errors import ClusterError, JobError
from dp_ray.replica.world import World

_FAULT = re.compile(
    r"(?P<action>kill|pause|drain) (?P<what>worker|node|driver)(?: (?P<which>[\w.:]+?))?"
    r"(?: for (?P<seconds>\d+(?:\.\d+)?) ?s)? at step (?P<step>\d+)"
)
_ALLOWED = {("kill", "worker"), ("kill", "node"), ("kill", "driver"), ("pause", "worker"), ("drain", "node")}
_SAYS = (
    "must be faults with ';' between them: 'kill worker 1 at step 20', 'kill node 2 at step 40' (or its address), "
    "'kill driver at step 50', 'pause worker 0 for 30s at step 60', 'drain node 1 for 30s at step 70'"
)


@dataclass(frozen=True)
class Fault:
    """One thing that is to go wrong, once: before the first step from `step` on that its worker comes to.

    `which` is a worker's rank, or a node's rank or address; `seconds` how long a pause lasts (None: for ever), or
    how long a drained node has left.
    """

    number: int
    action: str
    what: str
    which: str
    seconds: float | None
    step: int

    def __str__(self) -> str:
        which = "" if self.what == "driver" else f" {self.which}"
        lasting = "" if self.seconds is None else f" for {self.seconds:g}s"
        return f"{self.action} {self.what}{which}{lasting} at step {self.step}"

    def is_due(self, world: World, step: int) -> bool:
        """Whether this worker is the one to bring it about, now."""
        if step < self.step:
            return False
        if self.what == "worker":
            return str(world.rank) == self.which
        if self.what == "node":
            return world.local_rank == 0 and self.which in (str(world.node_rank), world.node)
        return world.rank == 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults of `--inject`; JobError says what can be asked for."""
    return tuple(_parse(number, part.strip()) for number, part in enumerate(text.split(";")) if part.strip())


def _parse(number: int, text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if not match or (match["action"], match["what"]) not in _ALLOWED:
        raise JobError(f"--inject {text!r}: {_SAYS}")
    is_named = bool(match["which"]) and (match["what"] == "node" or match["which"].isdecimal())
    if is_named == (match["what"] == "driver"):
        raise JobError(f"--inject {text!r}: which {match['what']}? {_SAYS}")
    if match["seconds"] and match["action"] == "kill":
        raise JobError(f"--inject {text!r}: what is killed stays so; {_SAYS}")
    seconds = float(match["seconds"]) if match["seconds"] else None
    return Fault(number, match["action"], match["what"], match["which"] or "", seconds, int(match["step"]))


def bring_about(fault: Fault, driver_node: str) -> None:
    """Do it, here: on the worker that is hit, or on its node. The driver ends itself."""
    if fault.what == "worker" and fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.what == "worker":
        _pause(fault.seconds)
    elif fault.what == "node":
        if ray.get_runtime_context().get_node_id() == driver_node:
            raise JobError(f"--inject '{fault}': the driver itself runs on that node")
        _kill_node() if fault.action == "kill" else _drain_node(fault.seconds)


def _pause(seconds: float | None) -> None:
    pid = os.getpid()
    if seconds is not None:
        line = ["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"]
        subprocess.Popen(line, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.kill(pid, signal.SIGSTOP)


def _kill_node() -> None:
    """Every process of the node's Ray dies at once."""
    raylet = psutil.Process().parent()
    assert raylet is not None and "raylet" in raylet.name(), "a worker's parent is its node's raylet"
    here = psutil.Process()
    family = [*raylet.children(recursive=True), raylet]
    for process in sorted(family, key=lambda one: one == here):
        process.kill()


def _drain_node(seconds: float | None) -> None:
    """What a cloud's notice comes to: Ray is told that the node will be taken away."""
    deadline = 0 if seconds is None else time.time_ns() // 10**6 + round(seconds * 1000)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    context = ray.get_runtime_context()
    gcs = ray._raylet.GcsClient(address=context.gcs_address)
    accepted, why = gcs.drain_node(context.get_node_id(), reason, "a rehearsal", deadline)
    if not accepted:
        raise ClusterError(f"--inject: Ray does not drain the node: {why}")

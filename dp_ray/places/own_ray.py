"""A host's part of a Ray that is there for a single command: `ray start`, followed and ended by its processes.

Nothing of it meets another Ray of the user: it takes free ports, keeps its files in a folder of its own, and wants a
token of its own. `ray stop`, which ends all Rays of a user, is never called.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dp_ray.cluster.internals.variables import ADDRESS, AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH, TMPDIR
from dp_ray.places.launchers import without_own
from dp_ray.system.linux import cores, ended_with_this_process

END_SECONDS = 5.0
KILL_SECONDS = 60.0  # what the kernel does not end by then, it may never end
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
TIMED_OUT = "timed out during startup"  # what Ray says of a start that took more than its 30 s, as on a busy host
TOKEN, LOG, CURRENT = "token", "ray-start.log", "ray_current_cluster"  # Ray writes the last once it is up
SHOWN_LINES = 15
FRAMES = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*", re.MULTILINE)
# Ports that the system chooses; two Rays on a host would else ask for the same ones.
FREE_PORTS = ("node-manager", "object-manager", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")


@dataclass(frozen=True)
class Machine:
    """What a host gives: `cpus` and `gpus`, None for what it has."""

    cpus: float | None = None
    gpus: float | None = None


@dataclass
class OwnRay:
    """This host's part of the Ray."""

    folder: Path
    line: list[str]  # the arguments of `ray` that start it
    process: "subprocess.Popen[bytes]"
    raylet: psutil.Process | None = None
    may_start_again: bool = True

    def address(self) -> str | None:
        """Return the address of the Ray once this host's part of it is up."""
        with suppress(OSError, psutil.Error):
            address = (self.folder / CURRENT).read_text().strip()
            if self.raylet is None:
                children = psutil.Process(self.process.pid).children()
                self.raylet = next((child for child in children if child.name() == "raylet"), None)
            return (address or None) if self.raylet is not None else None
        return None

    @property
    def is_alive(self) -> bool:
        """Whether it runs: a raylet that has been drained ends once nothing runs there."""
        if self.process.poll() is not None:
            return False
        with suppress(psutil.Error):
            return self.raylet is None or self.raylet.status() != psutil.STATUS_ZOMBIE
        return False

    def starts_again(self) -> bool:
        """Start it once more, if its start took longer than Ray waits; return whether it did."""
        if not self.may_start_again or TIMED_OUT not in self.last_lines():
            return False
        _end(self.process, self.folder)
        for left in (CURRENT, LOG):
            (self.folder / left).unlink(missing_ok=True)
        self.process, self.raylet, self.may_start_again = _start(self.line, self.folder), None, False
        return True

    def drain(self, why: str) -> "subprocess.Popen[bytes]":
        """Tell Ray that this host will be taken away; what runs here leaves, and then the raylet ends."""
        assert self.raylet is not None, "it is up"
        return _start(drain_node(self.raylet, why), self.folder)

    def last_lines(self) -> str:
        """Return the end of what `ray start` has said, without the frames of a traceback."""
        with suppress(OSError):
            lines = FRAMES.sub("", (self.folder / LOG).read_text(errors="replace")).splitlines()
            return "\n".join([line for line in lines if line.strip()][-SHOWN_LINES:])
        return ""


def drain_node(raylet: psutil.Process, why: str) -> list[str]:
    """Return the arguments of `ray` that tell the Ray of this raylet that its node will be taken away.

    Raises:
        psutil.NoSuchProcess: the raylet has ended.
    """
    told = dict(word.removeprefix("--").split("=", 1) for word in raylet.cmdline() if "=" in word)
    if not told:  # it ends just now
        raise psutil.NoSuchProcess(raylet.pid)
    which = [f"--address={told['gcs-address']}", f"--node-id={told['node_id']}"]
    return ["drain-node", *which, "--reason=DRAIN_NODE_REASON_PREEMPTION", f"--reason-message={why}"]


def clients_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a program that finds the token of the Ray in this folder, and no other Ray."""
    own = without_own(os.environ)
    kept = {name: own[name] for name in own if name not in (ADDRESS, AUTH_TOKEN, TMPDIR)}
    return {**kept, AUTH_MODE: "token", AUTH_TOKEN_PATH: str(folder / TOKEN)}


@contextmanager
def started(folder: Path, token: str, own: str, machine: Machine, head: str | None = None) -> Iterator[OwnRay]:
    """Start this host's part at its address `own`, of the Ray at `head` or as the first; it ends with the block.

    The block begins at once; `OwnRay.address` tells when it is up.
    """
    with os.fdopen(os.open(folder / TOKEN, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(token)
    line = ["start", "--block", f"--node-ip-address={own}", f"--temp-dir={folder}", "--disable-usage-stats"]
    line += [f"--{name}-port=0" for name in FREE_PORTS] + ["--min-worker-port=0", "--max-worker-port=0"]
    line += [f"--num-cpus={machine.cpus if machine.cpus is not None else usable_cpus(os.environ):g}"]
    line += [] if machine.gpus is None else [f"--num-gpus={machine.gpus:g}"]
    with _kept_port() as port:
        if head is None:
            line += ["--head", "--port=0", f"--ray-client-server-port={port}", "--include-dashboard=false"]
        else:
            line += [f"--address={head}"]
        ray = OwnRay(folder, line, _start(line, folder))
        try:
            yield ray
        finally:
            _end(ray.process, folder)


@contextmanager
def _kept_port() -> Iterator[int]:
    """Yield a free port that no other program gets while the block runs, for a server of gRPC.

    Ray's server for its clients takes no 0 for a port, and by default that of the next Ray on this host. gRPC shares
    a port with this socket, which takes no connections.
    """
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(("", 0))
        yield keeper.getsockname()[1]


def usable_cpus(variables: Mapping[str, str]) -> int:
    """Return how many CPUs this host gives: those that this process may use, of Slurm's job no more than it has.

    Slurm gives a job of GPUs one CPU if it asks for no more, and each worker takes one: so at least one for each GPU.
    """
    usable = len(cores()) or os.cpu_count() or 1
    cpus, gpus = (variables.get(name, "") for name in ("SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE"))
    has = min(usable, int(cpus)) if cpus.isdecimal() and int(cpus) else usable
    return max(has, int(gpus) if gpus.isdecimal() else 0)


def _start(line: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    """Run a command of Ray's, in a session of its own: signals for our group are ours alone."""
    # Slurm sends its signal to all processes of a step, if it does not track them by cgroups.
    command = ended_with_this_process([*RAY, *line], ignores=[signal.SIGUSR2])
    own, nowhere = clients_environment(folder), subprocess.DEVNULL
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, env=own, stdin=nowhere, stdout=log, stderr=log, start_new_session=True
        )


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End this host's part and all that it has started, politely at first."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
        psutil.wait_procs(_processes_of(folder), END_SECONDS)
    until = time.monotonic() + KILL_SECONDS
    while (left := _processes_of(folder)) and time.monotonic() < until:  # also what came meanwhile
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, END_SECONDS)
    process.kill()
    process.wait()


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes of the Ray in this folder: each has inherited where its token is."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_ours = process.status() != psutil.STATUS_ZOMBIE and process.uids().real == os.getuid()
            if is_ours and process.environ().get(AUTH_TOKEN_PATH) == str(folder / TOKEN):
                found.append(process)
    return found

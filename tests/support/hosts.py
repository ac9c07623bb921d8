"""Several hosts on one machine: network namespaces on a bridge, each with a Ray node of its own."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from dp_ray.cluster.internals.variables import AUTH_MODE, AUTH_TOKEN
from tests.support import host_forks, ray_forks
from tests.support.cluster import SYSTEM_CONFIG

PORT = 6379
BRIDGE = "dp-ray-br"
LOCK = Path(tempfile.gettempdir(), "dp-ray-hosts.lock")
# How soon Ray calls a silent node dead: by default after about a minute.
HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
CONFIG = json.dumps({**HEALTH, **json.loads(SYSTEM_CONFIG)})
ENVIRONMENT = {**os.environ, AUTH_MODE: "token", AUTH_TOKEN: secrets.token_hex(32)}


def needs_namespaces() -> None:
    """Skip where hosts cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts are network namespaces: this needs root and iproute2")
    ip("netns", "delete", "dp-ray-probe", check=False)
    if ip("netns", "add", "dp-ray-probe", check=False).returncode:
        pytest.skip("hosts are network namespaces: the kernel refuses to make one")
    ip("netns", "delete", "dp-ray-probe")


def ip(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"ip {' '.join(args)}: {done.stderr.strip()}"
    return done


@dataclass(frozen=True)
class Host:
    """One host: its namespace, its address on the bridge, its own folder."""

    number: int
    folder: Path
    sockets: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    cut_off: set[int] = field(default_factory=set)  # the ids of Ray nodes' processes that were

    @property
    def namespace(self) -> str:
        return f"dp-ray-{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    def command(self, *command: str) -> list[str]:
        """The command line that runs a command on this host, whose Ray has a folder of its own."""
        own = self.folder / f"ray-{self.number}"
        own.mkdir(exist_ok=True)
        mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
        within = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "sh", "-c", mount]
        return [*within, str(own), str(self.sockets), *command]

    def run(self, *command: str, timeout: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end."""
        line = self.command(*command)
        return subprocess.run(line, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=ENVIRONMENT)

    def start_ray(self, *args: str) -> None:
        """Start this host's Ray node; its workers are forked, and nobody reads their logs."""
        line = [
            sys.executable,
            ray_forks.__file__,
            str(self.folder),
            "start",
            f"--node-ip-address={self.address}",
            *args,
        ]
        line += ["--num-cpus=2", "--disable-usage-stats", "--object-store-memory=200000000", "--block"]
        line += ['--resources={"slot": 1}', "--include-log-monitor=false"]
        log = (self.folder / f"host-{self.number}.log").open("wb")
        with log:
            self.processes.append(
                subprocess.Popen(self.command(*line), stdout=log, stderr=log, cwd="/", env=ENVIRONMENT)
            )

    def wait_until_up(self) -> None:
        """Wait until its Ray node runs."""
        log = self.folder / f"host-{self.number}.log"
        until = time.monotonic() + 240
        while "Ray runtime started" not in log.read_text(errors="replace"):
            assert self.processes[-1].poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < until, log.read_text(errors="replace")
            time.sleep(0.2)

    @property
    def is_up(self) -> bool:
        """Whether its Ray node runs; Ray ends one that was cut off, some time later."""
        last = self.processes[-1] if self.processes else None
        return last is not None and last.poll() is None and last.pid not in self.cut_off

    def join(self) -> None:
        """Start this host's Ray node as one of the first host's cluster; that takes a while."""
        self.start_ray(f"--address=10.77.0.1:{PORT}")

    def cut(self) -> None:
        """Nothing reaches this host any more, nor leaves it."""
        self.cut_off.update(process.pid for process in self.processes[-1:])
        ip("link", "set", self._link, "down")

    def heal(self) -> None:
        ip("link", "set", self._link, "up")

    @property
    def _link(self) -> str:
        return f"dp-ray-v{self.number}"

    def kill(self) -> None:
        """Every process of this host dies at once, as when its power goes."""
        inside = ip("netns", "pids", self.namespace, check=False).stdout.split()
        for pid in inside:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()
        for process in self.processes:
            process.wait(30)


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """`count` hosts whose Ray nodes form one cluster; the first one is its head."""
    with (
        namespaces(count, folder) as made,
        # A folder of its own: in Ray's usual one stands the address by which other tests find their Ray.
        ray_forks.served(folder / ray_forks.SOCKET, f"--gcs-address=10.77.0.1:{PORT}", host_forks.__file__),
    ):
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={made[0].sockets}"]
        made[0].start_ray(*head, f"--system-config={CONFIG}")
        made[0].wait_until_up()
        for host in made[1:]:
            host.join()
        for host in made[1:]:
            host.wait_until_up()
        yield made
        for host in reversed(made):
            host.kill()


@contextlib.contextmanager
def namespaces(count: int, folder: Path) -> Iterator[list[Host]]:
    """`count` hosts on which nothing runs yet; at the end all that runs on them is killed."""
    needs_namespaces()
    with LOCK.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # The names below are those of the whole machine.
        _remove_all()  # A session that was killed has left its own.
        try:
            ip("link", "add", BRIDGE, "type", "bridge")
            ip("link", "set", BRIDGE, "up")
            with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
                made = [Host(number, folder, Path(sockets)) for number in range(1, count + 1)]
                for host in made:
                    _connect(host)
                yield made
        finally:
            _remove_all()


def _remove_all() -> None:
    """End every process of every host, and remove the hosts and their bridge."""
    namespaces = re.findall(r"^dp-ray-\d+", ip("netns", "list").stdout, re.MULTILINE)
    for name in namespaces:
        for pid in ip("netns", "pids", name, check=False).stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()
        ip("netns", "delete", name, check=False)
    # The kernel removes the links of a namespace some time after it.
    for link in re.findall(r"\bdp-ray-v\d+", ip("link", "show").stdout):
        ip("link", "delete", link, check=False)
    ip("link", "delete", BRIDGE, check=False)


def _connect(host: Host) -> None:
    """A namespace with a link to the bridge, and a second address that no other host reaches."""
    inner, outer = "eth0", f"dp-ray-v{host.number}"
    ip("netns", "add", host.namespace)
    ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", host.namespace)
    ip("link", "set", outer, "master", BRIDGE, "up")
    within = ["-n", host.namespace]
    ip(*within, "address", "add", f"{host.address}/24", "dev", inner)
    ip(*within, "link", "set", inner, "up")
    ip(*within, "link", "set", "lo", "up")
    ip(*within, "link", "add", "aside", "type", "veth", "peer", "name", "nowhere")
    ip(*within, "address", "add", "192.0.2.99/32", "dev", "aside")
    ip(*within, "link", "set", "aside", "up")

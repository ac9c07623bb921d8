"""Several hosts on one machine: network namespaces on a bridge, each with a Ray node of its own."""

import contextlib
import os
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

PORT = 6379
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def needs_namespaces() -> None:
    """Skip where hosts cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("hosts are network namespaces: this needs root and iproute2")
    if ip("netns", "add", "dp-ray-probe", check=False).returncode:
        pytest.skip("hosts are network namespaces: the kernel refuses to make one")
    ip("netns", "delete", "dp-ray-probe")


def ip(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *args], capture_output=True, text=True, check=check)


@dataclass(frozen=True)
class Host:
    """One host: its namespace, its address on the bridge, its own folder."""

    number: int
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return f"dp-ray-{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    def run(self, *command: str, timeout: float = 240, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end."""
        line = ["ip", "netns", "exec", self.namespace, *command]
        return subprocess.run(line, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=ENVIRONMENT)

    def start_ray(self, *args: str) -> None:
        """Start this host's Ray node and wait until it runs."""
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={self.address}", *args]
        line += ["--num-cpus=2", "--disable-usage-stats", "--object-store-memory=200000000", "--block"]
        log = (self.folder / f"host-{self.number}.log").open("wb")
        with log:
            command = ["ip", "netns", "exec", self.namespace, *line]
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd="/", env=ENVIRONMENT))
        self._wait_until_up()

    def _wait_until_up(self) -> None:
        log = self.folder / f"host-{self.number}.log"
        until = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text(errors="replace"):
            assert self.processes[-1].poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < until, log.read_text(errors="replace")
            time.sleep(0.2)

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
    needs_namespaces()
    made = [Host(number, folder) for number in range(1, count + 1)]
    bridge = "dp-ray-br"
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("link", "set", bridge, "up")
        for host in made:
            _connect(host, bridge)
        # A folder of its own: in Ray's usual one stands the address by which other tests find their Ray.
        with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
            made[0].start_ray("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={sockets}")
            for host in made[1:]:
                host.start_ray(f"--address={made[0].address}:{PORT}")
            yield made
            for host in reversed(made):
                host.kill()
    finally:
        for host in reversed(made):
            host.kill()
            ip("netns", "delete", host.namespace, check=False)
        ip("link", "delete", bridge, check=False)


def _connect(host: Host, bridge: str) -> None:
    """A namespace with a link to the bridge, and a second address that no other host reaches."""
    inner, outer = "eth0", f"dp-ray-v{host.number}"
    ip("netns", "add", host.namespace)
    ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", host.namespace)
    ip("link", "set", outer, "master", bridge, "up")
    within = ["-n", host.namespace]
    ip(*within, "address", "add", f"{host.address}/24", "dev", inner)
    ip(*within, "link", "set", inner, "up")
    ip(*within, "link", "set", "lo", "up")
    ip(*within, "link", "add", "aside", "type", "veth", "peer", "name", "nowhere")
    ip(*within, "address", "add", "192.0.2.99/32", "dev", "aside")
    ip(*within, "link", "set", "aside", "up")

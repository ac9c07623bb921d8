"""A process: its identity, its temporary folders, environment and import path, and its folder's git commit.

An identity is unique over reboots and reused process numbers, to know if an owner is dead: if a driver is killed, the
next one removes its temporary folders. Workers import this before torch, so it imports as little as possible.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from dp_ray.system.linux import machine, start_of
from dp_ray.system.threads import has_begun


@dataclass(frozen=True)
class Process:
    """A unique process: `machine` is one boot of a host and a PID namespace, `started` the process's start time."""

    host: str
    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """Return the identity of the current process."""
    pid = os.getpid()
    return Process(platform.node(), machine(), pid, start_of(pid) or "")


def is_dead(process: Process) -> bool:
    """Return whether a process has certainly ended; False if it ran on another machine, where nobody can know."""
    return process.machine == machine() and start_of(process.pid) != process.started


PREFIX = "dp_ray-"
OWNER = "dp_ray-owner.json"


def short_folder() -> str | None:
    """Return the parent of folders that hold sockets, whose paths are limited to 107 characters; TMPDIR is not."""
    return "/tmp" if os.path.isdir("/tmp") else None


@contextmanager
def own_folder(parent: str | None = None) -> Iterator[str]:
    """Make a temporary folder for the block; first remove those of drivers that are certainly dead."""
    has_begun()
    remove_orphans(Path(parent or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        (Path(folder) / OWNER).write_text(json.dumps(asdict(this_process())))
        yield folder


def remove_orphans(parent: Path) -> None:
    """Remove the folders in `parent` whose owner is certainly dead."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, TypeError):  # another user's, not complete yet, or not dp_ray's
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                owner = Process(**json.loads((folder / OWNER).read_text()))
                if is_dead(owner):
                    shutil.rmtree(folder, ignore_errors=True)


SETTING = re.compile(r"(--set=)?env(\.[^=]*)?=")


def is_env(setting: str) -> bool:
    """Return whether a `--set KEY=VALUE` sets `env` or a variable in it."""
    return bool(SETTING.match(setting))


def without_values(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without the values of `--set env.X=VALUE`, which may be secrets."""
    return [f"{match[0]}(not shown)" if (match := SETTING.match(argument)) else argument for argument in arguments]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs, then restore their former values."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


# NCCL takes a name as the begin of names, eth1 for eth10 too, unless after an equals sign; gloo takes names whole.
INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}


def interface_of(address: str) -> str | None:
    """The name of the network interface with an IP address; None if there is none."""

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    return None


def bind_to(address: str) -> None:
    """Have gloo and NCCL use the interface with this address, unless the user set one."""
    interface = interface_of(address)
    for variable, sign in INTERFACE_VARIABLES.items():
        if interface and variable not in os.environ:
            os.environ[variable] = sign + interface


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module or class of another package while the block runs."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def importing_from_here() -> Iterator[None]:
    """Within the block, modules are found in the current folder too, also in an installed script or a worker."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # deleted, or made anew, as by a further node of Ray on this machine
        here = ""
    known = here in sys.path or "" in sys.path
    if not known:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if not known:
            sys.path.remove(here)


SECONDS = 2.0
SHOWN = 50  # changed files that are listed


def git_state() -> dict[str, Any] | None:
    """Return the commit, branch and changed files of the repository around the current folder; None if unknown."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_status(done.stdout)


def parse_status(text: str) -> dict[str, Any]:
    """Parse what `git status --porcelain=v2 --branch` prints.

    >>> parse_status("# branch.oid 1f\\n# branch.head main\\n1 .M N... 100644 100644 100644 0 0 a b.py\\n")
    {'commit': '1f', 'branch': 'main', 'changed': ['a b.py'], 'num_changed': 1}
    """
    lines = text.splitlines()
    headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# ") and line.count(" ") > 1)
    # The path stands after 8 fields, or 9 if the file was renamed, or 10 if it has a conflict.
    fields = [(line, {"1": 8, "2": 9, "u": 10}.get(line[:1], 1)) for line in lines if not line.startswith("#")]
    changed = [line.split(" ", num)[-1].partition("\t")[0] for line, num in fields]
    return {
        "commit": headers.get("branch.oid"),
        "branch": headers.get("branch.head"),
        "changed": changed[:SHOWN],
        "num_changed": len(changed),
    }

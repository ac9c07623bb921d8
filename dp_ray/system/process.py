"""Identify a process uniquely over reboots and reused process numbers, to know if an owner is dead."""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


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
    """The identity of the current process."""
    pid = os.getpid()
    return Process(platform.node(), machine(), pid, _started(pid) or "")


def is_dead(process: Process) -> bool:
    """Whether a process has certainly ended; False if it ran on another machine, where this cannot be known."""
    return process.machine == machine() and _started(process.pid) != process.started


def machine() -> str:
    """This boot of this host and, on Linux, the PID namespace: a container has its own."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{platform.node()} {psutil.boot_time():.0f}"


def _started(pid: int) -> str | None:
    """When a process started, by the kernel's tick count, which clock changes do not affect; None if it has ended."""
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return None
        if not Path("/proc/self/stat").exists():
            return str(psutil.Process(pid).create_time())
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None

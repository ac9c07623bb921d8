"""Which process is meant, among all that ever were: so that a dead owner is told from a live one."""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Process:
    """A process among all that ever were: `machine` is one start of a host, and its space of process numbers."""

    host: str
    machine: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    pid = os.getpid()
    return Process(platform.node(), machine(), pid, _started(pid) or "")


def is_dead(process: Process) -> bool:
    """Whether a process is certainly over; False where nobody here can know."""
    return process.machine == machine() and _started(process.pid) != process.started


def machine() -> str:
    """This start of this host, and its space of process numbers: a container has its own."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{platform.node()} {psutil.boot_time():.0f}"


def _started(pid: int) -> str | None:
    """When a process started, by the kernel's own count, which no clock changes; None where it is over."""
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return None
        if not Path("/proc/self/stat").exists():
            return str(psutil.Process(pid).create_time())
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None

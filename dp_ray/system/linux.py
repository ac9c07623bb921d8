"""Functions that need Linux, each with a substitute for other systems. No other module names these things.

So macOS can try dp_ray; nobody has run it there. `threads.py` imports this before it handles Ctrl-C, and workers
import it before torch, so it imports as little as possible: psutil only on another system.
"""

import ctypes
import glob
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

# Tests set these as another system has them.
PROC = "/proc"
SHARED_MEMORY = "/dev/shm"
LIBC = ctypes.CDLL(None)
IS_LINUX = sys.platform == "linux"

ACTION_BYTES = 1024  # more than any system's `struct sigaction` has
# glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
# The lines of a core in /proc/cpuinfo that identify a processor's kind, on x86 and on Arm.
NAMES_OF_PROCESSORS = ("vendor_id", "model name")
NUMBERS_OF_PROCESSORS = (
    *("cpu family", "model", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)


def machine() -> str:
    """Return this boot of this host and, on Linux, the PID namespace: a container has its own."""
    with suppress(OSError), open(f"{PROC}/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink(f'{PROC}/self/ns/pid')}"
    import psutil

    return f"{os.uname().nodename} {psutil.boot_time():.0f}"


def start_of(pid: int) -> str | None:
    """Return when a process started, None if it has ended.

    On Linux it is in kernel ticks, which no clock change affects; elsewhere it is the clock's time.
    """
    if os.path.exists(f"{PROC}/self/stat"):
        try:
            with open(f"{PROC}/{pid}/stat") as file:
                state, *fields = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if state == "Z" else fields[18]
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.NoSuchProcess:
        return None


def path_of_stdout() -> str:
    """Return the path of the file to which this process prints; "" where it is not known."""
    with suppress(OSError):
        return os.readlink(f"{PROC}/self/fd/1")
    return ""


def open_sockets() -> dict[int, int]:
    """Return the sockets that this process has open, by file descriptor, each with its own number; none elsewhere."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(f"{PROC}/self/fd"):
            with suppress(OSError):  # it is closed meanwhile, as that of the folder is
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


def cut_sockets(sockets: Mapping[int, int]) -> None:
    """Have these sockets, as `open_sockets` gives them, end after what has arrived, as if the peers had closed them.

    Their owner closes them then, so that the peers hear too. It may still send until it has read that far: gloo would
    lose a message that it cannot send, and wait for it. Any thread may call this.
    """
    for descriptor, number in sockets.items():
        with suppress(OSError):
            copy = os.dup(descriptor)
            # By now the descriptor may be that of another socket, or of a file.
            status = os.fstat(copy)
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino != number:
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as connection:
                if connection.family != socket.AF_UNIX:
                    connection.getpeername()  # raises OSError for one that listens
                    connection.shutdown(socket.SHUT_RD)


def processor() -> str:
    """Return vendor and model of this machine's processor; of cores that differ, each kind."""
    kinds: dict[str, None] = {}
    with suppress(OSError), open(f"{PROC}/cpuinfo") as file:
        for core in file.read().split("\n\n"):
            pairs = (line.partition(":") for line in core.splitlines())
            values = {name.strip(): value.strip() for name, _, value in pairs}
            named = [values[name] for name in NAMES_OF_PROCESSORS if name in values]
            named += [f"{name} {values[name]}" for name in NUMBERS_OF_PROCESSORS if name in values]
            if named:
                kinds[", ".join(named)] = None
    if kinds:
        return " and ".join(kinds)
    import platform

    return platform.processor() or platform.machine()


def gpu_models() -> list[str]:
    """Return the models of this machine's NVIDIA GPUs, without CUDA; none if their driver does not say."""
    models = []
    for name in sorted(glob.glob(f"{PROC}/driver/nvidia/gpus/*/information")):
        with suppress(OSError), open(name) as file:
            models += [line.partition(":")[2].strip() for line in file if "Model:" in line]
    return models


def loaded_library(name: str) -> ctypes.CDLL | None:
    """Return a shared library of this name, the loaded one if there is one; None if it is not found."""
    with suppress(OSError):
        return ctypes.CDLL(name)
    return None


def full_memory() -> str:
    """Return what may be full if a process that shares memory ends, for messages."""
    return f"memory, or {SHARED_MEMORY}, is full" if os.path.isdir(SHARED_MEMORY) else "memory is full"


def cores() -> set[int]:
    """Return the cores on which this thread may run; none if the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def run_on(thread: int, cores: set[int]) -> None:
    """Have a thread of this process, if it still runs, run on some cores, which `cores` has told."""
    with suppress(OSError):
        os.sched_setaffinity(thread, cores)


def forks_after_imports() -> bool:
    """Return whether a process may fork once it has imported torch: macOS ends a child that uses its frameworks."""
    return IS_LINUX


def end_with(parent: int) -> None:
    """End this process once process `parent`, which has forked or spawned it, has ended. Call it in the main thread.

    A forked process holds all connections of its parent: as long as it lives, the other ends see no death. If another
    process has started it, as a fork server, it lives on; so it does on another system.

    The system sends a signal at the end of the thread that forked, though the others of its process may live. So the
    signal only has this process look; it comes again at the end of the next thread that stands in for that one.
    """
    if not IS_LINUX:
        return

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() == parent:
        parents_end = signal.SIGRTMAX - 1  # one that nobody else is likely to handle
        signal.signal(parents_end, look)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {parents_end})
        LIBC.prctl(PR_SET_PDEATHSIG, int(parents_end))
    if start_of(parent) is None:  # it ended before the signal was asked for
        os.kill(os.getpid(), signal.SIGKILL)


def ended_with_this_process(command: list[str], ignores: Iterable[signal.Signals] = ()) -> list[str]:
    """Return the command line of a program that the system kills as soon as this process has ended, however it ends.

    The program and what it starts ignore the signals `ignores`. It holds for the program itself, not for what it
    starts, and if the main thread starts it. On another system the program lives on.
    """
    if not IS_LINUX:
        return command
    code = (
        "import ctypes, os, signal, sys\n"
        f"for number in {[int(number) for number in ignores]}: signal.signal(number, signal.SIG_IGN)\n"
        f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, int(signal.SIGKILL))\n"
        f"if os.getppid() == {os.getpid()}: os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-S", "-E", "-c", code, *command]


def keep_freed_memory() -> bool:
    """Make glibc keep up to 1 GiB of freed memory for the next step; returns whether it does.

    A step frees about as much as the next one needs. By default the pages go back to the system, which must fill
    new ones with zeros: a tenth of a conv net's training time on a CPU. Other C libraries are not changed.
    """
    try:
        mallopt = LIBC.mallopt
    except AttributeError:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 32 << 20) and mallopt(M_TRIM_THRESHOLD, 1 << 30))


@contextmanager
def signal_actions_kept(numbers: Iterable[int]) -> Iterator[None]:
    """After the block, restore the system's actions on these signals, which C code may change too."""
    try:
        sigaction = LIBC.sigaction
    except AttributeError:
        yield
        return
    actions = {number: ctypes.create_string_buffer(ACTION_BYTES) for number in numbers}
    for number, action in actions.items():
        sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in actions.items():
            sigaction(number, action, None)

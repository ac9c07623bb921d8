"""Restores a worker's process after a job, for the next job.

What can be undone is undone: the environment, the working directory, torch's settings, hooks of all modules,
processes and memory. What cannot be undone is named: threads and open files. A worker with such remains is started
anew.

Imported modules stay imported, as in one Python process that runs the jobs in turn: a module's globals, the
attributes of its classes and whatever it patched in other modules are neither undone nor named.
"""

import multiprocessing
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import thread as executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil
import torch

from dp_ray.replica.freed_memory import free_memory
from dp_ray.task.settings import SETTINGS, Restore
from dp_ray.task.torch_settings import NotRestored
from dp_ray.tracebacks import is_installed

END_SECONDS = 2.0  # how long threads and processes of a job may take to end by themselves


@dataclass(frozen=True)
class Belongings:
    """What a process has that can remain after a job: child processes, threads and open files."""

    children: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    files: frozenset[str]

    @classmethod
    def now(cls) -> "Belongings":
        """What this process has now."""
        return cls(frozenset(_children()), frozenset(threading.enumerate()), frozenset(_open_files()))


@contextmanager
def isolated() -> Iterator[list[str]]:
    """After the block, restore this process; the list that it yields then names what remains."""
    belongings = Belongings.now()
    restores = {name: take() for name, take in SETTINGS.items()}
    remains: list[str] = []
    try:
        yield remains
    finally:
        for name, restore in reversed(restores.items()):
            remains += _not_restored(name, restore)
        _end_processes(belongings)
        _free_kernels()
        free_memory()
        remains += _remains(belongings)


def _not_restored(name: str, restore: Restore) -> list[str]:
    """Restore something; what remains of it, by its name."""
    try:
        restore()
    except NotRestored as what:
        return [f"{name}: {what}"]
    except Exception:  # user code may have broken anything
        return [name]
    return []


def _end_processes(before: Belongings) -> None:
    """End the processes that the job started; Python starts its server of forked processes again if it is needed."""
    started = [child for child in _children() if child not in before.children]
    server: Any = forkserver._forkserver
    for child in started:
        if child.pid == getattr(server, "_forkserver_pid", None):
            child.kill()
            server._stop()  # forgets the server, and waits for its end
            this: Any = multiprocessing.current_process()
            if folder := this._config.pop("tempdir", None):  # of its socket
                shutil.rmtree(folder, ignore_errors=True)
    _end(started)


def _children() -> list[psutil.Process]:
    """The child processes, but for Python's own that frees the shared memory of all others."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child for child in psutil.Process().children() if child.pid != tracker]


def _end(processes: list[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.terminate()
    for one in psutil.wait_procs(processes, timeout=END_SECONDS)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _free_kernels() -> None:
    """Forget what was compiled; it holds the models."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _remains(before: Belongings) -> list[str]:
    """What there is now and was not before: threads that do not end soon, and open files."""
    threads = [one for one in threading.enumerate() if one not in before.threads and not _is_foreign(one)]
    until = time.monotonic() + END_SECONDS
    for one in threads:
        one.join(max(0.0, until - time.monotonic()))
    return [
        *(f"the thread {one.name!r}" for one in threads if one.is_alive()),
        *(f"the open file {name}" for name in sorted(_open_files() - before.files)),
    ]


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether a thread runs no user code: one of Ray or torch, of an installed library, or of an executor."""
    if isinstance(thread, threading._DummyThread):
        return True
    does: Any = getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread).run
    code = getattr(does, "__code__", None)
    return code is not None and (is_installed(code.co_filename) or code.co_filename == executor.__file__)


def _open_files() -> set[str]:
    """The regular files that this process holds open for writing or reading, without logs of Ray and libraries."""
    with suppress(psutil.Error, OSError):
        return {one.path for one in psutil.Process().open_files() if not _is_foreign_file(one.path)}
    return set()


def _is_foreign_file(path: str) -> bool:
    return path.endswith((".so", ".py", ".pyc")) or "/ray/" in path or path.startswith(("/dev/", "/proc/", "/sys/"))

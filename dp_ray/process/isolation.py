"""Restore a worker's process after a job, for the next job of a session: begin at `isolated`.

It restores settings (`settings.py`), ends processes and frees memory. It names what it cannot undo: settings without
a way back, and threads. A worker with such remains is restarted. All else is as in one Python process that runs the
jobs in turn: imported modules and their globals, what they patched, hooks of all modules, and open files stay.
"""

import multiprocessing
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import thread as executor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil
import torch

from dp_ray.engine.user_code import free_memory
from dp_ray.errors import is_installed
from dp_ray.process.settings import restoring

END_SECONDS = 2.0  # how long threads and processes of a job may take to end by themselves


@contextmanager
def isolated() -> Iterator[list[str]]:
    """Restore this process after the block; the list that it yields then names what remains."""
    children, threads = _children(), threading.enumerate()
    remains: list[str] = []
    try:
        with restoring(remains):
            yield remains
    finally:
        _end_processes([child for child in _children() if child not in children])
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # compiled code holds the models
        free_memory()
        remains += _remaining([thread for thread in threading.enumerate() if thread not in threads])


def _end_processes(started: list[psutil.Process]) -> None:
    """End the processes that the job started; Python starts its server of forked processes again if it is needed."""
    server: Any = forkserver._forkserver
    for child in started:
        if child.pid == getattr(server, "_forkserver_pid", None):
            child.kill()
            server._stop()  # forgets the server, and waits for its end
            this: Any = multiprocessing.current_process()
            folder = this._config.pop("tempdir", None)  # of its socket
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    for child in psutil.wait_procs(started, timeout=END_SECONDS)[1]:  # processes that do not end when asked
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _children() -> list[psutil.Process]:
    """Return the child processes, without Python's own that frees the shared memory of all others."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child for child in psutil.Process().children() if child.pid != tracker]


def _remaining(started: list[threading.Thread]) -> list[str]:
    """Name new threads that do not end soon."""
    threads = [thread for thread in started if not _is_foreign(thread)]
    until = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [f"the thread {thread.name!r}" for thread in threads if thread.is_alive()]


def _is_foreign(thread: threading.Thread) -> bool:
    """Return whether a thread runs no user code: one of Ray or torch, of an installed library, or of an executor."""
    if isinstance(thread, threading._DummyThread):
        return True
    function: Any = getattr(thread, "_target", None) or getattr(thread, "function", None) or type(thread).run
    code = getattr(function, "__code__", None)
    return code is not None and (is_installed(code.co_filename) or code.co_filename == executor.__file__)

"""Start a Ray of our own faster: a fork server, and a connection that is made while the main thread imports torch.

Workers are forked from the server, a process with torch imported.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

from dp_ray.cluster import fork_server
from dp_ray.cluster.internals.variables import ADDRESS, JOB_CONFIG
from dp_ray.job.job import Job
from dp_ray.job.keys import WorkerKeys
from dp_ray.system.process import environment, own_folder, short_folder

# What a worker imports, but for Ray itself and what imports Ray: first our own, then what Ray needs of others.
MODULES = (
    "dp_ray.tasks.task",
    "dp_ray.monitor.messages",
    "dp_ray.monitor.monitor",
    "dp_ray.rundir.claim",
    "dp_ray.system.imports",
    "filelock",
    "fsspec.implementations.local",
    "google.protobuf.json_format",
    "jsonschema",
    "logging.config",
    "msgpack",
    "psutil",
    "pydantic.dataclasses",
    "pydantic.deprecated.class_validators",
    "requests",
    "tqdm.auto",
    "yaml",
)
OF_TRAINING = ("torch._dynamo",)  # torch imports it with the first optimizer, for nearly two seconds of a core
THREADS = "OMP_NUM_THREADS"
WAITING = 128  # requests that may wait until the server has imported what it needs

_early: dict[str, Path] = {}  # the socket of a server that was started before Ray is imported, by its threads


@contextmanager
def forking_early(keys: WorkerKeys, address: str | None) -> Iterator[None]:
    """Start a fork server before Ray is imported, if the job will get a Ray of its own; it ends with the block."""
    if address or ADDRESS in os.environ or JOB_CONFIG in os.environ:
        yield
        return
    with forking(keys) as server:
        if server is not None:
            _early[threads_of(keys)] = server
        try:
            yield
        finally:
            _early.clear()


@contextmanager
def forking(keys: WorkerKeys) -> Iterator[Path | None]:
    """Start a fork server, or take the early one; gives the path of its socket. It ends with the block.

    None with `env`, which has to be set in a worker before torch is imported there.
    """
    threads = threads_of(keys)
    if keys.env:
        yield None
    elif threads in _early:
        yield _early[threads]
    else:
        with own_folder(short_folder()) as folder, socket.socket(socket.AF_UNIX) as listener:
            path = Path(folder) / "fork-server"
            listener.bind(str(path))
            listener.listen(WAITING)
            with _started(listener, threads, modules_of(keys)):
                listener.close()  # so that nobody waits for an answer once the server has ended
                yield path


def threads_of(keys: WorkerKeys) -> str:
    """Return the number of threads that Ray sets for a worker: torch reads it when it is imported."""
    return os.environ.get(THREADS, str(max(int(keys.cpus_per_worker), 1)))


def modules_of(keys: WorkerKeys) -> Sequence[str]:
    """Return the modules to import for a job; a session does not know yet whether it trains."""
    return MODULES + OF_TRAINING if isinstance(keys, Job) and keys.task == "train" else MODULES


@contextmanager
def _started(listener: socket.socket, threads: str, modules: Sequence[str]) -> Iterator[None]:
    """Run the server's program while the block runs; should this process be killed, the program's stdin ends."""
    given = json.dumps([list(map(str, sys.path)), modules])
    line = [sys.executable, fork_server.__file__, str(listener.fileno()), given]
    nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is the driver's
    try:
        with environment({THREADS: threads}):
            server = subprocess.Popen(line, stdin=pipe, stdout=nowhere, stderr=nowhere, pass_fds=[listener.fileno()])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with server:
        try:
            yield
        finally:
            server.kill()


class EarlyConnection(threading.Thread):
    """A connection that a thread makes, holds and ends.

    The thread lives as long as the connection: the kernel ends an embedded Ray with the thread that started it.
    """

    begun: ClassVar["EarlyConnection | None"] = None  # until somebody takes it over

    def __init__(self, connect: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(name="connection to Ray")
        self._connect = connect
        self._is_there = threading.Event()
        self._ends = threading.Event()
        self._failure: BaseException | None = None

    @classmethod
    def take(cls) -> "EarlyConnection | None":
        """Return the connection that has begun and that nobody has taken over yet; it is the caller's from now on."""
        taken, cls.begun = cls.begun, None
        return taken

    def run(self) -> None:
        """Connect, and hold the connection until it is to end."""
        try:
            with self._connect():
                self._is_there.set()
                self._ends.wait()
        except BaseException as error:
            self._failure = error
        finally:
            self._is_there.set()

    def wait(self) -> None:
        """Wait until the connection is made or has failed."""
        self._is_there.wait()

    def end(self) -> None:
        """End the connection."""
        self._ends.set()
        self.join()

    def __enter__(self) -> None:
        """Wait for the connection; raises what it has failed with."""
        self.wait()
        if self._failure is not None:
            raise self._failure

    def __exit__(self, *_: object) -> None:
        """End the connection."""
        self.end()

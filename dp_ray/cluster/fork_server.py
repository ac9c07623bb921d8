"""A process of its own that imports what workers import, and forks each worker from itself.

The program of `internals/quick_start.py`. It imports all but Ray itself, which starts threads and reads its
environment when it is imported: each worker does that for itself, in a tenth of a second.
"""

import contextlib
import gc
import importlib
import json
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

BEGIN_SECONDS = 30  # from then on Ray sees that its raylet has ended


class ForkRequest(NamedTuple):
    """A request of `forked_worker`: its own arguments, environment, working directory, blocked signals and files.

    `is_leader` says that it has a process group of its own, with which Ray ends what a worker has started.
    `parent` is the process that has started it: the raylet.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    blocked: list[int]
    is_leader: bool
    parent: int
    files: list[int]


def main(listening: int, path: list[str], modules: list[str]) -> None:
    """Import modules with `path` as sys.path, then fork workers until stdin ends.

    In each worker, `fork_for_each` returns what it is to be.
    """
    own_path = [
        folder for folder in sys.path[1:] if folder not in python_path(os.environ)
    ]  # the first is this file's folder
    sys.path[:] = path
    import_all(modules)
    with socket.socket(fileno=listening) as listener:
        request = fork_for_each(listener)
    if request is not None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        take_place(request)
        threading.Thread(target=begin_with, args=(request.parent,), name="raylet", daemon=True).start()
        program = request.arguments[0]
        sys.path[:] = [os.path.dirname(program), *python_path(request.environment), *own_path]
        runpy.run_path(program, run_name="__main__")


def import_all(modules: Sequence[str]) -> None:
    """Import modules, whose objects the garbage collector then leaves alone: to look at them would copy them."""
    gc.disable()
    for name in modules:
        with contextlib.suppress(ImportError):  # a worker that needs it says so
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def fork_for_each(listener: socket.socket) -> ForkRequest | None:
    """Fork a worker for each request. In a worker return the request, else None once stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    waiting = select.poll()  # select() takes no file number above 1,023: the listener has that of a driver's file
    for stream in (listener, sys.stdin):
        waiting.register(stream, select.POLLIN)
    while sys.stdin.fileno() not in dict(waiting.poll()):
        connection, _ = listener.accept()
        with connection:
            try:
                request = received(connection)
            except (EOFError, OSError):  # whoever asked was killed meanwhile
                continue
            if os.fork() == 0:
                if numpy := sys.modules.get("numpy"):
                    numpy.random.seed()  # Python's own generator does so by itself
                return request
            with contextlib.suppress(OSError):  # likewise
                connection.sendall(b"forked")
        for file in request.files:
            os.close(file)
    return None


def received(connection: socket.socket) -> ForkRequest:
    """Return the request that comes through a connection, to its end."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    with connection.makefile("rb") as rest:
        arguments, environment, folder, blocked, is_leader, parent = marshal.loads(data + rest.read())
    return ForkRequest(arguments, environment, folder, blocked, is_leader, parent, files)


def python_path(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH in an environment."""
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def take_place(request: ForkRequest) -> None:
    """Make this process what the requesting one is: group, files, environment, folder, arguments, blocked signals."""
    if request.is_leader:
        os.setpgid(0, 0)
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.argv = request.arguments
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def begin_with(parent: int) -> None:
    """End this process if the raylet ends while it begins: Ray itself tries for half a minute to reach a cluster."""
    try:
        raylet = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # of an old kernel
        return
    waiting = select.poll()
    waiting.register(raylet, select.POLLIN)
    if waiting.poll(1000 * BEGIN_SECONDS):
        os._exit(1)
    os.close(raylet)


if __name__ == "__main__":
    main(int(sys.argv[1]), *json.loads(sys.argv[2]))

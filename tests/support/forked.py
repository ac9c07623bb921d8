"""Processes that start at once: each is forked, with torch imported, from a server that the first one starts."""

import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import torch

import dp_ray
from dp_ray.cli import main
from tests.support.cluster import ROOT
from tests.support.forked_python import FORKED, SERVER

FORKED.set_forkserver_preload(["tests.support.warm"])


def start_server() -> None:
    """Start the server, unless it runs.

    It starts in the project's root: elsewhere it would find nothing to import beforehand, without a word, and each
    process would import torch anew.
    """
    with chdir(ROOT):
        SERVER.ensure_running()


def new_process(function: Callable[..., Any], *args: Any) -> Any:
    """A process that is not started yet, to be forked from the server."""
    start_server()
    return FORKED.Process(target=function, args=args)


def fork_from_this(but: int) -> None:
    """Have the processes that this one starts with "forkserver" forked from a copy of it, where torch is imported.

    To be called before this process has threads. `but` is a file of this process that they must not hold open.
    """
    resource_tracker.ensure_running()
    lives, ends = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := f"{util.get_temp_dir()}/forks-{os.getpid()}")
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(ends)  # so that the copy ends with this process
            os.close(but)
            forkserver.main(listener.detach(), lives, [])
    os.close(lives)
    SERVER._forkserver_address, SERVER._forkserver_alive_fd, SERVER._forkserver_pid = address, ends, pid


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status, or minus the signal that killed it, and what it said."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Program:
    """A process that runs, and the folder that holds what it says."""

    process: Any
    said: Path

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, timeout: float = 240) -> Ended:
        """Wait until it has ended."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still runs after {timeout} s"
        return Ended(self.process.exitcode, *((self.said / name).read_text() for name in ("out", "err")))


@contextmanager
def started(
    function: Callable[..., Any], *args: Any, cwd: Path = ROOT, own_session: bool = False
) -> Iterator[Program]:
    """Call a function in a process of its own, as an interpreter that was started in `cwd` would; kill it at the end.

    `own_session` makes it the head of a process group, as a terminal does.
    """
    with tempfile.TemporaryDirectory() as said:
        given = (function, args, str(cwd), said, dict(os.environ), own_session)
        program = Program(new_process(_call, *given), Path(said))
        program.process.start()
        try:
            yield program
        finally:
            program.process.kill()
            program.process.join()


def ended(function: Callable[..., Any], *args: Any, **how: Any) -> Ended:
    """Call a function in a process of its own, and wait until that has ended."""
    with started(function, *args, **how) as program:
        return program.end()


def dp_ray_program(*args: str) -> None:
    """Be `dp-ray` with these arguments."""
    sys.argv = ["dp-ray", *args]
    main.main()


def run_job(keys: dict[str, Any]) -> None:
    """Run a job."""
    dp_ray.run(**keys)


def python_script(path: str) -> None:
    """Be `python PATH`."""
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], cwd: str, said: str, env: dict[str, str], own_session: bool
) -> None:
    if own_session:
        os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # as in the tests' own process: they share few cores
    function(*args)

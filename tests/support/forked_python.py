"""Stands for `python` where xdist starts a process: has it forked from the tests' server, where torch is imported.

`python tests/support/forked_python.py SERVER -u -c PROGRAM`, where SERVER is what `address` gives.
"""

import json
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

FORKED = multiprocessing.get_context("forkserver")
SERVER: Any = forkserver._forkserver
NAMES = ("_forkserver_address", "_forkserver_authkey")  # the second one since Python 3.14


def address() -> str:
    """What `use_server` needs in another process."""
    found = {name: getattr(SERVER, name) for name in NAMES if hasattr(SERVER, name)}
    return json.dumps({name: value.hex() if isinstance(value, bytes) else value for name, value in found.items()})


def use_server(address: str) -> None:
    """Have this process's processes forked from another one's server, which lives as long as that one does."""
    for name, value in json.loads(address).items():
        setattr(SERVER, name, bytes.fromhex(value) if name == NAMES[1] else value)
    _, SERVER._forkserver_alive_fd = os.pipe()  # a process that is forked holds it, as it holds the other one's
    SERVER.ensure_running = lambda: None


def be(files: list[Connection], program: str) -> None:
    """Be `python -c PROGRAM` with these standard files."""
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin = os.fdopen(0, closefd=False)
    exec(program, {"__name__": "__main__"})


def main(server: str, *words: str) -> int:
    """Start it, and end as it does."""
    use_server(server)
    files = [Connection(os.dup(number)) for number in range(3)]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for the tracker, which tells what killed processes had open
    process = FORKED.Process(target=be, args=(files, words[-1]))
    process.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

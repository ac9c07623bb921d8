"""The fork server: its workers have what it has imported, and it ends with its driver or its raylet."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dp_ray.cluster import fork_server
from dp_ray.cluster.internals import forked_worker
from dp_ray.system.process import own_folder, short_folder
from tests.support.within import within

SECONDS = 60.0
# A worker's program: writes which of the modules were imported before it was forked.
PROGRAM = "import sys\nopen(sys.argv[1], 'w').write(' '.join(sorted({'heavy'} & sys.modules.keys())))\n"
# What the workers need: it is imported once a file is there.
HEAVY = "import pathlib, time\nwhile not pathlib.Path({path!r}).exists(): time.sleep(0.05)\n"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's."""
    with own_folder(short_folder()) as folder:
        yield Path(folder)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The path of a server's socket, and its process."""
    (folder / "heavy.py").write_text(HEAVY.format(path=str(folder / "go")))
    (folder / "program.py").write_text(PROGRAM)
    path = folder / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        given = json.dumps([[str(folder), *sys.path], ["heavy"]])
        line = [sys.executable, fork_server.__file__, str(listener.fileno()), given]
        server = subprocess.Popen(line, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    with server:
        try:
            yield path, server
        finally:
            server.kill()


def asked(server: Path, name: str) -> subprocess.Popen[bytes]:
    """A process that asks for a worker, which writes a file of this name."""
    program, told = server.with_name("program.py"), server.with_name(name)
    given = {forked_worker.SERVER: str(server), forked_worker.DEFAULT_WORKER: str(program)}
    return subprocess.Popen([sys.executable, forked_worker.__file__, str(told)], env={**os.environ, **given})


def told(folder: Path, name: str) -> str:
    assert within(SECONDS, lambda: (folder / name).exists() and (folder / name).stat().st_size > 0)
    return (folder / name).read_text()


def test_who_comes_while_it_imports_waits(short_path: Path) -> None:
    with serving(short_path) as (server, _):
        asking = asked(server, "a")
        with pytest.raises(subprocess.TimeoutExpired):
            asking.wait(1.0)
        (short_path / "go").touch()
        assert told(short_path, "a") == "heavy"
        assert asking.wait(SECONDS) == 0


def test_who_comes_later_gets_all(short_path: Path) -> None:
    (short_path / "go").touch()
    with serving(short_path) as (server, process):
        (children,) = Path(f"/proc/{process.pid}/task").iterdir()
        assert within(SECONDS, lambda: is_ready(children))
        names = ("a", "b", "c")
        assert [one.wait(SECONDS) for one in [asked(server, name) for name in names]] == [0, 0, 0]
        assert [told(short_path, name) for name in names] == ["heavy"] * 3


def is_ready(thread: Path) -> bool:
    """Whether the server ignores the ends of its children: it serves."""
    (line,) = (line for line in (thread / "status").read_text().splitlines() if line.startswith("SigIgn"))
    return bool(int(line.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)


def test_a_server_of_a_driver_with_many_open_files_forks_too(many_files: list[int], short_path: Path) -> None:
    """The number of the listener's file is the one that it has in the driver."""
    (short_path / "go").touch()
    with serving(short_path) as (server, process):
        assert int(process.args[2]) >= 1024  # type: ignore[index,arg-type]
        assert asked(server, "a").wait(SECONDS) == 0
        assert told(short_path, "a") == "heavy"


RAYLET = """
import subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True)
print("forked", flush=True)
sys.stdin.read()
"""


def test_a_worker_whose_raylet_ends_while_it_begins_ends_too(short_path: Path) -> None:
    """Ray's own program would try for half a minute to reach the cluster that is gone."""
    (short_path / "go").touch()
    with serving(short_path) as (server, _):
        (short_path / "program.py").write_text(
            "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
        )
        given = {forked_worker.SERVER: str(server), forked_worker.DEFAULT_WORKER: str(short_path / "program.py")}
        line = [sys.executable, "-c", RAYLET, forked_worker.__file__, str(short_path / "pid")]
        with subprocess.Popen(
            line, env={**os.environ, **given}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as raylet:
            assert raylet.stdout is not None and raylet.stdout.readline() == b"forked\n"
            worker = int(told(short_path, "pid"))
            alive = Path(f"/proc/{worker}")
            assert alive.exists()
            raylet.kill()
        assert within(20, lambda: not alive.exists())

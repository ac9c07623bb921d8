"""The first seconds of a command that starts a Ray of its own: what ends it then leaves nothing behind."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from dp_ray.cluster.ray_internals.variables import VARIABLES
from dp_ray.errors import JobError
from dp_ray.system.folders import OWNER
from tests.support.cluster import ROOT
from tests.support.within import within

SECONDS = 120.0  # the machine may be busy


class Command:
    """`dp-ray run` in a process of its own, and all processes that it starts."""

    def __init__(self, running: subprocess.Popen[str], mark: str) -> None:
        self._mark = mark
        self.running = running

    def processes(self) -> dict[int, str]:
        """The command lines of its processes, but for its own, by their ids."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != self.running.pid and self._mark in process.environ():
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def ends(self) -> tuple[int, str]:
        """Its exit status, and what it wrote to stderr."""
        _, errors = self.running.communicate(timeout=SECONDS)
        return self.running.returncode, errors


@contextmanager
def started(*arguments: str) -> Iterator[Command]:
    mark = f"DP_RAY_FIRST_START_{uuid.uuid4().hex}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    line = [sys.executable, "-m", "dp_ray", "run", "jobs/tutorial.yaml", "--workers", "2", *arguments]
    with subprocess.Popen(line, cwd=ROOT, env={**kept, mark: "1"}, stderr=subprocess.PIPE, text=True) as running:
        command = Command(running, mark)
        try:
            yield command
        finally:
            running.kill()
    assert within(SECONDS, lambda: not command.processes()), command.processes()


def owner_of(folder: Path) -> str:
    with suppress(OSError):
        return (folder / OWNER).read_text()
    return ""


@pytest.mark.ray
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(("process", "number"), [("gcs_server", signal.SIGTERM), ("raylet", signal.SIGINT)])
def test_a_signal_while_ray_starts_ends_with_130_and_leaves_no_ray(
    process: str, number: signal.Signals, tmp_path: Path
) -> None:
    before = set(Path("/tmp").glob("dp_ray-*"))
    with started("--storage", str(tmp_path)) as command:
        assert within(SECONDS, lambda: any(process in line for line in command.processes().values()))
        command.running.send_signal(number)
        status, errors = command.ends()
        assert status == 130, errors
        assert errors.splitlines()[-1] == "interrupted"
        assert "Traceback" not in errors
    assert not list(tmp_path.iterdir()), "no run has begun"
    ours = [one for one in set(Path("/tmp").glob("dp_ray-*")) - before if str(command.running.pid) in owner_of(one)]
    assert not ours


@pytest.mark.ray
def test_a_killed_command_leaves_no_ray(tmp_path: Path) -> None:
    with started("--storage", str(tmp_path)) as command:
        assert within(SECONDS, lambda: any("raylet" in line for line in command.processes().values()))
        assert any("fork_server.py" in line for line in command.processes().values())
        command.running.kill()


@pytest.mark.ray
def test_a_model_that_cannot_be_imported_leaves_no_ray(tmp_path: Path) -> None:
    with started("--storage", str(tmp_path), "--set", "model=nowhere.at_all:Model") as command:
        status, errors = command.ends()
        assert status == JobError.exit_status, errors
        assert "nowhere.at_all" in errors.splitlines()[-1]
    assert not list(tmp_path.iterdir())

"""`dp-ray run` in a process of its own, with all processes that it starts."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

from dp_ray.cluster.internals.variables import VARIABLES
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
def started(
    *arguments: str, program: Sequence[str] = ("-m", "dp_ray"), job: str = "jobs/tutorial.yaml", **environment: str
) -> Iterator[Command]:
    mark = f"DP_RAY_FIRST_START_{uuid.uuid4().hex}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    line = [sys.executable, *program, "run", job, "--workers", "2", *arguments]
    with subprocess.Popen(
        line, cwd=ROOT, env={**kept, **environment, mark: "1"}, stderr=subprocess.PIPE, text=True
    ) as running:
        command = Command(running, mark)
        try:
            yield command
        finally:
            running.kill()
    assert within(SECONDS, lambda: not command.processes()), command.processes()

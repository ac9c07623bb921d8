"""`dp-ray node` as processes of their own, one for each host of a job, all on this machine."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import dp_ray
from dp_ray.cluster.internals.variables import AUTH_TOKEN, VARIABLES
from tests.support.cluster import ROOT
from tests.support.drivers import SLOW
from tests.support.within import within

SECONDS = 300.0  # the machine may be busy
TWO: dict[str, Any] = {**SLOW, "shards": 2, "epochs": 4, "checkpoint": {"every_steps": 3, "every_seconds": None}}


def job_in(folder: Path, name: str = "run", **keys: Any) -> str:
    """Write a job file, whose run is STORAGE `folder`/`name`, and return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**TWO, "storage": str(folder), "name": name, "workers": 2, **keys}))
    return str(path)


def bits(run_dir: Path) -> tuple[Any, Any, int]:
    """The weights' hash, the outputs' hash and the number of steps of a run that is done."""
    result = dp_ray.load(run_dir)
    assert result.status == "done", result.status
    return result.weights_sha256, result.outputs_sha256, result.steps


def undisturbed(folder: Path, **keys: Any) -> tuple[Any, Any, int]:
    """The same of the same training in a single process, which nothing disturbs."""
    name = f"undisturbed-{uuid.uuid4().hex[:8]}"
    dp_ray.run(**{**TWO, "storage": str(folder), "quiet": True, **keys, "name": name, "workers": 0})
    return bits(folder / name)


class Hosts:
    """The hosts of a job."""

    def __init__(self, folder: Path, mark: str, program: Sequence[str]) -> None:
        self.folder, self.mark, self.program = folder, mark, program
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, *command: str, hosts: int = 2, meet: str | None = None, token: str = "") -> None:
        """Start `dp-ray node` on the host of a rank; it has one CPU, so one worker."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith((VARIABLES, "SLURM_"))}
        meets = str(self.folder / "meet") if meet is None else meet
        line = [*self.program, "node", "--hosts", str(hosts), "--rank", str(rank), "--cpus", "1"]
        line += [*(["--meet", meets] if meets else []), "--", *command]
        own = {**kept, "PYTHONPATH": str(ROOT), self.mark: "1", **({AUTH_TOKEN: token} if token else {})}
        with (self.folder / f"host-{self.mark}-{rank}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(line, cwd=self.folder, env=own, stdout=log, stderr=log, start_new_session=True)
            )

    def said(self, rank: int) -> str:
        return (self.folder / f"host-{self.mark}-{rank}.log").read_text(errors="replace")

    def all_said(self) -> str:
        return "\n".join(self.said(rank) for rank in range(len(self.processes)))

    def wait_until_said(self, rank: int, what: str) -> None:
        ended = self.processes[rank]
        assert within(SECONDS, lambda: what in self.said(rank) or ended.poll() is not None), self.all_said()
        assert what in self.said(rank), self.all_said()

    def wait_for_steps(self, run_dir: Path, after: int = 0) -> None:
        """Wait until a run has a checkpoint after more than so many steps."""

        def there() -> bool:
            return any(int(path.stem[5:]) > after for path in run_dir.glob("checkpoints/step-*.safetensors"))

        assert within(SECONDS, lambda: there() or self.processes[0].poll() is not None), self.all_said()
        assert there(), self.all_said()

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].send_signal(number)

    def statuses(self) -> list[int]:
        """The exit statuses of all hosts, which end."""
        try:
            return [process.wait(SECONDS) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.all_said()) from None

    def left(self) -> dict[int, str]:
        """The command lines of what runs, but for `dp-ray node` itself, by their ids."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid not in {one.pid for one in self.processes} and self.mark in process.environ():
                    found[process.pid] = " ".join(process.cmdline())
        return found


@contextmanager
def hosts_in(folder: Path, program: Sequence[str] = (sys.executable, "-m", "dp_ray")) -> Iterator[Hosts]:
    """The hosts of a job in `folder`. All that they start must have ended soon after them."""
    made = Hosts(folder, f"DP_RAY_HOSTS_{uuid.uuid4().hex}", program)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()
    assert within(60, lambda: not made.left()), made.left()

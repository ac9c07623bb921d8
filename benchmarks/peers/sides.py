"""Run whole commands in turns, with the times of their steps."""

import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.compare import Goal, Pairs, compared
from benchmarks.table import Row, time_text

STAMPS = Path(__file__).with_name("stamps")
ROUNDS = 3


@dataclass(frozen=True)
class Timed:
    """Seconds of a command, and what it printed. Steps are those of the process that made the most."""

    whole: float
    steps: Sequence[float]  # when each ended, in seconds since the command began
    output: str

    @property
    def start(self) -> float:
        """Until the first step has ended."""
        return self.steps[0]

    @property
    def step(self) -> float:
        """The median time between a step and the next one."""
        return median(after - before for before, after in zip(self.steps, self.steps[1:], strict=False))

    @property
    def stepping(self) -> float:
        """From the first step's end to the last one's, with what lies between, as validations."""
        return self.steps[-1] - self.steps[0]


def timed(
    command: Sequence[object],
    cwd: Path | None = None,
    meanwhile: Callable[[Path], None] | None = None,
    **variables: str,
) -> Timed:
    """Run a command, with one thread for each process unless a variable says otherwise; it must succeed.

    Steps are seen in each process of Python that it starts. A thread may do something `meanwhile`, given the folder
    of the stamps: a file for each of these processes, named by its pid, with 8 bytes a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables, "STAMPS": folder}
        environment["PYTHONPATH"] = os.pathsep.join([str(STAMPS), *filter(None, [environment.get("PYTHONPATH")])])
        began = time.time()
        if meanwhile is not None:
            threading.Thread(target=meanwhile, args=(Path(folder),), daemon=True).start()
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        whole = time.time() - began
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}")
        written = [path.read_bytes() for path in Path(folder).iterdir()]
        stamps = [[at - began for (at,) in struct.iter_unpack("d", of)] for of in written]
    return Timed(whole, max(stamps, key=len, default=[]), done.stdout)


def in_turns(sides: Mapping[str, Callable[[], Timed]], rounds: int = ROUNDS) -> dict[str, list[Timed]]:
    """Run all sides, one after the other, `rounds` times."""
    found: dict[str, list[Timed]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            found[name].append(run())
    return found


def rows(
    what: str,
    found: Mapping[str, list[Timed]],
    figure: Callable[[Timed], float],
    goals: Mapping[str, Goal],
    shown: Callable[[float], str] = time_text,
) -> list[Row]:
    """A row for each side that has a goal: dp_ray's figure beside it."""

    def pairs(name: str) -> Pairs:
        return [(figure(ours), figure(theirs)) for ours, theirs in zip(found["dp_ray"], found[name], strict=True)]

    return [compared(what, pairs(name), shown, name, goal) for name, goal in goals.items() if name in found]

"""Slowness for the workers of a group: what faults of `--inject` and a slow storage bring about."""

import os
import time
from pathlib import Path

from dp_ray.messages import StepControl
from dp_ray.storage import Storage


class Slow(StepControl):
    """Slows one worker by `seconds` a step from a step on, and the storage by `commit` seconds a file."""

    hears_times = True
    slows = True

    def __init__(self, rank: int = -1, seconds: float = 0.0, step: int = 0, commit: float = 0.0) -> None:
        self._slowness = rank, seconds, step
        self._commit = commit

    def storage(self, folder: str) -> Storage:
        return Storage(folder).guarded(lambda: time.sleep(self._commit))

    def before(self, step: int) -> None:
        _, seconds, first = self._slowness
        self._due = seconds if step >= first else 0.0

    def take_delay(self, rank: int) -> float:
        due, self._due = self._due, 0.0
        return due if rank == self._slowness[0] else 0.0


class Begun(Slow):
    """Notes the steps that each worker begins, in a file of its process; its storage is slower than a step."""

    hears_times = False

    def __init__(self, folder: Path) -> None:
        super().__init__(commit=0.5)
        self._folder = folder

    def before(self, step: int) -> None:
        super().before(step)
        with (self._folder / f"begun-{os.getpid()}").open("a") as file:
            file.write(f"{step}\n")

"""Slowness for the workers of a group: what faults of `--inject` and a slow storage bring about."""

import time

from dp_ray.storage import Storage
from dp_ray.task.step_control import StepControl


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

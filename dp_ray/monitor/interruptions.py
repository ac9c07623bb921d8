"""The incidents of a run: printed on the console, and kept in its log."""

import time
from collections.abc import Callable

from dp_ray.monitor.console import Console
from dp_ray.rundir.incidents import IncidentKind, IncidentLog, Interruption


class Interruptions:
    """Adds to the log of a run's incidents, and calls `save` with the log after each change."""

    def __init__(self, log: IncidentLog, console: Console, save: Callable[[IncidentLog], None]) -> None:
        self.log = log
        self._console = console
        self._save = save
        self._moved = time.monotonic()

    def begin(self, num_workers: int) -> None:
        """Record that an attempt begins."""
        self.log = self.log.begun(num_workers)
        self._save(self.log)

    def moved(self) -> None:
        """Note the time at which all workers have finished a step."""
        self._moved = time.monotonic()

    def interrupt(self, by: Interruption) -> None:
        """Record that the workers are being replaced."""
        self.log = self.log.interrupted(by)
        self._console.say(f"interrupted, {by}")
        self._save(self.log)

    def resume(self, step: int) -> None:
        """Record that an attempt's first step begins, which ends the interruption before it."""
        if not self.log.is_interrupted:
            return
        is_known = self.log.interruptions[-1].kind is not IncidentKind.DRIVER
        seconds = round(time.monotonic() - self._moved, 1) if is_known else None
        self.log = self.log.resumed(step, seconds)
        self._console.say(self.log.interruptions[-1].resumption)
        self._save(self.log)

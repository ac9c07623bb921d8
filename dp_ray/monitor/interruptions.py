"""The incidents of a run: said on the console, and kept."""

import time
from collections.abc import Callable

from dp_ray.monitor.console import Console
from dp_ray.rundir.incidents import IncidentLog, Interruption


class Interruptions:
    """Adds to the log of a run's incidents; `save` takes it each time."""

    def __init__(self, log: IncidentLog, console: Console, save: Callable[[IncidentLog], None]) -> None:
        self.log = log
        self._console = console
        self._save = save
        self._moved = time.monotonic()

    def begin(self, num_workers: int) -> None:
        """An attempt begins."""
        self.log = self.log.begun(num_workers)
        self._save(self.log)

    def moved(self) -> None:
        """All workers are through with a step."""
        self._moved = time.monotonic()

    def interrupt(self, by: Interruption) -> None:
        """The workers are being replaced."""
        self.log = self.log.interrupted(by)
        self._console.say(f"interrupted, {by}")
        self._save(self.log)

    def resume(self, step: int) -> None:
        """The first step of an attempt begins: the interruption before it is over."""
        if not self.log.is_interrupted:
            return
        is_known = self.log.interruptions[-1].kind != "driver"
        seconds = round(time.monotonic() - self._moved, 1) if is_known else None
        self.log = self.log.resumed(step, seconds)
        self._console.say(self.log.interruptions[-1].resumption)
        self._save(self.log)

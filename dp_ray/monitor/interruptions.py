"""The incidents of a run: printed on the console, and kept in its log."""

import re
import time
from collections.abc import Callable, Sequence

from dp_ray.monitor.console import Console
from dp_ray.monitor.hangs import NodeControl
from dp_ray.monitor.messages import Interrupted, WorkerReady
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


def interruption_of(
    message: Interrupted, lost: Sequence[WorkerReady], hung: str, step: int, control: NodeControl
) -> Interruption:
    """The interruption after `step` that lost these workers; `hung` says how they hung, "" if they did not.

    If the node of a lost worker does not answer, the node was lost. An error of user code may come before the last
    reports, and name a later step.
    """
    kind, what = message.kind, message.what
    if kind is IncidentKind.ERROR and (named := re.match(r"step (\d+)\b", what)):
        step = max(step, int(named[1]))
    if kind is IncidentKind.WORKER and any(control.is_gone(one.node_id) for one in lost):
        kind = IncidentKind.NODE
    if hung:
        kind, what = IncidentKind.HANG, hung
    return Interruption(kind, what, step, message.ranks, tuple(sorted({one.world.node for one in lost})))

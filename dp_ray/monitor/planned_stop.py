"""A stop that the user asks for: after the current step, with the work kept."""

import threading

from dp_ray.monitor.console import Console
from dp_ray.monitor.hangs import NodeControl


class PlannedStop:
    """Whether the user asked the run to stop, by which signal, and whether the workers can still be asked."""

    def __init__(self, can_keep: bool, console: Console) -> None:
        self.is_asked = False
        self.by = ""  # the name of the last signal, or the asker
        self.asker = ""  # what asks by way of a signal
        self.is_closed = False  # messages are no longer read, so workers cannot be asked to stop
        self._can_keep = can_keep
        self._console = console

    def ask(self, control: NodeControl, runs_a_step: bool, signal_name: str) -> bool:
        """Ask the workers to stop after their current step; return whether they will.

        They cannot if no step runs, if the task keeps nothing, or if they were asked before. A signal handler calls
        this, so all that may block runs in a thread.
        """
        self.by = self.asker or signal_name
        if self.is_closed or self.is_asked or not runs_a_step or not self._can_keep:
            return False
        self.is_asked = True
        threading.Thread(target=self._stop, args=(control,), name="planned stop", daemon=True).start()
        return True

    def _stop(self, control: NodeControl) -> None:
        control.stop()
        self._console.say("stopping after this step, which is kept; a second Ctrl-C or SIGTERM ends the run at once")

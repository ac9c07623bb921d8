"""How the workers' part of a job ends."""

import threading

from dp_ray.monitor.messages import Finished, GaveUp


class JobEnd:
    """Whether the workers' part of a job has ended: all workers have left it, it was given up, or they are gone."""

    def __init__(self) -> None:
        self.finished: tuple[Finished, ...] = ()
        self.gave_up: GaveUp | None = None
        self._has_come = threading.Event()

    @property
    def has_come(self) -> bool:
        """Whether the end has come."""
        return self._has_come.is_set()

    def wait(self) -> None:
        """Wait for the end."""
        self._has_come.wait()

    def come(self) -> None:
        """Note that no worker will report any more."""
        self._has_come.set()

    def finish(self, finished: tuple[Finished, ...]) -> None:
        """Note how all workers of the newest attempt have left the job; none: some have not."""
        self.finished = finished
        if finished:
            self.come()

    def give_up(self, message: GaveUp) -> None:
        """Note that the job is given up."""
        self.gave_up = message
        self.come()

"""Between two steps, a worker reports its progress, and stops if it is asked to."""

from dp_ray.errors import Error


class StopRequested(Error):
    """The worker stopped between two steps, as it was asked, and kept all its work; this is no failure."""


class StepControl:
    """What a worker's loop calls between two steps; this base class asks the worker for nothing.

    `wants_stop` asks the worker to stop once all workers agree, or after its current step if it is the only one.
    `take_save` asks, once, to keep the work so far now. `slows` says whether `take_delay` may ask to sleep.
    """

    wants_stop = False
    slows = False

    def before(self, step: int) -> None:
        """The worker is about to run `step`."""

    def touch(self) -> None:
        """The worker is still at work in its step, on an evaluation for instance."""

    def through(self) -> None:
        """The worker has run its last step; its remaining writes have no time limit."""

    def take_save(self) -> bool:
        """Whether to keep the work so far now; true once for each request."""
        return False

    def take_delay(self, rank: int) -> float:
        """The seconds by which the worker's current step is to be slower; 0 from its second call in a step on."""
        return 0.0

    def leave(self) -> None:
        """Called when this worker has kept all its work: wait until the others have, then raise StopRequested."""
        raise StopRequested("stopped as it was asked")

    def end(self) -> None:
        """The worker has nothing left to run."""

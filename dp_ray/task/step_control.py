"""Between two steps: where a worker tells how far it is, and stops if it is asked to."""

from dp_ray.errors import Error


class StopRequested(Error):
    """The worker stopped between two steps, as it was asked, with all that it had done kept: no failure."""


class StepControl:
    """What a worker's loop meets between two steps. Alone in its process, nobody asks it for anything.

    `wants_stop`: the worker is to stop once all workers agree; one that is alone, after the step that it is in.
    `take_save` says, once, that what is done so far is to be kept now.
    """

    wants_stop = False

    def before(self, step: int) -> None:
        """The worker is about to run `step`."""

    def touch(self) -> None:
        """The worker is still at work in its step, on an evaluation for instance."""

    def through(self) -> None:
        """The worker has run its last step; what it still writes may take its time."""

    def take_save(self) -> bool:
        return False

    def leave(self) -> None:
        """All that this worker had to keep is kept: wait for the others', and raise StopRequested."""
        raise StopRequested("stopped as it was asked")

    def end(self) -> None:
        """The worker has nothing left to run."""

"""The actor in whose process Ray Train's controller runs.

Workers get its handle, and with it import this module: so it is small. Public: none; a TorchTrainer starts the
controller itself.
"""

import os
from types import SimpleNamespace
from typing import Any

import ray

from dp_ray.errors import JobError


class WorkerController:
    """Runs Ray Train's controller; it sets its variables itself, so that Ray can take a process that runs already.

    `made` is the reference, in a list, of what makes the controller, and its arguments: so they are fetched here, and
    with what makes it comes the module that says how Ray Train is imported.
    """

    def __init__(self, variables: dict[str, str], made: list[Any]) -> None:
        os.environ.update(variables)
        make, given = ray.get(made[0])
        self._controller = make(**given)

    async def run(self) -> None:
        """Run workers until they have ended."""
        await self._controller.run()

    def error(self) -> BaseException | None:
        """Return the error with which they have ended; None if they ended without."""
        found: BaseException | None = self._controller.get_result().error
        return found


# A part of the command line of its process. Public: `ray list actors`.
CONTROLLER_PROCESS = WorkerController.__name__


class NoSynchronization:
    """In place of the actor behind ray.train.report, whose process costs two seconds; dp_ray does not call it.

    Ray Train calls its `reset` where it replaces workers.
    """

    reset = SimpleNamespace(remote=lambda: ray.put(None))

    @classmethod
    def options(cls, **_: Any) -> type["NoSynchronization"]:
        """Take the actor's options."""
        return cls

    @classmethod
    def remote(cls, **_: Any) -> "NoSynchronization":
        """Start nothing."""
        return cls()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise JobError("ray.train.report and its barriers are not for a job of dp_ray, which reports by itself")

"""The error that ends a run: what a worker reports of it, and what the driver raises."""

from dp_ray.errors import ClusterError, DataError, Error, JobError, ModelError, StorageError, WorkerError
from dp_ray.monitor.messages import Failed

KINDS = (JobError, ClusterError, DataError, ModelError, StorageError, WorkerError, Error)


def kind_of(error: BaseException) -> type[Error] | None:
    """The class of dp_ray.errors that an error is of, also through a class that the user derived; None if of none."""
    return next((kind for kind in KINDS if isinstance(error, kind)), None)


def error_of(failed: Failed, is_verbose: bool = False) -> Error:
    """The error that a worker reported, with its rank, node and traceback.

    An error of `dp_ray.errors` shows only the frames of user code, unless verbose; any other error shows all frames.
    """
    error = (failed.kind or Error)(f"{failed.world}: {failed.text}")
    if note := failed.traceback if is_verbose or failed.kind is None else failed.frames:
        error.add_note(note)
    return error

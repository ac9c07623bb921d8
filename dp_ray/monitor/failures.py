"""The error that ends a run, built from a worker's report of it."""

from dp_ray import errors
from dp_ray.monitor.messages import Failed
from dp_ray.secrets import hide


def error_of(failed: Failed, is_verbose: bool = False) -> errors.Error:
    """The error that a worker reported, with its rank, node and traceback.

    An error of `dp_ray.errors` shows only the frames of user code, unless verbose; any other error shows all frames.
    """
    kind = getattr(errors, failed.kind, None)
    cls = kind if isinstance(kind, type) and issubclass(kind, errors.Error) else errors.Error
    error = cls(f"{failed.world}: {failed.text}")
    if note := failed.traceback if is_verbose or not failed.kind else failed.frames:
        error.add_note(hide(note))
    return error

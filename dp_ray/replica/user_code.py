"""Calls of the user's code: what it raises says which of the job's keys raised it, and what that got."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dp_ray.errors import Error, JobError, ModelError
from dp_ray.replica.world import is_lost_peer


@contextmanager
def raising(
    what: str, hint: Callable[[BaseException], str] = lambda error: "", kind: type[Error] = ModelError
) -> Iterator[None]:
    """Say that `what` raised what the block raises: `loss raised ValueError: ...`, and the hint after it.

    What dp_ray itself raises passes as it is; so does the loss of another worker, in what runs with the others.
    """
    try:
        yield
    except Error:
        raise
    except (Exception, SystemExit) as error:
        if kind is ModelError and is_lost_peer(error):
            raise
        raise kind(said(what, error, hint(error))) from error


@contextmanager
def at(where: str) -> Iterator[None]:
    """Say where the block raised, as in `step 3, shard 1`; what is wrong with the job itself is wrong everywhere."""
    try:
        yield
    except JobError:
        raise
    except Error as error:
        raise type(error)(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        if is_lost_peer(error):
            raise
        raise ModelError(said(where, error)) from error


def said(what: str, error: BaseException, hint: str = "") -> str:
    """What raised, what it said, and what else there is to say."""
    text = str(error).rstrip("." if hint else None)
    return f"{what} raised {type(error).__name__}" + (f": {text}" if text else "") + hint


def got(outputs: Any, target: Any) -> str:
    """What a loss or a metric got."""
    return f"; it got outputs {dtypes_and_sizes(outputs)}, target {dtypes_and_sizes(target)}"


def dtypes_and_sizes(value: Any) -> str:
    """The dtypes and sizes of what is nested: `float32 [4, 3]`, `(int64 [4], {mask: bool [4, 9]})`."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {dtypes_and_sizes(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(dtypes_and_sizes(one) for one in value[:4]) + ", ..." * (len(value) > 4) + ")"
    return f"a {type(value).__qualname__}"

"""Wrap errors of the user's code: the message names the job's key that raised, and what it got."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from dp_ray.engine.world import passes, text_of
from dp_ray.errors import DataError, Error, JobError, ModelError
from dp_ray.plan.split import Shard
from dp_ray.text import listed

Loaded = TypeVar("Loaded")
_ENDED_LOADER = re.compile(
    r"DataLoader worker \((?P<who>pid(?:\(s\))? [\d, ]+)\) (exited unexpectedly|is killed by signal)"
)


@contextmanager
def raising(
    what: str, hint: Callable[[BaseException], str] = lambda error: "", kind: type[Error] = ModelError
) -> Iterator[None]:
    """Turn an exception of the block into a `kind` of Error: `loss raised ValueError: ...`, then the hint.

    dp_ray's own errors pass unchanged. So does a failed collective, as of a lost worker, if `kind` is ModelError.
    """
    try:
        yield
    except Error:
        raise
    except (Exception, SystemExit) as error:
        if kind is ModelError and passes(error):
            raise
        if (ended := ended_loader(error)) is not None:
            raise ended from None
        raise kind(said(what, error, hint(error))) from error


@contextmanager
def at(where: str) -> Iterator[None]:
    """Put the place, like `step 3, shard 1`, before the block's error; a JobError is about no place, and passes."""
    try:
        yield
    except JobError:
        raise
    except Error as error:
        placed = type(error)(f"{where}: {error}")
        for note in getattr(error, "__notes__", ()):  # the user's frames in a loader process
            placed.add_note(note)
        raise placed from error
    except (Exception, SystemExit) as error:
        if passes(error):
            raise
        if (ended := ended_loader(error)) is not None:
            raise DataError(f"{where}: {ended}") from None
        raise ModelError(said(where, error)) from error


def ended_loader(error: BaseException) -> DataError | None:
    """What to raise for torch's error that a process of a DataLoader has ended; None for another error.

    It comes from a signal's handler, so wherever the worker is just then.
    """
    found = _ENDED_LOADER.search(str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    return loader_has_ended(f" ({found['who']})")


def loader_has_ended(who: str = "") -> DataError:
    """What to raise if a process of a DataLoader has ended; `who` names it."""
    return DataError(
        f"a process of the loader has ended in the midst of its work{who}, as where the system kills one because "
        "memory, or /dev/shm, is full: take fewer loader.processes or a smaller loader.prefetch"
    )


def loaded(batches: Iterator[Loaded], where: str) -> Loaded:
    """The next batch; the error of one that cannot be loaded says where it belongs, like `step 3, shard 1`."""
    with at(where):
        return next(batches)


def read_many(many: Callable[[list[int]], Any], indices: list[int], name: str) -> Any:
    """The samples that a dataset's `__getitems__` gives; raises DataError, naming it, unless it is one for each."""
    what = f"samples {listed(indices)}"
    with raising(f"{what} of {name}", kind=DataError):
        items = many(list(indices))
    if isinstance(items, list | tuple) and len(items) == len(indices):
        return items
    got = f"{len(items)} items" if isinstance(items, list | tuple) else f"a {type(items).__qualname__}"
    raise DataError(f"{name}'s __getitems__ gave {got} for {what}: it must give a list of one item for each")


def place(shard: Shard) -> str:
    """A shard's step and number, for messages."""
    return f"step {shard.step}, shard {shard.shard}"


def said(what: str, error: BaseException, hint: str = "") -> str:
    """The message of an error: what raised, the exception's type and text, and the hint."""
    text = text_of(error).rstrip("." if hint else None)
    return f"{what} raised {type(error).__name__}" + (f": {text}" if text else "") + hint


def got(outputs: Any, target: Any) -> str:
    """A hint for a loss or a metric: the dtypes and sizes that it got."""
    return f"; it got outputs {dtypes_and_sizes(outputs)}, target {dtypes_and_sizes(target)}"


def one_row_told(error: BaseException) -> str:
    """A hint where BatchNorm trains on a shard of a single row; else empty."""
    if "Expected more than 1 value per channel" not in str(error):
        return ""
    return "; this shard has one row: choose batch_size and shards so that each has two"


OF_SHARDS = (
    "; with strategy: fsdp the parameters of a block are whole only while the block runs, and shards (DTensors) "
    "elsewhere: compute with them in the forward of a module that fsdp.blocks names, or take strategy: ddp"
)


def shards_told(error: BaseException) -> str:
    """A hint where code meets the shards of parameters; else empty."""
    if not any(one in str(error) for one in ("DTensor", "tensor subclass", "Sharding propagation")):
        return ""
    return OF_SHARDS


def it_got(inputs: Any) -> str:
    """A hint for a model: the dtypes and sizes that it got."""
    return f"; it got {dtypes_and_sizes(inputs)}"


def dtypes_and_sizes(value: Any) -> str:
    """The dtypes and sizes of nested tensors: `float32 [4, 3]`, `(int64 [4], {mask: bool [4, 9]})`."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {dtypes_and_sizes(one)}" for key, one in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(dtypes_and_sizes(one) for one in value[:4]) + ", ..." * (len(value) > 4) + ")"
    return f"a {type(value).__qualname__}"

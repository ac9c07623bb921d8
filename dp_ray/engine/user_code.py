"""Wrap errors of the user's code: the message names the job's key that raised, and its inputs.

`reraise_as` names the code that raised, `locating` the step and shard; the hints say what to change.
"""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch

from dp_ray.engine.world import Trouble, passes, text_of
from dp_ray.errors import DataError, Error, JobError, ModelError
from dp_ray.plan.split import Shard
from dp_ray.system.linux import full_memory
from dp_ray.tensors.tree import sizes


@contextmanager
def reraise_as(
    what: str, hint: Callable[[BaseException], str] = lambda error: "", kind: type[Error] = ModelError
) -> Iterator[None]:
    """Turn an exception of the block into a `kind` of Error: `loss raised ValueError: ...`, then the hint.

    dp_ray's own errors pass unchanged. So does a failed collective, as of a lost worker, if `kind` is ModelError.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise_as(error, what, hint, kind)


def raise_as(
    error: BaseException,
    what: str,
    hint: Callable[[BaseException], str] = lambda error: "",
    kind: type[Error] = ModelError,
) -> NoReturn:
    """Raise what `reraise_as` raises for an exception: for the code of each step, where a block costs time."""
    if isinstance(error, Error) or (kind is ModelError and passes(error)):
        raise error
    raise kind(error_text(what, error, hint(error))) from error


@contextmanager
def locating(where: str) -> Iterator[None]:
    """Put a location, like `step 3, shard 1`, before the block's error; a JobError is about no step, and passes."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise_located(error, where)


def raise_located(error: BaseException, where: str) -> NoReturn:
    """Raise what `locating` raises for an exception: for the code of each step, where a block costs time."""
    if isinstance(error, JobError):
        raise error
    if isinstance(error, Error):
        located = type(error)(f"{where}: {error}")
        for note in getattr(error, "__notes__", ()):  # the user's frames in a loader process
            located.add_note(note)
        raise located from error
    if passes(error):
        raise error
    raise ModelError(error_text(where, error)) from error


def loader_ended_error(pid: int | None = None, status: int | None = None) -> DataError:
    """Return the error to raise if a process of a DataLoader has ended: its id, and its exit status, if known.

    A negative status is a signal's number.
    """
    known = []
    if pid is not None:
        known.append(f"pid {pid}")
    if status is not None:
        known.append(_signal_name(-status) if status < 0 else f"exit status {status}")
    says = "a process of the loader has ended in the midst of its work" + (f" ({', '.join(known)})" if known else "")
    if status == -signal.SIGBUS:
        return DataError(f"{says}, as where there is no room for a batch: {Trouble.SHARED_MEMORY.remedy}; {FEWER}")
    if status is not None and -status not in OF_MEMORY:
        return DataError(
            f"{says}: code that the dataset or the collate runs has ended it; loader.processes: 0 runs that in the "
            "worker, where a debugger can step into it"
        )
    return DataError(f"{says}, as where the system kills one because {full_memory()}: {FEWER}")


FEWER = "take fewer loader.processes or a smaller loader.prefetch"
OF_MEMORY = (signal.SIGKILL, signal.SIGTERM)  # of memory that is full, or near it


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def location(shard: Shard) -> str:
    """Return a shard's step and number, for messages."""
    return f"step {shard.step}, shard {shard.shard}"


def error_text(what: str, error: BaseException, hint: str = "") -> str:
    """Return the message of an error: the code that raised, the exception's type and text, and the hint."""
    text = text_of(error).rstrip("." if hint else None)
    return f"{what} raised {type(error).__name__}" + (f": {text}" if text else "") + hint


def describe_compared(outputs: Any, target: Any) -> str:
    """Return a hint for a loss or a metric: the dtypes and sizes that it got."""
    return f"; it got outputs {dtypes_and_sizes(outputs)}, target {dtypes_and_sizes(target)}"


OF_SHARDS = (
    "; with strategy: fsdp the parameters of a block are whole only while the block runs, and shards (DTensors) "
    "elsewhere: compute with them in the forward of a module that fsdp.blocks names, or take strategy: ddp"
)


def shards_hint(error: BaseException) -> str:
    """Return a hint for code that meets the shards of parameters; else empty."""
    if not any(word in str(error) for word in ("DTensor", "tensor subclass", "Sharding propagation")):
        return ""
    return OF_SHARDS


def gradients_hint(error: BaseException) -> str:
    """Return a hint for code that computes gradients where they are off; else empty."""
    if torch.is_grad_enabled() or "not require grad" not in str(error):
        return ""
    return (
        "; a prediction or an evaluation runs without gradients: compute one, say a force, in a block `with "
        "torch.enable_grad():`, of inputs on which it calls requires_grad_()"
    )


def describe_input(inputs: Any) -> str:
    """Return a hint for a model: the dtypes and sizes that it got."""
    return f"; it got {dtypes_and_sizes(inputs)}"


def dtypes_and_sizes(value: Any) -> str:
    """Return the dtypes and sizes of nested tensors: `float32 [4, 3]`, `(int64 [4], {mask: bool [4, 9]})`."""
    if isinstance(value, torch.Tensor | np.ndarray):
        size = sizes(value)
        return f"{str(value.dtype).removeprefix('torch.')} {list(size) if isinstance(size, torch.Size) else size}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {dtypes_and_sizes(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        parts = [dtypes_and_sizes(part) for part in value[:4]]
        return "(" + ", ".join([*parts, "..."] if len(value) > 4 else parts) + ")"
    return f"a {type(value).__qualname__}"

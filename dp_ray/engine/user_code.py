"""Wrap errors of the user's code: the message names the job's key that raised, and its inputs.

`reraise_as` names the code that raised, `locating` the step and shard; the hints say what to change. The last part is
for a device that has no memory left: what to change in the job, and how a worker frees memory.
"""

import gc
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch

from dp_ray.engine.world import Cause, Trouble, failed_collective, passes, text_of
from dp_ray.errors import DataError, Error, JobError, ModelError
from dp_ray.plan.split import Shard, chunk_sizes, num_filled
from dp_ray.system.linux import full_memory
from dp_ray.tensors.tree import sizes
from dp_ray.text import SHOWN, a_kind, counted, listed

if TYPE_CHECKING:
    from dp_ray.job.job import Job


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
    known = [] if pid is None else [f"pid {pid}"]
    if status is not None:
        is_signal = -status in set(signal.Signals)
        known.append(signal.Signals(-status).name if is_signal else f"exit status {status}")
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
    words = ("DTensor", "tensor subclass", "Sharding propagation")
    return OF_SHARDS if any(word in str(error) for word in words) else ""


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
    return a_kind(value)


CHANGES = "set one of: "  # in an error of memory that says what to change

# CUDA, its libraries and torch's allocator of a CPU raise plain RuntimeErrors with these texts. cuBLAS has two: where
# there is no memory for its handle, it only says that it is not initialised.
NO_MEMORY = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory|Triton Error \[(CUDA|HIP)\]: out of memory|cudaErrorMemoryAllocation"
    r"|Cuda failure (\d+ )?'out of memory'|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate|CUFFT_ALLOC_FAILED|MIOPEN_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)


class ShardSize(NamedTuple):
    """How a global batch of `batch_rows` rows is cut: into `shards`, of which this worker's largest has `rows` rows.

    `key` is the job's key that sets the size of the batches.
    """

    rows: int
    batch_rows: int
    shards: int
    key: str = "batch_size"


@contextmanager
def advised(job: "Job", where: str, size: ShardSize | None) -> Iterator[None]:
    """Turn an error of the block that depends on the rows of a shard into a ModelError that says what to change.

    It is one of memory, or of a BatchNorm that got a single row.

    `where` is the step. `size` is None if the memory does not depend on the rows. An error that says so already
    passes.
    """
    try:
        yield
    except (RuntimeError, ModelError) as error:
        raise_advised(error, job, where, size)


def raise_advised(error: RuntimeError | ModelError, job: "Job", where: str, size: ShardSize | None) -> NoReturn:
    """Raise what `advised` raises for an error: for the code of each step, where a block costs time."""
    if ONE_VALUE in str(error) and size is not None and size.rows and NEEDS_TWO not in str(error):
        raise ModelError(f"{str(error).rstrip('.')}; {two_rows_each(job, size)}") from error
    if not is_out_of_memory(error) or CHANGES in str(error):
        raise error
    text = str(error) if isinstance(error, ModelError) else f"{where}: {type(error).__name__}: {text_of(error)}"
    raise ModelError(f"{text.rstrip('.')}; {advice(job, size)}") from error


ONE_VALUE = "Expected more than 1 value per channel"  # what a BatchNorm raises
NEEDS_TWO = "a BatchNorm needs two rows in each shard"


def two_rows_each(job: "Job", size: ShardSize) -> str:
    """Return how a batch is cut whose last shard has one row, and the nearest numbers of shards without such."""
    rows = [count for count in chunk_sizes(size.batch_rows, size.shards) if count]
    cut = listed(rows) if len(rows) <= SHOWN else f"{rows[0]}, ..., {rows[-1]}"
    says = f"{NEEDS_TWO}: {counted(size.batch_rows, 'row')} in {counted(size.shards, 'shard')} are {cut}"
    if rows[-1] > 1:
        return f"{NEEDS_TWO}, and this one has a single row, as the others were left out"

    def fits(shards: int) -> bool:
        batches = {size.batch_rows, *([job.batch_size] if size.key == "batch_size" else [])}
        of_last = [each - (num_filled(each, shards) - 1) * -(-each // shards) for each in batches]
        return min(of_last) > 1 and num_filled(max(batches), shards) == shards

    fewer = next(filter(fits, range(size.shards - 1, max(1, job.max_workers) - 1, -1)), None)
    more = next(filter(fits, range(size.shards + 1, size.batch_rows // 2 + 1)), None)
    if would := [str(each) for each in (fewer, more) if each is not None]:
        return f"{says}; set shards: {' or '.join(would)}, or another {size.key}"
    return f"{says}; set another {size.key}, or drop_last: true to leave a short last batch out"


def batch_hint(error: BaseException, batch: Any) -> str:
    """Return a hint on an out-of-memory error, the dtypes and sizes of the shard's batch; "" for other errors."""
    return describe_input(batch) if is_out_of_memory(error) else ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the error, or one that caused it, says that a device has no memory left."""
    if error is None:
        return False
    has_text = isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None
    collective = failed_collective(error)
    of_nccl = collective is not None and collective.cause is Cause.OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError) or has_text or of_nccl or is_out_of_memory(error.__cause__)


def advice(job: "Job", size: ShardSize | None) -> str:
    """Return the changes to the job of which any one may be enough."""
    changes = []
    if size is not None and size.rows > 1:
        same = "the same gradient but for BatchNorm" if job.task == "train" else "the same outputs"
        shards = min(2 * size.shards, size.batch_rows)
        rows = chunk_sizes(size.batch_rows, shards)[0]
        changes.append(f"shards: {shards} instead of {size.shards} (at most {counted(rows, 'row')} each, {same})")
        changes.append(f"a smaller {size.key}")
    if size is not None and job.precision == "fp32":
        changes.append("precision: bf16")
    if size is None and job.task == "train":
        changes.append("an optimizer with less state")
    changes.append("more GPUs for each worker (gpus_per_worker, device_map: auto)")
    has = "" if size is None else f"this worker's shards have {counted(size.rows, 'row')}; "
    return f"{has}{CHANGES}{listed(changes)}"


MAX_COLLECTIONS = 5


def free_memory() -> None:
    """Free what only reference cycles hold, then the GPU memory that torch keeps for itself.

    It takes more than one collection: a cycle may hold objects of C++, and those the next cycle. The second one finds
    the model of a training with FSDP.
    """
    for _ in range(MAX_COLLECTIONS):
        if not gc.collect():
            break
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):  # after an assert in a kernel, which an error on its way tells, each call raises
            torch.cuda.empty_cache()

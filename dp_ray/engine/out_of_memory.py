"""Errors of a device that has no memory left: what to change in the job, and how a worker frees memory."""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from dp_ray.engine.user_code import describe_input
from dp_ray.engine.world import Cause, failed_collective, text_of
from dp_ray.errors import ModelError
from dp_ray.plan.split import chunk_sizes
from dp_ray.text import counted, listed

if TYPE_CHECKING:
    from dp_ray.job.job import Job

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
    """Turn an out-of-memory error of the block into a ModelError that says what to change.

    `where` is the step. `size` is None if the memory does not depend on the rows. An error that says so already
    passes.
    """
    try:
        yield
    except (RuntimeError, ModelError) as error:
        raise_advised(error, job, where, size)


def raise_advised(
    error: RuntimeError | ModelError,
    job: "Job",
    where: str,
    size: ShardSize | None,
    shards_that_fit: Callable[[], int | None] = lambda: None,
) -> NoReturn:
    """Raise what `advised` raises for an error: for the code of each step, where a block costs time.

    `shards_that_fit` estimates the smallest number of shards that would fit; by default, and where it gives None, it
    is twice as many as now.
    """
    if not is_out_of_memory(error) or CHANGES in str(error):
        raise error
    text = str(error) if isinstance(error, ModelError) else f"{where}: {type(error).__name__}: {text_of(error)}"
    more = shards_that_fit() if size is not None and size.rows > 1 else None
    raise ModelError(f"{text.rstrip('.')}; {advice(job, size, more)}") from error


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


def advice(job: "Job", size: ShardSize | None, more: int | None = None) -> str:
    """Return the changes to the job of which any one may be enough; `more` is a number of shards that would fit."""
    changes = []
    if size is not None and size.rows > 1:
        same = "the same gradient but for BatchNorm" if job.task == "train" else "the same outputs"
        shards = more or min(2 * size.shards, size.batch_rows)
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

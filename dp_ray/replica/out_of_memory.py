"""A device without memory left: an error that says what to change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.plan.split import chunk_sizes
from dp_ray.replica.failed_collective import Cause, failed_collective, text_of
from dp_ray.replica.user_code import it_got
from dp_ray.replica.world import World
from dp_ray.text import counted, listed

# cuBLAS, CUDA itself and torch's allocator of a CPU raise plain RuntimeErrors with these texts.
TEXTS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory")


class ShardSize(NamedTuple):
    """How a global batch of `batch_rows` rows is cut: into `shards`, of which this worker's largest has `rows` rows.

    `key` is the job's key that sets the size of the batches.
    """

    rows: int
    batch_rows: int
    shards: int
    key: str = "batch_size"


@contextmanager
def advised(
    job: Job, where: str, size: ShardSize | None, shards_that_fit: Callable[[], int | None] = lambda: None
) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a ModelError that says what to change.

    `where` is the step. `size` is None if the memory does not depend on the rows. `shards_that_fit` estimates the
    smallest number of shards that would fit; by default, and where it gives None, it is twice as many as now.
    """
    try:
        yield
    except (RuntimeError, ModelError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error) if isinstance(error, ModelError) else f"{where}: {type(error).__name__}: {text_of(error)}"
        more = shards_that_fit() if size is not None and size.rows > 1 else None
        raise ModelError(f"{said.rstrip('.')}; {advice(job, size, more)}") from error


def shapes_told(error: BaseException, batch: Any) -> str:
    """A hint for an out-of-memory error: the dtypes and sizes of the shard's batch; nothing for other errors."""
    return it_got(batch) if is_out_of_memory(error) else ""


def gpu_room(world: World) -> int | None:
    """The bytes of its GPU that a worker may use; None if it computes on a CPU or on several devices."""
    if world.device.type != "cuda" or len(world.devices) > 1:
        return None
    return int(torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, says that a device has no memory left."""
    if error is None:
        return False
    told = isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)
    collective = failed_collective(error)
    of_nccl = collective is not None and collective.cause is Cause.OUT_OF_MEMORY
    return isinstance(error, torch.OutOfMemoryError) or told or of_nccl or is_out_of_memory(error.__cause__)


def advice(job: Job, size: ShardSize | None, more: int | None = None) -> str:
    """What to change in the job, of which any one may be enough; `more` is a number of shards that would fit."""
    changes = [] if size is None else [*_smaller(job, size, more)]
    if size is None and job.task == "train":
        changes.append("an optimizer with less state")
    changes.append("more GPUs for each worker (gpus_per_worker, device_map: auto)")
    has = "" if size is None else f"this worker's shards have {counted(size.rows, 'row')}; "
    return f"{has}set one of: {listed(changes)}"


def _smaller(job: Job, size: ShardSize, more: int | None) -> Iterator[str]:
    """The changes that make a shard's tensors smaller."""
    if size.rows > 1:
        same = "the same gradient but for BatchNorm" if job.task == "train" else "the same outputs"
        shards = more or min(2 * size.shards, size.batch_rows)
        rows = chunk_sizes(size.batch_rows, shards)[0]
        yield f"shards: {shards} instead of {size.shards} (at most {counted(rows, 'row')} each, {same})"
        yield f"a smaller {size.key}"
    if job.precision == "fp32":
        yield "precision: bf16"

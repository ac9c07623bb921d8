"""A device without memory left: an error that says what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.text import listed

# cuBLAS and CUDA itself raise plain RuntimeErrors with these texts.
TEXTS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


@contextmanager
def advised(job: Job, where: str, rows: int | None, batch_size: str = "batch_size") -> Iterator[None]:
    """Turn an out-of-memory error of the block into a ModelError that says what to change.

    `where` is the step. `rows` is the size of the worker's largest shard; None if the memory does not depend on it.
    `batch_size` is the key that sets the size of the batches.
    """
    try:
        yield
    except (RuntimeError, ModelError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error) if isinstance(error, ModelError) else f"{where}: {type(error).__name__}: {error}"
        raise ModelError(f"{said.rstrip('.')}; {advice(job, rows, batch_size)}") from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, says that a device has no memory left."""
    if error is None:
        return False
    told = isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)
    return isinstance(error, torch.OutOfMemoryError) or told or is_out_of_memory(error.__cause__)


def advice(job: Job, rows: int | None, batch_size: str = "batch_size") -> str:
    """What to change in the job, of which any one may be enough."""
    changes = [] if rows is None else [*_smaller(job, rows, batch_size)]
    if rows is None and job.task == "train":
        changes.append("an optimizer with less state")
    changes.append("more GPUs for each worker (gpus_per_worker, device_map: auto)")
    has = "" if rows is None else f"this worker's shards have {rows} row{'s' * (rows != 1)}; "
    return f"{has}set one of: {listed(changes)}"


def _smaller(job: Job, rows: int, batch_size: str) -> Iterator[str]:
    """The changes that make a shard's tensors smaller."""
    if rows > 1:
        same = "the same gradient, but for BatchNorm," if job.task == "train" else "the same outputs"
        yield f"shards: {2 * job.num_shards} instead of {job.num_shards} ({same} in smaller pieces)"
        yield f"a smaller {batch_size}"
    if job.precision == "fp32":
        yield "precision: bf16"

"""The order in which a job takes its samples: the dataset's, shuffled, or shuffled by blocks. It imports no torch."""

import hashlib
from typing import Any

import numpy as np

from dp_ray.errors import DataError, JobError
from dp_ray.job import Job
from dp_ray.plan.block_order import BlockOrder, Ints, blocks_held
from dp_ray.plan.order import Order
from dp_ray.plan.work import Work
from dp_ray.text import counted


def order_of(job: Job, dataset: Any) -> Order | BlockOrder:
    """The order of the job's first epoch. Raises what `block_rows_of` raises."""
    how, sizes = job.block_shuffle, block_rows_of(job, dataset)
    if how is None or sizes is None:
        return Order(len(dataset), job.seed, 0, job.is_shuffled)
    return BlockOrder(sizes, how.window_blocks, job.batch_size, job.num_shards, job.seed)


def block_rows_of(job: Job, dataset: Any) -> Ints | None:
    """The sizes of the blocks that a training shuffles, int64 [blocks]; None if it does not shuffle blocks.

    Raises JobError if neither the job nor the dataset says what a block is, and DataError if the dataset's blocks
    do not hold as many samples as the dataset.
    """
    if job.block_shuffle is None:
        return None
    if (rows := job.block_shuffle.block_rows) is not None:
        full, rest = divmod(len(dataset), rows)
        return np.array([rows] * full + [rest] * (rest > 0), np.int64)
    given = getattr(dataset, "block_rows", None)
    if given is None:
        what = f"the dataset, a {type(dataset).__qualname__}, does not say what its blocks are"
        raise JobError(f"shuffle: blocks: {what}; say how many samples a block has: shuffle: {{block_rows: 1000}}")
    sizes = np.asarray(given, np.int64)
    if sizes.ndim != 1 or (sizes < 0).any() or sizes.sum() != len(dataset):
        says = f"has {counted(sizes.size, 'block')} of {sizes.sum()} samples in all, and {len(dataset)} samples"
        raise DataError(f"dataset: {says}; its block_rows must be a list of the samples in each block")
    return sizes


def describe_blocks(job: Job, dataset: Any) -> str | None:
    """All that decides the order of shuffled blocks, besides seed and epoch, as text; None without such a shuffle."""
    how, sizes = job.block_shuffle, block_rows_of(job, dataset)
    if how is None or sizes is None:
        return None
    digest = hashlib.sha256(sizes.astype("<i8").tobytes()).hexdigest()[:16]
    dealt = f"windows of {how.window_blocks}, dealt to {counted(job.num_shards, 'shard')}"
    return f"{counted(len(sizes), 'block')} with sizes of hash {digest}, {dealt}"


def hold_blocks(job: Job, dataset: Any, work: Work) -> None:
    """Have a dataset of dp_ray.data keep in memory the blocks of a window that the worker reads."""
    if not hasattr(dataset, "hold_blocks"):
        return
    how, shards = job.block_shuffle, job.num_shards if job.scatter == "batch" else len(work.shards)
    dataset.hold_blocks(1 if how is None else blocks_held(how.window_blocks, shards, job.num_shards))

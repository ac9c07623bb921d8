"""The samples that a training skips: its shards without them, on any worker, by arithmetic alone."""

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from dp_ray.job import Job
from dp_ray.plan.split import Shard
from dp_ray.plan.work import Work
from dp_ray.replica.read_requests import Indices
from dp_ray.replica.sample_order import order_of
from dp_ray.tensors.scatter import cut

NOTHING: tuple[Indices, None] = (np.empty(0, np.int64), None)  # a batch without rows
AT_ONCE = 4096  # positions whose samples are computed at once: for one small shard numpy's overhead would dominate
REMEMBERED = 256  # times so many positions: a loader asks for a shard long before its step does


class Skipping:
    """Gives a shard without the samples of the job's `skip`: their positions are missing from it."""

    def __init__(self, job: Job, dataset: Any) -> None:
        self._samples = np.array(job.skipped, np.int64)
        self._order = order_of(job, dataset) if job.skipped else None
        self._remembered = functools.lru_cache(maxsize=REMEMBERED)(self._skipped)

    def __call__(self, shard: Shard) -> Shard:
        """The shard without what is skipped."""
        if self._order is None or shard.start == shard.stop:
            return shard
        blocks = range(shard.start // AT_ONCE, (shard.stop - 1) // AT_ONCE + 1)
        found = (at for block in blocks for at in self._remembered(shard.epoch, block))
        missing = tuple(at for at in found if shard.start <= at < shard.stop)
        return dataclasses.replace(shard, missing=missing) if missing else shard

    def _skipped(self, epoch: int, block: int) -> list[int]:
        """The positions of what is skipped, among those of a block of an epoch's order."""
        assert self._order is not None
        start, order = block * AT_ONCE, dataclasses.replace(self._order, epoch=epoch)
        samples = order.indices(start, min(len(order), start + AT_ONCE))
        found: list[int] = (np.flatnonzero(np.isin(samples, self._samples)) + start).tolist()
        return found


def filled_shards(work: Work, real: Callable[[Shard], Shard]) -> Iterator[Shard]:
    """A worker's shards that have rows, in order; `real` gives a shard without what is skipped."""
    return (one for _, shards in work for one in map(real, shards) if one.rows)


def filled_batches(work: Work, real: Callable[[Shard], Shard]) -> Iterator[Shard]:
    """The whole global batches that have rows, of which the worker has shards."""
    return (one for step, shards in work if shards and (one := real(work.split.whole(step))).rows)


def pieces_of(
    whole: Shard, shards: Iterable[Shard], indices: Indices, picked: Any, batch_dim: int
) -> Iterator[tuple[Indices, Any]]:
    """Each shard's sample indices and rows, of those of the whole global batch; None for a shard without rows.

    The shards keep the borders that they have in a batch of which nothing is missing.
    """
    positions = whole.positions
    for shard in shards:
        first = bisect_left(positions, shard.start)
        end = first + shard.rows
        yield indices[first:end], cut(picked, first, end, batch_dim) if shard.rows else None

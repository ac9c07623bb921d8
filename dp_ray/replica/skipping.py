"""The samples that a training skips: its shards without them, on any worker, by arithmetic alone."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from dp_ray.job import Job
from dp_ray.plan.split import Shard
from dp_ray.plan.work import Work
from dp_ray.replica.read_requests import Indices, Positions
from dp_ray.replica.sample_order import order_of
from dp_ray.tensors.scatter import cut

NOTHING: tuple[Indices, None] = (np.empty(0, np.int64), None)  # a batch without rows
REMEMBERED = 4096  # shards: a loader asks for one long before the step does


class Skipping:
    """Gives a shard without the samples of the job's `skip`: their positions are missing from it."""

    def __init__(self, job: Job, dataset: Any) -> None:
        self._samples = np.array(job.skipped, np.int64)
        self._positions = Positions(order_of(job, dataset)) if job.skipped else None
        self._remembered = functools.lru_cache(maxsize=REMEMBERED)(self._without)

    def __call__(self, shard: Shard) -> Shard:
        """The shard without what is skipped."""
        return shard if self._positions is None else self._remembered(shard)

    def _without(self, shard: Shard) -> Shard:
        assert self._positions is not None
        if shard.epoch != self._positions.order.epoch:
            self._positions = Positions(dataclasses.replace(self._positions.order, epoch=shard.epoch))
        found = np.isin(self._positions.indices(shard.start, shard.stop), self._samples)
        return dataclasses.replace(shard, missing=tuple((np.flatnonzero(found) + shard.start).tolist()))


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
    for shard in shards:
        first = sum(at < shard.start for at in whole.positions)
        end = first + shard.rows
        yield indices[first:end], cut(picked, first, end, batch_dim) if shard.rows else None

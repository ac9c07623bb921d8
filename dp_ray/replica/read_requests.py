"""What a worker's loader is asked to read: the samples of a shard or of a global batch, by their indices."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dp_ray.plan.block_order import BlockOrder
from dp_ray.plan.order import Order
from dp_ray.plan.split import Shard

ORDER_BLOCK = 4096  # positions computed at once: for one small shard numpy's overhead would dominate

Indices = np.ndarray[Any, np.dtype[np.int64]]


class ReadRequest(NamedTuple):
    """One read from the dataset: the samples of a shard, or with `shard` -1 of a whole global batch.

    `ahead` are blocks of the dataset that later requests to the same process need.
    """

    epoch: int
    step: int
    shard: int
    indices: list[int]
    ahead: Sequence[int] = ()


class Positions:
    """The sample indices at consecutive positions of an order, computed a block at a time."""

    def __init__(self, order: Order | BlockOrder) -> None:
        self.order = order
        self.start = 0
        self.block = np.empty(0, np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        """The sample indices at positions start .. stop - 1, int64 [stop - start]."""
        if not self.start <= start <= stop <= self.start + len(self.block):
            self.start = start
            self.block = self.order.indices(start, min(len(self.order), max(stop, start + ORDER_BLOCK)))
        return self.block[start - self.start : stop - self.start]


class IndexLists:
    """The batch sampler of a worker's DataLoader: one ReadRequest for each piece that it collates.

    `pieces` gives the shards or the global batches. It is a function because the loader may start more than once.
    `look_ahead`, if there is one, gives for the pieces the blocks to read ahead with each.
    """

    def __init__(
        self,
        order: Order | BlockOrder,
        pieces: Callable[[], Iterator[Shard]],
        look_ahead: Callable[[Iterator[Shard]], Iterator[Sequence[int]]] | None = None,
    ) -> None:
        self.order = order
        self.pieces = pieces
        self.look_ahead = look_ahead

    def __iter__(self) -> Iterator[ReadRequest]:
        positions = Positions(self.order)
        ahead = itertools.repeat(()) if self.look_ahead is None else self.look_ahead(self.pieces())
        for piece, blocks in zip(self.pieces(), ahead, strict=False):
            if piece.epoch != positions.order.epoch:
                positions = Positions(dataclasses.replace(self.order, epoch=piece.epoch))
            indices = positions.indices(piece.start, piece.stop).tolist()
            yield ReadRequest(piece.epoch, piece.step, piece.shard, indices, blocks)

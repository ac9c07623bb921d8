"""What a worker's loader is asked to read: the samples of a shard or of a global batch, by their indices."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dp_ray.plan.block_order import BlockOrder
from dp_ray.plan.order import Order
from dp_ray.plan.split import Shard

# For one small shard numpy's overhead would dominate.
POSITIONS_AT_ONCE = 4096  # computed, or more, if one piece has more
PIECES_AT_ONCE = 64

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


class IndexLists:
    """The batch sampler of a worker's DataLoader: one ReadRequest for each piece that it collates.

    `pieces` gives the shards or the global batches; what is missing from one is not read. It is a function because
    the loader may start more than once.
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
        ahead = itertools.repeat(()) if self.look_ahead is None else self.look_ahead(self.pieces())
        for (piece, indices), blocks in zip(self._indices(), ahead, strict=False):
            yield ReadRequest(piece.epoch, piece.step, piece.shard, indices.tolist(), blocks)

    def _indices(self) -> Iterator[tuple[Shard, Indices]]:
        """Each piece with its sample indices, int64 [rows], computed for several pieces at once."""
        order = self.order
        for pieces in _at_once(self.pieces()):
            if pieces[0].epoch != order.epoch:
                order = dataclasses.replace(self.order, epoch=pieces[0].epoch)
            found = order.at(np.concatenate([_positions(one) for one in pieces]))
            yield from zip(pieces, np.split(found, np.cumsum([one.rows for one in pieces[:-1]])), strict=True)


def _positions(piece: Shard) -> Indices:
    """The positions of a piece's rows, without those that are missing."""
    every = np.arange(piece.start, piece.stop)
    return np.delete(every, [at - piece.start for at in piece.missing]) if piece.missing else every


def _at_once(pieces: Iterator[Shard]) -> Iterator[list[Shard]]:
    """Consecutive pieces of one epoch, as many as are computed at once."""
    group: list[Shard] = []
    rows = 0
    for piece in pieces:
        if group and (
            piece.epoch != group[0].epoch or rows + piece.rows > POSITIONS_AT_ONCE or len(group) == PIECES_AT_ONCE
        ):
            yield group
            group, rows = [], 0
        group.append(piece)
        rows += piece.rows
    if group:
        yield group

"""Which blocks of a dataset the coming requests need, so that they are read before they are asked for."""

import dataclasses
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

from dp_ray.plan.block_order import BlockOrder
from dp_ray.plan.order import Order
from dp_ray.plan.split import Shard

LEAST_AHEAD = 8  # blocks
AT_ONCE = 16  # pieces that are looked at with each request: all of a window at once would delay that request
REMEMBERED = 1024  # needs of a process

Need: TypeAlias = tuple[Hashable, Callable[[], Sequence[int]]]  # what tells it from others, and its blocks
Needs: TypeAlias = Callable[[Shard], Iterator[Need]]


class LookAhead(Iterator[Sequence[int]]):
    """For the request of each piece of a worker, in order, the blocks that its process is to read ahead.

    Request number n goes to process n modulo `processes`, which is told the blocks of its own pieces, as they are
    found. The search goes on until `blocks` of them for each process lie ahead. There is no end.
    """

    def __init__(self, needs: Needs, pieces: Iterator[Shard], processes: int, blocks: int) -> None:
        self._needs = needs
        self._pieces = enumerate(pieces)
        self._processes = processes
        self._most = max(blocks, LEAST_AHEAD) * processes
        self._number = -1  # of the request
        self._seen = -1  # the last piece that was looked at
        self._found: deque[tuple[int, int]] = deque()  # pieces ahead, each with how many blocks it was first to need
        self._num_ahead = 0
        self._told: list[list[int]] = [[] for _ in range(processes)]
        self._known: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(processes)]

    def __next__(self) -> Sequence[int]:
        self._number += 1
        while self._found and self._found[0][0] <= self._number:
            self._num_ahead -= self._found.popleft()[1]
        for _ in range(AT_ONCE):
            if self._is_far_enough() or (coming := next(self._pieces, None)) is None:
                break
            self._look_at(*coming)
        process = self._number % self._processes
        told, self._told[process] = self._told[process], []
        return tuple(told)

    def _is_far_enough(self) -> bool:
        return self._num_ahead >= self._most and self._seen >= self._number + self._processes

    def _look_at(self, number: int, piece: Shard) -> None:
        """Find the blocks that a piece is the first to need."""
        process = number % self._processes
        known, new = self._known[process], list[int]()
        for key, blocks in self._needs(piece):
            if key not in known:
                known[key] = None
                new += blocks()
        while len(known) > REMEMBERED:
            known.popitem(last=False)
        self._told[process] += new
        self._seen = number
        self._found.append((number, len(new)))
        self._num_ahead += len(new)


def look_ahead(
    order: Order | BlockOrder, dataset: Any, processes: int
) -> Callable[[Iterator[Shard]], Iterator[Sequence[int]]] | None:
    """How to look ahead among pieces; None if the dataset does not read ahead, or any sample may come next."""
    if not getattr(dataset, "reads_ahead", False) or (isinstance(order, Order) and order.shuffle):
        return None
    needs = _by_window(order, dataset) if isinstance(order, BlockOrder) else _in_order(dataset)
    return functools.partial(LookAhead, needs, processes=max(1, processes), blocks=dataset.blocks_held)


def _in_order(dataset: Any) -> Needs:
    """The needs of pieces whose samples come in the dataset's order: blocks."""

    def needs(piece: Shard) -> Iterator[Need]:
        for block in dataset.blocks_at(piece.start, piece.stop):
            yield (piece.epoch, block), functools.partial(list, (block,))

    return needs


def _by_window(order: BlockOrder, dataset: Any) -> Needs:
    """The needs of pieces of shuffled blocks: what their shard draws from their windows."""
    of_epoch = functools.lru_cache(maxsize=1)(lambda epoch: dataclasses.replace(order, epoch=epoch))

    def needs(piece: Shard) -> Iterator[Need]:
        here = of_epoch(piece.epoch)
        shards = range(order.shards) if piece.shard < 0 else range(piece.shard, piece.shard + 1)
        for window in here.windows_at(piece.start, piece.stop):
            yield (piece.epoch, window, piece.shard), functools.partial(_blocks_of, here, dataset, window, shards)

    return needs


def _blocks_of(order: BlockOrder, dataset: Any, window: int, shards: range) -> list[int]:
    ranges = order.samples_of(window, shards)
    return list(dict.fromkeys(block for first, stop in ranges for block in dataset.blocks_at(first, stop)))

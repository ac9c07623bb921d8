"""The order in which a job takes its samples: the dataset's, shuffled, or shuffled by blocks. It imports no torch.

What a worker's loader is asked to read: the samples of a shard or of a global batch, by their indices.

Which blocks of a dataset the coming requests need, so that they are read before they are asked for.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.plan.order import BlockOrder, Ints, Order, blocks_held
from dp_ray.plan.split import Shard, Work
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

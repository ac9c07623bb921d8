"""The order of a job's samples, and the requests of a worker's loader to read them. It imports no torch.

`order_of` is the dataset's order, shuffled, or shuffled by blocks, or that of a mixture. `IndexLists` makes the
requests: the samples of a shard or of a global batch, by their indices. `LookAhead` adds the blocks that later
requests need.
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
from dp_ray.plan.history import LOSS_OF, ROWS_OF
from dp_ray.plan.mixture import Mixture, MixtureOrder
from dp_ray.plan.order import BlockOrder, Ints, Order, blocks_held
from dp_ray.plan.split import Shard, Work
from dp_ray.text import a_kind, counted

JobOrder: TypeAlias = Order | BlockOrder | MixtureOrder


def order_of(job: Job, dataset: Any) -> JobOrder:
    """Return the order of the job's first epoch. Raises what `block_rows_of` raises, and JobError for a mixture's."""
    if (mixture := mixture_of(dataset)) is not None:
        if job.block_shuffle is not None:
            raise JobError("shuffle: blocks: a Mix shuffles the rows of each of its sources; set shuffle: true")
        if job.skipped:
            raise JobError(
                "skip: numbers the samples of one dataset, and this is a Mix; leave them out of its sources"
            )
        columns = {f"{kind}{source}" for source in mixture.names for kind in (LOSS_OF, ROWS_OF)}
        if job.task != "predict" and (taken := sorted(columns & job.metrics.keys())):
            raise JobError(
                f"metrics.{taken[0]}: is a column of the history for a source of the Mix; rename the metric"
            )
        return MixtureOrder(mixture, job.seed, 0, job.is_shuffled)
    how, sizes = job.block_shuffle, block_rows_of(job, dataset)
    if how is None or sizes is None:
        return Order(len(dataset), job.seed, 0, job.is_shuffled)
    return BlockOrder(sizes, how.window_blocks, job.batch_size, job.num_shards, job.seed)


def mixture_of(dataset: Any) -> Mixture | None:
    """Return the mixture that a dataset brings, which has its order; None of any other dataset."""
    mixture = getattr(dataset, "mixture", None)
    return mixture if isinstance(mixture, Mixture) else None


def block_rows_of(job: Job, dataset: Any) -> Ints | None:
    """Return the sizes of the blocks that a training shuffles, int64 [blocks]; None if it does not shuffle blocks.

    Raises JobError if neither the job nor the dataset says what a block is, and DataError if the dataset's blocks
    do not hold as many samples as the dataset.
    """
    if job.block_shuffle is None:
        return None
    if (rows := job.block_shuffle.block_rows) is not None:
        full, rest = divmod(len(dataset), rows)
        return np.array([rows] * full + ([rest] if rest else []), np.int64)
    stated = getattr(dataset, "block_rows", None)
    if stated is None:
        what = f"the dataset, {a_kind(dataset)}, does not say what its blocks are"
        raise JobError(f"shuffle: blocks: {what}; say how many samples a block has: shuffle: {{block_rows: 1000}}")
    sizes = np.asarray(stated, np.int64)
    if sizes.ndim != 1 or (sizes < 0).any() or sizes.sum() != len(dataset):
        says = f"has {counted(sizes.size, 'block')} of {sizes.sum()} samples in all, and {len(dataset)} samples"
        raise DataError(f"dataset: {says}; its block_rows must be a list of the samples in each block")
    return sizes


def describe_order(job: Job, dataset: Any) -> dict[str, Any]:
    """Return what else than seed, epoch and rows decides the order: of shuffled blocks or a mixture; or nothing."""
    if (mixture := mixture_of(dataset)) is not None:
        return {"mixture": mixture.describe()}
    how, sizes = job.block_shuffle, block_rows_of(job, dataset)
    if how is None or sizes is None:
        return {}
    digest = hashlib.sha256(sizes.astype("<i8").tobytes()).hexdigest()[:16]
    dealt = f"windows of {how.window_blocks}, dealt to {counted(job.num_shards, 'shard')}"
    return {"blocks": f"{counted(len(sizes), 'block')} with sizes of hash {digest}, {dealt}"}


def hold_blocks(job: Job, dataset: Any, work: Work) -> None:
    """Have a dataset of dp_ray.data keep in memory the blocks of a window that the worker reads."""
    if not hasattr(dataset, "hold_blocks"):
        return
    how = job.block_shuffle
    dataset.hold_blocks(1 if how is None else blocks_held(how.window_blocks, len(work.shards), job.num_shards))


# For one small shard numpy's overhead would dominate.
POSITIONS_AT_ONCE = 4096  # computed, or more, if one piece has more
PIECES_AT_ONCE = 64

Indices = np.ndarray[Any, np.dtype[np.int64]]


class ReadRequest(NamedTuple):
    """One read from the dataset: the samples of a shard, or with `shard` -1 one that is no step's.

    `ahead` are blocks of the dataset that later requests to the same process need.
    """

    epoch: int
    step: int
    shard: int
    indices: list[int]
    ahead: Sequence[int] = ()


@dataclasses.dataclass(eq=False)
class IndexLists:
    """The batch sampler of a worker's DataLoader: one ReadRequest for each piece that it collates.

    `pieces` gives the shards; what is missing from one is not read. It is a function, as the loader may start again.
    `look_ahead`, if there is one, gives for the pieces the blocks to read ahead with each.
    """

    order: JobOrder
    pieces: Callable[[], Iterator[Shard]]
    look_ahead: Callable[[Iterator[Shard]], Iterator[Sequence[int]]] | None = None

    def __iter__(self) -> Iterator[ReadRequest]:
        order = self.order
        ahead = itertools.repeat(()) if self.look_ahead is None else self.look_ahead(self.pieces())
        for pieces in _at_once(self.pieces()):
            if pieces[0].epoch != order.epoch:
                order = dataclasses.replace(self.order, epoch=pieces[0].epoch)
            # The indices of several pieces are computed at once.
            every = [np.arange(piece.start, piece.stop) for piece in pieces]
            for number, piece in enumerate(pieces):
                if piece.missing:
                    every[number] = np.delete(every[number], [at - piece.start for at in piece.missing])
            of_pieces = np.split(order.at(np.concatenate(every)), np.cumsum([piece.rows for piece in pieces[:-1]]))
            for piece, indices, blocks in zip(pieces, of_pieces, ahead, strict=False):
                yield ReadRequest(piece.epoch, piece.step, piece.shard, indices.tolist(), blocks)


def _at_once(pieces: Iterator[Shard]) -> Iterator[list[Shard]]:
    """Yield consecutive pieces of one epoch, as many as are computed at once."""
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
REMEMBERED = 1024  # blocks, or windows, that a process has got


def look_ahead(
    order: JobOrder, dataset: Any, processes: int
) -> Callable[[Iterator[Shard]], Iterator[Sequence[int]]] | None:
    """Return how to look ahead among pieces; None if the dataset does not read ahead, or any sample may come next."""
    if isinstance(order, MixtureOrder) or not getattr(dataset, "reads_ahead", False):
        return None
    if isinstance(order, Order) and order.shuffle:
        return None
    return functools.partial(LookAhead, order, dataset, max(1, processes))


class LookAhead(Iterator[Sequence[int]]):
    """For the request of each piece of a worker, in order, the blocks that its process is to read ahead.

    Request number n goes to process n modulo `processes`, which gets the blocks of its own pieces, as they are found.
    The search goes on until the blocks that the dataset holds lie ahead for each process. There is no end.
    """

    def __init__(self, order: Order | BlockOrder, dataset: Any, processes: int, pieces: Iterator[Shard]) -> None:
        self._order = order
        self._dataset = dataset
        self._processes = processes
        self._pieces = enumerate(pieces)
        self._most = max(dataset.blocks_held, LEAST_AHEAD) * processes
        self._number = -1  # of the request
        self._seen = -1  # the last piece that was looked at
        self._found: deque[tuple[int, int]] = deque()  # pieces ahead, each with how many blocks it was first to need
        self._num_ahead = 0
        self._unsent: list[list[int]] = [[] for _ in range(processes)]
        self._known: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(processes)]

    def __next__(self) -> Sequence[int]:
        self._number += 1
        while self._found and self._found[0][0] <= self._number:
            self._num_ahead -= self._found.popleft()[1]
        for _ in range(AT_ONCE):
            is_far_enough = self._num_ahead >= self._most and self._seen >= self._number + self._processes
            if is_far_enough or (upcoming := next(self._pieces, None)) is None:
                break
            self._look_at(*upcoming)
        process = self._number % self._processes
        blocks, self._unsent[process] = self._unsent[process], []
        return tuple(blocks)

    def _look_at(self, number: int, piece: Shard) -> None:
        """Find the blocks that a piece is the first to need."""
        process = number % self._processes
        known, new = self._known[process], list[int]()
        if isinstance(self._order, BlockOrder):
            if self._order.epoch != piece.epoch:
                self._order = dataclasses.replace(self._order, epoch=piece.epoch)
            for window in self._order.windows_at(piece.start, piece.stop):
                if (piece.epoch, window, piece.shard) not in known:
                    known[(piece.epoch, window, piece.shard)] = None
                    new += self._blocks_of(self._order, window, piece.shard)
        else:
            for block in self._dataset.blocks_at(piece.start, piece.stop):
                if (piece.epoch, block) not in known:
                    known[(piece.epoch, block)] = None
                    new.append(block)
        while len(known) > REMEMBERED:
            known.popitem(last=False)
        self._unsent[process] += new
        self._seen = number
        self._found.append((number, len(new)))
        self._num_ahead += len(new)

    def _blocks_of(self, order: BlockOrder, window: int, shard: int) -> list[int]:
        """Return the blocks of which a shard, or with -1 any shard, draws samples from a window."""
        shards = range(order.shards) if shard < 0 else range(shard, shard + 1)
        ranges = order.samples_of(window, shards)
        return list(dict.fromkeys(block for first, stop in ranges for block in self._dataset.blocks_at(first, stop)))

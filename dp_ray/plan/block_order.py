"""The order of an epoch whose blocks of consecutive samples are shuffled, and then the samples in windows of blocks.

The blocks are permuted, and the row of blocks is cut into windows of `window_blocks`. The samples of a window are
dealt to the job's shards, in consecutive stretches: a shard draws its samples of all steps in the window from its own
stretch, in random order. So a worker reads only the blocks in which the stretches of its shards lie.

Everything held in memory has the size of the blocks, never of the samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dp_ray.plan.order import Order, check_number, check_position, check_range
from dp_ray.plan.permutation import Permutation, hashed, num_rounds, round_keys, sides, stream_of

Ints = NDArray[np.int64]

# What a random stream is for; beyond the numbers that count rounds, windows and shards.
_STRETCHES, _OFFSETS = 2**62, 2**62 + 1
_ROUNDS = num_rounds(0)  # for each stretch, however long: as many as the shortest one needs


@dataclass(frozen=True, eq=False)
class BlockOrder:
    """The sample index at each position of one epoch: a function of its fields alone.

    `block_rows` are the sizes of the blocks, int64 [blocks]; `batch_size` and `shards` are the job's. Each window of
    `window_blocks` blocks is finished before the next one begins.
    """

    block_rows: Ints
    window_blocks: int
    batch_size: int
    shards: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "epoch"):
            check_number(name, getattr(self, name))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, position: int) -> int:
        """The sample index at `position`; raises IndexError outside 0 .. num_samples - 1."""
        check_position(position, len(self))
        return int(self.indices(position, position + 1)[0])

    def indices(self, start: int, stop: int) -> Ints:
        """The sample indices at positions start .. stop - 1; raises IndexError unless 0 <= start <= stop <= n."""
        check_range(start, stop, len(self))
        return self.at(np.arange(start, stop, dtype=np.int64))

    def at(self, positions: Ints) -> Ints:
        """The sample indices at positions from 0 to n - 1, int64 [positions]."""
        return self._samples(self._rows(positions)) if len(positions) else positions

    def windows_at(self, start: int, stop: int) -> range:
        """The windows in which the positions start .. stop - 1 lie, of which there is one or more."""
        first, last = np.searchsorted(self._windows, [start, stop - 1], side="right").tolist()
        return range(first - 1, last)

    def samples_of(self, window: int, shards: range) -> list[tuple[int, int]]:
        """The samples that consecutive shards draw from a window: a range `first, stop` for each block."""
        begin, end = self._windows[window], self._windows[window + 1]
        bounds = np.array([shards.start, shards.stop])
        first, stop = self._before(end, bounds) - self._before(begin, bounds)
        if first == stop:
            return []
        first_row = int((first + self._offsets(np.array([window]), end - begin)[0]) % (end - begin) + begin)
        stop_row = first_row + int(stop - first)
        # What reaches beyond the window's last row goes on at its first one.
        rows = [(first_row, min(stop_row, end)), (begin, begin + stop_row - end)]
        return [samples for first, stop in rows for samples in self._samples_between(int(first), int(stop))]

    def _samples_between(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """The samples at rows of the permuted blocks: a range for each block."""
        if first >= stop:
            return
        begin, last = np.searchsorted(self._row_starts, [first, stop - 1], side="right").tolist()
        for block in range(begin - 1, last):
            rows = slice(*self._row_starts[block : block + 2].tolist())
            before = int(self._starts[self._blocks[block]]) - rows.start
            if rows.start < rows.stop:
                yield before + max(first, rows.start), before + min(stop, rows.stop)

    @cached_property
    def _starts(self) -> Ints:
        """The first sample of each block, and the end of the last."""
        return _ends(self.block_rows)

    @cached_property
    def _blocks(self) -> Ints:
        """The blocks in the order in which they are read."""
        return Order(len(self.block_rows), self.seed, self.epoch).indices(0, len(self.block_rows))

    @cached_property
    def _row_starts(self) -> Ints:
        """The first row of each block in the order in which they are read, and the end of the last."""
        return _ends(self.block_rows[self._blocks])

    @cached_property
    def _windows(self) -> Ints:
        """The first row of each window, and the end of the last."""
        return np.append(self._row_starts[: -1 : self.window_blocks], self._row_starts[-1])

    def _samples(self, rows: Ints) -> Ints:
        """The samples at these rows of the permuted blocks."""
        blocks = np.searchsorted(self._row_starts, rows, side="right") - 1
        samples: Ints = self._starts[self._blocks[blocks]] + rows - self._row_starts[blocks]
        return samples

    def _rows(self, positions: Ints) -> Ints:
        """The rows of the permuted blocks at these positions."""
        windows = np.searchsorted(self._windows, positions, side="right") - 1
        begin, end = self._windows[windows], self._windows[windows + 1]
        shards = self._shards_at(positions)
        # Among the window's rows, the stretch of a shard follows those of the shards before it.
        first = self._before(end, shards) - self._before(begin, shards)
        size = self._before(end, shards + 1) - self._before(begin, shards + 1) - first
        ranks = self._of_shard(positions, shards) - self._of_shard(begin, shards)
        self._permutations(windows, shards, size).apply(ranks.view(np.uint64))
        rows: Ints = begin + (first + ranks + self._offsets(windows, end - begin)) % (end - begin)
        return rows

    def _offsets(self, windows: Ints, rows: Ints) -> Ints:
        """Where in each window the first stretch begins: at random, so that each sample may be in any shard."""
        words = hashed(stream_of((self.seed, self.epoch, _OFFSETS)), windows.astype(np.uint64))
        return (words % rows.astype(np.uint64)).astype(np.int64)

    def _permutations(self, windows: Ints, shards: Ints, sizes: Ints) -> Permutation:
        """The bijection of the stretch of each position."""
        _, firsts, stretches = np.unique(windows * self.shards + shards, return_index=True, return_inverse=True)
        rectangles = np.array([sides(size) for size in sizes[firsts].tolist()], np.uint64)
        stream = hashed(stream_of((self.seed, self.epoch, _STRETCHES)), windows[firsts].astype(np.uint64))
        keys = round_keys(hashed(stream, shards[firsts].astype(np.uint64)), _ROUNDS)
        width, height = rectangles[stretches].T
        return Permutation(sizes.astype(np.uint64), width, height, keys[:, stretches])

    def _shards_at(self, positions: Ints) -> Ints:
        """The shard that runs each position."""
        in_batch = positions % self.batch_size
        found: Ints = in_batch // -(-self._batch_rows(positions) // self.shards)
        return found

    def _of_shard(self, positions: Ints, shards: Ints) -> Ints:
        """How many of the positions below each of `positions` the shard runs."""
        return self._before(positions, shards + 1) - self._before(positions, shards)

    def _before(self, positions: Ints, shards: Ints) -> Ints:
        """How many of the positions below each of `positions` are run by shards below each of `shards`."""
        steps, in_batch = np.divmod(positions, self.batch_size)
        in_full = np.minimum(self.batch_size, shards * -(-self.batch_size // self.shards))
        rows = self._batch_rows(positions)
        in_last: Ints = np.minimum(in_batch, np.minimum(rows, shards * -(-rows // self.shards)))
        return steps * in_full + in_last

    def _batch_rows(self, positions: Ints) -> Ints:
        """The rows of the global batch of each position: the last one of an epoch may be short."""
        full, rest = divmod(len(self), self.batch_size)
        return np.where(positions < full * self.batch_size, self.batch_size, rest)


def blocks_held(window_blocks: int, shards: int, all_shards: int) -> int:
    """How many blocks of a window the worker of so many consecutive shards reads, if blocks are of about one size.

    >>> blocks_held(16, 2, 8)
    6
    """
    return min(window_blocks, -(-window_blocks * shards // all_shards) + 2)


def _ends(sizes: Ints) -> Ints:
    """0, and the sums of the first one, two, three ... sizes."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])

"""The order of an epoch: a permutation of the sample indices, computed index by index from (seed, epoch).

No list of the dataset's length is held in memory: a keyed bijection maps each position to its sample. The cost of
a slice depends on its length alone, on any worker, at any step.

The bijection is Black and Rogaway's ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002): a generalised
Feistel network over a rectangle of `width * height >= n` numbers, with "cycle walking": a result of n or above is
permuted again until it is below n. All arithmetic is on unsigned 64-bit integers, so the bits are the same on every
platform.

`derive_seed` makes the seeds of all random numbers: they depend on the purpose of a draw, never on the worker.
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
_Steps = Literal["forward", "after", "update", "loss", "parallel"]
Purpose = Literal["dataset", "sample", "collate", "set_epoch", "generator", "sweep", "audit"] | _Steps

LIMIT = 2**63

_SHIFT_27, _SHIFT_30, _SHIFT_31, _SHIFT_32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# Numbers permuted at once: few enough that the temporaries stay in the processor's cache.
_BLOCK = 2**14


class Permutation(NamedTuple):
    """A bijection of the numbers below `size`: one for all numbers, or one for each of them."""

    size: Words
    width: Words
    height: Words
    keys: Words  # [rounds, 1], or [rounds, numbers]

    def apply(self, words: Words) -> None:
        """Replace each number by the one to which it is mapped, in place."""
        for first in range(0, len(words), _BLOCK):
            block = slice(first, first + _BLOCK)
            self.at(block)._walk(words[block])

    def at(self, places: NDArray[np.int64] | slice) -> "Permutation":
        """Return the bijections of the numbers at these places."""
        if len(self.size) == 1:
            return self
        return Permutation(self.size[places], self.width[places], self.height[places], self.keys[:, places])

    def _walk(self, words: Words) -> None:
        words[:] = self._permute(words)
        # The rectangle has more numbers than there are samples: those outside walk on along the cycle until inside.
        outside = np.flatnonzero(words >= self.size)
        while outside.size:
            own = self.at(outside)
            words[outside] = own._permute(words[outside])
            outside = outside[words[outside] >= own.size]

    def _permute(self, words: Words) -> Words:
        """Return the Feistel network: a bijection of the numbers below width * height."""
        width, height = self.width, self.height
        left, right = np.divmod(words, height)
        for key in self.keys:
            total = left + _below(width, hashed(key, right))
            # Modulo the width: if the total is below it, the difference wraps around to a huge number.
            left, right = right, np.minimum(total, total - width)
            width, height = height, width
        return left * height + right


def permutation(size: int, parts: Sequence[int]) -> Permutation:
    """Return the bijection of the numbers below `size` that the parts key."""
    width, height = sides(size)
    keys = round_keys(stream_of(parts), num_rounds(width))
    return Permutation(_alone(size), _alone(width), _alone(height), keys)


def each_permutation(sizes: Sequence[int], streams: Words, own: Ints) -> Permutation:
    """Return for each number its bijection: at place `own` of those that have these sizes and random streams."""
    size, width, height = np.array([(size, *sides(size)) for size in sizes], np.uint64)[own].T
    return Permutation(size, width, height, round_keys(streams, _ROUNDS)[:, own])


def sides(size: int) -> tuple[int, int]:
    """Return width and height of a rectangle that is just large enough for `size` numbers.

    The width is even. With two odd sides, every round would be an even permutation, and so would every order of
    9 or 25 samples. With more than 4 numbers no side is below 4: thin rectangles mix slowly.
    """
    width = math.isqrt(max(size, 1) - 1) + 1
    width += width % 2
    return width, max(-(-size // width), min(width, 4))


def num_rounds(width: int) -> int:
    """Return the number of rounds; it is even, so that the two sides end in their places.

    Every two rounds bring the joint distribution of a few positions closer to uniform, by a factor of about the
    shorter side. So small sets need more rounds. With these numbers of rounds, a few positions are within about
    1e-6 (total variation) of uniform at every size.
    """
    return 24 if width < 32 else 12


# The purposes of random streams, beyond the numbers that count rounds, windows and shards.
_STRETCHES, _OFFSETS = 2**62, 2**62 + 1
_ROUNDS = num_rounds(0)  # for each stretch, however long: as many as the shortest one needs


def stream_of(parts: Sequence[int]) -> Words:
    """Return the random stream that the parts key: uint64 [1]."""
    stream = np.array([_GOLDEN])
    for part in parts:
        stream = hashed(stream, _alone(part))
    return stream


def round_keys(streams: Words, rounds: int) -> Words:
    """Return a key for each round, from each stream: uint64 [rounds, streams]."""
    return hashed(streams, np.arange(rounds, dtype=np.uint64)[:, None])


def hashed(key: Words, words: Words) -> Words:
    """Return the outputs numbered `words` (the first is 1) of the SplitMix64 generator seeded with `key`."""
    mixed = words * _GOLDEN + key
    mixed ^= mixed >> _SHIFT_30
    mixed *= _MIX_1
    mixed ^= mixed >> _SHIFT_27
    mixed *= _MIX_2
    mixed ^= mixed >> _SHIFT_31
    return mixed


def _alone(number: int) -> Words:
    return np.array([number], np.uint64)


def _below(bound: Words, words: Words) -> Words:
    """Scale random words to 0 .. bound - 1, for a bound up to 2**32, by Lemire's product: `%` is slow."""
    return ((words >> _SHIFT_32) * bound) >> _SHIFT_32


class EpochOrder:
    """The sample index at each position of one epoch; a subclass has its length, and `at` for many positions."""

    def __len__(self) -> int:
        raise NotImplementedError

    def at(self, positions: Ints) -> Ints:
        """Return the sample indices at positions from 0 to n - 1, int64 [positions]."""
        raise NotImplementedError

    def __getitem__(self, position: int) -> int:
        """Return the sample index at `position`; raises IndexError outside 0 .. num_samples - 1."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside an order of {len(self)} samples")
        return int(self.indices(position, position + 1)[0])

    def indices(self, start: int, stop: int) -> Ints:
        """Return the sample indices at positions start .. stop - 1; raises IndexError if they are outside 0 .. n."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"positions {start} to {stop} are no range in an order of {len(self)} samples")
        return self.at(np.arange(start, stop, dtype=np.int64))


@dataclass(frozen=True)
class Order(EpochOrder):
    """The sample index at each position of one epoch, a function of (seed, epoch, num_samples) alone.

    `Order(5, seed=1)[0]` is the first sample; `indices(2, 4)` are those at positions 2 and 3.
    Without `shuffle`, position and sample index are the same. Raises ValueError for a number outside 0 .. 2**63 - 1.
    """

    num_samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("num_samples", "seed", "epoch"):
            check_number(name, getattr(self, name))

    def __len__(self) -> int:
        return self.num_samples

    def at(self, positions: Ints) -> Ints:
        """Return the sample indices at positions from 0 to n - 1, int64 [positions], in place of them."""
        if self.shuffle:
            self._permutation.apply(positions.view(np.uint64))  # without a copy: no position is negative
        return positions

    @cached_property
    def _permutation(self) -> Permutation:
        return permutation(self.num_samples, (self.seed, self.epoch))


def check_number(name: str, value: int) -> None:
    """Raise ValueError for a number outside 0 .. 2**63 - 1."""
    if not 0 <= value < LIMIT:
        raise ValueError(f"{name} is {value}; it must be at least 0 and below 2**63")


@dataclass(frozen=True, eq=False)
class BlockOrder(EpochOrder):
    """The order of an epoch whose blocks of samples are shuffled, and then the samples in windows of blocks.

    The blocks are permuted, and the row of blocks is cut into windows. The samples of a window are dealt to the job's
    shards, in consecutive stretches: a shard draws its samples of all steps in the window from its own stretch, in
    random order. So a worker reads only the blocks in which the stretches of its shards lie. Everything held in
    memory has the size of the blocks, never of the samples.

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

    def at(self, positions: Ints) -> Ints:
        """Return the sample indices at positions from 0 to n - 1, int64 [positions]."""
        return self._samples(self._rows(positions)) if len(positions) else positions

    def windows_at(self, start: int, stop: int) -> range:
        """Return the windows of the positions start .. stop - 1; `stop` is above `start`."""
        first, last = np.searchsorted(self._windows, [start, stop - 1], side="right").tolist()
        return range(first - 1, last)

    def samples_of(self, window: int, shards: range) -> list[tuple[int, int]]:
        """Return the samples that consecutive shards draw from a window: a range `first, stop` for each block."""
        begin, end = self._windows[window], self._windows[window + 1]
        bounds = np.array([shards.start, shards.stop])
        first, stop = self._before(end, bounds) - self._before(begin, bounds)
        if first == stop:
            return []
        first_row = int((first + self._offsets(np.array([window]), end - begin)[0]) % (end - begin) + begin)
        stop_row = first_row + int(stop - first)
        # Rows beyond the window's last one wrap around to its first.
        rows = [(first_row, min(stop_row, end)), (begin, begin + stop_row - end)]
        return [samples for first, stop in rows for samples in self._samples_between(int(first), int(stop))]

    def _samples_between(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the samples at rows of the permuted blocks: a range for each block."""
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
        """Return the samples at these rows of the permuted blocks."""
        blocks = np.searchsorted(self._row_starts, rows, side="right") - 1
        samples: Ints = self._starts[self._blocks[blocks]] + rows - self._row_starts[blocks]
        return samples

    def _rows(self, positions: Ints) -> Ints:
        """Return the rows of the permuted blocks at these positions."""
        windows = np.searchsorted(self._windows, positions, side="right") - 1
        begin, end = self._windows[windows], self._windows[windows + 1]
        shards: Ints = positions % self.batch_size // -(-self._batch_rows(positions) // self.shards)
        # Among the window's rows, the stretch of a shard follows those of the shards before it.
        first = self._before(end, shards) - self._before(begin, shards)
        size = self._before(end, shards + 1) - self._before(begin, shards + 1) - first
        ranks = self._of_shard(positions, shards) - self._of_shard(begin, shards)
        self._permutations(windows, shards, size).apply(ranks.view(np.uint64))
        rows: Ints = begin + (first + ranks + self._offsets(windows, end - begin)) % (end - begin)
        return rows

    def _offsets(self, windows: Ints, rows: Ints) -> Ints:
        """Return where in each window the first stretch begins: at random, so any sample may be in any shard."""
        words = hashed(stream_of((self.seed, self.epoch, _OFFSETS)), windows.astype(np.uint64))
        return (words % rows.astype(np.uint64)).astype(np.int64)

    def _permutations(self, windows: Ints, shards: Ints, sizes: Ints) -> Permutation:
        """Return the bijection of the stretch of each position."""
        _, firsts, stretches = np.unique(windows * self.shards + shards, return_index=True, return_inverse=True)
        stream = hashed(stream_of((self.seed, self.epoch, _STRETCHES)), windows[firsts].astype(np.uint64))
        streams = hashed(stream, shards[firsts].astype(np.uint64))
        return each_permutation(sizes[firsts].tolist(), streams, stretches)

    def _of_shard(self, positions: Ints, shards: Ints) -> Ints:
        """Return how many of the positions below each of `positions` the shard runs."""
        return self._before(positions, shards + 1) - self._before(positions, shards)

    def _before(self, positions: Ints, shards: Ints) -> Ints:
        """Return how many of the positions below each of `positions` are run by shards below each of `shards`."""
        steps, in_batch = np.divmod(positions, self.batch_size)
        in_full = np.minimum(self.batch_size, shards * -(-self.batch_size // self.shards))
        rows = self._batch_rows(positions)
        in_last: Ints = np.minimum(in_batch, np.minimum(rows, shards * -(-rows // self.shards)))
        return steps * in_full + in_last

    def _batch_rows(self, positions: Ints) -> Ints:
        """Return the rows of the global batch of each position: the last one of an epoch may be short."""
        full, rest = divmod(len(self), self.batch_size)
        return np.where(positions < full * self.batch_size, self.batch_size, rest)


def blocks_held(window_blocks: int, shards: int, all_shards: int) -> int:
    """Return how many blocks of a window the worker of so many shards in a row reads, if blocks are about one size.

    >>> blocks_held(16, 2, 8)
    6
    """
    return min(window_blocks, -(-window_blocks * shards // all_shards) + 2)


def _ends(sizes: Ints) -> Ints:
    """Return 0, and the sums of the first one, two, three ... sizes."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def derive_seed(seed: int, purpose: Purpose, *parts: int) -> int:
    """Return a seed of 63 bits: a hash of the job's seed, the purpose and the parts (epoch, step, shard ...)."""
    packed = struct.pack(f"<{1 + len(parts)}q", seed, *parts)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1

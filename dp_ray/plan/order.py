"""The order of an epoch: a permutation of the sample indices, computed index by index from (seed, epoch).

No list of the dataset's length is held in memory: a keyed bijection maps each position to its sample. The cost of
a slice depends on its length alone, on any worker, at any step. All arithmetic is on unsigned 64-bit integers, so
the bits are the same on every platform.

The bijection is Black and Rogaway's ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002): a generalised
Feistel network over a rectangle of `width * height >= n` numbers, with "cycle walking": a result of n or above is
permuted again until it is below n.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

LIMIT = 2**63

_SHIFT_27, _SHIFT_30, _SHIFT_31, _SHIFT_32 = (np.uint64(bits) for bits in (27, 30, 31, 32))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# Positions permuted at once: few enough that the temporaries stay in the processor's cache.
_BLOCK = 2**14


@dataclass(frozen=True)
class Order:
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
            value = getattr(self, name)
            if not 0 <= value < LIMIT:
                raise ValueError(f"{name} is {value}; it must be at least 0 and below 2**63")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, position: int) -> int:
        """The sample index at `position`; raises IndexError outside 0 .. num_samples - 1."""
        if not 0 <= position < self.num_samples:
            raise IndexError(f"position {position} is outside an order of {self.num_samples} samples")
        return int(self.indices(position, position + 1)[0])

    def indices(self, start: int, stop: int) -> NDArray[np.int64]:
        """The sample indices at positions start .. stop - 1; raises IndexError unless 0 <= start <= stop <= n."""
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"positions {start} to {stop} are no range in an order of {self.num_samples} samples")
        samples = np.arange(start, stop, dtype=np.int64)
        if self.shuffle:
            for first in range(0, len(samples), _BLOCK):
                self._shuffle(samples[first : first + _BLOCK].view(np.uint64))
        return samples

    def _shuffle(self, words: Words) -> None:
        """Replace positions by their sample indices, in place."""
        num_samples = np.uint64(self.num_samples)
        words[:] = self._permute(words)
        outside = np.flatnonzero(words >= num_samples)
        while outside.size:
            words[outside] = self._permute(words[outside])
            outside = outside[words[outside] >= num_samples]

    def _permute(self, words: Words) -> Words:
        """The Feistel network: a bijection of the numbers below width * height."""
        width, height = self._sides
        left, right = np.divmod(words, height)
        for key in self._round_keys:
            left, right = right, _add_modulo(left, _below(width, _hash(key, right)), width)
            width, height = height, width
        return left * height + right

    @cached_property
    def _sides(self) -> tuple[np.uint64, np.uint64]:
        """Width and height of a rectangle that is just large enough for all samples.

        The width is even. With two odd sides, every round would be an even permutation, and so would every order of
        9 or 25 samples. With more than 4 samples no side is below 4: thin rectangles mix slowly.
        """
        width = math.isqrt(max(self.num_samples, 1) - 1) + 1
        width += width % 2
        height = max(-(-self.num_samples // width), min(width, 4))
        return np.uint64(width), np.uint64(height)

    @cached_property
    def _round_keys(self) -> Words:
        """A key for each round; the number of rounds is even, so that the two sides end in their places.

        Every two rounds bring the joint distribution of a few positions closer to uniform, by a factor of about the
        shorter side. So small sets need more rounds. With these numbers of rounds, a few positions are within about
        1e-6 (total variation) of uniform at every size.
        """
        num_rounds = 24 if self._sides[0] < 32 else 12
        stream = np.array([_GOLDEN])
        for part in (self.seed, self.epoch):
            stream = _hash(stream, np.array([part], np.uint64))
        return _hash(stream, np.arange(num_rounds, dtype=np.uint64))


def _hash(key: Words | np.uint64, words: Words) -> Words:
    """The outputs numbered `words` (the first is 1) of the SplitMix64 generator seeded with `key`."""
    mixed = words * _GOLDEN + key
    mixed ^= mixed >> _SHIFT_30
    mixed *= _MIX_1
    mixed ^= mixed >> _SHIFT_27
    mixed *= _MIX_2
    mixed ^= mixed >> _SHIFT_31
    return mixed


def _below(bound: np.uint64, words: Words) -> Words:
    """Scale random words to 0 .. bound - 1, for a bound up to 2**32, by Lemire's product: `%` is slow."""
    return ((words >> _SHIFT_32) * bound) >> _SHIFT_32


def _add_modulo(first: Words, second: Words, modulus: np.uint64) -> Words:
    """(first + second) % modulus, for numbers below the modulus."""
    total = first + second
    # If the total is below the modulus, the difference wraps around to a huge number.
    wrapped: Words = np.minimum(total, total - modulus)
    return wrapped

"""Keyed bijections of the numbers 0 .. n - 1, computed number by number.

The bijection is Black and Rogaway's ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002): a generalised
Feistel network over a rectangle of `width * height >= n` numbers, with "cycle walking": a result of n or above is
permuted again until it is below n. All arithmetic is on unsigned 64-bit integers, so the bits are the same on every
platform.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

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
        """The bijections of the numbers at these places."""
        if len(self.size) == 1:
            return self
        return Permutation(self.size[places], self.width[places], self.height[places], self.keys[:, places])

    def _walk(self, words: Words) -> None:
        words[:] = self._permute(words)
        outside = np.flatnonzero(words >= self.size)
        while outside.size:
            own = self.at(outside)
            words[outside] = own._permute(words[outside])
            outside = outside[words[outside] >= own.size]

    def _permute(self, words: Words) -> Words:
        """The Feistel network: a bijection of the numbers below width * height."""
        width, height = self.width, self.height
        left, right = np.divmod(words, height)
        for key in self.keys:
            left, right = right, _add_modulo(left, _below(width, hashed(key, right)), width)
            width, height = height, width
        return left * height + right


def permutation(size: int, parts: Sequence[int]) -> Permutation:
    """The bijection of the numbers below `size` that the parts key."""
    width, height = sides(size)
    keys = round_keys(stream_of(parts), num_rounds(width))
    return Permutation(_alone(size), _alone(width), _alone(height), keys)


def sides(size: int) -> tuple[int, int]:
    """Width and height of a rectangle that is just large enough for `size` numbers.

    The width is even. With two odd sides, every round would be an even permutation, and so would every order of
    9 or 25 samples. With more than 4 numbers no side is below 4: thin rectangles mix slowly.
    """
    width = math.isqrt(max(size, 1) - 1) + 1
    width += width % 2
    return width, max(-(-size // width), min(width, 4))


def num_rounds(width: int) -> int:
    """The number of rounds; it is even, so that the two sides end in their places.

    Every two rounds bring the joint distribution of a few positions closer to uniform, by a factor of about the
    shorter side. So small sets need more rounds. With these numbers of rounds, a few positions are within about
    1e-6 (total variation) of uniform at every size.
    """
    return 24 if width < 32 else 12


def stream_of(parts: Sequence[int]) -> Words:
    """The random stream that the parts key: uint64 [1]."""
    stream = np.array([_GOLDEN])
    for part in parts:
        stream = hashed(stream, _alone(part))
    return stream


def round_keys(streams: Words, rounds: int) -> Words:
    """A key for each round, from each stream: uint64 [rounds, streams]."""
    return hashed(streams, np.arange(rounds, dtype=np.uint64)[:, None])


def hashed(key: Words, words: Words) -> Words:
    """The outputs numbered `words` (the first is 1) of the SplitMix64 generator seeded with `key`."""
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


def _add_modulo(first: Words, second: Words, modulus: Words) -> Words:
    """(first + second) % modulus, for numbers below the modulus."""
    total = first + second
    # If the total is below the modulus, the difference wraps around to a huge number.
    wrapped: Words = np.minimum(total, total - modulus)
    return wrapped

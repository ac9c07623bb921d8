"""How much a test draws, statistics of it, and the generator from which an order's keys are drawn."""

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

from dp_ray.plan.order import Order, Permutation, num_rounds, round_keys, sides, stream_of

Ints = NDArray[np.int64]

# The draws are fixed, so a test passes or fails for good; a sound order exceeds this once in two million.
SIGMAS = 5.0


def examples(number: int) -> int:
    """How many examples a test draws that draws `number` in `make full`: a third of them in `make test`."""
    return max(1, settings().max_examples * number // 100)


def handful(number: int) -> int:
    """As `examples`, of a drawn suite of which each example takes a second or more: five in `make test`."""
    return min(5, number) if settings().max_examples < 100 else examples(number)


def orders_of(n: int, keys: Sequence[tuple[int, int]]) -> Ints:
    """The orders of n samples for pairs of seed and epoch, one in each row.

    They are permuted all at once, which takes a twentieth of the time; every fiftieth is compared with Order's own.
    """
    size, width, height = (np.full(n * len(keys), number, np.uint64) for number in (n, *sides(n)))
    streams = np.concatenate([stream_of(key) for key in keys])
    own_keys = np.repeat(round_keys(streams, num_rounds(sides(n)[0])), n, axis=1)
    numbers = np.tile(np.arange(n, dtype=np.uint64), len(keys))
    Permutation(size, width, height, own_keys).apply(numbers)
    orders = numbers.astype(np.int64).reshape(len(keys), n)
    for row in range(0, len(keys), 50):
        np.testing.assert_array_equal(orders[row], Order(n, *keys[row]).indices(0, n))
    return orders


def splitmix64(seed: int, number: int) -> int:
    """Output `number` (the first is 1) of Steele, Lea and Flood's SplitMix64."""
    z = (seed + number * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def deviation(statistic: float, freedom: int) -> float:
    """A chi-square statistic in standard deviations of a normal variable (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def uniformity(counts: Ints) -> float:
    """How far counts are from those of equally likely outcomes, in standard deviations."""
    expected = counts.sum() / counts.size
    return deviation(float(((counts - expected) ** 2).sum() / expected), counts.size - 1)


def ranks(permutations: Ints) -> Ints:
    """The number of each row among all permutations: its digits in the factorial number system."""
    n = permutations.shape[1]
    later_and_smaller = [(permutations[:, i + 1 :] < permutations[:, i : i + 1]).sum(1) for i in range(n)]
    weights = np.array([math.factorial(n - 1 - i) for i in range(n)])
    numbers: Ints = weights @ np.stack(later_and_smaller)
    return numbers

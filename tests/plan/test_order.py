"""The order of an epoch: a permutation, in slices, random in law, the same bits everywhere."""

import math
import pickle
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dp_ray.plan.order import Order
from tests.support.chance import SIGMAS, deviation, examples, orders_of, ranks, splitmix64, uniformity

Ints = NDArray[np.int64]

SMALL = (2, 3, 4, 5, 6, 7, 9, 16, 30)
NUM_EPOCHS = 1200

seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 2**63 - 1)


def reference(n: int, seed: int, epoch: int, position: int) -> int:
    """The definition once more, on Python's unbounded integers: the sample at one position."""
    width = next(w for w in range(math.isqrt(n), n + 3) if w * w >= n and w % 2 == 0)
    height = max(math.ceil(n / width), 2 if width == 2 else 4)
    stream = splitmix64(splitmix64(0x9E3779B97F4A7C15, seed), epoch)
    keys = [splitmix64(stream, number) for number in range(24 if width < 32 else 12)]
    sample = position
    while True:
        left, right = divmod(sample, height)
        for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
            left = (left + (splitmix64(key_left, right) >> 32) * width // 2**32) % width
            right = (right + (splitmix64(key_right, left) >> 32) * height // 2**32) % height
        sample = left * height + right
        if sample < n:
            return sample


def test_the_reference_is_splitmix64_as_published() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, number) for number in (1, 2, 3, 4)] == published


@given(st.integers(1, 3000) | st.integers(1, 2**45), seeds, epochs, st.data())
@settings(max_examples=examples(150), deadline=None)
def test_agrees_with_python_integers(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, n - 1))
    assert Order(n, seed, epoch)[position] == reference(n, seed, epoch, position)


@pytest.mark.parametrize(
    ("order", "start", "expected"),
    [
        (Order(10), 0, [3, 0, 2, 1, 4, 9, 5, 8, 6, 7]),
        (Order(100, seed=7, epoch=3), 0, [47, 39, 3, 85, 21, 49, 89, 23]),
        (Order(1797, seed=1), 1790, [1084, 338, 476, 570, 1167, 12, 153]),
        (Order(10**9, seed=2**63 - 1, epoch=12), 0, [598536627, 422743127, 341676760, 360983933]),
        (
            Order(2**63 - 1, seed=5),
            2**63 - 5,
            [7443285348014402018, 8699090772647565854, 4070593570337264301, 6317555830878018883],
        ),
    ],
)
def test_the_bits_never_change(order: Order, start: int, expected: list[int]) -> None:
    """Whoever changes these values breaks every run that is to be resumed or repeated."""
    assert order.indices(start, start + len(expected)).tolist() == expected


@pytest.mark.parametrize("epoch", [0, 1])
def test_is_a_permutation_of_every_small_size(epoch: int) -> None:
    for n in range(301):
        assert sorted(Order(n, seed=11, epoch=epoch).indices(0, n)) == list(range(n)), n


@given(st.integers(301, 200_000), seeds, epochs)
@settings(max_examples=examples(25), deadline=None)
def test_is_a_permutation_of_larger_sizes(n: int, seed: int, epoch: int) -> None:
    np.testing.assert_array_equal(np.sort(Order(n, seed, epoch).indices(0, n)), np.arange(n))


@pytest.mark.parametrize("n", [900, 901, 961, 1024, 1025, 16384, 16385, 2**16 + 1, 2**18 - 1])
def test_is_a_permutation_where_the_shape_changes(n: int) -> None:
    np.testing.assert_array_equal(np.sort(Order(n).indices(0, n)), np.arange(n))


@given(st.integers(1, 2**50), seeds, epochs, st.data())
@settings(max_examples=examples(60), deadline=None)
def test_slices_agree_with_single_indexes(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start, min(n, start + 40)))
    order = Order(n, seed, epoch)
    samples = order.indices(start, stop)
    assert samples.dtype == np.int64
    assert samples.tolist() == [order[position] for position in range(start, stop)]


def test_a_long_slice_agrees_with_short_ones() -> None:
    order = Order(10**6, seed=4)
    whole = order.indices(5, 70_005)
    parts = [order.indices(first, first + 1000) for first in range(5, 70_005, 1000)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_a_huge_order_stays_in_range_without_repeats() -> None:
    samples = Order(2**40 + 1, seed=3).indices(2**40 + 1 - 50_000, 2**40 + 1)
    assert samples.min() >= 0 and samples.max() <= 2**40
    assert len(np.unique(samples)) == 50_000


@given(st.integers(0, 2**62), st.data())
@settings(max_examples=examples(30), deadline=None)
def test_without_shuffle_it_is_the_identity(n: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    stop = min(n, start + 20)
    assert Order(n, seed=9, epoch=9, shuffle=False).indices(start, stop).tolist() == list(range(start, stop))


@pytest.mark.parametrize("n", [0, 1, 2, 10, 2**40])
def test_length(n: int) -> None:
    assert len(Order(n)) == n


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("n", "position"), [(0, 0), (5, 5), (5, -1), (5, -5), (5, 2**70)])
def test_a_position_out_of_range_is_an_index_error(n: int, position: int, shuffle: bool) -> None:
    with pytest.raises(IndexError, match=f"position {position} is outside an order of {n} samples"):
        Order(n, shuffle=shuffle)[position]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 6), (4, 3), (6, 6), (-2, -1)])
def test_a_slice_out_of_range_is_an_index_error(start: int, stop: int, shuffle: bool) -> None:
    with pytest.raises(IndexError, match=f"positions {start} to {stop} are no range in an order of 5 samples"):
        Order(5, shuffle=shuffle).indices(start, stop)


def test_an_empty_slice_is_empty_at_either_end() -> None:
    assert Order(0).indices(0, 0).tolist() == Order(5).indices(0, 0).tolist() == Order(5).indices(5, 5).tolist() == []


@pytest.mark.parametrize("value", [-1, 2**63])
def test_an_impossible_value_is_named(value: int) -> None:
    with pytest.raises(ValueError, match=f"num_samples is {value}; it must be at least 0 and below"):
        Order(value)
    with pytest.raises(ValueError, match=f"seed is {value}; it must be"):
        Order(5, seed=value)
    with pytest.raises(ValueError, match=f"epoch is {value}; it must be"):
        Order(5, epoch=value)


def test_a_used_order_is_equal_and_the_same_in_another_process() -> None:
    order = Order(1000, seed=2, epoch=1)
    samples = order.indices(0, 1000)
    copy = pickle.loads(pickle.dumps(order))
    assert copy == order == Order(1000, seed=2, epoch=1)
    np.testing.assert_array_equal(copy.indices(0, 1000), samples)


def test_the_first_index_of_a_billion_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        assert 0 <= Order(10**9)[0] < 10**9
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6


@cache
def drawn(n: int) -> Ints:
    """The orders of n samples, one in each row, for as many epochs."""
    return orders_of(n, [(0, epoch) for epoch in range(NUM_EPOCHS)])


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_permutations_are_equally_likely_over_epochs(n: int) -> None:
    assert abs(uniformity(np.bincount(ranks(drawn(n)), minlength=math.factorial(n)))) < SIGMAS


def test_all_permutations_are_equally_likely_over_seeds() -> None:
    orders = orders_of(4, [(seed, 1) for seed in range(NUM_EPOCHS)])
    assert abs(uniformity(np.bincount(ranks(orders), minlength=24))) < SIGMAS


@pytest.mark.parametrize("n", [*SMALL, 100])
def test_every_sample_is_equally_likely_at_every_position(n: int) -> None:
    orders = drawn(n)
    counts = np.stack([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    expected = len(orders) / n
    # Rows and columns both add up to the number of orders: (n - 1)**2 degrees of freedom, not n * (n - 1).
    statistic = ((counts - expected) ** 2).sum() / expected * (n - 1) / n
    assert abs(deviation(statistic, (n - 1) ** 2)) < SIGMAS


@pytest.mark.parametrize("n", [n for n in SMALL if n > 2])
def test_all_pairs_are_equally_likely_at_any_two_positions(n: int) -> None:
    """Neighbours, and positions that share a row or a column of the network's rectangle, among them."""
    orders = drawn(n)
    for other in range(1, n):
        first, second = orders[:, 0], orders[:, other]
        pairs = first * (n - 1) + second - (second > first)
        assert abs(uniformity(np.bincount(pairs, minlength=n * (n - 1)))) < SIGMAS, other


@pytest.mark.parametrize("n", [9, 16, 25])
def test_odd_permutations_are_as_likely_as_even_ones(n: int) -> None:
    """Sizes that are squares: there a careless network can only ever give even permutations."""
    orders = drawn(n)
    inversions = sum((orders[:, i + 1 :] < orders[:, i : i + 1]).sum(1) for i in range(n))
    assert abs(uniformity(np.bincount(inversions % 2, minlength=2))) < SIGMAS


@pytest.mark.parametrize("n", [30, 100])
def test_steps_between_neighbours_are_equally_likely(n: int) -> None:
    orders = drawn(n)
    for position in (0, n // 2, n - 2):
        steps = (orders[:, position + 1] - orders[:, position]) % n
        assert steps.min() > 0
        assert abs(uniformity(np.bincount(steps - 1, minlength=n - 1))) < SIGMAS, position


@pytest.mark.parametrize("n", [10**5, 10**6 + 3, 10**9, 2**40])
@pytest.mark.parametrize("apart", [1, 2, 30])
def test_a_long_stretch_of_a_large_order_is_uniform(n: int, apart: int) -> None:
    samples = Order(n, seed=1).indices(1000, 21_000)
    steps = (samples[apart:] - samples[:-apart]) % n
    for values in (samples, steps, samples % 97):
        assert abs(uniformity(np.histogram(values, bins=97, range=(0, values.max() + 1))[0])) < SIGMAS


Key = tuple[int, int]
KINDRED: dict[str, Callable[[int], tuple[Key, Key]]] = {
    "next epoch": lambda i: ((3, i), (3, i + 1)),
    "next seed": lambda i: ((i, 3), (i + 1, 3)),
    "swapped": lambda i: ((i, i + 5), (i + 5, i)),
    "same sum": lambda i: ((i, i + 1), (i + 1, i)),
    "same product": lambda i: ((i, 6), (2 * i, 3)),
    "high bit": lambda i: ((i, 0), (i + 2**62, 0)),
    "low and high bits": lambda i: ((i, 0), (i * 2**32, 0)),
}


def agreements(pairs: Sequence[tuple[Key, Key]], n: int) -> int:
    """The number of positions at which the two orders of a pair have the same sample, over all pairs."""
    first, second = (orders_of(n, list(keys)) for keys in zip(*pairs, strict=True))
    return int((first == second).sum())


@pytest.mark.parametrize("kind", KINDRED)
def test_kindred_seeds_and_epochs_agree_by_chance_alone(kind: str) -> None:
    """Two random permutations agree at one position on average, with variance one."""
    pairs = [KINDRED[kind](i) for i in range(1, 301)]
    assert abs(agreements(pairs, 64) - 300) < SIGMAS * math.sqrt(300)


@pytest.mark.slow
def test_no_two_of_many_seeds_and_epochs_share_an_order() -> None:
    starts = {tuple(Order(10**9, seed, epoch).indices(0, 4)) for seed in range(60) for epoch in range(60)}
    assert len(starts) == 60 * 60

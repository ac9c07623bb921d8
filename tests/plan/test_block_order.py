"""The order of shuffled blocks: a permutation, window after window, random in law, the same bits everywhere."""

import math
import pickle
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dp_ray.plan.order import BlockOrder, Order, blocks_held
from dp_ray.plan.split import chunk_bounds
from tests.support.chance import SIGMAS, deviation, examples, ranks, splitmix64, uniformity

Ints = NDArray[np.int64]

NUM_EPOCHS = 500
GOLDEN = 0x9E3779B97F4A7C15


def order(sizes: Sequence[int], window: int, batch: int, shards: int, seed: int = 0, epoch: int = 0) -> BlockOrder:
    return BlockOrder(np.array(sizes, np.int64), window, batch, shards, seed, epoch)


def whole(block_order: BlockOrder) -> list[int]:
    samples: list[int] = block_order.indices(0, len(block_order)).tolist()
    return samples


def stream(*parts: int) -> int:
    found = GOLDEN
    for part in parts:
        found = splitmix64(found, part)
    return found


def permuted(n: int, key: int, number: int) -> int:
    """The keyed bijection of test_order's reference, always of 24 rounds."""
    width = next(w for w in range(math.isqrt(n), n + 3) if w * w >= n and w % 2 == 0)
    height = max(math.ceil(n / width), 2 if width == 2 else 4)
    keys = [splitmix64(key, number) for number in range(24)]
    while True:
        left, right = divmod(number, height)
        for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
            left = (left + (splitmix64(key_left, right) >> 32) * width // 2**32) % width
            right = (right + (splitmix64(key_right, left) >> 32) * height // 2**32) % height
        number = left * height + right
        if number < n:
            return number


def shards_of(rows: int, batch: int, shards: int) -> list[int]:
    """The shard that runs each position of an epoch, as torch.chunk cuts each global batch."""
    found = []
    for start in range(0, rows, batch):
        size = min(batch, rows - start)
        for shard in range(shards):
            first, end = chunk_bounds(size, shards, shard)
            found += [shard] * (end - first)
    return found


def reference(block_order: BlockOrder) -> list[int]:
    """The definition once more, with lists of all samples and Python's unbounded integers."""
    sizes, seed, epoch = block_order.block_rows.tolist(), block_order.seed, block_order.epoch
    starts = [0, *accumulate(sizes)]
    blocks = Order(len(sizes), seed, epoch).indices(0, len(sizes)).tolist()
    shards, found = shards_of(sum(sizes), block_order.batch_size, block_order.shards), [-1] * sum(sizes)
    at = 0
    for window, first in enumerate(range(0, len(sizes), block_order.window_blocks)):
        mine = blocks[first : first + block_order.window_blocks]
        rows = [sample for block in mine for sample in range(starts[block], starts[block + 1])]
        offset = splitmix64(stream(seed, epoch, 2**62 + 1), window) % len(rows)
        rows = rows[offset:] + rows[:offset]
        positions = range(at, at + len(rows))
        for shard in range(block_order.shards):
            own = [position for position in positions if shards[position] == shard]
            stretch, rows = rows[: len(own)], rows[len(own) :]
            key = splitmix64(stream(seed, epoch, 2**62, window), shard)
            for number, position in enumerate(own):
                found[position] = stretch[permuted(len(own), key, number)]
        at = positions.stop
    return found


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=12)
seeds = st.integers(0, 2**63 - 1)


@given(sizes, st.integers(1, 13), st.integers(1, 40), st.integers(1, 9), seeds, seeds)
@settings(max_examples=examples(40), deadline=None)
def test_agrees_with_lists_of_python_integers(
    sizes: list[int], window: int, batch: int, shards: int, seed: int, epoch: int
) -> None:
    made = order(sizes, window, batch, shards, seed, epoch)
    assert whole(made) == reference(made)


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 41), st.integers(1, 999), st.integers(1, 70), seeds)
@settings(max_examples=examples(40), deadline=None)
def test_is_a_permutation_whatever_the_sizes(
    sizes: list[int], window: int, batch: int, shards: int, seed: int
) -> None:
    assert sorted(whole(order(sizes, window, batch, shards, seed))) == list(range(sum(sizes)))


@pytest.mark.slow
@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 9), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_slices_agree_with_single_indexes(sizes: list[int], window: int, shards: int, data: st.DataObject) -> None:
    made = order(sizes, window, 7, shards)
    start = data.draw(st.integers(0, sum(sizes) - 1))
    stop = min(sum(sizes), start + 40)
    samples = made.indices(start, stop)
    assert samples.dtype == np.int64
    assert samples.tolist() == [made[position] for position in range(start, stop)]


@pytest.mark.parametrize(
    ("block_order", "expected"),
    [
        (order([3, 2, 4, 1], 2, 4, 1), [8, 6, 3, 5, 4, 7, 0, 9, 1, 2]),
        (order([10] * 10, 4, 12, 3, seed=7, epoch=3), [37, 36, 20, 60, 25, 10, 29, 22, 33, 32, 16, 31]),
        (order([10**9] * 7, 3, 1000, 8, seed=2**63 - 1, epoch=12), [1881977860, 1800599104, 1805940115]),
    ],
)
def test_the_bits_never_change(block_order: BlockOrder, expected: list[int]) -> None:
    """Whoever changes these values breaks every training that is to be resumed or repeated."""
    start = len(block_order) * 3 // 7 if len(block_order) > 10**6 else 0
    assert block_order.indices(start, start + len(expected)).tolist() == expected


def test_a_window_is_finished_before_the_next_one_begins() -> None:
    blocks = order([9] * 8, 3, 4, 2).indices(0, 72) // 9
    windows = [set(blocks[start : start + 27].tolist()) for start in (0, 27, 54)]
    assert [len(window) for window in windows] == [3, 3, 2]
    assert set.union(*windows) == set(range(8))


def test_positions_out_of_range_and_impossible_numbers_are_named() -> None:
    made = order([2, 3], 1, 2, 1)
    with pytest.raises(IndexError, match="position 5 is outside an order of 5 samples"):
        made[5]
    with pytest.raises(IndexError, match="positions 4 to 6 are no range in an order of 5 samples"):
        made.indices(4, 6)
    with pytest.raises(ValueError, match="epoch is -1; it must be"):
        order([2], 1, 1, 1, epoch=-1)
    assert order([], 3, 2, 1).indices(0, 0).tolist() == made.indices(5, 5).tolist() == []


def test_a_used_order_is_the_same_in_another_process() -> None:
    made = order([4] * 25, 5, 6, 2, seed=2, epoch=1)
    samples = whole(made)
    assert whole(pickle.loads(pickle.dumps(made))) == samples
    assert whole(replace(made, epoch=2)) != samples


def test_the_first_index_of_ten_billion_rows_takes_the_memory_of_their_blocks() -> None:
    tracemalloc.start()
    try:
        made = order([10**5] * 10**5, 16, 4096, 8, seed=1)
        assert 0 <= made[0] < 10**10
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30e6


@cache
def drawn(sizes: tuple[int, ...], window: int, batch: int, shards: int) -> Ints:
    """The orders of these blocks, one in each row, for as many epochs."""
    first = order(sizes, window, batch, shards, seed=1)
    return np.stack([replace(first, epoch=epoch).indices(0, sum(sizes)) for epoch in range(NUM_EPOCHS)])


@pytest.mark.full(but=["sizes0"])
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), (1, 2, 1)])
def test_all_permutations_of_one_window_are_equally_likely(sizes: tuple[int, ...]) -> None:
    counts = np.bincount(ranks(drawn(sizes, 9, 3, 1)), minlength=math.factorial(sum(sizes)))
    assert abs(uniformity(counts)) < SIGMAS


@pytest.mark.full(but=["sizes1-3-4-2"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "window", "batch", "shards"),
    [((4,) * 6, 2, 5, 1), ((4,) * 3, 3, 4, 2), ((3,) * 10, 4, 7, 4)],
)
def test_every_sample_is_equally_likely_at_every_position(
    sizes: tuple[int, ...], window: int, batch: int, shards: int
) -> None:
    """Of blocks of one size, whatever the shards: none draws some rows of a block more often than others."""
    orders = drawn(sizes, window, batch, shards)
    n = sum(sizes)
    counts = np.stack([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    expected = len(orders) / n
    statistic = ((counts - expected) ** 2).sum() / expected * (n - 1) / n
    assert abs(deviation(statistic, (n - 1) ** 2)) < SIGMAS


@pytest.mark.slow
def test_all_pairs_of_a_window_are_equally_likely_at_any_two_of_its_positions() -> None:
    orders = drawn((3, 4, 2), 3, 4, 1)
    for other in range(1, 9):
        first, second = orders[:, 0], orders[:, other]
        pairs = first * 8 + second - (second > first)
        assert abs(uniformity(np.bincount(pairs, minlength=72))) < SIGMAS, other


@pytest.mark.slow
def test_all_sets_of_blocks_are_equally_likely_in_a_window() -> None:
    orders = drawn((4,) * 6, 2, 5, 1)
    blocks = np.sort(orders[:, :8] // 4, axis=1)
    pairs = blocks[:, 0] * 6 + blocks[:, -1]
    _, counts = np.unique(pairs, return_counts=True)
    assert len(counts) == 15
    assert abs(uniformity(counts)) < SIGMAS


def test_windows_and_shards_of_an_epoch_are_shuffled_independently() -> None:
    """Two random permutations agree at one place on average, with variance one."""
    agreements = 0
    for seed in range(150):
        parts = (
            order([40] * 4, 2, 10, 2, seed).indices(0, 160).reshape(2, 8, 2, 5).transpose(0, 2, 1, 3).reshape(4, 40)
        )
        places = [np.argsort(part) for part in parts]
        agreements += int((places[0] == places[1]).sum()) + int((places[0] == places[2]).sum())
    assert abs(agreements - 300) < SIGMAS * math.sqrt(300)


def blocks_in(block_order: BlockOrder, rows: int) -> Ints:
    """How many samples each stretch of so many positions has of each block, over one window of equal blocks."""
    per_block = int(block_order.block_rows[0])
    window = block_order.indices(0, block_order.window_blocks * per_block) // per_block
    _, window = np.unique(window, return_inverse=True)
    batches = window[: len(window) // rows * rows].reshape(-1, rows)
    return np.stack([np.bincount(batch, minlength=block_order.window_blocks) for batch in batches])


@pytest.mark.parametrize("shards", [1, 4, 16])
def test_a_global_batch_draws_from_all_blocks_of_its_window(shards: int) -> None:
    """At one shard its counts are those of a draw without return; shards make them more even, never less."""
    batch, per_block, window = 64, 512, 16
    counts = np.concatenate(
        [blocks_in(order([per_block] * 64, window, batch, shards, seed), batch) for seed in range(8)]
    )
    rows = window * per_block
    variance = batch / window * (1 - 1 / window) * (rows - batch) / (rows - 1)
    found = counts.var()
    noise = variance * math.sqrt(2 / counts.size)
    assert counts.mean() == batch / window
    assert abs(found - variance) < SIGMAS * noise if shards == 1 else found < variance


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.integers(2, 25), seeds)
@settings(max_examples=examples(40), deadline=None)
def test_consecutive_shards_draw_from_few_blocks_of_each_window(
    shards: int, workers: int, per_shard: int, batch: int, seed: int
) -> None:
    workers = min(workers, shards)
    window, rows = per_shard * shards, 50
    made = order([rows] * window * 3, window, batch, shards, seed)
    owner = np.array(shards_of(len(made), batch, shards))
    blocks = made.indices(0, len(made)) // rows
    for rank in range(workers):
        first, end = shards * rank // workers, shards * (rank + 1) // workers
        for at in range(0, len(made), window * rows):
            part = slice(at, at + window * rows)
            mine = blocks[part][(owner[part] >= first) & (owner[part] < end)]
            full = len(made) // batch * batch
            if at + window * rows <= full and batch % shards == 0:
                assert len(np.unique(mine)) <= blocks_held(window, end - first, shards)

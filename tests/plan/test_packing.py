"""The arithmetic of packing, against lists: each token once, in windows that are full as far as they can be."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_ray.plan import packing
from dp_ray.plan.packing import Cut, Packing, RowPart, Sums, TooLongRow, Whole, best_fit, padding

some_lengths = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)
blocks = st.sampled_from([1, 3, 8, 1024])


def windows_of(packed: Packing) -> list[list[RowPart]]:
    return [packed.parts(window) for window in range(len(packed))]


def tokens_of(windows: Sequence[Sequence[RowPart]]) -> list[tuple[int, int]]:
    return [(part.row, at) for parts in windows for part in parts for at in range(part.start, part.stop)]


def first_fit(lengths: Sequence[int], length: int) -> int:
    """How many windows the plainest rule needs: each row into the first window that has room."""
    spaces: list[int] = []
    for size in filter(None, lengths):
        at = next((at for at, space in enumerate(spaces) if space >= size), None)
        if at is None:
            spaces.append(length - size)
        else:
            spaces[at] -= size
    return len(spaces)


@settings(deadline=None)
@given(lengths=some_lengths, length=st.integers(1, 50), rows=blocks, kind=st.sampled_from(["u2", "i4", "i8"]))
def test_a_stream_is_cut_as_a_list_is(lengths: list[int], length: int, rows: int, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "ROWS_AT_ONCE", rows)
        patch.setattr(packing, "SUMMED_AT_ONCE", rows * 2)
        cut = Cut(np.array(lengths, kind), length)
        stream = [(row, at) for row, size in enumerate(lengths) for at in range(size)]
        windows = windows_of(cut)
        assert [tokens_of([parts]) for parts in windows] == [
            stream[at : at + length] for at in range(0, len(stream), length)
        ]
        assert all(len({part.row for part in parts}) == len(parts) for parts in windows)
        check_ranges(cut, windows, rows)


@settings(deadline=None)
@given(lengths=some_lengths, more=st.integers(0, 30), rows=blocks)
def test_whole_rows_are_each_in_one_window(lengths: list[int], more: int, rows: int) -> None:
    length = max(lengths) + more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "ROWS_AT_ONCE", rows)
        patch.setattr(packing, "SUMMED_AT_ONCE", rows * 2)
        whole = Whole(np.array(lengths, np.uint32), length)
        windows = windows_of(whole)
        assert sorted(part for parts in windows for part in parts) == [
            (row, 0, size) for row, size in enumerate(lengths) if size
        ]
        sizes = [sum(part.stop for part in parts) for parts in windows]
        assert all(0 < size <= length for size in sizes)
        block_of = [{part.row // rows for part in parts} for parts in windows]
        assert all(len(each) == 1 for each in block_of), "blocks are packed by themselves"
        for at, size in enumerate(sizes):  # else one of them is too many
            others = [other for to, other in enumerate(sizes) if to != at and block_of[to] == block_of[at]]
            assert all(size + other > length for other in others)
        firsts = [parts[0].row for parts in windows]
        assert firsts == sorted(firsts) and all(parts == sorted(parts) for parts in windows)
        check_ranges(whole, windows, rows)
        counted = Whole(np.array(lengths, np.uint32), length, whole.block_windows)
        assert windows_of(counted) == windows


def check_ranges(packed: Packing, windows: list[list[RowPart]], rows: int) -> None:
    assert packed.tokens == len(tokens_of(windows))
    assert packed.filled == pytest.approx(packed.tokens / (len(windows) * packed.length))
    assert packed.block_windows.sum() == len(packed) == len(windows)
    assert len(packed.block_windows) == -(-len(packed.lengths) // rows)
    for first in range(len(windows)):
        for stop in range(first + 1, min(first + 4, len(windows)) + 1):
            begin, end = packed.rows_between(first, stop)
            assert all(begin <= part.row < end for parts in windows[first:stop] for part in parts)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30), rows=blocks)
def test_sums_are_those_of_lists(lengths: list[int], rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "ROWS_AT_ONCE", rows)
        sums = Sums(np.array(lengths))
        ends = list(accumulate(lengths))
        starts = [end - size for end, size in zip(ends, lengths, strict=True)]
        assert [sums.bounds(row) for row in range(len(lengths))] == list(zip(starts, ends, strict=True))
        of_tokens = [row for row, size in enumerate(lengths) for _ in range(size)]
        assert [sums.row_at(place) for place in range(len(of_tokens))] == of_tokens
        places = range(ends[-1] + 1)
        before = [sum(start < place for start in starts) for place in places]
        assert sums.rows_before(np.array(places)).tolist() == before


@pytest.mark.parametrize("mean", [3, 20, 60])
def test_best_fit_needs_fewer_windows_than_first_fit(mean: int) -> None:
    generator = np.random.default_rng(mean)
    ours = theirs = least = 0
    for _ in range(100):
        lengths = np.clip(generator.geometric(1 / mean, 300), 1, 100).tolist()
        found = len(best_fit(lengths, 100))
        plain = first_fit(lengths, 100)
        assert found <= plain
        ours, theirs, least = ours + found, theirs + plain, least + -(-sum(lengths) // 100)
    assert least <= ours < theirs or least == ours == theirs
    assert ours <= 1.02 * least or mean == 60, "rows of more than half of a window stay alone"


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=7), more=st.integers(0, 8))
def test_few_rows_need_at_most_a_window_more_than_the_best_of_all_ways(lengths: list[int], more: int) -> None:
    length = max(lengths) + more

    def fewest(rest: tuple[int, ...], spaces: tuple[int, ...]) -> int:
        if not rest:
            return len(spaces)
        size, others = rest[0], rest[1:]
        ways: list[Any] = [(*spaces, length - size)]
        ways += [(*spaces[:at], space - size, *spaces[at + 1 :]) for at, space in enumerate(spaces) if space >= size]
        return min(fewest(others, way) for way in set(ways))

    assert len(best_fit(lengths, length)) <= fewest(tuple(lengths), ()) + 1


def test_a_row_above_the_window_is_named() -> None:
    with pytest.raises(TooLongRow) as caught:
        Whole(np.array([3, 9, 4, 12]), 8)
    assert (caught.value.row, caught.value.size) == (1, 9)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any), batch=st.integers(1, 8))
def test_padding_is_that_of_batches_of_lists(lengths: list[int], batch: int) -> None:
    batches = [lengths[at : at + batch] for at in range(0, len(lengths), batch)]
    places = sum(len(each) * max(each) for each in batches)
    assert padding(np.array(lengths), batch) == pytest.approx(1 - sum(lengths) / places)


def test_memory_does_not_grow_with_the_rows_beyond_their_lengths() -> None:
    import tracemalloc

    rows = 2_000_000
    lengths = np.full(rows, 100, np.uint32)
    tracemalloc.start()
    try:
        cut = Cut(lengths, 2048)
        for window in range(0, len(cut), 1000):
            cut.parts(window)
        whole = Whole(lengths, 2048, np.full(-(-rows // 1024), 52))
        for window in range(0, len(whole), 1000):
            whole.parts(window)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40e6, "what is kept of the last blocks, and sums of a million rows at once"

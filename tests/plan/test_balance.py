"""The parts of a partition: the largest one is as small as it can be, by trying all cuts."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.plan.split import balance


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_the_largest_part_is_the_smallest_of_all_cuts(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    cut = balance(sizes, parts)
    assert [block for part in cut for block in part] == list(range(len(sizes)))
    assert len(cut) == parts and all(len(part) > 0 for part in cut)

    def largest(cuts: tuple[int, ...]) -> int:
        edges = [0, *cuts, len(sizes)]
        return max(sum(sizes[first:end]) for first, end in pairwise(edges))

    best = min(largest(cuts) for cuts in combinations(range(1, len(sizes)), parts - 1))
    assert max(sum(sizes[block] for block in part) for part in cut) == best


@pytest.mark.parametrize("parts", [0, 4])
def test_fewer_blocks_than_parts_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=rf"3 blocks cannot be cut into {parts} parts"):
        balance([1, 2, 3], parts)

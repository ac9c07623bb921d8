"""The fixed tree of shards, and the keys of randomness: arithmetic that no number of workers changes."""

import functools
import math

from hypothesis import given
from hypothesis import strategies as st

from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import chunk_sizes, num_filled, worker_shards
from dp_ray.plan.tree import Node, climb, fold, halves, leaf_pairs, nodes, parents, transfers

FLOATS = st.floats(-1e30, 1e30, allow_subnormal=True) | st.sampled_from([0.0, -0.0, 1e16, 1.0, -1e16, 1e-30])


def by_definition(values: list[float], start: int, stop: int) -> float:
    """The sum of a node as it is defined: of its halves' sums."""
    if stop - start == 1:
        return values[start]
    middle = (start + stop) // 2
    return by_definition(values, start, middle) + by_definition(values, middle, stop)


def plus(left: float, right: float) -> float:
    return left + right


@given(st.lists(FLOATS, min_size=1, max_size=40), st.data())
def test_the_sum_over_workers_is_the_sum_by_definition(values: list[float], data: st.DataObject) -> None:
    shards, root = len(values), (0, len(values))
    workers = data.draw(st.integers(1, shards))
    held: dict[Node, float] = {}
    for rank in range(workers):
        for node in nodes(worker_shards(shards, workers, rank), root):
            held[node] = by_definition(values, *node)
    covered = [shard for node in sorted(held) for shard in range(*node)]
    assert covered == list(range(shards)), "each shard is in one node"
    total = fold(held, root, plus)
    expected = by_definition(values, 0, shards)
    assert total is not None
    assert math.copysign(1, total) == math.copysign(1, expected)
    assert total == expected or (math.isnan(total) and math.isnan(expected))
    leaves = {(shard, shard + 1): value for shard, value in enumerate(values) if value is not None}
    assert fold(leaves, root, plus) == total or math.isnan(total)


@given(st.integers(1, 20), st.integers(0, 6))
def test_a_power_of_two_of_workers_that_divides_the_shards_has_a_node_each(times: int, power: int) -> None:
    workers = 2**power
    shards = times * workers
    assert all(len(nodes(worker_shards(shards, workers, rank), (0, shards))) == 1 for rank in range(workers))


@given(st.integers(4, 200), st.sampled_from([2, 4]))
def test_two_and_four_workers_always_have_a_node_each(shards: int, workers: int) -> None:
    assert all(len(nodes(worker_shards(shards, workers, rank), (0, shards))) == 1 for rank in range(workers))


@given(st.integers(2, 64), st.data())
def test_a_worker_has_few_nodes(shards: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, shards))
    bound = max(1, 2 * math.ceil(math.log2(shards)))
    assert all(len(nodes(worker_shards(shards, workers, rank), (0, shards))) <= bound for rank in range(workers))


@given(
    st.lists(FLOATS, min_size=1, max_size=20).flatmap(
        lambda parts: st.tuples(st.just(parts), st.permutations(range(len(parts))))
    )
)
def test_sums_that_climb_as_they_come_are_those_by_definition(given: tuple[list[float], list[int]]) -> None:
    values, arrivals = given
    held: dict[Node, float] = {}
    for shard in arrivals:
        climb(held, (shard, shard + 1), values[shard], parents((0, len(values))), plus)
    (total,) = held.values()
    expected = by_definition(values, 0, len(values))
    assert total == expected or (math.isnan(total) and math.isnan(expected))


def test_what_is_missing_counts_nothing() -> None:
    assert fold({(0, 1): 1.0, (3, 4): 4.0}, (0, 4), plus) == 5.0
    assert fold({}, (0, 2), plus) is None
    assert fold({}, (0, 1), plus) is None


@given(st.integers(1, 40))
def test_parents_and_pairs_are_those_of_the_halves(shards: int) -> None:
    above = parents((0, shards))
    assert all(node in halves(parent) for node, parent in above.items())
    assert {(shard, shard + 1) for shard in range(shards)} <= above.keys() | {(0, 1)}
    pairs = {node for node in {*above, (0, shards)} if node[1] - node[0] == 2}
    assert leaf_pairs((0, shards)) == pairs


@given(st.integers(0, 300), st.integers(1, 40))
def test_filled_shards_are_those_with_rows(rows: int, shards: int) -> None:
    assert num_filled(rows, shards) == sum(size > 0 for size in chunk_sizes(rows, shards))


def test_keys_differ_by_all_that_they_are_made_of_and_are_the_same_for_ever() -> None:
    parts = [(seed, epoch, step) for seed in range(5) for epoch in range(5) for step in range(40)]
    made = {
        derive_seed(seed, purpose, epoch, step) for seed, epoch, step in parts for purpose in ("sample", "forward")
    }
    assert len(made) == 2 * len(parts)
    assert all(0 <= number < 2**63 for number in made)
    assert derive_seed(0, "forward", 0, 0, 0) == derive_seed(0, "forward", 0, 0, 0) != derive_seed(0, "forward", 0, 0)
    ones = functools.reduce(lambda total, number: total + number.bit_count(), made, 0) / len(made)
    assert 30 < ones < 33


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 4), st.floats(width=32))), min_size=1, max_size=24))
def test_transfers_between_any_owners_sum_by_definition_on_the_first(leaves: list[tuple[int, float] | None]) -> None:
    """Each worker holds its own leaves alone, wherever they stand, and gets others' sums only as they are sent."""
    root = (0, len(leaves))
    owners = {at: leaf[0] for at, leaf in enumerate(leaves) if leaf is not None}
    held: dict[int, dict[Node, float]] = {worker: {} for worker in range(5)}
    for at, owned in enumerate(leaves):
        if owned is not None:
            climb(held[owned[0]], (at, at + 1), owned[1], parents(root), plus)
    for step in transfers(owners, root):
        left, right = fold(held[step.receiver], step.left, plus), fold(held[step.sender], step.right, plus)
        assert left is not None and right is not None and step.receiver != step.sender
        held[step.receiver][step.node] = plus(left, right)
    if owners:
        expected = fold({(at, at + 1): leaf[1] for at, leaf in enumerate(leaves) if leaf is not None}, root, plus)
        got = fold(held[owners[min(owners)]], root, plus)
        assert got is not None and expected is not None
        assert got == expected or (math.isnan(got) and math.isnan(expected))

"""The order of a mixture against lists: weights in every prefix, each row once in each of its source's epochs."""

import itertools
import time
import tracemalloc
from collections import Counter
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_ray.job.samples import IndexLists
from dp_ray.plan.mixture import Mixture, MixtureOrder, Stage, tree_of
from dp_ray.plan.split import Split, Work
from tests.support.chance import examples

NAMES = tuple("abcdefghijklmnop")


def shares(parts: list[int]) -> tuple[Fraction, ...]:
    return tuple(Fraction(part, sum(parts)) for part in parts)


def stages_of(weights: list[list[int]], lengths: list[int]) -> tuple[Stage, ...]:
    starts = [0, *itertools.accumulate(lengths[: len(weights) - 1])]
    return tuple(Stage(start, shares(parts)) for start, parts in zip(starts, weights, strict=True))


@st.composite
def mixtures(draw: st.DrawFn, stop: Any = None, least: int = 0, most: int = 40) -> Mixture:
    """A mixture of up to six small sources, with up to three stages of weights; some weights may be 0."""
    number = draw(st.integers(1, 6))
    part = st.integers(least, 12) | st.integers(1, 10**6) | st.integers(2**40, 2**41)
    one_stage = st.lists(part, min_size=number, max_size=number).filter(any)
    weights = draw(st.lists(one_stage, min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(1, most), min_size=number, max_size=number))
    lengths = draw(st.lists(st.integers(1, 60), min_size=3, max_size=3))
    stages = stages_of(weights, lengths)
    return Mixture(NAMES[:number], tuple(sizes), stages, draw(st.integers(1, 200)) if stop is None else stop)


def as_list(mixture: Mixture, rows: int) -> list[tuple[int, int]]:
    """The source of each of the first rows, and the row's number there."""
    sources, numbers = mixture.sources_at(np.arange(rows))
    return list(zip(sources.tolist(), numbers.tolist(), strict=True))


def most_off(weights: tuple[Fraction, ...], sources: list[int]) -> Fraction:
    """How far a source is off its weight in any prefix, counted row by row."""
    had, worst = [0] * len(weights), Fraction(0)
    for rows, source in enumerate(sources, 1):
        had[source] += 1
        off = max(abs(count - rows * weight) for count, weight in zip(had, weights, strict=True))
        worst = max(worst, off)
    return worst


@pytest.mark.full
@given(st.lists(st.integers(1, 50) | st.integers(1, 10**7), min_size=1, max_size=16))
@settings(max_examples=examples(60), deadline=None)
def test_weights_hold_in_every_prefix(parts: list[int]) -> None:
    mixture = Mixture(NAMES[: len(parts)], (5,) * len(parts), (Stage(0, shares(parts)),), 1)
    off = most_off(shares(parts), [source for source, _ in as_list(mixture, 1500)])
    assert off < (1 if len(parts) == 2 else 2)


@pytest.mark.full(but=["parts1"])
@pytest.mark.parametrize(
    "parts", [[1] * 16, [2**number for number in range(16)], [3**number for number in range(14)], [1000, *[1] * 15]]
)
def test_weights_of_every_kind_hold_in_every_prefix(parts: list[int]) -> None:
    mixture = Mixture(NAMES[: len(parts)], (5,) * len(parts), (Stage(0, shares(parts)),), 1)
    assert most_off(shares(parts), [source for source, _ in as_list(mixture, 20_000)]) < 2


def test_thirds_are_thirds() -> None:
    mixture = Mixture(("a", "b"), (100, 100), (Stage(0, (Fraction(1, 3), Fraction(2, 3))),), 300)
    sources = [source for source, _ in as_list(mixture, 300)]
    assert sources[:6] == sources[3:9] == sources[294:]
    assert Counter(sources) == {0: 100, 1: 200}


@given(mixtures(), st.integers(0, 400))
@settings(max_examples=examples(100), deadline=None)
def test_a_stage_has_its_own_weights_from_its_first_row_on(mixture: Mixture, rows: int) -> None:
    sources = [source for source, _ in as_list(mixture, rows)]
    ends = [stage.start for stage in mixture.stages[1:]] + [rows]
    for stage, end in zip(mixture.stages, ends, strict=True):
        assert most_off(stage.weights, sources[stage.start : end]) < 2


@given(mixtures(), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_rows_of_a_source_follow_one_another_and_any_of_them_is_found(mixture: Mixture, data: st.DataObject) -> None:
    rows = 400
    listed = as_list(mixture, rows)
    had = [0] * len(mixture.names)
    for source, number in listed:
        assert number == had[source]
        had[source] += 1
    places = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=50))
    sources, numbers = mixture.sources_at(np.array(places))
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == [listed[place] for place in places]
    for place in places:
        assert mixture.row_of(*listed[place]) == place
        counts = Counter(source for source, _ in listed[:place])
        assert mixture.counts(place) == [counts[source] for source in range(len(mixture.names))]


@pytest.mark.full
@given(mixtures(stop="first", least=1) | mixtures(stop="all", least=1))
@settings(max_examples=examples(100), deadline=None)
def test_an_epoch_ends_where_it_says(mixture: Mixture) -> None:
    had, through = [0] * len(mixture.names), set[int]()
    first = None
    for row in itertools.count():
        (source,), _ = mixture.sources_at(np.array([row]))
        had[source] += 1
        if had[source] == mixture.sizes[source]:
            through.add(source)
            first = row + 1 if first is None else first
        if mixture.stop == "first" and first is not None:
            assert mixture.rows == first
            return
        if len(through) == len(had):
            assert mixture.rows == row + 1
            return
        if row > 3000:  # a weight of one in millions: its end is far, and the formula's inverse is tested above
            assert mixture.rows > 3000
            return


def test_an_epoch_without_an_end_is_refused() -> None:
    stages = (Stage(0, (Fraction(1, 2), Fraction(1, 2))), Stage(6, (Fraction(1), Fraction(0))))
    with pytest.raises(ValueError, match="source 'b' is never through"):
        Mixture(("a", "b"), (5, 4), stages, "all")
    assert Mixture(("a", "b"), (5, 3), stages, "all").rows == 8
    assert Mixture(("a", "b"), (5, 4), stages, "first").rows == 8


@given(mixtures(), st.integers(0, 2**63 - 1), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_each_row_comes_once_in_each_epoch_of_its_source(mixture: Mixture, seed: int, shuffle: bool) -> None:
    epochs = 5
    ids = [MixtureOrder(mixture, seed, epoch, shuffle).indices(0, mixture.rows).tolist() for epoch in range(epochs)]
    every = list(itertools.chain.from_iterable(ids))
    assert len(set(every)) == len(every) == epochs * mixture.rows
    passes: dict[tuple[str, int], list[int]] = {}
    for number in every:
        name, epoch, index = mixture.row(number)
        passes.setdefault((name, epoch), []).append(index)
    for (name, epoch), indices in passes.items():
        size = mixture.sizes[mixture.names.index(name)]
        assert len(set(indices)) == len(indices) and set(indices) <= set(range(size))
        if (name, epoch + 1) in passes:  # so this one is through
            assert sorted(indices) == list(range(size))
        if not shuffle:
            assert indices == list(range(len(indices)))
    counts = Counter(mixture.row(number)[0] for number in every)
    by_epoch = [mixture.counts_between(epoch, 0, mixture.rows) for epoch in range(epochs)]
    assert all(sum(own[name] for own in by_epoch) == counts[name] for name in mixture.names)


@given(mixtures(most=200), st.integers(1, 40), st.integers(1, 3), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_one_to_five_workers_read_the_same_batches_resumed_at_any_step(
    mixture: Mixture, batch_size: int, epochs: int, data: st.DataObject
) -> None:
    split = Split(mixture.rows, batch_size, 5, epochs=epochs)
    order = MixtureOrder(mixture, 3)
    flat = [MixtureOrder(mixture, 3, epoch).indices(0, mixture.rows).tolist() for epoch in range(epochs)]
    start, done = 0, 0
    while done < split.total_steps:  # a run that is stopped, and goes on with another number of workers
        start, workers = done, data.draw(st.integers(1, 5))
        done = data.draw(st.integers(start + 1, split.total_steps))
        got: dict[int, list[int]] = {step: [] for step in range(start, done)}
        for rank in range(workers):
            pieces = [
                piece for step, mine in Work(split, workers, rank, start=start) if step < done for piece in mine
            ]
            for request in IndexLists(order, partial(iter, pieces)):
                got[request.step] += request.indices
        for step, ids in got.items():
            epoch, (first, end) = step // split.steps, split.batch(step)
            assert ids == flat[epoch][first:end]


def test_a_source_keeps_its_order_beside_others_and_differs_in_each_epoch() -> None:
    stage = Stage(0, (Fraction(1, 2), Fraction(1, 2)))

    def orders(names: tuple[str, str], seed: int = 0) -> dict[tuple[str, int], list[int]]:
        order = MixtureOrder(Mixture(names, (50, 50), (stage,), 200), seed)
        found: dict[tuple[str, int], list[int]] = {}
        for number in order.indices(0, 200).tolist():
            name, epoch, index = order.mixture.row(number)
            found.setdefault((name, epoch), []).append(index)
        return found

    both = orders(("a", "b"))
    assert both["a", 0] == orders(("a", "c"))["a", 0]
    assert len({tuple(order) for order in both.values()}) == 4
    assert both["a", 0] != orders(("a", "b"), seed=1)["a", 0]


def test_the_order_stays() -> None:
    stages = (Stage(0, (Fraction(1, 3), Fraction(1, 6), Fraction(1, 2))),)
    order = MixtureOrder(Mixture(("a", "b", "c"), (5, 7, 100), stages, "first"), seed=1)
    assert len(order) == 14
    assert order.indices(0, 14).tolist() == GOLDEN


GOLDEN = [48, 1, 67, 11, 78, 0, 31, 2, 100, 5, 61, 4, 54, 3]


def test_a_billion_rows_of_sixteen_sources_take_no_memory_and_no_time() -> None:
    sizes = tuple(60_000_000 + 1000 * number for number in range(16))
    stages = (
        Stage(0, shares([number + 1 for number in range(16)])),
        Stage(10**8, shares([7**at for at in range(16)])),
    )
    order = MixtureOrder(Mixture(NAMES, sizes, stages, 10**9), seed=5, epoch=2)
    tracemalloc.start()
    order.indices(5 * 10**8, 5 * 10**8 + 1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    seconds = []
    for number in range(20):
        began = time.perf_counter()
        order.indices(number * 10**7, number * 10**7 + 1024)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) / 1024 < 5e-6


def test_a_tree_never_has_a_heavy_side_of_several_sources() -> None:
    """The bound on how far a source is off needs it: see the module's docstring."""

    def check(tree: Any) -> None:
        if not isinstance(tree, int):
            for side, part in ((tree.left, tree.part), (tree.right, tree.whole - tree.part)):
                assert isinstance(side, int) or 3 * part <= 2 * tree.whole
                check(side)

    for parts in itertools.product([1, 2, 3, 5, 8, 100], repeat=4):
        check(tree_of(dict(enumerate(parts))))

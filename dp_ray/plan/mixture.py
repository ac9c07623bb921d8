"""The order of a mixture of sources: to which source each row belongs, and its number there, by arithmetic alone.

A mixture is one sequence without an end, of which each epoch takes the next rows. A tree deals it: each of its nodes
gives the share `a / b` of its rows to one side, so that of the first `c` of them that side has `c * a / b`, rounded.
Each number is a function of the row's number, so that no list is held, and any row is as near as the first.

Rounding puts a side off by at most half a row, and a part of what its node is off. A side with more than one source
has at most two thirds of a node's weight, so that what a source is off in any prefix stays below two rows:
1/2 + 2/3 * (1/2 + 2/3 * (...)) is below 3/2 for a node, and so below 2 for a source. With two sources it is 1/2.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dp_ray.plan.order import LIMIT, EpochOrder, Ints, check_number, each_permutation, hashed, stream_of

_FAST = 2**31  # a node whose rows repeat after fewer is dealt in 64 bits, another in Python's own numbers
_SOURCES = 2**62 + 2  # the purpose of a random stream: the orders of sources


class Share(NamedTuple):
    """A node of the tree: of each `whole` of its rows, `part` go to the left; a side is a node, or a source."""

    part: int
    whole: int
    left: "Share | int"
    right: "Share | int"

    def before(self, rows: int) -> int:
        """Return how many of the node's first rows go to the left: their share, rounded."""
        return (2 * rows * self.part + self.whole) // (2 * self.whole)

    def deal(self, rows: Ints) -> tuple[NDArray[np.bool_], Ints]:
        """Return which of the rows of these numbers go to the left, and the number of each on its side."""
        part, whole = self.part, self.whole
        numbers: Any = rows if whole < _FAST else rows.astype(object)
        periods = numbers // whole
        halves = 2 * (numbers - periods * whole) * part + whole
        before = halves // (2 * whole)
        is_left = (halves - before * 2 * whole >= 2 * (whole - part)).astype(bool)
        before = (before + periods * part).astype(np.int64)
        return is_left, np.where(is_left, before, rows - before)

    def row_of(self, is_left: bool, number: int) -> int:
        """Return the number among the node's rows of the row that has this number on a side: `deal`'s inverse."""
        halves = self.whole * (2 * number + 1)
        if is_left:
            return -(-halves // (2 * self.part)) - 1
        return halves // (2 * (self.whole - self.part))


def tree_of(weights: Mapping[int, int]) -> Share | int:
    """Return the tree that deals rows to sources by their whole weights; those of weight 0 are in it nowhere."""
    heaviest = sorted((source for source, weight in weights.items() if weight), key=lambda at: (-weights[at], at))
    if len(heaviest) == 1:
        return heaviest[0]
    sides: tuple[dict[int, int], dict[int, int]] = {}, {}
    for source in heaviest:  # each to the lighter side: a side of several has two thirds of the weight at most
        sides[sum(sides[0].values()) > sum(sides[1].values())][source] = weights[source]
    left, right = (sum(side.values()) for side in sides)
    share = Fraction(left, left + right)
    return Share(share.numerator, share.denominator, tree_of(sides[0]), tree_of(sides[1]))


def _dealt(tree: Share | int, rows: Ints, places: Ints) -> Iterator[tuple[int, Ints, Ints]]:
    """Yield each source that has some of the rows, with their places and their numbers there."""
    if not len(rows):
        return
    if isinstance(tree, int):
        yield tree, places, rows
        return
    is_left, numbers = tree.deal(rows)
    for side, own in ((tree.left, is_left), (tree.right, ~is_left)):
        yield from _dealt(side, numbers[own], places[own])


def _counted(tree: Share | int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield each source of a tree, and how many of its first rows it has."""
    if isinstance(tree, int):
        yield tree, rows
    else:
        before = tree.before(rows)
        yield from chain(_counted(tree.left, before), _counted(tree.right, rows - before))


def _found(tree: Share | int, source: int, number: int) -> int | None:
    """Return the number among all rows of a tree of a source's row; None if the source is not in it."""
    if isinstance(tree, int):
        return number if tree == source else None
    for is_left, side in ((True, tree.left), (False, tree.right)):
        if (row := _found(side, source, number)) is not None:
            return tree.row_of(is_left, row)
    return None


class Stage(NamedTuple):
    """The rows from number `start` on, until the next stage: a weight for each source, which add up to 1."""

    start: int
    weights: tuple[Fraction, ...]


class Mixed(NamedTuple):
    """Rows of a mixture: of each its source, by number, the source's epoch, and its index there: int64 [rows]."""

    sources: Ints
    epochs: Ints
    indices: Ints


@dataclass(frozen=True)
class Mixture:
    """The rows of sources in one sequence without an end, of which an epoch takes `rows`, where the last one ended.

    `names` are sorted, so that the order in which they were given does not count; `sizes` are the sources' rows.
    `stages` begin at row 0. `stop` says when an epoch ends: with the source that is through `first`, when `all` are,
    or after a number of rows. Raises ValueError if an epoch has no end, or no row.

    A row has an id: a number that is its index among the rows of all sources, one source after another, and its
    source's epoch times the number of these.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stages: tuple[Stage, ...]
    stop: str | int = "first"

    def __post_init__(self) -> None:
        check_number("the number of rows of a mixture", self.rows)

    @cached_property
    def rows(self) -> int:
        """The rows of an epoch."""
        if isinstance(self.stop, int):
            return self.stop
        ends = {
            name: self.row_of(at, size - 1)
            for at, (name, size) in enumerate(zip(self.names, self.sizes, strict=True))
        }
        known = [end for end in ends.values() if end is not None]
        if self.stop == "first":
            return min(known) + 1
        endless = [name for name, end in ends.items() if end is None]
        if endless:
            raise ValueError(f"source {endless[0]!r} is never through: its weight is 0 from some row on")
        return max(known) + 1

    @cached_property
    def all_rows(self) -> int:
        """The rows of all sources together: ids of one row differ by a multiple of it."""
        return sum(self.sizes)

    @cached_property
    def _starts(self) -> Ints:
        """The first row of each source, among those of all."""
        return np.array([0, *accumulate(self.sizes[:-1])], np.int64)

    @cached_property
    def _begun(self) -> list[int]:
        return [stage.start for stage in self.stages]

    @cached_property
    def _trees(self) -> list[Share | int]:
        return [tree_of(_whole(stage.weights)) for stage in self.stages]

    @cached_property
    def _given(self) -> list[list[int]]:
        """How many rows each source has had when each stage begins."""
        given = [[0] * len(self.names)]
        for (stage, after), tree in zip(pairwise(self.stages), self._trees, strict=False):
            counts = dict(_counted(tree, after.start - stage.start))
            given.append([had + counts.get(source, 0) for source, had in enumerate(given[-1])])
        return given

    def counts(self, rows: int) -> list[int]:
        """Return how many of the first rows of the sequence each source has."""
        at = bisect_right(self._begun, rows) - 1
        counts = dict(_counted(self._trees[at], rows - self._begun[at]))
        return [had + counts.get(source, 0) for source, had in enumerate(self._given[at])]

    def counts_between(self, epoch: int, start: int, stop: int) -> dict[str, int]:
        """Return how many rows each source has at positions start .. stop - 1 of an epoch."""
        ends = (self.counts(epoch * self.rows + position) for position in (start, stop))
        return {name: after - before for name, before, after in zip(self.names, *ends, strict=True)}

    def row_of(self, source: int, number: int) -> int | None:
        """Return where in the sequence a source's row of this number is, over all its epochs; None if nowhere."""
        for at, (tree, given) in enumerate(zip(self._trees, self._given, strict=True)):
            ends = at + 1 == len(self.stages)
            if not ends and self._given[at + 1][source] <= number:
                continue
            row = _found(tree, source, number - given[source])
            return None if row is None else self._begun[at] + row
        raise AssertionError("the last stage has no end")

    def sources_at(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each row of the sequence, and the row's number there over all its epochs."""
        sources, numbers = np.empty_like(rows), np.empty_like(rows)
        stages = np.searchsorted(self._begun, rows, side="right") - 1
        for stage in range(len(self.stages)):
            places = np.flatnonzero(stages == stage)
            own = rows[places] - self._begun[stage]
            for source, at, of_source in _dealt(self._trees[stage], own, places):
                sources[at], numbers[at] = source, of_source + self._given[stage][source]
        return sources, numbers

    def ids(self, mixed: Mixed) -> Ints:
        """Return the ids of rows."""
        if mixed.epochs.max(initial=0) >= LIMIT // self.all_rows - 1:
            raise ValueError("a source has been gone through so often that its rows have no number of 64 bits")
        ids: Ints = mixed.epochs * self.all_rows + self._starts[mixed.sources] + mixed.indices
        return ids

    def locate(self, ids: Ints) -> Mixed:
        """Return the rows that have these ids."""
        epochs, rows = np.divmod(ids, self.all_rows)
        sources = np.searchsorted(self._starts, rows, side="right") - 1
        return Mixed(sources, epochs, rows - self._starts[sources])

    def row(self, number: int) -> tuple[str, int, int]:
        """Return the source of the row with an id, the source's epoch, and the row's index there."""
        sources, epochs, indices = (int(part[0]) for part in self.locate(np.array([number], np.int64)))
        return self.names[sources], epochs, indices

    def describe(self) -> dict[str, Any]:
        """Return all that decides its rows, as plain JSON values."""
        stages = [
            {
                "from": stage.start,
                **{name: str(weight) for name, weight in zip(self.names, stage.weights, strict=True)},
            }
            for stage in self.stages
        ]
        return {"rows": dict(zip(self.names, self.sizes, strict=True)), "weights": stages, "stop": self.stop}


def _whole(weights: Sequence[Fraction]) -> dict[int, int]:
    """Return the weights of sources, by number, as whole numbers."""
    common = lcm(*(weight.denominator for weight in weights))
    return {source: int(weight * common) for source, weight in enumerate(weights)}


@dataclass(frozen=True, eq=False)
class MixtureOrder(EpochOrder):
    """The id of the row at each position of one epoch of a mixture.

    With `shuffle`, each source goes in its own random order, which is another one in each of its epochs. That is a
    function of the seed, the source's name, its epoch and its size alone.
    """

    mixture: Mixture
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("seed", "epoch"):
            check_number(name, getattr(self, name))

    def __len__(self) -> int:
        return self.mixture.rows

    def at(self, positions: Ints) -> Ints:
        """Return the ids at positions from 0 to n - 1, int64 [positions]."""
        return self.mixture.ids(self.rows_at(positions))

    def rows_at(self, positions: Ints) -> Mixed:
        """Return the rows at positions from 0 to n - 1."""
        mixture = self.mixture
        sources, numbers = mixture.sources_at(positions + self.epoch * mixture.rows)
        epochs, indices = np.divmod(numbers, np.array(mixture.sizes, np.int64)[sources])
        if self.shuffle and len(positions):
            passes = epochs * len(mixture.sizes) + sources
            _, firsts, own = np.unique(passes, return_index=True, return_inverse=True)
            streams = hashed(stream_of((self.seed, _SOURCES)), self._keys[sources[firsts]])
            streams = hashed(streams, epochs[firsts].astype(np.uint64))
            sizes = [mixture.sizes[source] for source in sources[firsts].tolist()]
            each_permutation(sizes, streams, own).apply(indices.view(np.uint64))
        return Mixed(sources, epochs, indices)

    @cached_property
    def _keys(self) -> NDArray[np.uint64]:
        """A number for each source, which its name alone decides."""
        digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in self.mixture.names)
        return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)

"""Packing: rows of several lengths joined to windows of one length, by arithmetic on the lengths alone.

A window consists of parts, each a stretch of a row. `Cut` joins all rows to one stream, and cuts that into windows.
`Whole` cuts nothing: among ROWS_AT_ONCE consecutive rows it looks for those that fill a window best. Both compute the
parts of a window when they are asked for it: what is held in memory grows with the blocks of rows alone.

The same rows are together in each epoch, so a window has one number, under which it can be named. The order of the
windows is that of an epoch (`order.py`).
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Lengths = np.ndarray[Any, np.dtype[Any]]  # of rows: whole numbers of any type

ROWS_AT_ONCE = 1024  # a block: rows that are packed together, and of which `Cut` keeps one sum
SUMMED_AT_ONCE = 1 << 20  # rows, a multiple of ROWS_AT_ONCE
BLOCKS_KEPT = 1024  # whose packing was asked for last
IGNORED = -100  # the label that torch's losses leave out


class RowPart(NamedTuple):
    """The tokens `start` .. `stop` - 1 of a row."""

    row: int
    start: int
    stop: int


class TooLongRow(ValueError):
    """A row has more tokens than a window, and may not be cut."""

    def __init__(self, row: int, size: int) -> None:
        super().__init__(f"row {row} has {size} tokens")
        self.row = row
        self.size = size


@dataclass(eq=False)
class Sums:
    """Rows of these lengths, one behind another: where each begins and ends, from one sum for each block of rows."""

    lengths: Lengths

    def __post_init__(self) -> None:
        sums = [np.zeros(1, np.int64)]
        for first in range(0, len(self.lengths), SUMMED_AT_ONCE):
            some = np.asarray(self.lengths[first : first + SUMMED_AT_ONCE], np.int64)
            sums.append(np.add.reduceat(some, np.arange(0, len(some), ROWS_AT_ONCE)))
        self.before: Ints = np.cumsum(np.concatenate(sums))  # tokens before each block, and in all

    def __len__(self) -> int:
        return len(self.lengths)

    def bounds(self, row: int) -> tuple[int, int]:
        """Return where a row begins and ends."""
        ends = self.ends(row - row % ROWS_AT_ONCE, row + 1)
        return int(ends[-1] - int(self.lengths[row])), int(ends[-1])

    def row_at(self, place: int) -> int:
        """Return the row that has the token at a place."""
        first = (int(np.searchsorted(self.before, place, side="right")) - 1) * ROWS_AT_ONCE
        return first + int(np.searchsorted(self.ends(first, first + ROWS_AT_ONCE), place, side="right"))

    def rows_before(self, places: Ints) -> Ints:
        """Return how many rows begin before each place: int64 [places]."""
        blocks = np.searchsorted(self.before, places, side="left").tolist()
        found = []
        for block, place in zip(blocks, places.tolist(), strict=True):
            first = max(0, block - 1) * ROWS_AT_ONCE
            sizes = np.asarray(self.lengths[first : first + ROWS_AT_ONCE], np.int64)
            starts = self.ends(first, first + ROWS_AT_ONCE) - sizes
            found.append(first + int(np.searchsorted(starts, place, side="left")))
        return np.array(found, np.int64)

    def ends(self, first: int, stop: int) -> Ints:
        """Return where the rows first .. stop - 1 end; `first` begins a block."""
        sizes = np.asarray(self.lengths[first:stop], np.int64)
        ends: Ints = np.cumsum(sizes) + self.before[first // ROWS_AT_ONCE]
        return ends


@dataclass(eq=False)
class _Windows:
    """Windows of `length` tokens into which rows of these lengths are packed; rows of no tokens are in none."""

    lengths: Lengths
    length: int

    def __post_init__(self) -> None:
        self.tokens = int(self.lengths.sum(dtype=np.int64))

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def filled(self) -> float:
        """The share of the windows' places that hold tokens."""
        return self.tokens / max(1, len(self) * self.length)


@dataclass(eq=False)
class Cut(_Windows):
    """All rows as one stream, cut anywhere: the last window alone may be short."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows = Sums(self.lengths)

    def __len__(self) -> int:
        return -(-self.tokens // self.length)

    def parts(self, window: int) -> list[RowPart]:
        """Return the parts of a window, in the order of their rows."""
        begin, end = window * self.length, min((window + 1) * self.length, self.tokens)
        first_row, stop_row = self.rows_between(window, window + 1)
        ends = self._rows.ends(first_row, stop_row)
        first, last = np.searchsorted(ends, [begin, end - 1], side="right").tolist()
        starts = ends[first : last + 1] - self.lengths[first_row + first : first_row + last + 1]
        cut = zip(
            range(first_row + first, first_row + last + 1),
            (np.maximum(begin, starts) - starts).tolist(),
            (np.minimum(end, ends[first : last + 1]) - starts).tolist(),
            strict=True,
        )
        return [RowPart(row, start, stop) for row, start, stop in cut if start < stop]

    def rows_between(self, first: int, stop: int) -> tuple[int, int]:
        """Return a range of rows, `first, stop`, that holds those of the windows first .. stop - 1."""
        ends = [first * self.length, min(stop * self.length, self.tokens) - 1]
        begin, last = np.searchsorted(self._rows.before, ends, side="right").tolist()
        return (begin - 1) * ROWS_AT_ONCE, min(last * ROWS_AT_ONCE, len(self.lengths))

    @property
    def block_windows(self) -> Ints:
        """How many windows begin in each block of rows: int64 [blocks]."""
        begun: Ints = np.diff(-(-self._rows.before // self.length))
        return begun


@dataclass(eq=False)
class Whole(_Windows):
    """Whole rows, joined within blocks of consecutive rows: each goes where the least place is left, longest first.

    No two windows of a block would fit into one. `counts` are the windows of each block, if they are known. Raises
    TooLongRow for the first row above `length`.
    """

    counts: Ints | None = None
    _packed: OrderedDict[int, tuple[Ints, list[int]]] = field(default_factory=OrderedDict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths.max(initial=0) > self.length:
            row = int(np.argmax(self.lengths > self.length))
            raise TooLongRow(row, int(self.lengths[row]))
        if self.counts is None:
            blocks = range(0, len(self.lengths), ROWS_AT_ONCE)
            self.counts = np.array([len(self._pack(first)[1]) - 1 for first in blocks], np.int64)
        self._starts = np.append(0, np.cumsum(self.counts))  # the first window of each block

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": OrderedDict()}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def parts(self, window: int) -> list[RowPart]:
        """Return the parts of a window, in the order of their rows."""
        block = int(np.searchsorted(self._starts, window, side="right")) - 1
        rows, ends = self._block(block)
        number = window - int(self._starts[block])
        mine = rows[ends[number] : ends[number + 1]] + block * ROWS_AT_ONCE
        return [RowPart(row, 0, size) for row, size in zip(mine.tolist(), self.lengths[mine].tolist(), strict=True)]

    def rows_between(self, first: int, stop: int) -> tuple[int, int]:
        """Return a range of rows, `first, stop`, that holds those of the windows first .. stop - 1."""
        begin, last = np.searchsorted(self._starts, [first, stop - 1], side="right").tolist()
        return (begin - 1) * ROWS_AT_ONCE, min(last * ROWS_AT_ONCE, len(self.lengths))

    @property
    def block_windows(self) -> Ints:
        """How many windows lie in each block of rows: int64 [blocks]."""
        return np.diff(self._starts)

    def _block(self, block: int) -> tuple[Ints, list[int]]:
        if block not in self._packed:
            self._packed[block] = self._pack(block * ROWS_AT_ONCE)
            while len(self._packed) > BLOCKS_KEPT:
                self._packed.popitem(last=False)
        self._packed.move_to_end(block)
        return self._packed[block]

    def _pack(self, first: int) -> tuple[Ints, list[int]]:
        """Return the rows of a block, window by window; and where each window begins in them, and the last ends."""
        windows = best_fit(self.lengths[first : first + ROWS_AT_ONCE].tolist(), self.length)
        ends = np.cumsum([0, *map(len, windows)]).tolist()
        return np.array([row for rows in windows for row in rows], np.int64), ends


Packing: TypeAlias = Cut | Whole


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return windows of rows whose sizes fit together into `length`; each has its rows in order.

    The longest row comes first; each goes into the window in which the least place is left for it, else into a new
    one. The windows are in the order of their first rows. A row of size 0 is in none.

    >>> best_fit([3, 5, 2, 4], 7)
    [[0, 3], [1, 2]]
    """
    windows: list[list[int]] = []
    spaces: list[int] = []  # that are left in some window, each once, in order
    with_space: dict[int, list[int]] = {}  # the windows with each space
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        size = sizes[row]
        if not size:  # nor have those after it: the longest come first
            break
        at = bisect_left(spaces, size)
        if at == len(spaces):
            number, left = len(windows), length - size
            windows.append([])
        else:
            having = with_space[spaces[at]]
            number, left = having.pop(), spaces[at] - size
            if not having:
                del with_space[spaces.pop(at)]
        windows[number].append(row)
        if left:
            if left not in with_space:
                insort(spaces, left)
                with_space[left] = []
            with_space[left].append(number)
    return sorted(sorted(rows) for rows in windows)


def above_int64(tokens: Lengths) -> int | None:
    """Return the place of the first number that int64 cannot hold; None if there is none."""
    most = np.iinfo(np.int64).max
    if tokens.dtype != np.uint64 or not len(tokens) or tokens.max() <= most:
        return None
    return int(np.argmax(tokens > most))


def padding(sizes: Lengths, batch_size: int) -> float:
    """Return the share of padding in batches of these rows, in this order, each as long as its longest row.

    >>> padding(np.array([1, 3, 2, 2]), 2)
    0.2
    """
    starts = np.arange(0, len(sizes), batch_size)
    rows = np.diff(np.append(starts, len(sizes)))
    places = int((np.maximum.reduceat(sizes, starts).astype(np.int64) * rows).sum())
    return 1 - int(sizes.sum(dtype=np.int64)) / max(1, places)

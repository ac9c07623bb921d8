"""A dataset whose samples lie in blocks: row groups, record batches, stretches of a file or of a tar shard."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils.data import Dataset

from dp_ray.data.cache import Cache
from dp_ray.data.files import File, pins_of
from dp_ray.data.values import MissingValue
from dp_ray.errors import DataError

CACHE_BYTES = 256 << 20

Item = dict[str, Any]
Rows = np.ndarray[Any, np.dtype[np.int64]]
Source = TypeVar("Source")


@dataclass(frozen=True)
class Block(Generic[Source]):
    """Consecutive samples of a file that are read at once; `source` says where they lie, `where` in words."""

    file: File
    rows: int
    source: Source
    where: str = ""

    def __str__(self) -> str:
        return f"{self.file}{', ' * bool(self.where)}{self.where}"


class Blocks(Dataset[Item], Generic[Source]):
    """A map-style dataset of the rows of blocks, in order; the blocks that were read last stay in memory.

    `__getitems__` reads each block once, whatever the order of the samples asked for.
    """

    def __init__(self, files: list[File], blocks: Sequence[Block[Source]], cache_bytes: int = CACHE_BYTES) -> None:
        self.files = tuple(files)
        self._blocks = tuple(blocks)
        self._starts = np.cumsum([0, *(block.rows for block in blocks)])
        self._cache = Cache(cache_bytes)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __iter__(self) -> Iterator[Item]:
        for start, stop in itertools.pairwise(self._starts.tolist()):
            yield from self.__getitems__(range(start, stop))

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """The samples at these indices, in their order. Raises IndexError, and DataError if a file is damaged."""
        items: list[Item] = [{}] * len(indices)
        for places, read, rows in self._by_block(indices):
            with self._placed(indices[places[0]]):
                found = self._items(read, rows)
            for place, item in zip(places, found, strict=True):
                items[place] = item
        return items

    @contextmanager
    def _placed(self, index: int) -> Iterator[None]:
        """Name the file and the row of a value that is missing in the block of the sample at an index."""
        try:
            yield
        except MissingValue as error:
            number = int(np.searchsorted(self._starts, index % len(self), side="right")) - 1
            file, first = self._blocks[number].file, number
            while first and self._blocks[first - 1].file is file:
                first -= 1
            row = self._starts[number] - self._starts[first] + error.row
            raise DataError(f"row {row} of {file}, counted from 0: {error}") from None

    def _by_block(self, indices: Sequence[int]) -> Iterator[tuple[Rows, Any, Rows]]:
        """For each block that holds samples at the indices: their places among these, what it holds, their rows."""
        wanted = np.asarray(indices, np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"sample {indices} of {len(self)}")
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        # Block after block as they are first asked for: those of a new window follow those of the last one.
        asked = list(dict.fromkeys(numbers.tolist()))
        for first in range(0, len(asked), self._cache.least):
            several = asked[first : first + self._cache.least]
            for number, read in zip(several, self._cache.get_all(several, self._load), strict=True):
                places = np.flatnonzero(numbers == number)
                yield places, read, wanted[places] - self._starts[number]

    def hold_blocks(self, number: int) -> None:
        """Keep at least so many blocks in memory, those that were read last, whatever their size.

        So many may be read at once, in threads.
        """
        self._cache.least = number

    def blocks_at(self, first: int, stop: int) -> range:
        """The numbers of the blocks that hold the samples first .. stop - 1, of which there is one or more."""
        begin, last = np.searchsorted(self._starts, [first, stop - 1], side="right").tolist()
        return range(begin - 1, last)

    @property
    def reads_ahead(self) -> bool:
        """Whether there is room in memory for blocks that are read ahead."""
        return self._cache.most_bytes > 0

    @property
    def blocks_held(self) -> int:
        """How many blocks are kept in memory at least."""
        return self._cache.least

    def read_ahead(self, numbers: Sequence[int]) -> None:
        """Have these blocks read in the background, in this order, as far as `cache_bytes` allow."""
        self._cache.read_ahead(numbers, self._load)

    def stop_reading_ahead(self) -> None:
        """Read nothing more in the background, and forget what is not needed yet."""
        self._cache.stop_reading_ahead()

    def take_seconds_ahead(self) -> float:
        """How long reading in the background took since the last call, but for what was waited for."""
        return self._cache.take_seconds()

    @property
    def block_rows(self) -> Rows:
        """The number of rows of each block: int64 [blocks]."""
        return np.diff(self._starts)

    @property
    def pins(self) -> dict[str, str]:
        """The size and the version of each file; they change if the file does."""
        return pins_of(self.files)

    @property
    def loader_context(self) -> str | None:
        """How processes that read the files are started: spawned, since a storage's client does not survive a fork.

        None for local files: by the system's default.
        """
        return None if all(file.is_local for file in self.files) else "spawn"

    def _load(self, number: int) -> tuple[Any, int]:
        return self._read(self._blocks[number])

    def _read(self, block: Block[Source]) -> tuple[Any, int]:
        """What a block holds, and its size in bytes."""
        raise NotImplementedError

    def _items(self, read: Any, rows: Rows) -> list[Item]:
        """The samples at these rows of a block that was read."""
        raise NotImplementedError

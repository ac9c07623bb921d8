"""A dataset whose samples lie in blocks: row groups, record batches, stretches of a file or of a tar shard.

The blocks that were read last, and those that are read in the background before they are needed, are in a bounded
cache.
"""

import itertools
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from torch.utils.data import Dataset

from dp_ray.data.files import File, kept_numbers
from dp_ray.data.values import MissingValue, RowNumbers
from dp_ray.errors import DataError
from dp_ray.tables import Numbers

READ_AT_ONCE = 8  # of what is needed now
AHEAD_AT_ONCE = 4  # in the background
CACHE_BYTES = 256 << 20
END_SECONDS = 5.0  # how long the end of a job waits for reads in the background, which nobody needs any more

Key = TypeVar("Key", bound=Hashable)
BlockSource = TypeVar("BlockSource")
Item = dict[str, Any]
Load: TypeAlias = Callable[[Any], tuple[Any, int]]  # the value of a key, and its size in bytes


class Cache:
    """The values that were read last, up to a number of bytes but at least `least` of them; its copy is empty.

    Blocks that are read ahead replace the oldest ones, and never make the cache larger than its limit. Several
    threads may use the cache. Threads that read ahead live only while there is something to read.
    """

    def __init__(self, most_bytes: int, least: int = 1) -> None:
        self.least = least
        self.most_bytes = most_bytes
        self.forget()
        _caches.add(self)

    def forget(self) -> None:
        """Begin with nothing, as a forked process must: it has no copy of the threads, which may hold the lock."""
        self._changed = threading.Condition()
        self._held: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._ahead: dict[Any, tuple[Any, int]] = {}  # read in the background, and not needed yet
        self._coming: dict[Any, Load] = {}  # to be read in the background, in this order
        self._reading: set[Any] = set()  # being read in the background
        self._bytes = 0
        self._largest = 0
        self._num_threads = 0
        self._seconds = 0.0

    def get(self, key: Key, load: Callable[[Key], tuple[Any, int]]) -> Any:
        """Return what `load` gives for the key, from memory if it is there."""
        return self.get_all([key], load)[0]

    def get_all(self, keys: Sequence[Key], load: Callable[[Key], tuple[Any, int]]) -> list[Any]:
        """Return what `load` gives for each key, from memory if it is there; others are loaded several at a time."""
        with self._changed:
            for key in keys:
                self._coming.pop(key, None)
            loaded = {key: hit for key in keys if (hit := self._held.get(key) or self._ahead.get(key)) is not None}
            # Nobody loads these yet.
            missing = [key for key in keys if key not in loaded and key not in self._reading]
        if len(missing) < 2:
            loaded |= {key: load(key) for key in missing}
        else:
            with ThreadPoolExecutor(min(READ_AT_ONCE, len(missing))) as pool:
                loaded |= zip(missing, pool.map(load, missing), strict=True)
        for key in keys:
            if key not in loaded:
                loaded[key] = self._wait_for(key) or load(key)
        with self._changed:
            for key in keys:  # each becomes the newest, wherever it was before
                for values in (self._held, self._ahead):
                    self._bytes -= values.pop(key, (None, 0))[1]
                self._held[key] = loaded[key]
                self._count(loaded[key][1])
            self._read_on()
        return [loaded[key][0] for key in keys]

    def read_ahead(self, keys: Iterable[Key], load: Callable[[Key], tuple[Any, int]]) -> None:
        """Have these loaded in the background, in this order, as far as there is room for them.

        If loading one raises, it is loaded again when it is needed.
        """
        with self._changed:
            for key in keys:
                if key not in self._held and key not in self._ahead and key not in self._reading:
                    self._coming.setdefault(key, load)
            self._read_on()

    def stop_reading_ahead(self) -> None:
        """Drop what was read ahead, and wait for the threads to end."""
        with self._changed:
            self._bytes -= sum(size for _, size in self._ahead.values())
            for held in (self._ahead, self._coming, self._reading):
                held.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_threads, END_SECONDS)

    def take_seconds(self) -> float:
        """Return how long reading in the background took since the last call, but for what was waited for."""
        with self._changed:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _wait_for(self, key: Hashable) -> tuple[Any, int] | None:
        """Wait for a value that is being read in the background; None if that has failed."""
        with self._changed:
            began = time.perf_counter()
            self._changed.wait_for(lambda: key not in self._reading)
            self._seconds -= time.perf_counter() - began
            return self._ahead.get(key)

    def _count(self, size: int) -> None:
        """Count the bytes of a new value, and drop the oldest ones while there are too many."""
        self._bytes += size
        self._largest = max(self._largest, size)
        while self._bytes > self.most_bytes and len(self._held) > self.least:
            self._bytes -= self._held.popitem(last=False)[1][1]

    def _read_on(self) -> None:
        """Start threads for what is to be read in the background, in its order, as far as there is room."""
        while self._coming and self._num_threads < AHEAD_AT_ONCE and self._has_room():
            key, load = next(iter(self._coming.items()))
            reader = threading.Thread(target=self._read_in_background, args=(key, load), name="reading-ahead")
            reader.daemon = True
            try:
                reader.start()
            except RuntimeError:  # the system has no thread left: who needs it reads it
                return
            del self._coming[key]
            self._reading.add(key)
            self._num_threads += 1

    def _has_room(self) -> bool:
        """Whether one more fits beside those read ahead and those to be held, even if all are like the largest."""
        ahead = sum(size for _, size in self._ahead.values())
        needed = ahead + (self.least + len(self._reading) + 1) * self._largest
        return self._largest > 0 and needed <= self.most_bytes  # without a largest one, no size is known yet

    def _read_in_background(self, key: Any, load: Load) -> None:
        """Read a value, and keep it unless it is no longer needed: the work of a thread."""
        began, read = time.perf_counter(), None
        with suppress(Exception):  # the reader that needs it loads it again, and gets the error
            read = load(key)
        with self._changed:
            self._seconds += time.perf_counter() - began
            if key in self._reading:
                self._reading.remove(key)
                if read is not None:
                    self._ahead[key] = read
                    self._count(read[1])
            self._num_threads -= 1
            self._read_on()
            self._changed.notify_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.most_bytes, self.least)


_caches: "weakref.WeakSet[Cache]" = weakref.WeakSet()


def _forget_all() -> None:
    for cache in list(_caches):
        cache.forget()


os.register_at_fork(after_in_child=_forget_all)


@dataclass(frozen=True)
class Block(Generic[BlockSource]):
    """Consecutive samples of a file that are read at once; `source` says where they lie, `where` in words."""

    file: File
    rows: int
    source: BlockSource
    where: str = ""

    def __str__(self) -> str:
        return f"{self.file}, {self.where}" if self.where else str(self.file)


class Blocks(Dataset[Item], Generic[BlockSource]):
    """A map-style dataset of the rows of blocks, in order; the blocks that were read last stay in memory.

    `__getitems__` reads each block once, whatever the order of the samples asked for.
    """

    def __init__(
        self, files: list[File], blocks: Sequence[Block[BlockSource]], cache_bytes: int = CACHE_BYTES
    ) -> None:
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
        """Return the samples at these indices, in order. Raises IndexError, and DataError if a file is damaged."""
        items: list[Item] = [{}] * len(indices)
        for places, read, rows in self._by_block(indices):
            with self._placed(indices[places[0]]):
                new = self._items(read, rows)
            for place, item in zip(places, new, strict=True):
                items[place] = item
        return items

    @contextmanager
    def _placed(self, index: int) -> Iterator[None]:
        """Name the file and the row of a value that is missing in the block of the sample at an index."""
        try:
            yield
        except MissingValue as error:
            number = int(np.searchsorted(self._starts, index % len(self), side="right")) - 1
            raise DataError(f"{self.where(int(self._starts[number]) + error.row)}: {error}") from None

    def where(self, index: int) -> str:
        """Name the file of a sample, and its row there."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        file, first = self._blocks[number].file, number
        while first and self._blocks[first - 1].file is file:
            first -= 1
        return f"row {index - self._starts[first]} of {file}, counted from 0"

    def kept(self, kind: str, of: str, build: Callable[[], Numbers]) -> Numbers:
        """Return numbers about these samples, kept beside the first file, if they were made `of` the same."""
        return kept_numbers(self.files[0], kind, of, build)

    def _wanted(self, indices: Sequence[int]) -> RowNumbers:
        """Return the indices, counted from the begin. Raises IndexError."""
        wanted = np.asarray(indices, np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"sample {indices} of {len(self)}")
        return wanted

    def _by_block(self, indices: Sequence[int]) -> Iterator[tuple[RowNumbers, Any, RowNumbers]]:
        """For each block with samples at the indices, return their places in these, its contents, and their rows."""
        wanted = self._wanted(indices)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        # Blocks in the order in which they are first needed: a new window's blocks follow those of the last window.
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
        """Return the numbers of the blocks that hold the samples first .. stop - 1; `stop` is above `first`."""
        begin, last = np.searchsorted(self._starts, [first, stop - 1], side="right").tolist()
        return range(begin - 1, last)

    @property
    def reads_ahead(self) -> bool:
        """Whether there is room in memory for blocks that are read ahead."""
        return self._cache.most_bytes > 0

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    @property
    def blocks_held(self) -> int:
        """How many blocks are kept in memory at least."""
        return self._cache.least

    def read_ahead(self, numbers: Sequence[int]) -> None:
        """Have these blocks read in the background, in this order, as far as `cache_bytes` allow."""
        self._cache.read_ahead(numbers, self._load)

    def stop_reading_ahead(self) -> None:
        """Read nothing more in the background, and drop what was read ahead."""
        self._cache.stop_reading_ahead()

    def take_seconds_ahead(self) -> float:
        """Return how long reading in the background took since the last call, but for what was waited for."""
        return self._cache.take_seconds()

    @property
    def block_rows(self) -> RowNumbers:
        """The number of rows of each block: int64 [blocks]."""
        return np.diff(self._starts)

    @property
    def pins(self) -> dict[str, str]:
        """The size and the version of each file, by its path or URL; they change if the file does."""
        return {str(file): f"{file.size} bytes, {file.version}" for file in self.files}

    @cached_property  # which may be set to another
    def loader_context(self) -> str | None:
        """How processes that read the files are started: spawned, since a storage's client does not survive a fork.

        None for local files: by the system's default.
        """
        return None if all(file.is_local for file in self.files) else "spawn"

    def _load(self, number: int) -> tuple[Any, int]:
        return self._read(self._blocks[number])

    def _read(self, block: Block[BlockSource]) -> tuple[Any, int]:
        """Return what a block holds, and its size in bytes."""
        raise NotImplementedError

    def _items(self, read: Any, rows: RowNumbers) -> list[Item]:
        """Return the samples at these rows of a block that was read."""
        raise NotImplementedError

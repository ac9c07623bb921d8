"""What can only be read forward, as a dataset: each process reads on, and passes over what others take."""

import bisect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, _utils

from dp_ray.data.decode import Decoder, named
from dp_ray.errors import DataError, JobError
from dp_ray.plan.split import chunk_sizes

Source: TypeAlias = str | Iterable[Any] | Callable[..., Iterable[Any]]

END = object()
COUNTED = "give the number of items that are to be read; counting them would mean to read all of them first"


class Stream(Dataset[Any]):
    """The first `rows` items of an iterable, in its order; it is iterated anew for each epoch and after a restart.

    `iterable` is an object that can be iterated more than once, a function that returns one, or such a function's
    name as `package.module:function`. `rows` may be left out if it has a length. `decode` is applied to the items
    that a process needs, and not to those that it passes over.

    With `files`, the iterable is a function of one of them that gives its items, and `rows` a list of their numbers:
    only files with items that the process needs are read. Give it the job's `batch_size` and `shards` too, and
    the items are dealt so that each shard reads a stretch of the files of its own. Without them, they come in order.

    Raises JobError for arguments that do not go together. Reading raises DataError if there are fewer items than
    `rows`, if a file has more, or if the iterable draws random numbers.
    """

    reads_forward = True

    def __init__(
        self,
        iterable: Source,
        rows: int | Sequence[int] | None = None,
        decode: Decoder | str | None = None,
        files: Sequence[str] | None = None,
        batch_size: int | None = None,
        shards: int = 1,
    ) -> None:
        self._source = named("iterable", iterable) if isinstance(iterable, str) else iterable
        self._decode = named("decode", decode) if isinstance(decode, str) else decode
        self._files = None if files is None else list(files)
        self._starts = [0, *itertools.accumulate(_sizes(self._source, rows, self._files))]
        self._lanes = Lanes(len(self), batch_size or len(self) or 1, shards if batch_size else 1)
        self._readers: dict[int, Reader] = {}
        if files is None and batch_size is not None:
            raise JobError("Stream: batch_size deals the items of files to shards; without files it is of no use")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items at these indices; those before them are passed over, and earlier ones are read anew."""
        before = _random_state()
        with _as_without_loader():
            items = [self._read(*self._lanes.place(self._checked(index))) for index in indices]
        if _random_state() != before:
            says = "the iterable of a Stream draws random numbers, so its items depend on which process reads them"
            raise DataError(
                f"{says}; draw them in decode, or from a generator that it makes itself from a fixed seed"
            )
        return items if self._decode is None else [self._decode(item) for item in items]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}  # a copy for another process begins by itself

    def _checked(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        return index % len(self)

    def _read(self, lane: int, row: int) -> Any:
        reader = self._readers.get(lane) or self._readers.setdefault(lane, self._new_reader())
        try:
            return reader.read(row)
        except BaseException:
            del self._readers[lane]  # a generator that has raised gives no more items
            raise

    def _new_reader(self) -> "Reader":
        return Reader(self._open, self._starts, self._files is not None)

    def _open(self, file: int) -> tuple[Iterator[Any], str]:
        """An iterator over a file's items, or over all of them, and what it is called."""
        given = [] if self._files is None else [self._files[file]]
        found = self._source(*given) if callable(self._source) else self._source
        return iter(found), f"{given[0]}" if given else "the stream"


class Reader:
    """Reads on from where it is; it begins a file anew to go back, and leaves out what lies between.

    With `ends`, a file must end with its last row.
    """

    def __init__(
        self, open_file: Callable[[int], tuple[Iterator[Any], str]], starts: Sequence[int], ends: bool
    ) -> None:
        self._open = open_file
        self._starts = starts
        self._ends = ends
        self._file = -1
        self._name = ""
        self._next = 0
        self._items: Iterator[Any] = iter(())

    def read(self, row: int) -> Any:
        """The item of a row. Raises DataError if its file has fewer or more items than it was said to have."""
        file = bisect.bisect_right(self._starts, row) - 1
        if file != self._file or row < self._next:
            (self._items, self._name), self._file, self._next = self._open(file), file, self._starts[file]
        self._next += sum(1 for _ in itertools.islice(self._items, row - self._next))
        item = next(self._items, END)
        rows = self._starts[file + 1] - self._starts[file]
        if item is END:
            got = self._next - self._starts[file]
            raise DataError(f"{self._name} ended after {got} items, and rows says {rows}; set it to the true number")
        self._next += 1
        if self._ends and self._next == self._starts[file + 1] and next(self._items, END) is not END:
            raise DataError(f"{self._name} has more than the {rows} items that rows says; set it to the true number")
        return item


class Lanes:
    """Deals rows so that the same shard of all global batches takes consecutive rows: a stretch of its own.

    With one shard, the index of an item is its row.
    """

    def __init__(self, rows: int, batch_size: int, shards: int) -> None:
        self._batch_size = batch_size
        self._full, rest = divmod(rows, batch_size)
        self._sizes, self._last = chunk_sizes(batch_size, shards), chunk_sizes(rest, shards)
        each = [self._full * size + last for size, last in zip(self._sizes, self._last, strict=True)]
        self._starts = [0, *itertools.accumulate(each)]

    def place(self, index: int) -> tuple[int, int]:
        """The shard that takes the item, and the item's row."""
        step, offset = divmod(index, self._batch_size)
        shard, within = divmod(offset, (self._sizes if step < self._full else self._last)[0])
        return shard, self._starts[shard] + step * self._sizes[shard] + within


def _sizes(source: Any, rows: int | Sequence[int] | None, files: list[str] | None) -> list[int]:
    """The number of items of each file, or of the iterable."""
    if files is not None:
        if isinstance(rows, Sequence) and len(rows) == len(files) and callable(source):
            return [int(one) for one in rows]
        raise JobError("Stream: files need an iterable that is a function of a file, and in rows a number for each")
    if isinstance(source, Iterator):
        kind = type(source).__qualname__
        raise JobError(f"Stream: a {kind} can be iterated only once; give the function that returns it")
    if rows is None and not callable(source) and hasattr(source, "__len__"):
        return [len(source)]
    if not isinstance(rows, int) or rows < 0:
        raise JobError(f"Stream: rows must be a whole number, got {rows!r}: {COUNTED}")
    return [rows]


def _random_state() -> tuple[Any, ...]:
    """The state of the global generators."""
    numpy: Mapping[str, Any] = np.random.get_state(legacy=False)
    state = numpy["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"], torch.get_rng_state().numpy().tobytes()


@contextmanager
def _as_without_loader() -> Iterator[None]:
    """Within the block, torch names no loader process: iterables of torch would leave out the items of others."""
    worker: Any = _utils.worker
    here, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = here

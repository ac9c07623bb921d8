"""An iterable that can only be read forward as a dataset: each process reads on, and passes over others' items."""

import bisect
import collections
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, _utils

from dp_ray.data.values import Decoder, named
from dp_ray.errors import DataError, JobError
from dp_ray.plan.split import chunk_sizes
from dp_ray.system.process import patched

IterableSource: TypeAlias = str | Iterable[Any] | Callable[..., Iterable[Any]]

END = object()
COUNTED = "give the number of items that are to be read; counting them would mean to read all of them first"


class Stream(Dataset[Any]):
    """The first `rows` items of an iterable, in its order; it is iterated again for each epoch and after a restart.

    `iterable` is an object that can be iterated more than once, a function that returns one, or such a function's
    name as `package.module:function`. `rows` may be left out if it has a length. `decode` is applied only to the
    items that a process needs.

    With `files`, the iterable is a function of one of them that gives its items, and `rows` a list of their numbers:
    only files with items that the process needs are read. Give it the job's `batch_size` and `shards` too, and
    the items are dealt so that each shard reads a stretch of the files of its own. Without them, they come in order.

    If the iterable has a `set_epoch`, it is called with the epoch before each iteration.

    Raises JobError for arguments that do not go together. Reading raises DataError if there are fewer items than
    `rows`, if a file has more, or if the iterable draws random numbers.

    >>> import dp_ray
    >>> def squares():
    ...     return (number * number for number in range(10))
    >>> dataset = dp_ray.data.Stream(squares, rows=10)
    >>> len(dataset), dataset[3]
    (10, 9)
    """

    reads_forward = True

    def __init__(
        self,
        iterable: IterableSource,
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
        self._epoch: int | None = None
        self._differs = False  # whether epochs may have other items
        self._kept: dict[int, Callable[[], Any]] = {}  # if one of several items raised
        if files is None and batch_size is not None:
            raise JobError("Stream: batch_size deals the items of files to shards; without files it is of no use")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items at these indices. It passes over items before them, and iterates again to go back.

        If one of several raises, they can be asked for one by one without going back.
        """
        if len(indices) == 1 and (kept := self._kept.pop(indices[0], None)) is not None:
            return [kept()]
        if len(indices) > 1:
            self._kept = {}
        before = _random_state()
        # Without the name of a loader process: an iterable of torch would leave out the items of the others.
        with patched(_utils.worker, _worker_info=None):
            items = self._each(indices, indices, self._read)
        if _random_state() != before:
            says = "the iterable of a Stream draws random numbers, so its items depend on which process reads them"
            raise DataError(
                f"{says}; draw them in decode, or from a generator that it makes itself from a fixed seed"
            )
        return items if self._decode is None else self._each(indices, items, self._decode)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next items; an iterable with a `set_epoch` is then iterated again."""
        self._epoch = epoch
        if self._differs:
            self._readers, self._kept = {}, {}

    def _each(self, indices: Sequence[int], given: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
        """Return `make(value)` for each; if one raises, keep the results so far, for reads one by one.

        Each item is decoded once, since that may change what was read.
        """
        made: list[Any] = []
        try:
            for step in given:
                made.append(make(step))
        except Exception as error:
            if len(indices) > 1:
                is_decoding = given is not indices
                done = self._decode if self._decode is not None and not is_decoding else lambda item: item
                rest = [functools.partial(make, step) for step in given[len(made) + 1 :] if is_decoding]
                kept = [*(functools.partial(done, step) for step in made), functools.partial(_raised, error), *rest]
                self._kept = dict(zip(indices, kept, strict=False))
            raise
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}, "_kept": {}}  # a copy for another process begins by itself

    def _read(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        lane, row = self._lanes.place(index % len(self))
        if lane not in self._readers:
            self._readers[lane] = Reader(self._open, self._starts, self._files is not None)
        reader = self._readers[lane]
        try:
            return reader.read(row)
        except BaseException as error:
            if not (isinstance(error, Exception) and reader.goes_on):
                del self._readers[lane]
            raise

    def _open(self, file: int) -> tuple[Iterator[Any], str]:
        """Return an iterator over a file's items, or over all of them, and what it is called."""
        names = [] if self._files is None else [self._files[file]]
        iterable = self._source(*names) if callable(self._source) else self._source
        name = f"{names[0]}" if names else "the stream"
        told = getattr(iterable, "set_epoch", None)
        self._differs = self._differs or callable(told)
        if callable(told) and self._epoch is not None:
            try:
                told(self._epoch)
            except Exception as error:
                says = f"{type(error).__name__}: {error}"
                raise DataError(f"set_epoch({self._epoch}) of {name} raised {says}") from error
        return iter(iterable), name


def _raised(error: Exception) -> Any:
    raise error


@dataclass(eq=False)
class Reader:
    """A reader that only moves forward: it passes over items to reach a later row, and reopens the file to go back.

    With `ends`, a file must end with its last row. An item whose reading raises counts as one: what comes after it
    can be read, unless the iterator `goes_on` no more, as a generator that has raised.
    """

    open_file: Callable[[int], tuple[Iterator[Any], str]]
    starts: Sequence[int]  # the first row of each file, and the end of the last
    ends: bool
    goes_on: bool = field(default=True, init=False)
    _file: int = field(default=-1, init=False)
    _name: str = field(default="", init=False)
    _next: int = field(default=0, init=False)
    _items: Iterator[Any] = field(default_factory=lambda: iter(()), init=False)
    _error: Exception | None = field(default=None, init=False)  # that the last item raised

    def read(self, row: int) -> Any:
        """Return the item of a row. Raises DataError if its file has fewer or more items than it was said to have."""
        file = bisect.bisect_right(self.starts, row) - 1
        if file != self._file or row < self._next:
            self._items, self._name = self.open_file(file)
            self._file, self._next, self._error = file, self.starts[file], None
        rows = self.starts[file + 1] - self.starts[file]
        self._pass_over(row)
        try:
            item = next(self._items, END)
        except Exception as error:
            self._note(error)
            raise
        if item is END:
            self.goes_on = False
            text = f"{self._name} gave no more items after one raised {self._error!r}"
            if self._error is None:
                got = self._next - self.starts[file]
                text = f"{self._name} ended after {got} items, and rows says {rows}; set it to the true number"
            raise DataError(text) from self._error
        self._error = None
        self._next += 1
        if self.ends and self._next == self.starts[file + 1] and next(self._items, END) is not END:
            raise DataError(f"{self._name} has more than the {rows} items that rows says; set it to the true number")
        return item

    def _pass_over(self, row: int) -> None:
        """Pass over the items before a row, also those that raise."""
        while self._next < row:
            passed = itertools.count()
            try:
                collections.deque(
                    zip(itertools.islice(self._items, row - self._next), passed, strict=False), maxlen=0
                )
            except Exception as error:
                self._next += next(passed)
                self._note(error)
                if not self.goes_on:
                    raise
                continue
            count = next(passed)
            self._error = self._error if count == 0 else None
            self._next += count
            return

    def _note(self, error: Exception) -> None:
        """Count an item that has raised; a generator gives no more after it."""
        self._next += 1
        self._error = error
        self.goes_on = not isinstance(self._items, types.GeneratorType)


class Lanes:
    """Deals rows to shards: a shard takes consecutive rows over all global batches, a stretch of its own.

    With one shard, the index of an item is its row.
    """

    def __init__(self, rows: int, batch_size: int, shards: int) -> None:
        self._batch_size = batch_size
        self._full, rest = divmod(rows, batch_size)
        self._sizes, self._last = chunk_sizes(batch_size, shards), chunk_sizes(rest, shards)
        each = [self._full * size + last for size, last in zip(self._sizes, self._last, strict=True)]
        self._starts = [0, *itertools.accumulate(each)]

    def place(self, index: int) -> tuple[int, int]:
        """Return the shard that takes the item, and the item's row."""
        step, offset = divmod(index, self._batch_size)
        shard, within = divmod(offset, (self._sizes if step < self._full else self._last)[0])
        return shard, self._starts[shard] + step * self._sizes[shard] + within


def _sizes(source: Any, rows: int | Sequence[int] | None, files: list[str] | None) -> list[int]:
    """Return the number of items of each file, or of the iterable."""
    if files is not None:
        if isinstance(rows, Sequence) and len(rows) == len(files) and callable(source):
            return [int(row) for row in rows]
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
    """Return the state of the global generators."""
    numpy: Mapping[str, Any] = np.random.get_state(legacy=False)
    state = numpy["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"], torch.get_rng_state().numpy().tobytes()

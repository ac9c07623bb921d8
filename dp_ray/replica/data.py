"""What one worker reads: its own shards' samples, collated, checked and on its device."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from dp_ray.errors import DataError, Error
from dp_ray.job import Job, Loader, Target
from dp_ray.plan.order import Order
from dp_ray.plan.work import Work
from dp_ray.replica.targets import resolve
from dp_ray.replica.tree import flatten, map_leaves, num_rows, scatter, sizes

ORDER_BLOCK = 4096  # positions computed at once: a shard is often far smaller than numpy's overhead


class Samples(Dataset[Any]):
    """The user's dataset, whose errors name the sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Sequence[int], Any]:
        """The samples, with the indices by which they were read, so that nobody else need say which they are."""
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            what = f"samples {_shorten(indices)}"
            return indices, _check_items(_read(many, list(indices), what), len(indices), what)
        return indices, [_read(self.dataset.__getitem__, index, f"sample {index}") for index in indices]


Indices = np.ndarray[Any, np.dtype[np.int64]]
Batch = tuple[Indices, Any]


class Positions:
    """The sample indices at consecutive positions of an order, computed a block at a time."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.start = 0
        self.block = np.empty(0, np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        if not self.start <= start <= stop <= self.start + len(self.block):
            self.start = start
            self.block = self.order.indices(start, min(len(self.order), max(stop, start + ORDER_BLOCK)))
        return self.block[start - self.start : stop - self.start]


class IndexLists:
    """The batch sampler of a worker's DataLoader: the sample indices of each thing that it collates."""

    def __init__(self, order: Order, ranges: Iterable[tuple[int, int]]) -> None:
        self.order = order
        self.ranges = ranges

    def __iter__(self) -> Iterator[list[int]]:
        positions = Positions(self.order)
        for start, stop in self.ranges:
            yield positions.indices(start, stop).tolist()


def load_shards(job: Job, dataset: Any, work: Work, device: torch.device) -> Iterator[Batch]:
    """The sample indices and the model's inputs of each shard of `work`, in its order, on `device`.

    Raises DataError where a sample raises (its index is named) or where a leaf's rows are not the shard's.
    """
    make = _whole_batches if job.scatter == "batch" else _shards
    return on_device(make(job, dataset, work, device), device)


def _shards(job: Job, dataset: Any, work: Work, device: torch.device) -> Iterator[Batch]:
    """Read and collate each shard by itself: only the worker's own rows are read."""
    ranges = Ranges(lambda: ((shard.start, shard.stop) for _, shards in work for shard in shards))
    loaded = iter(_loader(job, dataset, ranges, device))
    for _, shards in work:
        for shard in shards:
            indices, batch = next(loaded)
            inputs = _inputs(job, batch)
            _check_rows(inputs, shard.rows, job.batch_dim, f"shard {shard.shard} of step {shard.step}")
            yield indices, inputs


def _whole_batches(job: Job, dataset: Any, work: Work, device: torch.device) -> Iterator[Batch]:
    """Collate the whole global batch, then cut it: for collates that pad to the batch's longest."""
    ranges = Ranges(lambda: (work.split.batch(step) for step, shards in work if shards))
    loaded = iter(_loader(job, dataset, ranges, device))
    for step, shards in work:
        if not shards:
            continue
        indices, batch = next(loaded)
        inputs = _inputs(job, batch)
        start, stop = work.split.batch(step)
        _check_rows(inputs, stop - start, job.batch_dim, f"the global batch of step {step}")
        pieces = scatter(inputs, job.num_shards, job.batch_dim)
        for shard in shards:
            yield indices[shard.start - start : shard.stop - start], pieces[shard.shard]


class Ranges:
    """An iterable over position ranges that can be walked anew: the loader may start more than once."""

    def __init__(self, make: Callable[[], Iterator[tuple[int, int]]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self.make()


def _loader(job: Job, dataset: Any, ranges: Ranges, device: torch.device) -> DataLoader[Any]:
    loader: Loader = job.loader
    order = Order(len(dataset), job.seed, 0, job.shuffle)
    return DataLoader(
        Samples(dataset),
        batch_sampler=IndexLists(order, ranges),
        collate_fn=functools.partial(_collate, collate=collate_of(job)),
        num_workers=loader.processes,
        prefetch_factor=loader.prefetch if loader.processes else None,
        pin_memory=device.type == "cuda" if loader.pin_memory == "auto" else loader.pin_memory,
        persistent_workers=loader.persistent and loader.processes > 0,
        multiprocessing_context=loader.context if loader.processes else None,
    )


def _collate(read: tuple[Sequence[int], Any], collate: Callable[[Any], Any]) -> Batch:
    indices, items = read
    try:
        return np.asarray(indices, np.int64), collate(items)
    except Exception as error:
        what = f"collate raised {type(error).__name__} on samples {_shorten(indices)}: {error}"
        raise DataError(what) from error


def collate_of(job: Job) -> Callable[[list[Any]], Any]:
    """The user's collate, or torch's with the rows along `batch_dim`."""
    if job.collate is None:
        return functools.partial(_default_collate, batch_dim=job.batch_dim)
    collate: Any = resolve("collate", job.collate) if isinstance(job.collate, Target) else job.collate
    args = job.collate.args if isinstance(job.collate, Target) else {}
    return functools.partial(collate, **args)


def _default_collate(items: list[Any], batch_dim: int) -> Any:
    """torch's collate stacks along dimension 0; labels of one dimension stay as they are."""
    batch = default_collate(items)
    if batch_dim == 0:
        return batch

    def along(leaf: Any) -> Any:
        return leaf.movedim(0, batch_dim) if leaf.ndim > batch_dim else leaf

    return map_leaves(along, batch)


def _inputs(job: Job, batch: Any) -> Any:
    """What of a collated batch the model gets."""
    if job.inputs == "all":
        return batch
    if isinstance(batch, tuple | list) and batch:
        return batch[0]
    raise DataError(
        f"inputs: 'first' needs items that are (inputs, target), "
        f"got a batch of type {type(batch).__qualname__}; set inputs: all"
    )


def _check_rows(inputs: Any, rows: int, batch_dim: int, what: str) -> None:
    got = num_rows(inputs, batch_dim)
    if got is not None and got != rows:
        raise DataError(
            f"{what} has {rows} rows, but collate gave {got} along dimension {batch_dim}: "
            f"{sizes(inputs)}; collate must give one row for each sample"
        )


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`; to a GPU the next one is copied while this one is computed."""
    if device.type != "cuda":
        yield from batches if device.type == "cpu" else (_move(batch, device) for batch in batches)
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ready = None
    for batch in batches:
        with torch.cuda.stream(copies):
            coming = _move(batch, device)
        if ready is not None:
            yield _wait_for(ready, copies, device)
        ready = coming
    if ready is not None:
        yield _wait_for(ready, copies, device)


def _move(batch: Batch, device: torch.device) -> Batch:
    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    indices, inputs = batch
    return indices, map_leaves(move, inputs)


def _wait_for(batch: Batch, copies: "torch.cuda.Stream", device: torch.device) -> Batch:
    """Make the computing stream wait for the copy, and keep the memory from being used anew too early."""
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(copies)
    for leaf in flatten(batch[1])[0]:
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(computing)
    return batch


def _read(read: Callable[[Any], Any], wanted: Any, what: str) -> Any:
    try:
        return read(wanted)
    except Error:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{what} of the dataset raised {type(error).__name__}: {error}") from error


def _check_items(items: Any, wanted: int, what: str) -> Any:
    if isinstance(items, list | tuple) and len(items) == wanted:
        return items
    got = f"{len(items)} items" if isinstance(items, list | tuple) else f"a {type(items).__qualname__}"
    raise DataError(f"the dataset's __getitems__ gave {got} for {what}: it must give a list of one item for each")


def _shorten(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:8])
    return shown if len(indices) <= 8 else f"{shown}, ... ({len(indices)} in all)"

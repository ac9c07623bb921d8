"""Load one worker's shards: read the samples, collate them, check the rows, copy them to the device.

Begin at `load_shards`. Samples of the job's `skip` are left out by arithmetic alone, the same on any worker.
"""

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from dp_ray.engine.bad_samples import Screen
from dp_ray.engine.clock import Part, SilentClock, StepClock
from dp_ray.engine.items import (
    ColumnSlice,
    ItemKeys,
    PassthroughBatch,
    PassthroughSample,
    Plain,
    WholeColumns,
    collate_passthrough,
    item_keys,
    passthrough_keys,
    passthrough_of,
    whole_columns,
)
from dp_ray.engine.random import RngProbe, own_generators, preserved, seed_all, seed_own
from dp_ray.engine.step import model_inputs
from dp_ray.engine.timed_loader import StepTimes, TimedCollate, TimedLoader, TimedReads, begin_process
from dp_ray.engine.user_code import error_text, loader_ended_error, read_many, reraise_as
from dp_ray.errors import DataError, Error, frames_of
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.samples import IndexLists, Indices, ReadRequest, hold_blocks, look_ahead, order_of
from dp_ray.job.targets import bound, build_dataset, dataset_seed, resolve
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard, Work
from dp_ray.tensors.files import moved
from dp_ray.tensors.scatter import cut, num_rows, scatter
from dp_ray.tensors.tree import flatten, map_leaves, sizes
from dp_ray.text import listed

Batch: TypeAlias = tuple[Indices, Any]


class LoadedShard(NamedTuple):
    """A shard as it was read: without the samples that are skipped or set aside; None for a batch without rows."""

    shard: Shard
    indices: Indices
    batch: Any


class LoadedStep(NamedTuple):
    """One worker's part of a step: its shards, maybe none, without the samples that are skipped or set aside.

    `loaded` reads them, in order; the first one is read by the time that the step is given. `whole` is the global
    batch, without the samples that are skipped.
    """

    step: int
    shards: list[Shard]
    loaded: Iterable[LoadedShard]
    whole: Shard


Batches = Generator[Batch, None, None]
Pick: TypeAlias = Callable[[Any], Any]
CPU = torch.device("cpu")


@dataclasses.dataclass(eq=False)
class Samples(Dataset[Any]):
    """The user's dataset, whose errors name the sample, and whose samples have random numbers of their own.

    Samples are read a shard at a time until one draws a random number. That shard is then read again, and from
    there on each sample is read by itself, after seeding. The result is the same as with seeding from the start.
    A dataset with generators of its own is seeded for each sample from the start. Of each sample, `keys` picks what
    the job takes. Where `columns` cut a batch as it is, no sample is read by itself. A `screen` puts a BadSample in
    the place of each sample that cannot be read. With keys to `carry`, each sample becomes a PassthroughSample.
    """

    dataset: Any
    seed: int
    name: str = "the dataset"
    keys: ItemKeys | None = None
    columns: WholeColumns | None = None
    times: StepTimes = dataclasses.field(default_factory=StepTimes)
    screen: Screen | None = None
    carry: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.screen is not None:
            self.screen.source, self.screen.carried_alone = self._unscreened, self._carried_alone
            self.screen.carry = self.carry
        self._own = own_generators(self.dataset)
        self._quiet = RngProbe()
        self._draws = bool(self._own)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `times`: no use in a loader's process, and on a GPU they hold events, which stay here."""
        return {**self.__dict__, "times": None}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, wanted: ReadRequest) -> tuple[ReadRequest, Any]:
        """Return the request and its samples; in a loader process, an error in place of the samples."""
        try:
            items = self._read_request(wanted)
        except Error as error:
            return wanted, loader_error(error)
        if wanted.ahead:  # after what is needed now
            self.dataset.read_ahead(wanted.ahead)
        return wanted, items

    def _read_request(self, wanted: ReadRequest) -> Any:
        batch = None if self.columns is None else self.columns.cut(wanted.indices)
        if batch is not None:
            return batch
        if not self._draws:
            self._quiet.begin()
            items = self._read(wanted, wanted.indices)
            self._draws = self._quiet.is_broken()
            if not self._draws:
                return items
        items = []
        for index in wanted.indices:
            number = derive_seed(self.seed, "sample", wanted.epoch, index)
            seed_all(number)
            seed_own(self._own, number)
            items += self._read(wanted, [index])
        return items

    def _read(self, wanted: ReadRequest, indices: list[int]) -> Any:
        if self.screen is None:
            return self._unscreened(indices)
        return self.screen.read(wanted, indices, at_once=hasattr(self.dataset, "__getitems__"))

    def _unscreened(self, indices: list[int]) -> Any:
        items = self._whole(indices)
        if self.keys is None and not self.carry:
            return items
        made = []
        for index, item in zip(indices, items, strict=True):
            try:
                picked = item if self.keys is None else self.keys.pick(item)
                made.append(
                    PassthroughSample(picked, index, passthrough_of(item, self.carry)) if self.carry else picked
                )
            except DataError as error:
                raise DataError(f"sample {index} of {self.name}: {error}") from None
        return made

    def _carried_alone(self, index: int) -> dict[str, Plain]:
        """Return the carried values of an unreadable sample, as far as the dataset reads columns alone."""
        read = getattr(self.dataset, "read_values", None)
        item = {} if read is None else read(index, self.carry)
        values: dict[str, Plain] = {}
        for key in item:
            with suppress(DataError):  # a value that cannot be carried
                (values[key],) = passthrough_of(item, [key])
        return values

    def _whole(self, indices: list[int]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            return read_many(many, indices, self.name)
        items, get, index = [], self.dataset.__getitem__, -1
        try:
            for index in indices:
                items.append(get(index))
        except Error:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(error_text(f"sample {index} of {self.name}", error)) from error
        return items


NOTHING: tuple[Indices, None] = (np.empty(0, np.int64), None)  # a batch without rows
AT_ONCE = 4096  # positions whose samples are computed at once: for one small shard numpy's overhead would dominate
REMEMBERED = 256  # times so many positions: a loader asks for a shard long before its step does


class Skipping:
    """A function of a shard that leaves out the samples of the job's `skip`: their positions are missing from it."""

    def __init__(self, job: Job, dataset: Any) -> None:
        self._samples = np.array(job.skipped, np.int64)
        self._order = order_of(job, dataset) if job.skipped else None
        self._remembered = functools.lru_cache(maxsize=REMEMBERED)(self._skipped)

    def __call__(self, shard: Shard) -> Shard:
        """Return the shard without what is skipped."""
        if self._order is None or shard.start == shard.stop:
            return shard
        blocks = range(shard.start // AT_ONCE, (shard.stop - 1) // AT_ONCE + 1)
        skipped = (at for block in blocks for at in self._remembered(shard.epoch, block))
        missing = tuple(at for at in skipped if shard.start <= at < shard.stop)
        return dataclasses.replace(shard, missing=missing) if missing else shard

    def _skipped(self, epoch: int, block: int) -> list[int]:
        """Return the positions of what is skipped, among those of a block of an epoch's order."""
        assert self._order is not None
        start, order = block * AT_ONCE, dataclasses.replace(self._order, epoch=epoch)
        samples = order.indices(start, min(len(order), start + AT_ONCE))
        positions: list[int] = (np.flatnonzero(np.isin(samples, self._samples)) + start).tolist()
        return positions


def load_shards(
    job: Job,
    dataset: Any,
    work: Work,
    device: torch.device,
    pick: Pick | None = None,
    name: str = "the dataset",
    times: StepTimes | None = None,
) -> Generator[Batch, None, None]:
    """Yield the sample indices and the batch, on `device`, of each shard of `work`, in its order.

    The batch is the collated one, or what `pick` returns for it; None for a shard of which all samples are skipped.
    `times` measures the wait for batches, and the loader's work. Close the generator, also after an error: then
    nothing more is read in the background.

    Raises DataError if reading a sample raises; the message names the sample and the dataset by `name`.
    Raises DataError if a leaf of the model's inputs does not have one row for each sample of the shard.
    """
    hold_blocks(job, dataset, work)
    make = _whole_batches if job.scatter == "batch" else _shards
    times, keys = times or StepTimes(), item_keys(job)
    columns = whole_columns(job, dataset, keys)
    samples = Samples(dataset, job.seed, name, keys, columns, times, carry=passthrough_keys(job))
    return times.waiting(on_device(make(job, samples, work, device, pick), device, times.clock))


def _shards(job: Job, samples: Samples, work: Work, device: torch.device, pick: Pick | None) -> Iterator[Batch]:
    """Read and collate each shard by itself: only the worker's own rows are read."""
    skipping = Skipping(job, samples.dataset)
    with make_loader(job, samples, functools.partial(filled_shards, work, skipping), device) as loaded:
        for shard in (skipping(one) for _, shards in work for one in shards):
            indices, batch = next_batch(loaded) if shard.rows else NOTHING
            yield indices, checked(job, batch, pick, shard.rows, f"shard {shard.shard} of step {shard.step}")


def _whole_batches(
    job: Job, samples: Samples, work: Work, device: torch.device, pick: Pick | None
) -> Iterator[Batch]:
    """Collate the whole global batch, then cut it: for collates that pad to the batch's longest."""
    skipping = Skipping(job, samples.dataset)
    with make_loader(job, samples, functools.partial(filled_batches, work, skipping), device) as loaded:
        for step, shards in work:
            if not shards:
                continue
            whole = skipping(work.split.whole(step))
            indices, batch = next_batch(loaded) if whole.rows else NOTHING
            picked = checked(job, batch, pick, whole.rows, f"the global batch of step {step}")
            if whole.missing:
                yield from pieces_of(whole, map(skipping, shards), indices, picked, job.batch_dim)
                continue
            pieces = scatter(picked, job.num_shards, job.batch_dim)
            for shard in shards:
                yield indices[shard.start - whole.start : shard.stop - whole.start], pieces[shard.shard]


def filled_shards(work: Work, skipping: Callable[[Shard], Shard]) -> Iterator[Shard]:
    """Yield a worker's shards that have rows, in order; `skipping` gives a shard without what is skipped."""
    return (one for _, shards in work for one in map(skipping, shards) if one.rows)


def filled_batches(work: Work, skipping: Callable[[Shard], Shard]) -> Iterator[Shard]:
    """Yield the whole global batches that have rows, of which the worker has shards."""
    return (one for step, shards in work if shards and (one := skipping(work.split.whole(step))).rows)


def pieces_of(
    whole: Shard, shards: Iterable[Shard], indices: Indices, picked: Any, batch_dim: int
) -> Iterator[tuple[Indices, Any]]:
    """Yield each shard's indices and rows, cut from the whole global batch's; None for a shard without rows.

    The shards keep the borders that they have in a batch of which nothing is missing.
    """
    positions = whole.positions
    for shard in shards:
        first = bisect_left(positions, shard.start)
        end = first + shard.rows
        yield indices[first:end], cut(picked, first, end, batch_dim) if shard.rows else None


def make_loader(
    job: Job,
    samples: Samples,
    pieces: Callable[[], Iterator[Shard]],
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None = None,
) -> TimedLoader:
    """Start torch's DataLoader of these pieces, by default with the job's collate."""
    loader, processes, screen = job.loader, num_processes(job), samples.screen
    order = order_of(job, samples.dataset)
    # The client of an object store does not survive a fork: a dataset that reads from one asks for "spawn".
    context = loader.context or getattr(samples.dataset, "loader_context", None)
    seed = None if job.collate is None else job.seed
    collate = collate or collate_of(job)
    if samples.carry:
        collate = functools.partial(collate_passthrough, collate, samples.carry)
    picks = item_keys(job) is not None
    collates = functools.partial(collated, collate=collate, seed=seed, screen=screen, picks=picks)
    made: DataLoader[Any] = DataLoader(
        TimedReads(samples, getattr(samples.dataset, "take_seconds_ahead", None)),
        batch_sampler=IndexLists(order, pieces, look_ahead(order, samples.dataset, processes)),  # type: ignore[arg-type]
        collate_fn=TimedCollate(collates),
        num_workers=processes,
        timeout=screen.limit.poll_seconds if screen is not None and screen.limit is not None else 0,
        prefetch_factor=loader.prefetch if processes else None,
        pin_memory=device.type == "cuda" if loader.pin_memory == "auto" else loader.pin_memory,
        persistent_workers=loader.persistent and processes > 0,
        multiprocessing_context=context if processes else None,
        worker_init_fn=begin_process,
    )
    return TimedLoader(made, samples.times, getattr(samples.dataset, "stop_reading_ahead", None))


def num_processes(job: Job) -> int:
    """Return how many processes load for each worker: only in one of them can a sample's read be ended."""
    has_limit = job.on_error is not None and job.on_error.timeout is not None
    return job.loader.processes or int(has_limit)


def collate_of(job: Job) -> Callable[[list[Any]], Any]:
    """Return the user's collate, or torch's with the rows along `batch_dim`."""
    if job.collate is None:
        return functools.partial(_default_collate, batch_dim=job.batch_dim)
    collate: Callable[[list[Any]], Any] = bound("collate", job.collate)
    return collate


def _default_collate(items: list[Any], batch_dim: int) -> Any:
    """Collate as torch does, then move the rows from dimension 0 to `batch_dim`; labels of one dimension stay."""
    batch = default_collate(items)
    if batch_dim == 0:
        return batch

    def along(leaf: Any) -> Any:
        return leaf.movedim(0, batch_dim) if leaf.ndim > batch_dim else leaf

    return map_leaves(along, batch)


def collated(
    read: tuple[ReadRequest, Any],
    collate: Callable[[Any], Any],
    seed: int | None,
    screen: Screen | None,
    picks: bool = False,
) -> Batch:
    """Collate the samples that were read; with a `screen`, return a Screened in place of the batch.

    `picks` says that `inputs` and `target` have picked keys of the items.
    """
    wanted, items = read
    indices = np.asarray(wanted.indices, np.int64)
    if isinstance(items, LoaderError | ColumnSlice):
        return indices, items if isinstance(items, LoaderError) else items.batch
    seeded = functools.partial(_collate_seeded, wanted, collate, seed, picks)
    try:
        return indices, seeded(items) if screen is None else screen.collate(items, wanted.indices, seeded)
    except Error as error:
        return indices, loader_error(error)


def _collate_seeded(
    wanted: ReadRequest, collate: Callable[[Any], Any], seed: int | None, picks: bool, items: Any
) -> Any:
    """Collate samples; random numbers that the user's collate draws are keyed by the shard."""
    if seed is not None:
        seed_all(derive_seed(seed, "collate", wanted.epoch, wanted.step, wanted.shard))
    note = ", of which inputs and target pick keys before the collate" if picks else ""
    with reraise_as("collate", lambda _: f"; it got samples {listed(wanted.indices)}{note}", DataError):
        return collate(items)


class LoaderError(NamedTuple):
    """An error of a loader process, as sent to the worker, with the user's frames.

    If the error were raised, torch would put the whole traceback into its message.
    """

    error: Error
    frames: str


def loader_error(error: Error) -> LoaderError:
    """Return, in a loader process, the error to send; in the worker itself, raise it."""
    if get_worker_info() is None:
        raise error
    return LoaderError(error, frames_of(error))


def next_batch(loaded: Iterator[Batch]) -> Batch:
    """Return the next batch; raise what a loader process sent in its place, or DataError if one has ended."""
    try:
        batch = next(loaded)
    except RuntimeError as error:
        if "cannot pin" not in str(error):
            raise
        what = "samples that are on a GPU already, or are not dense, cannot be copied to pinned memory"
        raise DataError(f"{what}; set loader.pin_memory: false") from error
    except (EOFError, ConnectionError, FileNotFoundError) as error:  # its tensor was to be fetched from a process
        raise loader_ended_error() from error
    sent = batch[1]
    if not isinstance(sent, LoaderError):
        return batch
    if sent.frames:
        sent.error.add_note(sent.frames)
    raise sent.error


def checked(job: Job, batch: Any, pick: Pick | None, rows: int, what: str) -> Any:
    """Return the batch, or what `pick` makes of it, after a check that the inputs have one row for each sample.

    None for a batch of no rows.
    """
    if not rows:
        return None
    if isinstance(batch, PassthroughBatch):
        return batch._replace(batch=checked(job, batch.batch, pick, rows, what))
    picked = batch if pick is None else pick(batch)
    if job.step is None:  # only the user's step knows which parts of its batch hold rows
        check_rows(job, model_inputs(job, batch) if pick is None else picked, rows, what)
    return picked


def check_rows(job: Job, inputs: Any, rows: int, what: str) -> None:
    """Raise DataError unless each leaf of the inputs has this many rows."""
    got = num_rows(inputs, job.batch_dim)
    if got is not None and got != rows:
        raise DataError(
            f"{what} has {rows} rows, but collate gave {got} along dimension {job.batch_dim}: "
            f"{sizes(inputs)}; collate must give one row for each sample"
        )


def on_device(batches: Iterator[Batch], device: torch.device, clock: StepClock | None = None) -> Iterator[Batch]:
    """Yield the batches on `device`; on a GPU the next batch is copied while the current one is computed."""
    if device.type != "cuda":
        yield from batches if device.type == "cpu" else (_move(batch, device) for batch in batches)
        return
    clock = clock or SilentClock()
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ready = None
    for batch in batches:
        before = clock.enter(Part.HOST_TO_DEVICE)
        with torch.cuda.stream(copies):
            coming = _move(batch, device), copies.record_event()
        current = _wait_for(*ready, device) if ready is not None else None
        clock.enter(before)
        if current is not None:
            yield current
        ready, current = coming, None  # a name would keep the batch's memory while the next one is copied
    if ready is not None:
        yield _wait_for(*ready, device)


def _move(batch: Batch, device: torch.device) -> Batch:
    indices, inputs = batch
    return indices, map_leaves(lambda leaf: moved(leaf, device), inputs)


def _wait_for(batch: Batch, copied: "torch.cuda.Event", device: torch.device) -> Batch:
    """Return the batch once the computing stream waits for its copy, and its memory is not reused too early."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(copied)  # not wait_stream: the next batch's copy is in the queue already
    for leaf in flatten(batch[1])[0]:
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(computing)
    return batch


def seeded_dataset(job: Job, name: str = "dataset") -> Any:
    """Build the job's dataset after seeding: random data is the same on every worker and in every run.

    Raises what `build_dataset` raises.
    """
    if isinstance(job.dataset, Target):
        resolve(name, job.dataset)  # before seeding: a module may draw random numbers, but on its first import only
    with preserved(CPU):
        seed_all(dataset_seed(job, name))
        return build_dataset(job, name)


@dataclasses.dataclass
class OverlappedRead:
    """One batch ahead of those that `passing` yields, read where the worker would otherwise wait for the others.

    An error of reading it is raised where that batch is due: a training that ends before it never meets the error.
    """

    _batches: Batches | None = None
    _ahead: Future[Batch] | None = None  # the batch, or the error of its reading

    def passing(self, batches: Batches) -> Batches:
        """Yield the same batches; one that was read ahead is there at once. Closing it closes `batches`."""
        self._batches = batches
        try:
            while True:
                ahead, self._ahead = self._ahead, None
                try:
                    batch = next(batches) if ahead is None else ahead.result()
                except StopIteration:
                    return
                del ahead  # it holds the batch, which may be large, until the next one is asked for
                yield batch
        finally:
            self._batches = self._ahead = None
            batches.close()

    def read(self) -> None:
        """Read the next batch now; nothing happens before the first one is asked for."""
        if self._batches is None or self._ahead is not None:
            return
        ahead: Future[Batch] = Future()
        try:
            ahead.set_result(next(self._batches))
        except Exception as error:
            ahead.set_exception(error)
        self._ahead = ahead

"""Torch's DataLoader of one worker: it reads the user's samples and collates them. Begin at `make_loader`.

Most of this runs in the loader's processes, if there are any. `next_batch` raises in the worker what they sent.
"""

import dataclasses
import functools
import io
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.context import BaseContext, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from dp_ray.engine.bad_samples import HungRead, ReadLimit, Reference, Screen, end_loader_process
from dp_ray.engine.inside import inside
from dp_ray.engine.items import ColumnSlice, SampleReader, WholeColumns, collate_passthrough
from dp_ray.engine.objects import part_that_fails
from dp_ray.engine.random import OwnGenerator, SampleSeeds, own_generators, preserved, seed_all, seed_own
from dp_ray.engine.timed_loader import StepTimes, TimedLoader, begin_process
from dp_ray.engine.user_code import loader_ended_error, reraise_as
from dp_ray.engine.world import CPU
from dp_ray.errors import DataError, Error, JobError, frames_of
from dp_ray.job.job import Job
from dp_ray.job.samples import IndexLists, Indices, ReadRequest, look_ahead, order_of
from dp_ray.job.targets import bound
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard
from dp_ray.tensors.tree import bare_tensors, flatten, map_leaves, unflatten, with_tensors
from dp_ray.text import listed

LOOKS = 32
Pieces: TypeAlias = Callable[[], Iterator[Shard]]


class Read(NamedTuple):
    """The samples of a request, or an error in place of them, and the seconds that reading them took."""

    wanted: ReadRequest
    items: Any
    seconds: float


@dataclasses.dataclass(eq=False)
class Samples(Dataset[Any]):
    """The user's dataset, whose errors name the sample, and whose samples have random numbers of their own.

    Samples are read a shard at a time until one draws a random number. That shard is then read again, and from
    there on each sample is read by itself, after seeding the generators that samples have drawn from so far. The
    result is the same as with seeding all from the start. Where `columns` cut a batch as it is, no sample is read by
    itself. A `screen` of the same reader puts a BadSample in the place of each sample that
    cannot be read. A dataset with a `set_epoch` is told each epoch before the first read of it in this process.
    """

    reader: SampleReader
    seed: int
    columns: WholeColumns | None = None
    times: StepTimes = dataclasses.field(default_factory=StepTimes)
    screen: Screen | None = None
    told: dict[int, int] = dataclasses.field(default_factory=dict)  # of Source

    def __post_init__(self) -> None:
        self.dataset = self.reader.dataset
        self._tells = callable(getattr(self.dataset, "set_epoch", None))
        self._is_bare = self.screen is None and self.reader.keys is None and not self.reader.carry
        self._seeds: SampleSeeds | None = None
        self._looks = 0  # after how many more requests to look for generators that are new

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `times`: no use in a loader's process, and on a GPU they hold events, which stay here.

        The dataset has another id there, and generators of its own.
        """
        return {**self.__dict__, "times": None, "told": {}, "_seeds": None}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, wanted: ReadRequest) -> Read:
        """Return the samples of a request; in a loader process, an error in place of them."""
        began = time.perf_counter()
        try:
            if self._tells and self.told.get(id(self.dataset)) != wanted.epoch:
                self._tell(wanted.epoch)
            items: Any = None if self.columns is None else self.columns.cut(wanted.indices)
            if items is None:
                items = self._seeded(wanted)
            if wanted.ahead:  # after what is needed now
                self.dataset.read_ahead(wanted.ahead)
        except Error as error:
            items = loader_error(error)
        in_background = getattr(self.dataset, "take_seconds_ahead", None)
        return Read(wanted, items, time.perf_counter() - began + (in_background() if in_background else 0.0))

    def _seeded(self, wanted: ReadRequest) -> Any:
        """Return the samples of a request, each with random numbers of its own."""
        if self._seeds is None:
            self._seeds, self._looks = SampleSeeds(self._own_generators()), LOOKS
        while True:
            items = failed = None
            self._seeds.begin()
            try:
                if self._seeds.drawn:
                    items = self._each(wanted, self._seeds)
                else:
                    items = self.reader.whole(wanted.indices) if self._is_bare else self._read(wanted, wanted.indices)
            except Error as error:  # what was drawn before it was seeded may have led to it
                failed = error
            has_learnt = self._seeds.learn()
            if self._looks:  # a dataset may make its generators in its first reads
                has_learnt |= self._finds_new()
            if not has_learnt:
                if failed is not None:
                    raise failed
                return items

    def _finds_new(self) -> bool:
        """Return whether the dataset has other generators now; then these are watched."""
        assert self._seeds is not None
        own, self._looks = self._own_generators(), self._looks - 1
        if [each.rng for each in own] == [each.rng for each in self._seeds.own]:
            return False
        self._seeds = SampleSeeds(own)
        return True

    def _own_generators(self) -> list[OwnGenerator]:
        return own_generators(self.dataset, with_globals=True)[0]

    def _each(self, wanted: ReadRequest, seeds: SampleSeeds) -> Any:
        """Return the samples of a request, each read by itself."""
        items: list[Any] = []
        for index in wanted.indices:
            seeds.seed(derive_seed(self.seed, "sample", wanted.epoch, index))
            items += self._read(wanted, [index])
        return items

    def _tell(self, epoch: int) -> None:
        """Tell the dataset which epoch comes. What it draws for that is the same in every process."""
        number, rows = derive_seed(self.seed, "set_epoch", epoch), len(self.dataset)
        with preserved(CPU), reraise_as(f"set_epoch({epoch}) of {self.reader.name}", kind=DataError):
            seed_all(number)
            seed_own(self._own_generators(), number)
            self.dataset.set_epoch(epoch)
        if len(self.dataset) != rows:
            raise DataError(
                f"set_epoch({epoch}) of {self.reader.name} made it {len(self.dataset)} samples long, and it had "
                f"{rows}: the steps of all epochs are planned before; keep its length"
            )
        self.told[id(self.dataset)] = epoch
        self._seeds = None  # it may have made new generators

    def _read(self, wanted: ReadRequest, indices: list[int]) -> Any:
        return self.reader(indices) if self.screen is None else self.screen.read(wanted, indices)


def make_loader(
    job: Job,
    samples: Samples,
    pieces: Pieces,
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None = None,
) -> TimedLoader:
    """Start torch's DataLoader of these pieces, by default with the job's collate."""
    loader, processes, screen = job.loader, num_processes(job), samples.screen
    order = order_of(job, samples.dataset)
    # The client of an object store does not survive a fork: a dataset that reads from one asks for "spawn".
    context = loader.context or getattr(samples.dataset, "loader_context", None)
    collate = collate or collate_of(job)
    if samples.reader.carry:
        collate = functools.partial(collate_passthrough, collate, samples.reader.carry)
    seed, own = (None, []) if job.collate is None else (job.seed, own_generators(collate, with_globals=True)[0])
    made: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=IndexLists(order, pieces, look_ahead(order, samples.dataset, processes)),  # type: ignore[arg-type]
        collate_fn=Collate(collate, seed, screen, samples.reader, own),  # type: ignore[arg-type]
        num_workers=processes,
        timeout=screen.limit.poll_seconds if screen is not None and screen.limit is not None else 0,
        prefetch_factor=loader.prefetch if processes else None,
        pin_memory=device.type == "cuda" if loader.pin_memory == "auto" else loader.pin_memory,
        persistent_workers=loader.persistent and processes > 0,
        multiprocessing_context=context if processes else None,
        worker_init_fn=begin_process,
    )
    try:
        return TimedLoader(made, samples.times, getattr(samples.dataset, "stop_reading_ahead", None))
    except Exception:
        if processes:
            _check_can_be_sent(made.multiprocessing_context or multiprocessing.get_context(), samples, collate)
        raise


def _generator_of(device: torch.device, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    return generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


# To a process that is not forked, torch itself sends the state in shared memory, where it is no longer there.
ForkingPickler.register(
    torch.Generator, lambda generator: (_generator_of, (generator.device, generator.get_state().numpy().tobytes()))
)


def _check_can_be_sent(context: BaseContext, samples: Samples, collate: Any) -> None:
    """Raise JobError, which names the part, if the dataset or the collate cannot be sent to a loader's process.

    A forked one is sent nothing. Python 3.14 forks none by default.
    """
    if context.get_start_method() == "fork":
        return

    def dump(value: Any) -> None:
        with open(os.devnull, "wb") as nowhere:
            ForkingPickler(nowhere).dump(value)

    # As while a process is started: locks and queues of multiprocessing can be pickled only then.
    standing_in: Any = SimpleNamespace(DupFd=int, duplicate_for_child=int)
    set_spawning_popen(standing_in)
    try:
        own = [(samples.reader.name, samples.dataset), ("collate", collate)]
        found = [(what, *fails) for what, value in own if (fails := part_that_fails(value, dump))]
    finally:
        set_spawning_popen(None)
    for what, name, part, error in found:
        if isinstance(part, FunctionType):
            advice = "give a function that has a name in a module, or set loader.context: fork"
        else:
            advice = "open it where it is used first, as in __getitem__, so that each process has its own"
        part_of = f"{what}'s attribute {name}" if name else what
        kind = (
            type(part).__qualname__
            if type(part).__module__ == "builtins"
            else f"{type(part).__module__}.{type(part).__qualname__}"
        )
        raise JobError(
            f"loader.context: {context.get_start_method()} pickles the dataset and the collate for each process, and "
            f"{part_of}, a {kind}, cannot be pickled: {type(error).__name__}: {error}; {advice}"
        ) from error


def remarks_on(job: Job, name: str, dataset: Any) -> list[str]:
    """Return lines on what a dataset holds that cannot be seeded, or that forked processes would share."""
    lines = []
    _, not_seeded = own_generators(dataset, with_globals=True)
    if not_seeded:
        lines.append(
            f"{name}: generators that cannot be seeded, so that what samples draw from them depends on workers and "
            f"loader processes: {listed(not_seeded)}; draw from the global ones of torch, numpy or random"
        )
    method = job.loader.context or getattr(dataset, "loader_context", None) or multiprocessing.get_start_method()
    if num_processes(job) and method == "fork" and (opened := opened_in(dataset)):
        lines.append(
            f"{name}: forked loader processes share the position in what it has open, and may read wrong rows: "
            f"{listed(opened)}; open it where it is used first, as in __getitem__, so that each process has its own"
        )
    return lines


def opened_in(dataset: Any) -> list[str]:
    """Return the files, archives and connections that a dataset holds open for reading, with their paths in it."""
    found: dict[Any, str] = {}  # by file descriptor: an archive and its file are the same
    for path, value in inside({"": dataset}, with_globals=True):
        kind = type(value)
        module = kind.__module__.partition(".")[0]
        if issubclass(kind, io.IOBase):
            with suppress(OSError, ValueError):  # it has no file, or is closed
                if value.readable() and value.seekable():
                    found.setdefault(value.fileno(), f"{path} ({getattr(value, 'name', kind.__qualname__)})")
        elif kind.__qualname__ in CONNECTIONS.get(module, ()):
            found[id(value)] = f"{path} (a {module}.{kind.__qualname__})"
    return list(found.values())


# Classes whose objects hold a file or a connection that is not to be used after a fork.
CONNECTIONS = {"sqlite3": ("Connection",), "h5py": ("File", "Group", "Dataset"), "lmdb": ("Environment",)}


def num_processes(job: Job) -> int:
    """Return how many processes load for each worker: only in one of them can a sample's read be ended."""
    has_limit = job.on_error is not None and job.on_error.timeout is not None
    return job.loader.processes or int(has_limit)


def collate_of(job: Job) -> Callable[[list[Any]], Any]:
    """Return the user's collate, or torch's with the rows along `batch_dim`."""
    if job.collate is None:
        return functools.partial(_collate_along, batch_dim=job.batch_dim) if job.batch_dim else default_collate
    collate: Callable[[list[Any]], Any] = bound("collate", job.collate)
    return collate


def _collate_along(items: list[Any], batch_dim: int) -> Any:
    """Collate as torch does, then move the rows from dimension 0 to `batch_dim`; labels of one dimension stay."""

    def along(leaf: Any) -> Any:
        return leaf.movedim(0, batch_dim) if leaf.ndim > batch_dim else leaf

    return map_leaves(along, default_collate(items))


class Collated(NamedTuple):
    """The seconds of reading and collating; and the samples' indices, and their batch."""

    seconds: float
    read: tuple[Indices, Any]

    def pin_memory(self) -> "Collated":
        """Return it in pinned memory; torch's loader, which would walk all tuples around the batch, calls this."""
        indices, batch = self.read
        if type(batch) is torch.Tensor:  # as most of a prediction
            return Collated(self.seconds, (indices, batch.pin_memory()))
        if (bare := bare_tensors(batch)) is not None:
            return Collated(self.seconds, (indices, with_tensors(batch, [tensor.pin_memory() for tensor in bare])))
        parts, spec = flatten(batch, is_whole=_can_pin)
        pinned = unflatten(spec, [part.pin_memory() if _can_pin(part) else part for part in parts])
        return Collated(self.seconds, (indices, pinned))


def _can_pin(node: Any) -> bool:
    """Return whether it is a tensor, or an object that puts its tensors into pinned memory itself."""
    return hasattr(node, "pin_memory") and not isinstance(node, type)


@dataclasses.dataclass(frozen=True)
class Collate:
    """Collates the samples that were read; with a `screen`, its batch is Screened.

    Random numbers that the user's collate draws, also from its `own` generators, are keyed by `seed` and the shard.
    `reader` has read the samples.
    """

    collate: Callable[[Any], Any]
    seed: int | None
    screen: Screen | None
    reader: SampleReader
    own: Sequence[OwnGenerator] = ()

    def __call__(self, read: Read) -> Collated:
        """Return the batch; in a loader process, an error may be in its place."""
        began = time.perf_counter()
        wanted, items, seconds = read
        indices = np.asarray(wanted.indices, np.int64)
        try:
            if isinstance(items, LoaderError | ColumnSlice):
                batch = items if isinstance(items, LoaderError) else items.batch
            elif self.screen is None:
                batch = self._seeded(wanted, items)
            else:
                batch = self.screen.collate(items, wanted.indices, functools.partial(self._seeded, wanted))
        except Error as error:
            batch = loader_error(error)
        return Collated(seconds + time.perf_counter() - began, (indices, batch))

    def _seeded(self, wanted: ReadRequest, items: Any) -> Any:
        if self.seed is not None:
            number = derive_seed(self.seed, "collate", wanted.epoch, wanted.step, wanted.shard)
            seed_all(number)
            seed_own(self.own, number)
        try:
            return self.collate(items)
        except (Exception, SystemExit):
            picks = self.reader.keys is not None
            note = ", of which inputs and target pick keys before the collate" if picks else ""
            with reraise_as("collate", lambda _: f"; it got {self.reader.named(wanted.indices)}{note}", DataError):
                raise


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


def next_batch(loader: Iterator[Any], limit: ReadLimit | None = None) -> tuple[Indices, Any] | HungRead:
    """Return the next batch; raise what a loader process sent in its place, or DataError if one has ended.

    With a limit, return a read that hangs in its place; the process that reads is ended.
    """
    while True:
        try:
            indices, batch = next(loader)
            break
        except RuntimeError as error:
            if "cannot pin" in str(error):
                what = "samples that are on a GPU already, or are not dense, cannot be copied to pinned memory"
                raise DataError(f"{what}; set loader.pin_memory: false") from error
            if limit is None or "DataLoader timed out" not in str(error):
                raise
        except (EOFError, ConnectionError, FileNotFoundError) as error:  # its tensor was to be fetched from a process
            raise loader_ended_error() from error
        if (hung := limit.hung()) is not None:
            end_loader_process(hung.pid)
            return hung
    if not isinstance(batch, LoaderError):
        return indices, batch
    if batch.frames:
        batch.error.add_note(batch.frames)
    raise batch.error


def new_screen(job: Job, reader: SampleReader, reference: Reference | None = None) -> Screen:
    """Make a screen for what a reader reads; the job must have `on_error`."""
    assert job.on_error is not None
    seconds = job.on_error.timeout
    limit = None if seconds is None else ReadLimit(seconds, num_processes(job))
    return Screen(reader, job.on_error.finite, job.collate is not None, limit, reference)

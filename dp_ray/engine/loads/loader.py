"""Torch's DataLoader of one worker: it reads the user's samples and collates them. Begin at `make_loader`.

Most of this runs in the loader's processes, if there are any. `TimedLoader` gives the worker the batches, or raises
what the processes sent. They begin and end as a run needs them: `started_loader`, `begin_process` and `Watch`.
"""

import dataclasses
import functools
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, queues, resource_tracker
from multiprocessing.context import BaseContext, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.loads.bad_samples import Reference, Screen
from dp_ray.engine.loads.items import ColumnSlice, SampleReader, WholeColumns, collate_passthrough
from dp_ray.engine.random import OwnGenerator, SampleSeeds, inside, own_generators, preserved, seed_all, seed_own
from dp_ray.engine.ship import part_that_fails
from dp_ray.engine.user_code import error_text, loader_ended_error, reraise_as
from dp_ray.engine.world import CPU, show_alone
from dp_ray.errors import DataError, Error, JobError, frames_of
from dp_ray.job.job import Job
from dp_ray.job.samples import IndexLists, ReadRequest, look_ahead, order_of
from dp_ray.job.targets import bound
from dp_ray.plan.order import derive_seed
from dp_ray.plan.split import Shard
from dp_ray.system.linux import end_with
from dp_ray.system.process import importing_from_here, patched
from dp_ray.system.threads import SIGNALS, if_longer
from dp_ray.tensors.tree import bare_tensors, flatten, map_leaves, unflatten, with_tensors
from dp_ray.text import listed

T = TypeVar("T")
_handling: Any = signal_handling  # Any, as its functions are torch's in C

LOOKS = 32
Pieces: TypeAlias = Callable[[], Iterator[Shard]]


class StepTimes:
    """The seconds of one worker's loop, in parts.

    `data_wait` is how long the loop waited for its next batch. `load` is how long reading and collating took: in the
    worker itself, or in its loader processes, all of them together. `clock` splits the steps into parts.
    """

    def __init__(self, clock: StepClock | None = None) -> None:
        self.clock = clock or StepClock()
        self.data_wait = 0.0
        self.load = 0.0
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Begin the loop and its first step now: the time before counts nowhere."""
        self._began = time.perf_counter()
        self.clock.restart()

    def waiting(self, batches: Iterator[T]) -> Generator[T, None, None]:
        """Yield the same batches; the wait for each is added to `data_wait`. Closing it ends `batches` too."""
        end: Any = object()
        while True:
            began, before = time.perf_counter(), self.clock.enter(Part.DATA_WAIT)
            batch = next(batches, end)
            self.clock.enter(before)
            self.data_wait += time.perf_counter() - began
            if batch is end:
                return
            yield batch

    def to_json(self) -> dict[str, float]:
        """Return the times as a result shows them; `loop_seconds` is the whole time since the loop began."""
        seconds = {"loop": time.perf_counter() - self._began, "data_wait": self.data_wait, "load": self.load}
        return {f"{name}_seconds": round(value, 6) for name, value in seconds.items()}


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
                drawn = self._seeds.drawn
                items = self._each(wanted, self._seeds) if drawn else self._read(wanted, wanted.indices)
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
        return self.reader(indices) if self.screen is None else self.screen.read(indices)


def make_loader(
    job: Job,
    samples: Samples,
    pieces: Pieces,
    device: torch.device,
    collate: Callable[[list[Any]], Any] | None = None,
) -> "TimedLoader":
    """Start torch's DataLoader of these pieces, by default with the job's collate."""
    loader, processes, screen = job.loader, job.loader.processes, samples.screen
    order = order_of(job, samples.dataset)
    # The client of an object store does not survive a fork: a dataset that reads from one asks for "spawn".
    context = getattr(samples.dataset, "loader_context", None) if processes else None
    if context not in (None, *(known := multiprocessing.get_all_start_methods())):
        what = f"{samples.reader.name}'s attribute loader_context"
        raise JobError(f"{what}: must be None, {' or '.join(map(repr, known))}, got {context!r:.80}")
    collate = collate or collate_of(job)
    if samples.reader.carry:
        collate = functools.partial(collate_passthrough, collate, samples.reader.carry)
    seed, own = (None, []) if job.collate is None else (job.seed, own_generators(collate, with_globals=True)[0])
    made: DataLoader[Any] = DataLoader(
        samples,
        batch_sampler=IndexLists(order, pieces, look_ahead(order, samples.dataset, processes)),  # type: ignore[arg-type]
        collate_fn=Collate(collate, seed, screen, samples.reader, own),  # type: ignore[arg-type]
        num_workers=processes,
        prefetch_factor=loader.prefetch if processes else None,
        pin_memory=device.type == "cuda" if loader.pin_memory == "auto" else loader.pin_memory,
        persistent_workers=loader.persistent and processes > 0,
        multiprocessing_context=context,
        worker_init_fn=begin_process,
    )
    try:
        at_end = getattr(samples.dataset, "stop_reading_ahead", None)
        return TimedLoader(made, samples.times, at_end)
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
        part_of, kind = f"{what}'s attribute {name}" if name else what, type(part)
        of_module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        advice = "open it where it is used first, as in __getitem__, so that each process has its own"
        if kind is FunctionType:
            advice = "give a function that a module names, or the dataset an attribute loader_context = 'fork'"
        raise JobError(
            f"loader.processes: {context.get_start_method()} pickles the dataset and the collate for each one, and "
            f"{part_of}, a {of_module}{kind.__qualname__}, cannot be pickled: {type(error).__name__}: {error}; "
            f"{advice}"
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
    method = getattr(dataset, "loader_context", None) or multiprocessing.get_start_method()
    if job.loader.processes and method == "fork" and (opened := opened_in(dataset)):
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
            found[id(value)] = f"{path} ({kind.__qualname__})"
    return list(found.values())


# Classes whose objects hold a file or a connection that is not to be used after a fork; that of lmdb has no module.
CONNECTIONS = {"sqlite3": ("Connection",), "h5py": ("File", "Group", "Dataset"), "builtins": ("Environment",)}


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
    """The seconds of reading and collating; and the samples' indices, and their batch, or an error in their place."""

    seconds: float
    read: Any

    def pin_memory(self) -> "Collated":
        """Return it in pinned memory; torch would make lists of tuples, and leave objects as they are."""
        if isinstance(self.read, LoaderError):
            return self
        indices, batch = self.read
        if (bare := bare_tensors(batch)) is not None:  # as most are
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
        """Collate what was read; in a loader process, an error goes in its place."""
        began = time.perf_counter()
        wanted, items, seconds = read
        result = items
        if not isinstance(items, LoaderError):
            try:
                result = np.asarray(wanted.indices, np.int64), self._batch(wanted, items)
            except Error as error:
                result = loader_error(error)
        return Collated(seconds + time.perf_counter() - began, result)

    def _batch(self, wanted: ReadRequest, items: Any) -> Any:
        if isinstance(items, ColumnSlice):
            return items.batch
        if self.screen is None:
            return self._seeded(wanted, items)
        return self.screen.collate(items, wanted.indices, functools.partial(self._seeded, wanted))

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


def new_screen(job: Job, reader: SampleReader, reference: Reference | None = None) -> Screen:
    """Make a screen for what a reader reads; the job must have `on_error`."""
    assert job.on_error is not None
    return Screen(reader, job.on_error.finite, job.collate is not None, reference)


class TimedLoader(Iterator[Any]):
    """The batches of a DataLoader that gives each after the seconds it took, which are added to `load`.

    It is no generator: after an error of the DataLoader, the next batch can be asked for. Use it in a `with` block,
    whose end calls `at_end` and ends the DataLoader's processes.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        times: StepTimes,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self._batches = started_loader(loader)
        self._watch = Watch(self._batches) if isinstance(self._batches, _MultiProcessingDataLoaderIter) else None
        self._times = times
        self._at_end = at_end

    def __enter__(self) -> "TimedLoader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._at_end is not None:
            self._at_end()
        if self._watch is not None:
            self._watch.end()

    def __next__(self) -> Any:
        """Return the next batch; raise what a process sent in its place, or DataError if one has ended at work."""
        try:
            seconds, read = next(self._batches)
        except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
            if self._watch is not None and (ended := self._watch.ended(END_SECONDS)):
                raise loader_ended_error(ended.pid, ended.exitcode) from None
            if "cannot pin" in str(error):
                what = "samples that are on a GPU already, or are not dense, cannot be copied to pinned memory"
                raise DataError(f"{what}; set loader.pin_memory: false") from error
            if not isinstance(error, RuntimeError):  # its tensor was to be fetched from a process
                raise loader_ended_error() from error
            raise
        self._times.load += seconds
        if isinstance(read, LoaderError):
            if read.frames:
                read.error.add_note(read.frames)
            raise read.error
        return read


END_SECONDS = 1.0  # how long a process may take to end by itself, once its data is not needed
LOOK_SECONDS = 5.0  # after which a process is checked: a child of it that lives on may hide its end


class _EndOfFile:
    """In place of a batch: what unpacks it gets the end of a file."""

    def __iter__(self) -> Iterator[Any]:
        raise EOFError


class Watch:
    """A thread that waits for the end of a loader's processes; use `end` to end them.

    If one ends in the midst of its work, all end, and a reader that waits for them reads the end of a file: also in
    the midst of a batch, or for a lock that the process held. So the error is raised where the next batch is awaited,
    in any thread. The handler of a signal, as torch's, raises wherever the main thread is.
    """

    def __init__(self, batches: _MultiProcessingDataLoaderIter) -> None:
        self._batches = batches
        self._processes: list[Any] = batches._workers
        self._ended: Any = None
        self._has_ended = threading.Event()
        if batches._pin_memory:  # its thread may take a batch from a process that is killed meanwhile
            thread: Any = batches._pin_memory_thread
            tells, ends = thread._invoke_excepthook, EOFError | OSError
            thread._invoke_excepthook = lambda args: None if isinstance(sys.exc_info()[1], ends) else tells(args)
        self._thread = threading.Thread(target=self._wait, name="end of the loader's processes", daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> Any:
        """Return the process that ended in the midst of its work; None if none has within so many seconds."""
        return self._ended if self._has_ended.wait(seconds) else None

    def _wait(self) -> None:
        sentinels = [process.sentinel for process in self._processes]
        while True:
            connection.wait(sentinels, LOOK_SECONDS)
            if self._batches._shutdown:  # by `end`, or by torch after the last batch
                return
            if ended := [process for process in self._processes if process.exitcode is not None]:
                break
        self._ended = ended[0]
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._has_ended.set()
        batches: Any = self._batches
        if batches._pin_memory:  # its thread reads the pipe then, and hands on
            batches._data_queue.put(_EndOfFile())
        batches._worker_result_queue._writer.close()

    def end(self) -> None:
        """End the processes, also in the midst of a read.

        This is not left to torch: the frames of an error hold the iterator. Once only the garbage collector finds it,
        the queue through which torch would end its processes is closed already, and torch waits for each for 5 s.
        """
        batches: Any = self._batches
        if self._has_ended.is_set() and not batches._shutdown:
            batches._shutdown = True  # torch's way would wait for a lock that the process may have held
            _handling._remove_worker_pids(id(batches))
            for queue in batches._index_queues:
                queue.cancel_join_thread()
                queue.close()
        with if_longer(END_SECONDS, lambda: [process.terminate() for process in self._processes]):
            batches._shutdown_workers()
        self._thread.join(END_SECONDS)


def started_loader(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the loader, and return its batches; its processes hold signals back until `begin_process`.

    They find the modules of the job where this process found them: one that is not forked gets a copy of sys.path.
    """
    if not loader.num_workers:
        return iter(loader)
    context: Any = loader.multiprocessing_context or multiprocessing
    with importing_from_here(), _unknown_to_torchs_handler():
        if context.get_start_method() == "forkserver":
            return iter(loader)  # a server would hold them back from all that is ever forked from it
        resource_tracker.ensure_running()  # before signals are blocked: it lets them through when it starts
        # Until `begin_process`, a signal for the whole group would end the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_STARTING = threading.Lock()


@contextmanager
def _unknown_to_torchs_handler() -> Iterator[None]:
    """Within the block, torch sets no handler for SIGCHLD, and one that is there gets to know no process.

    It raises in the main thread, wherever that is: in the user's code, or while Python starts a thread. If other code
    starts a DataLoader meanwhile, torch finds its ended processes by its check every 5 s.
    """
    know = _handling._set_worker_pids
    with (
        _STARTING,
        patched(_handling, _set_worker_pids=lambda loader, _: know(loader, ()), _set_SIGCHLD_handler=lambda: None),
    ):
        yield


def begin_process(_: int) -> None:
    """Ignore, in a loader's process, signals for the whole group that stop a run, but not torch's that ends it.

    The user's code sees the same world as elsewhere, of one process.
    A terminal's Ctrl-C, and the SIGTERM or SIGUSR2 of `timeout` or of a batch system, go to all processes of a group.
    They are a planned stop of the run, whose current step still needs what this process reads.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    show_alone("fake")  # torch's backend without threads: its collectives work for one process
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # drops one that was held back
    torch._C._set_worker_signal_handlers()
    queues.Queue._on_queue_feeder_error = _send_instead  # type: ignore[attr-defined]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _send_instead(queue: Any, error: Exception, put: Any) -> None:
    """Send, from a loader's process, an error in place of a batch that cannot be sent: the worker waits for it.

    A thread of the queue pickles the batch and shares its tensors' memory. Python only has it print the error.
    """
    match put:
        case int(number), (float(seconds), _):
            says = error_text("sending a batch from the loader's process to the worker", error)
            queue.put((number, (seconds, LoaderError(DataError(says), ""))))
        case _:  # a queue of the user's
            traceback.print_exception(error)

"""Where the time of a worker's steps goes: how long they wait for data, and how long reading the data takes.

The processes of a DataLoader: how they begin, which signals they heed, and how they end.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dp_ray.engine.bad_samples import arm_loader
from dp_ray.engine.clock import Part, StepClock
from dp_ray.system.process import importing_from_here
from dp_ray.system.threads import SIGNALS

END_SECONDS = 1.0  # how long a process may take to end by itself, once nobody needs what it reads


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches; its processes hold signals back until `begin_process`, but those of a "forkserver".

    They find the modules of the job where this process found them: one that is not forked gets a copy of sys.path.
    """
    if not loader.num_workers:
        return iter(loader)
    context: Any = loader.multiprocessing_context or multiprocessing
    with importing_from_here():
        if context.get_start_method() == "forkserver":
            return iter(loader)  # a server would hold them back from all that is ever forked from it
        resource_tracker.ensure_running()  # it lets signals through when it starts
        with _signals_held():
            return iter(loader)


@contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_process(process: int) -> None:
    """In a process of a loader: heed neither Ctrl-C nor a SIGTERM for the whole group, but torch's that ends it.

    A terminal's Ctrl-C, and the SIGTERM of `timeout` or of a batch system, go to all processes of a group. They are
    a planned stop of the run, whose current step still needs what this process reads.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drops one that was held back
    torch._C._set_worker_signal_handlers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    arm_loader(process)


def end(batches: Iterator[Any]) -> None:
    """End the processes behind a DataLoader's batches, also in the midst of a read.

    This is not left to torch: the frames of an error hold the iterator. Once only the garbage collector finds it, the
    queue through which torch would end its processes is closed already, and torch waits for each of them for 5 s.
    """
    if not isinstance(batches, _MultiProcessingDataLoaderIter):
        return
    late = threading.Timer(END_SECONDS, _terminate, (batches._workers,))
    late.daemon = True
    late.start()
    try:
        batches._shutdown_workers()
    finally:
        late.cancel()


def _terminate(processes: list[Any]) -> None:
    for one in processes:
        one.terminate()


T = TypeVar("T")


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
        self._told = 0.0

    def begin(self) -> None:
        """Begin the loop and its first step now: what was set up before counts nowhere."""
        self._began = time.perf_counter()
        self.clock.restart()

    def waiting(self, batches: Iterator[T]) -> Generator[T, None, None]:
        """The same batches; the time until each is there counts as `data_wait`. Closing it ends `batches` too."""
        end: Any = object()
        while True:
            began, before = time.perf_counter(), self.clock.enter(Part.DATA_WAIT)
            batch = next(batches, end)
            self.clock.enter(before)
            self.data_wait += time.perf_counter() - began
            if batch is end:
                return
            yield batch

    def new_data_wait(self) -> float:
        """The `data_wait` since the last call."""
        new, self._told = self.data_wait - self._told, self.data_wait
        return new

    def to_json(self) -> dict[str, float]:
        """All of it as a result shows it; `loop_seconds` is the whole time since the loop began."""
        seconds = {"loop": time.perf_counter() - self._began, "data_wait": self.data_wait, "load": self.load}
        return {f"{name}_seconds": round(value, 6) for name, value in seconds.items()}


class TimedReads(Dataset[Any]):
    """A dataset that says with what it reads how many seconds that took; `beside` tells those in the background."""

    def __init__(self, dataset: Any, beside: Callable[[], float] | None = None) -> None:
        self.dataset = dataset
        self.beside = beside

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, wanted: Any) -> tuple[float, Any]:
        """What the dataset gives, after the seconds."""
        began = time.perf_counter()
        read = self.dataset.__getitems__(wanted)
        return time.perf_counter() - began + (self.beside() if self.beside else 0.0), read


class TimedCollate:
    """A collate for what TimedReads gives; its batch follows the seconds of both."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, read: Any) -> tuple[float, Any]:
        """The seconds, and the batch."""
        began = time.perf_counter()
        batch = self.collate(read[1])
        return read[0] + time.perf_counter() - began, batch


class TimedLoader(Iterator[Any]):
    """The batches of a DataLoader of TimedReads and a TimedCollate; their seconds are added to `load`.

    It is no generator: after an error of the DataLoader, the next batch can be asked for. Use it in a `with` block,
    whose end calls `at_end` and ends the DataLoader's processes.
    """

    def __init__(self, loader: DataLoader[Any], times: StepTimes, at_end: Callable[[], None] = lambda: None) -> None:
        self._batches = started(loader)
        self._times = times
        self._at_end = at_end

    def __enter__(self) -> "TimedLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self._at_end()
        end(self._batches)

    def __next__(self) -> Any:
        seconds, batch = next(self._batches)
        self._times.load += seconds
        return batch


def share_of_wait(times: list[dict[str, float]]) -> float | None:
    """The share of the workers' loops in which they waited for data; None if no worker told its times."""
    whole = sum(one["loop_seconds"] for one in times)
    return round(sum(one["data_wait_seconds"] for one in times) / whole, 4) if whole else None

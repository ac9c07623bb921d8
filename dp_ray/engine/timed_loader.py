"""A DataLoader whose reads are timed, and whose processes begin and end as a run needs them.

`StepTimes` says how long a worker's steps wait for data, and how long reading the data takes.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.world import show_alone
from dp_ray.system.process import importing_from_here
from dp_ray.system.threads import SIGNALS, if_longer

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
        self._reported_wait = 0.0

    def begin(self) -> None:
        """Begin the loop and its first step now: what was set up before counts nowhere."""
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

    def new_data_wait(self) -> float:
        """Return the `data_wait` since the last call."""
        new = self.data_wait - self._reported_wait
        self._reported_wait = self.data_wait
        return new

    def to_json(self) -> dict[str, float]:
        """Return the times as a result shows them; `loop_seconds` is the whole time since the loop began."""
        seconds = {"loop": time.perf_counter() - self._began, "data_wait": self.data_wait, "load": self.load}
        return {f"{name}_seconds": round(value, 6) for name, value in seconds.items()}


class TimedLoader(Iterator[Any]):
    """The batches of a DataLoader that gives each after the seconds it took, which are added to `load`.

    It is no generator: after an error of the DataLoader, the next batch can be asked for. Use it in a `with` block,
    whose end calls `at_end` and ends the DataLoader's processes.
    """

    def __init__(self, loader: DataLoader[Any], times: StepTimes, at_end: Callable[[], None] | None = None) -> None:
        self._batches = started(loader)
        self._times = times
        self._at_end = at_end

    def __enter__(self) -> "TimedLoader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._at_end is not None:
            self._at_end()
        end(self._batches)

    def __next__(self) -> Any:
        seconds, batch = next(self._batches)
        self._times.load += seconds
        return batch


END_SECONDS = 1.0  # how long a process may take to end by itself, once nobody needs what it reads


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Start the loader, and return its batches; its processes hold signals back until `begin_process`.

    They find the modules of the job where this process found them: one that is not forked gets a copy of sys.path.
    """
    if not loader.num_workers:
        return iter(loader)
    context: Any = loader.multiprocessing_context or multiprocessing
    with importing_from_here():
        if context.get_start_method() == "forkserver":
            return iter(loader)  # a server would hold them back from all that is ever forked from it
        resource_tracker.ensure_running()  # before signals are blocked: it lets them through when it starts
        # Until `begin_process`, a Ctrl-C or a SIGTERM for the whole group would end the process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_process(process: int) -> None:
    """Ignore, in a loader's process, Ctrl-C and a SIGTERM for the whole group, but not torch's that ends it.

    The user's code sees the same world as elsewhere, of one process.
    A terminal's Ctrl-C, and the SIGTERM of `timeout` or of a batch system, go to all processes of a group. They are
    a planned stop of the run, whose current step still needs what this process reads.
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    show_alone("fake")  # torch's backend without threads: its collectives work for one process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drops one that was held back
    torch._C._set_worker_signal_handlers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    info: Any = get_worker_info()
    screen = info and info.dataset.screen  # of Samples
    if screen is not None and screen.limit is not None:
        screen.limit.arm(process)


def end(batches: Iterator[Any]) -> None:
    """End the processes behind a DataLoader's batches, also in the midst of a read.

    This is not left to torch: the frames of an error hold the iterator. Once only the garbage collector finds it, the
    queue through which torch would end its processes is closed already, and torch waits for each of them for 5 s.
    """
    if not isinstance(batches, _MultiProcessingDataLoaderIter):
        return
    workers: list[Any] = batches._workers
    with if_longer(END_SECONDS, lambda: [one.terminate() for one in workers]):
        batches._shutdown_workers()


def share_of_wait(times: list[dict[str, float]]) -> float | None:
    """Return the share of the workers' loops spent waiting for data; None if no worker reported its times."""
    whole = sum(one["loop_seconds"] for one in times)
    return round(sum(one["data_wait_seconds"] for one in times) / whole, 4) if whole else None

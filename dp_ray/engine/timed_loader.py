"""A DataLoader whose reads are timed, and whose processes begin and end as a run needs them.

`StepTimes` measures how long a worker's steps wait for data, and how long reading the data takes.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing import connection, queues, resource_tracker
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.user_code import error_text, loader_ended_error
from dp_ray.engine.world import show_alone
from dp_ray.errors import DataError
from dp_ray.system.linux import end_with
from dp_ray.system.process import importing_from_here, patched
from dp_ray.system.threads import SIGNALS, if_longer

T = TypeVar("T")
_handling: Any = signal_handling  # Any, as its functions are torch's in C


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


class TimedLoader(Iterator[Any]):
    """The batches of a DataLoader that gives each after the seconds it took, which are added to `load`.

    It is no generator: after an error of the DataLoader, the next batch can be asked for. Use it in a `with` block,
    whose end calls `at_end` and ends the DataLoader's processes.
    """

    def __init__(self, loader: DataLoader[Any], times: StepTimes, at_end: Callable[[], None] | None = None) -> None:
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
        """Return the next batch; raises DataError if a process has ended at work, or cannot send the batch."""
        try:
            seconds, batch = next(self._batches)
        except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
            is_late = "DataLoader timed out" in str(error)  # so are others who wait no longer
            if self._watch is None or (ended := self._watch.ended(0.0 if is_late else END_SECONDS)) is None:
                raise
            raise loader_ended_error(ended.pid, ended.exitcode) from None
        self._times.load += seconds
        if isinstance(batch, DataError):  # which is sent in its place
            raise batch
        return batch


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


def begin_process(process: int) -> None:
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
    info: Any = get_worker_info()
    screen = info and info.dataset.screen  # of Samples
    if screen is not None and screen.limit is not None:
        screen.limit.arm(process)


def _send_instead(queue: Any, error: Exception, put: Any) -> None:
    """Send, from a loader's process, an error in place of a batch that cannot be sent: the worker waits for it.

    A thread of the queue pickles the batch and shares its tensors' memory. Python only has it print the error.
    """
    match put:
        case int(number), (float(seconds), _):
            says = error_text("sending a batch from the loader's process to the worker", error)
            queue.put((number, (seconds, DataError(says))))
        case _:  # a queue of the user's
            traceback.print_exception(error)


def share_of_wait(times: list[dict[str, float]]) -> float | None:
    """Return the share of the workers' loops spent waiting for data; None if no worker reported its times."""
    whole = sum(row["loop_seconds"] for row in times)
    return round(sum(row["data_wait_seconds"] for row in times) / whole, 4) if whole else None

"""The processes of a DataLoader: how they begin, which signals they heed, and how they end."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dp_ray.replica.read_limit import arm_loader
from dp_ray.system.import_path import importing_from_here
from dp_ray.system.stop_signals import SIGNALS

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

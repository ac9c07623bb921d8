"""A loader's process that is killed: told where its next batch is awaited, and never in the midst of other code.

And one whose worker is killed: it ends at once, since it holds all connections of its worker.
"""

import fcntl
import multiprocessing
import os
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import pin_memory, signal_handling

from dp_ray.engine.loads.loader import StepTimes, TimedLoader, begin_process
from dp_ray.engine.world import World
from dp_ray.errors import DataError
from dp_ray.job.job import Job
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.system.linux import end_with, start_of
from dp_ray.tasks.task import run_task
from tests.support import models
from tests.support.forked import ended, run_job, started
from tests.support.within import within

SECONDS = 60.0  # the machine may be busy
PIPE = 65536  # bytes that a pipe holds
OF_STEP_1 = 4  # the number of its forward: two before the steps tell which outputs have rows


@pytest.fixture(autouse=True)
def _no_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process in which torch has set no handler for the ends of processes yet."""
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


def end(process: BaseProcess, number: int = signal.SIGKILL) -> None:
    """End a process, and return once the system has told so and Python has called the handlers of signals."""
    assert process.pid is not None
    os.kill(process.pid, number)
    with suppress(ChildProcessError):  # somebody has looked why it ended: here it is left to that one
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(1000):
        time.monotonic()


class Ends(models.Linear):
    """A model whose forward of step 1 ends a process of the loader, and then starts a thread."""

    def __init__(self, place: int = 0, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.place, self.number = place, number
        self.others = set(multiprocessing.active_children())
        self.begun, self.ended, self.pid = 0, 0, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.begun += 1
        if self.begun == OF_STEP_1:
            processes = sorted(set(multiprocessing.active_children()) - self.others, key=lambda one: one.pid or 0)
            process = processes[self.place]
            end(process, self.number)
            self.pid = process.pid or 0
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
        self.ended += 1
        return super().forward(inputs)


class Slow(models.Rows):
    """Rows of which all but those of the first two shards take long to read."""

    loader_context = "fork"

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 14:
            time.sleep(600)
        return super().__getitem__(index)


def run(model: Ends, folder: Path) -> None:
    loader = {"processes": 2}
    keys = {"model": model, "dataset": Slow(), "batch_size": 7, "workers": 1, "loader": loader}
    storage = Storage(str(folder))
    storage.child(PARTS).create()
    run_task(Job.make(keys, "job"), World(), storage, lambda message: None)


@pytest.mark.full(but=["torch's handler-the one that is waited for"])
@pytest.mark.parametrize("place", [0, 1], ids=["the one that is waited for", "another one"])
@pytest.mark.parametrize("knows", ["nobody", "torch's handler", "the user's handler"])
def test_one_that_is_killed_within_a_forward_is_told_at_the_next_batch(
    place: int, knows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, came = Ends(place), list[int]()
    if knows == "torch's handler":  # a DataLoader of the user's own has set it
        signal_handling._set_SIGCHLD_handler()
    if knows == "the user's handler":
        signal.signal(signal.SIGCHLD, lambda number, _: came.append(number))
    handler = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(DataError) as raised:
        run(model, tmp_path)
    says = f"step 2, shard 0: a process of the loader has ended in the midst of its work (pid {model.pid}, SIGKILL)"
    assert str(raised.value).startswith(f"{says}, as where the system kills one because ")
    assert "take fewer loader.processes" in str(raised.value)
    assert (model.begun, model.ended) == (OF_STEP_1, OF_STEP_1), "the forward went to its end"
    assert signal.getsignal(signal.SIGCHLD) is handler
    assert bool(came) == (knows == "the user's handler")
    assert not set(multiprocessing.active_children()) - model.others
    assert "end of the loader's processes" not in {thread.name for thread in threading.enumerate()}


def test_what_ended_by_its_own_code_is_not_told_as_a_lack_of_memory(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"\(pid \d+, SIGSEGV\): code that the dataset or the collate runs has ended it"
    ):
        run(Ends(number=signal.SIGSEGV), tmp_path)


def test_one_that_is_killed_while_a_thread_starts_breaks_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python removes the thread from those that start once more, if its start raises: a KeyError."""
    model, kill, start = Ends(), end, threading._start_new_thread  # type: ignore[attr-defined]
    begun = list[threading.Event]()

    def start_new_thread(function: Any, arguments: tuple[Any, ...]) -> int:
        number: int = start(function, arguments)
        if model.begun == OF_STEP_1 and not begun:
            begun.append(threading.Event())
            time.sleep(0.05)  # the thread has begun
            processes = set(multiprocessing.active_children()) - model.others
            kill(min(processes, key=lambda one: one.pid or 0))
        return number

    monkeypatch.setattr(threading, "_start_new_thread", start_new_thread)
    monkeypatch.setattr("tests.engine.loads.test_killed_loaders.end", lambda *_: None)
    with pytest.raises(DataError, match="step 2, shard 0: a process of the loader has ended"):
        run(model, tmp_path)
    assert begun and model.ended == OF_STEP_1
    assert not threading._limbo  # type: ignore[attr-defined]


class Large(Dataset[Any]):
    """Batches too large for a pipe, as TimedLoader takes them."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[float, bytes]:
        return 0.0, bytes(16 * PIPE)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is a GPU: a thread of torch's pins what the processes send, here as it is."""
    for name, value in {"is_available": True, "current_device_index": 0, "set_device_index": None}.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
    monkeypatch.setattr(pin_memory, "pin_memory", lambda data, device=None: data)


@pytest.mark.usefixtures("pinned")
def test_the_thread_that_pins_memory_keeps_nobody_waiting_either() -> None:
    """Nor does it print a traceback of its own, which would fail this test."""
    made: Any = DataLoader(
        Slow(), batch_size=None, num_workers=2, collate_fn=timed, multiprocessing_context="fork", pin_memory=True
    )
    with TimedLoader(made, StepTimes()) as loader:
        batches: Any = loader._batches
        assert batches._pin_memory
        next(loader)
        os.kill(batches._workers[1].pid, signal.SIGKILL)
        with pytest.raises(DataError, match=r"ended in the midst of its work \(pid \d+, SIGKILL\)"):
            list(loader)
    batches._pin_memory_thread.join(SECONDS)
    assert not batches._pin_memory_thread.is_alive()


def timed(batch: Any) -> tuple[float, Any]:
    return 0.0, batch


@pytest.mark.parametrize("processes", [1, 2])
def test_one_that_is_killed_in_the_midst_of_a_batch_keeps_nobody_waiting(processes: int) -> None:
    """In a worker's thread, to which no handler of a signal comes."""
    made: Any = DataLoader(Large(), batch_size=None, num_workers=processes, multiprocessing_context="fork")
    with ThreadPoolExecutor(1) as threads, TimedLoader(made, StepTimes()) as loader:
        batches: Any = loader._batches
        reader = batches._worker_result_queue._reader

        def waits() -> bool:
            return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, struct.pack("i", 0)), "little") >= PIPE // 2

        assert within(SECONDS, waits)
        began = time.monotonic()
        for worker in batches._workers:
            os.kill(worker.pid, signal.SIGKILL)
            break
        awaited = threads.submit(lambda: [next(loader) for _ in range(100)])
        with pytest.raises(DataError, match=r"ended in the midst of its work \(pid \d+, SIGKILL\)"):
            awaited.result(SECONDS)
    assert time.monotonic() - began < SECONDS


class Asleep(models.Rows):
    """Rows of which none is ever read; each process that is to read one has a file with its number."""

    def __init__(self, folder: str, loader_context: str) -> None:
        super().__init__()
        self.folder, self.loader_context = Path(folder), loader_context

    def __getitem__(self, index: int) -> torch.Tensor:
        (self.folder / str(os.getpid())).touch()
        while True:
            time.sleep(60)


@pytest.mark.full(but=["fork-2"])
@pytest.mark.parametrize(("context", "processes"), [("fork", 2), ("spawn", 1)])
def test_those_of_a_killed_worker_end_at_once_also_in_the_midst_of_a_read(
    context: str, processes: int, tmp_path: Path
) -> None:
    """torch has each look after its worker every 5 s, but only between two reads."""
    (tmp_path / "pids").mkdir()
    args = {"folder": str(tmp_path / "pids"), "loader_context": context}
    keys = {
        "model": {"target": "tests.support.models:Linear"},
        "dataset": {"target": "tests.engine.loads.test_killed_loaders:Asleep", "args": args},
        "loader": {"processes": processes},
        "storage": str(tmp_path),
        "batch_size": 7,
        "workers": 0,
    }
    pids = list[int]()
    with started(run_job, keys) as worker:
        try:
            assert within(SECONDS, lambda: len(list((tmp_path / "pids").iterdir())) == processes)
            pids += [int(path.name) for path in (tmp_path / "pids").iterdir()]
            assert worker.process.pid not in pids and all(map(start_of, pids))
            worker.send_signal(signal.SIGKILL)
            assert within(SECONDS, lambda: not any(map(start_of, pids)))
        finally:
            for pid in filter(start_of, pids):
                os.kill(pid, signal.SIGKILL)


class Few(Dataset[Any]):
    """Few numbers, each with the seconds that its read took, as TimedLoader takes them."""

    screen = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, int]:
        return 0.0, index


def outlive_their_thread() -> None:
    made: Any = DataLoader(
        Few(), batch_size=None, num_workers=2, multiprocessing_context="fork", worker_init_fn=begin_process
    )
    with ThreadPoolExecutor(1) as threads:
        loader = threads.submit(TimedLoader, made, StepTimes()).result(SECONDS)
        batches: Any = loader._batches
        threads.submit(next, loader).result(SECONDS)  # they have begun
    with loader:
        time.sleep(0.5)  # the thread has ended; no sign comes of what does not happen
        assert all(worker.is_alive() for worker in batches._workers)
        assert list(loader) == [*range(1, 8)]


def test_those_that_a_thread_has_started_outlive_it() -> None:
    """The system tells a process of the end of the thread that forked it, not of that thread's process.

    In a process of its own: not every library that other tests have loaded stands a fork by another thread.
    """
    process = ended(outlive_their_thread)
    assert process.returncode == 0, process.stderr


def test_one_that_begins_after_its_workers_end_ends_too_but_one_of_a_fork_server_lives() -> None:
    fork = multiprocessing.get_context("fork")
    ended = fork.Process(target=int)
    ended.start()
    ended.join(SECONDS)
    assert ended.pid is not None
    for parent, status in [(ended.pid, -signal.SIGKILL), (1, 0)]:
        process = fork.Process(target=end_with, args=(parent,))
        process.start()
        process.join(SECONDS)
        assert process.exitcode == status

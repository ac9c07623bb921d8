"""A job's workers as real processes in a gloo group, without Ray.

The processes stay from one group to the next of the same test, and end with it: none inherits another's state.
"""

import pickle
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.engine.ship import pickled_copy
from dp_ray.engine.user_code import free_memory
from dp_ray.engine.world import World, everyone, form_group, leave_group
from dp_ray.job.job import Job
from dp_ray.messages import Measured, Report, StepControl
from dp_ray.plan.history import CLOCKED
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.setup import Context
from dp_ray.tasks.task import run_task, settings_of
from tests.support.forked import fork_from_this, new_process
from tests.support.forked_python import FORKED

LOCALHOST = "127.0.0.1"
_idle: list[tuple[Any, Connection]] = []  # processes and the pipes to them


class ProcessExit(Exception):
    """A worker ended otherwise than well; holds what it raised."""


class StopsBefore(StepControl):
    """Ends every worker before a step: what it had not kept by then is lost."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before(self, step: int) -> None:
        if step == self._step:
            raise Stopped


class StopsBeforeItsWeights(StepControl):
    """Ends every worker once its writer has ended, before it writes the weights of a training."""

    _times = 0

    def through(self) -> None:
        self._times += 1
        if self._times == 2:
            raise Stopped


class Stopped(Exception):
    """The worker was ended as it was meant to be."""


def run_group(job: Job, folder: Path | str, control: StepControl | None = None) -> list[Any]:
    """Run the job on its workers, to its end or until they die; return what they sent.

    Each worker has a copy of `control`, if there is one. Raises ProcessExit with the traceback of what one raised. If
    the control `hears_times`, the shape reports of all workers that tell the times of steps are among what they sent;
    if it has a `storage`, that makes the run directory of a folder; a `task` of its own runs in place of the job's.
    """
    run = Storage(str(folder))
    run.child(PARTS).create()
    size = job.max_workers
    # A worker that finds no store yet waits for half a second and more: this process opens it first.
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    group = [_idle.pop() if _idle else _started() for _ in range(size)]
    messages: list[Any] = []
    dead: list[Connection] = []
    try:
        for rank, (_, pipe) in enumerate(group):
            # Bytes of its own for each: multiprocessing would have the workers share the memory of the job's tensors.
            pipe.send_bytes(pickle.dumps((rank, size, job, str(folder), store.port, control)))
        busy = [pipe for _, pipe in group]
        while busy:
            ready: list[Any] = wait(busy)
            for pipe in ready:
                kind, what = _received(pipe)
                if kind == "raised":
                    raise ProcessExit(what)
                messages += [what] if kind == "told" else []
                dead += [pipe] if kind == "died" else []
                if kind in ("done", "died"):
                    busy.remove(pipe)
    except BaseException:
        _end(group)
        raise
    _end([one for one in group if one[1] in dead])
    _idle.extend(one for one in group if one[1] not in dead)
    return messages


def end_idle() -> None:
    """End the processes that wait for a group."""
    _end(_idle)
    _idle.clear()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The trained weights, read by the safetensors library."""
    return dict(load_file(folder / "weights.safetensors"))


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The rows that the pieces of the history hold, without what the clock says; read by pyarrow alone."""
    pieces = sorted((folder / "history").iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    rows = [row for piece in pieces for row in pq.read_table(piece).to_pylist()]
    return [{name: value for name, value in row.items() if name not in CLOCKED} for row in rows]


def measured(messages: list[Any]) -> dict[str, float]:
    """What an evaluation told."""
    (found,) = (message.metrics for message in messages if isinstance(message, Measured))
    return dict(found)


def shapes_in(messages: list[Any], column: str) -> list[Any]:
    """The values of a column of `shapes.parquet` in the reports among the messages."""
    tables = [message.shapes for message in messages if isinstance(message, Report) and message.shapes is not None]
    return [value for table in tables for value in table[column].to_pylist()]


def _started() -> tuple[Any, Connection]:
    here, there = FORKED.Pipe()
    process = new_process(_serve, there)
    process.start()
    there.close()
    return process, here


def _end(group: list[tuple[Any, Connection]]) -> None:
    for process, _ in group:
        process.kill()
    for process, pipe in group:
        pipe.close()
        process.join(120)
        process.close()


def _received(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, what = pipe.recv()
        return kind, what
    except (EOFError, ConnectionResetError):
        return "died", None


def _serve(pipe: Connection) -> None:
    """Be a worker of one group after the other."""
    torch.set_num_threads(1)
    FORKED.set_forkserver_preload(
        ["dp_ray.data", "dp_ray.engine.loads.loading"]
    )  # of a server that a later job starts
    is_first = True
    while True:
        try:
            given = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        if is_first and given[2].loader.processes:  # later it has threads
            fork_from_this(but=pipe.fileno())
        is_first = False
        _work(pipe, *given)


def _work(
    pipe: Connection, rank: int, size: int, job: Job, folder: str, port: int, control: StepControl | None
) -> None:
    one_at_a_time = threading.Lock()  # the recorder's thread sends too

    def send(what: Any) -> None:
        tells_times = getattr(control, "hears_times", False) and getattr(what, "times", None) is not None
        with one_at_a_time:
            if tells_times or (rank == 0 and "Report" not in type(what).__name__):
                pipe.send(("told", what))

    try:
        if size > 1:
            form_group("gloo", TCPStore(LOCALHOST, port), World(rank, size))
        devices = tuple(torch.device(name) for name in job.devices or ["cpu"])
        with suppress(Stopped):
            job = pickled_copy(job)  # a pipe gives all workers the same memory of its tensors
            run = getattr(control, "storage", Storage)(folder)
            world = World(rank, size, rank, all_devices=devices)
            if (task := getattr(control, "task", None)) is None:
                run_task(job, world, run, send, control)
            else:
                with settings_of(job, world):
                    task(Context(job, world, run, send, control or StepControl()))
        free_memory()  # as a worker does
        if size > 1:
            dist.barrier(group=everyone())
            leave_group()
        pipe.send(("done", None))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))

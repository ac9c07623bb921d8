"""The function that Ray Train runs on every worker."""

import io
import os
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import ray
import ray.train
import ray.train.torch
import torch

from dp_ray.cluster.channel import send
from dp_ray.cluster.heartbeat import Heartbeat
from dp_ray.errors import JobError, WorkerError
from dp_ray.job import Job
from dp_ray.monitor.failures import kind_of
from dp_ray.monitor.faults import Fault
from dp_ray.monitor.messages import Ending, Failed, Printed, WorkerExit, WorkerReady, message_of
from dp_ray.replica.world import World, broadcast
from dp_ray.rundir.claim import check_shared
from dp_ray.storage import Storage
from dp_ray.system.memory import keep_freed_memory
from dp_ray.task.step_control import StopRequested
from dp_ray.task.task import run_task
from dp_ray.tracebacks import frames_of


@dataclass(frozen=True)
class WorkerConfig:
    """What the driver hands to every worker."""

    job: Job
    run_dir: str = field(repr=False)  # a URL may hold a secret
    token: str
    channel: Any
    keep_prints: bool
    faults: tuple[Fault, ...] = ()
    driver_node: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> None:
    """Run the job's task on this worker, and report to the driver what happens."""
    given = config["worker"]
    keep_freed_memory()
    world = place(given.job)
    attempt = broadcast(uuid.uuid4().hex)
    heartbeat = Heartbeat(given.channel, attempt, world, given.job.timeouts.step, given.faults, given.driver_node)
    with forwarded_prints(given, world), reported_errors(given, attempt, world, heartbeat):
        run = Storage(given.run_dir)
        check_shared(run, given.token, str(world))
        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", []))
        send(given.channel, WorkerReady(attempt, world, os.getpid(), gpus, context.get_node_id()))
        with heartbeat:
            run_task(
                given.job,
                world,
                run,
                lambda what: send(given.channel, message_of(attempt, what)),
                heartbeat,
                given.rows,
            )


def place(job: Job) -> World:
    """This worker's rank, node and device."""
    context = ray.train.get_context()
    given = (
        [torch.device(name) for name in job.devices]
        if job.devices
        else ray.train.torch.get_devices()[: job.num_devices]
    )
    return World(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
        node=ray.util.get_node_ip_address(),
        device=given[0],
        all_devices=tuple(given),
    )


@contextmanager
def reported_errors(given: WorkerConfig, attempt: str, world: World, heartbeat: Heartbeat) -> Iterator[None]:
    """Report an error to the driver at once, before the errors that it causes on other ranks.

    For Ray Train's controller it becomes a WorkerExit, which says how the loop ended.
    """
    try:
        yield
    except StopRequested as stopped:
        raise WorkerExit(Ending.STOPPED, str(stopped), True) from None
    except BaseException as error:
        kind = kind_of(error)
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        send(given.channel, Failed(attempt, world, kind, text, traceback.format_exc(), frames_of(error)))
        raise WorkerExit(_ending_of(error), text, heartbeat.has_progressed) from None


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, WorkerError):
        return Ending.LOST_PEER
    passes = isinstance(error, Exception) and not isinstance(error, JobError)
    return Ending.RAISED if passes else Ending.MISTAKEN


@contextmanager
def forwarded_prints(given: WorkerConfig, world: World) -> Iterator[None]:
    """Send the lines that user code prints to the driver while the block runs."""
    before = sys.stdout, sys.stderr
    lines: Any = Lines(given, world, before[0])
    sys.stdout = sys.stderr = lines
    try:
        yield
    finally:
        lines.close()
        sys.stdout, sys.stderr = before


class Lines(io.TextIOBase):
    """A text stream whose lines go to the driver and, with `keep_prints`, to the worker's own log too.

    The lines pass through a pipe, so that the forked processes of a data loader reach the driver too.
    """

    _END = "\0"

    def __init__(self, given: WorkerConfig, world: World, log: TextIO) -> None:
        self._given = given
        self._world = world
        self._log = log
        self._pid = os.getpid()
        self._rest = ""
        self.buffer = Bytes(self)
        reading, self._pipe = os.pipe()
        self._thread = threading.Thread(target=self._forward, args=(reading,), name="prints", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Send the complete lines of the text; hold the rest until its line ends."""
        if self._given.keep_prints:
            self._log.write(text)
        if self._pid != os.getpid():
            self._pid, self._rest = os.getpid(), ""
        *lines, rest = (self._rest + text).replace("\r\n", "\n").split("\n")
        self._rest = rest[rest.rfind("\r", 0, -1) + 1 :]  # keep only the last update of a progress bar
        for line in lines:
            os.write(self._pipe, f"{line[line.rfind(chr(13)) + 1 :]}\n".encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        self._log.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._log.fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Send the rest and end the thread; an end mark is sent because a forked process may hold the pipe open."""
        if self.closed:
            return
        self.write("\n" * bool(self._rest) + f"{self._END}\n")
        self._thread.join()
        os.close(self._pipe)
        super().close()

    def _forward(self, reading: int) -> None:
        """Send the lines to the driver, all that have arrived since the last message in one."""
        rest = b""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while True:
                *lines, rest = (rest + pipe.read(1 << 16)).split(b"\n")
                ended = self._END.encode() in lines
                said = tuple(line.decode(errors="replace") for line in lines if line != self._END.encode())
                if said:
                    send(self._given.channel, Printed(self._world, said), wait=False)
                if ended:
                    return


class Bytes(io.RawIOBase):
    """The `buffer` of Lines, for code that writes bytes."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._lines.write(bytes(data).decode(errors="replace"))
        return len(data)

"""What Ray Train runs on every worker."""

import os
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import ray
import ray.train
import ray.train.torch
import torch

from dp_ray.errors import Error
from dp_ray.job import Job
from dp_ray.replica.world import World, broadcast
from dp_ray.results.storage import Storage
from dp_ray.runner.inbox import tell
from dp_ray.runner.messages import Failed, Hello, Printed, Shapes
from dp_ray.runner.rundir import check_shared
from dp_ray.task import run_task


@dataclass(frozen=True)
class WorkerConfig:
    """What the driver hands to every worker."""

    job: Job
    run_dir: str
    token: str
    inbox: Any
    keep_prints: bool


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> None:
    """Run the job's task on this worker, telling the driver what happens."""
    given = config["worker"]
    world = place(given.job)
    attempt = broadcast(uuid.uuid4().hex)
    with forwarded_prints(given, world), told_errors(given, attempt, world):
        run = Storage(given.run_dir)
        check_shared(run, given.token, str(world))
        gpus = tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))
        tell(given.inbox, Hello(attempt, world, os.getpid(), gpus))
        run_task(given.job, world, run, lambda report: tell(given.inbox, Shapes(attempt, report)))


def place(job: Job) -> World:
    """This worker's rank, node and device."""
    context = ray.train.get_context()
    device = torch.device(job.devices[0]) if job.devices else ray.train.torch.get_device()
    return World(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
        node=ray.util.get_node_ip_address(),
        device=device,
    )


@contextmanager
def told_errors(given: WorkerConfig, attempt: str, world: World) -> Iterator[None]:
    """Tell the driver of an error at once, before those that it causes on other ranks."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, Error) else ""
        text = str(error) if kind else f"{type(error).__name__}: {error}"
        tell(given.inbox, Failed(attempt, world, kind, text, traceback.format_exc()))
        raise


@contextmanager
def forwarded_prints(given: WorkerConfig, world: World) -> Iterator[None]:
    """Send what user code prints to the driver, line by line."""
    before = sys.stdout, sys.stderr
    lines: Any = Lines(given, world, before[0])
    sys.stdout = sys.stderr = lines
    try:
        yield
    finally:
        lines.close()
        sys.stdout, sys.stderr = before


class Lines:
    """A text stream whose lines go to the driver, and to the worker's own log where nothing else shows that.

    They pass through a pipe, so that the processes of a loader, which are forked, have a way to the driver too.
    """

    encoding = "utf-8"
    errors = "replace"
    _END = "\0"

    def __init__(self, given: WorkerConfig, world: World, log: TextIO) -> None:
        self._given = given
        self._world = world
        self._log = log
        self._pid = os.getpid()
        self._rest = ""
        reading, self._pipe = os.pipe()
        self._thread = threading.Thread(target=self._forward, args=(reading,), name="prints", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        if self._given.keep_prints:
            self._log.write(text)
        if self._pid != os.getpid():
            self._pid, self._rest = os.getpid(), ""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            os.write(self._pipe, f"{line}\n".encode(errors="replace"))
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
        """Send what is left; a forked process may hold the pipe open, so its end is said, not waited for."""
        self.write("\n" * bool(self._rest) + f"{self._END}\n")
        self._thread.join()
        os.close(self._pipe)

    def _forward(self, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                if line == f"{self._END}\n":
                    return
                tell(self._given.inbox, Printed(self._world, line.rstrip("\n")), wait=False)

"""A job on a worker: begin at `run_job`, which the loop of `cluster/loop.py` calls.

Around the job's task stand the process group, formed anew for each job; a heartbeat (`heartbeat.py`); and a stream
that sends to the driver what user code prints (`prints.py`).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch

from dp_ray.cluster.channel import GROUP, Ask, Terms, WorkerConfig, send
from dp_ray.cluster.group import place_of_worker, process_group, report, with_devices
from dp_ray.cluster.heartbeat import Heartbeat
from dp_ray.cluster.internals.context import place_of_this_worker
from dp_ray.cluster.prints import forwarded_prints
from dp_ray.engine.out_of_memory import free_memory, is_out_of_memory
from dp_ray.engine.votes import NotFinite, StopRequested
from dp_ray.engine.world import Trouble, World, leave_group, trouble_of
from dp_ray.errors import JobError, StorageError, WorkerError
from dp_ray.job.job import Job
from dp_ray.messages import Ending, Finished, Logged, WorkerExit, WorkerReady
from dp_ray.monitor.faults import Fault
from dp_ray.rundir.claim import check_shared
from dp_ray.rundir.files import FLIGHT_RECORDER, NCCL_RECORD
from dp_ray.rundir.quarantine import QuarantineFull
from dp_ray.storage import Storage
from dp_ray.system.imports import imported_files
from dp_ray.system.process import environment
from dp_ray.tasks.isolation import isolated
from dp_ray.tasks.numerics import OtherKind
from dp_ray.tasks.task import run_task


@dataclass(frozen=True)
class Assignment:
    """A job as the driver hands it to each of its workers; `backend` is that of the process group."""

    job: Job
    run_dir: str = field(repr=False)  # a URL may hold a secret
    token: str
    backend: str
    faults: tuple[Fault, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)


def run_job(worker: WorkerConfig, terms: Terms, packed: Any, env: dict[str, str]) -> None:
    """Run the job's task on this worker, with `env` set, and report to the driver what happens.

    `packed` refers to the job's Assignment, packed.
    """
    node_id, here = ray.get_runtime_context().get_node_id(), place_of_worker(terms.workers)
    worker = replace(worker, number=terms.number, kind=terms.kind, node_id=node_id)
    attempt = f"{os.environ[GROUP]}-{terms.number}"
    prints = forwarded_prints(worker.channel, worker.number, worker.keep_prints, here)
    with isolated() as remains, environment(env), prints:
        is_stopped = run_packed(worker, packed, attempt, here)
    imported = imported_files() if here.rank == 0 and not terms.is_last else ()
    send(worker.channel, Finished(attempt, here.rank, is_stopped, tuple(remains), imported), worker.number)


def run_packed(worker: WorkerConfig, packed: Any, attempt: str, here: World) -> bool:
    """Run the job; return whether it stopped as the user asked. When this returns, nobody holds the job's objects."""
    with reported_errors(worker, attempt, here, lambda: False):
        assigned: Assignment = ray.get(packed).load()
        world = with_devices(here, assigned.job, assigned.job.num_devices)
        run = Storage(assigned.run_dir)
    limit, faults = assigned.job.timeouts.step, assigned.faults
    heartbeat = Heartbeat(worker, attempt, world, run, limit, faults)
    with reported_errors(worker, attempt, world, lambda: heartbeat.has_progressed):
        try:
            run_assigned(worker, assigned, run, attempt, world, heartbeat)
        except StopRequested:
            if ray.get(worker.channel.state.remote())[0].ask is not Ask.STOP:
                raise  # so that the workers are started anew, more or fewer of them
            return True
        except OtherKind as other:
            ray.get(worker.channel.avoid.remote(worker.number, other.node_ids))
            raise
        except Exception as error:
            if trouble_of(error) is Trouble.BROKEN_GPU:
                ray.get(worker.channel.tell_broken.remote(worker.number, worker.node_id))
            raise
    return False


def run_assigned(
    worker: WorkerConfig, assigned: Assignment, run: Storage, attempt: str, world: World, heartbeat: "Heartbeat"
) -> None:
    """Run the task within the process group of the job's workers.

    Raises StopRequested if it stopped as it was asked.
    """
    job, channel = assigned.job, worker.channel
    # Ray Train numbers the workers node by node; the job may take only the first of those on this node.
    first = world.rank - world.local_rank
    on_node = min(world.world_size - first, place_of_this_worker().get_local_world_size())
    flight = run.child(FLIGHT_RECORDER)
    recorder = recorder_variables(assigned.backend, flight, attempt)
    step_seconds = job.timeouts.step
    with (
        environment(recorder),
        process_group(channel, attempt, world, assigned.backend, step_seconds, on_node),
        left_together(channel, attempt, world),
    ):
        check_shared(run, assigned.token, str(world))
        if DUMP_FILE in recorder:
            with suppress(StorageError):
                flight.create()  # NCCL makes no folder
        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", []))
        send(worker.channel, WorkerReady(attempt, world, os.getpid(), gpus, worker.node_id), worker.number)
        with heartbeat:
            run_task(
                job,
                world,
                run,
                # The loop waits for no row of the history: messages of a worker arrive in order.
                lambda message: send(channel, message, worker.number, wait=not isinstance(message, Logged)),
                heartbeat,
                assigned.rows,
            )
    if DUMP_FILE in recorder and world.rank == 0:
        with suppress(StorageError):
            if flight.is_empty():
                flight.remove()


DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch appends the rank


def recorder_variables(backend: str, folder: Storage, attempt: str) -> dict[str, str]:
    """Return the variables with which NCCL writes its flight recorder before it ends a process, but for the user's.

    It does so if a collective fails, or takes longer than the group's time-out. The files go to `folder` if that is
    one of a file system, since NCCL writes to no other storage. torch's `torchfrtrace` reads them.
    """
    size = "TORCH_FR_BUFFER_SIZE"
    older = {size: "TORCH_NCCL_TRACE_BUFFER_SIZE", DUMP_FILE: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}  # torch reads both
    values = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", size: "2000"} if "nccl" in backend else {}
    if values and folder.is_local:
        values[DUMP_FILE] = folder.file(NCCL_RECORD.format(attempt, ""))
    takes_older = torch.__version__ < "2.12"
    return {
        older[name] if name == size and takes_older else name: value
        for name, value in values.items()
        if not {name, older.get(name, name)} & os.environ.keys()
    }


@contextmanager
def reported_errors(
    worker: WorkerConfig, attempt: str, world: World, has_progressed: Callable[[], bool]
) -> Iterator[None]:
    """Report an error to the driver at once, before the errors that it causes on other ranks.

    For Ray Train's controller it becomes a WorkerExit, which says how the loop ended.
    """
    try:
        yield
    except StopRequested as stopped:
        raise WorkerExit(Ending.STOPPED, str(stopped), True) from None
    except BaseException as error:
        text = report(worker.channel, worker.number, attempt, world, error)
        raise WorkerExit(_ending_of(error), text, has_progressed()) from None


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, WorkerError):
        return Ending.LOST_PEER
    if isinstance(error, OtherKind):
        return Ending.OTHER_KIND
    if not isinstance(error, Exception) or isinstance(error, QuarantineFull | NotFinite):
        return Ending.MISTAKEN
    trouble = trouble_of(error)
    if trouble is Trouble.BROKEN_GPU:
        return Ending.BROKEN_GPU
    if trouble is Trouble.BUSY_GPU or is_out_of_memory(error):  # a JobError too, if the model finds no room at first
        return Ending.OUT_OF_MEMORY
    is_final = trouble is not None and trouble.is_final
    return Ending.MISTAKEN if is_final or isinstance(error, JobError) else Ending.RAISED


@contextmanager
def left_together(channel: Any, attempt: str, world: World) -> Iterator[None]:
    """Leave the process group at the block's end, once no peer reads from it any more: that would end the process.

    If the block raises, but for StopRequested, the group stays: peers may wait in it, and the process is about to
    end.
    """

    def leave() -> None:
        ray.get(channel.end.remote(f"{attempt} group", world.rank, world.world_size, True))
        leave_group()

    try:
        yield
    except StopRequested:
        leave()
        raise
    # DDP's part in C++ must not be the last to hold the group: if the collector frees that, it waits for the
    # group's threads, and they may wait for the interpreter, which the collector holds.
    free_memory()
    leave()

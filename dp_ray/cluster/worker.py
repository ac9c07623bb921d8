"""The function that Ray Train runs on every worker: it runs one job of the session after another."""

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch

from dp_ray.cluster.channel import send
from dp_ray.cluster.heartbeat import Heartbeat
from dp_ray.cluster.prints import forwarded_prints
from dp_ray.cluster.process_group import process_group
from dp_ray.cluster.ray_internals.context import place_of_this_worker
from dp_ray.cluster.ray_internals.devices import assigned_devices
from dp_ray.cluster.requests import GROUP, Ask, Terms, WorkerConfig
from dp_ray.errors import JobError, WorkerError
from dp_ray.job import Job
from dp_ray.job_keys import gpu_number
from dp_ray.monitor.failures import kind_of
from dp_ray.monitor.faults import Fault
from dp_ray.monitor.message_of import message_of
from dp_ray.monitor.messages import Ending, Failed, Finished, WorkerExit, WorkerReady
from dp_ray.replica.loss_watch import NotFinite
from dp_ray.replica.world import CPU, World
from dp_ray.rundir.claim import check_shared
from dp_ray.rundir.quarantine_files import QuarantineFull
from dp_ray.storage import Storage
from dp_ray.system.edited import imported_files
from dp_ray.system.environment import environment
from dp_ray.system.imports import end_imports
from dp_ray.system.memory import keep_freed_memory
from dp_ray.task.isolation import isolated
from dp_ray.task.step_control import StopRequested
from dp_ray.task.task import run_task
from dp_ray.tracebacks import frames_of


@dataclass(frozen=True)
class Assignment:
    """What the driver hands to every worker of a job; `backend` is that of the process group."""

    job: Job
    run_dir: str = field(repr=False)  # a URL may hold a secret
    token: str
    backend: str
    faults: tuple[Fault, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> None:
    """Run the session's jobs, one after another, until the session ends."""
    given = config["worker"]
    end_imports()
    keep_freed_memory()
    first = assigned_devices()[0]
    if first.type == "cuda" and torch.cuda.is_available():  # a job may be told to run on the CPU nevertheless
        torch.cuda.set_device(first)
    run_jobs(given)


def run_jobs(given: WorkerConfig) -> None:
    """Run the jobs that the channel holds, until it says that the session ends."""
    rank, number = place_of_this_worker().get_world_rank(), 0
    while (found := ray.get(given.channel.next_job.remote(number, os.environ[GROUP]))) is not Ask.STOP:
        if found is Ask.RESTART:
            raise WorkerExit(Ending.STOPPED, "asked to leave while no job runs", False)
        terms, (packed, env) = found
        number = terms.number
        if rank < terms.workers:
            run_job(given, terms, packed, env)


def run_job(given: WorkerConfig, terms: Terms, packed: Any, env: dict[str, str]) -> None:
    """Run the job's task on this worker, with `env` set, and report to the driver what happens.

    `packed` refers to the bytes of the job's Assignment.
    """
    given, here = replace(given, number=terms.number), place(terms.workers)
    attempt = f"{os.environ[GROUP]}-{terms.number}"
    prints = forwarded_prints(given.channel, given.number, given.keep_prints, here)
    with isolated() as remains, environment(env), prints:
        is_stopped = run_packed(given, packed, attempt, here)
    imported = imported_files() if here.rank == 0 and not terms.is_last else ()
    send(given.channel, Finished(attempt, here.rank, is_stopped, tuple(remains), imported), given.number)


def run_packed(given: WorkerConfig, packed: Any, attempt: str, here: World) -> bool:
    """Run the job; return whether it stopped as the user asked. When this returns, nobody holds the job's objects."""
    with reported_errors(given, attempt, here, lambda: False):
        assigned: Assignment = pickle.loads(ray.get(packed))
        world = with_devices(here, assigned.job)
    limit, faults = assigned.job.timeouts.step, assigned.faults
    heartbeat = Heartbeat(given.channel, given.number, attempt, world, limit, faults, given.driver_node)
    with reported_errors(given, attempt, world, lambda: heartbeat.has_progressed):
        try:
            run_assigned(given, assigned, attempt, world, heartbeat)
        except StopRequested:
            if ray.get(given.channel.state.remote())[0].ask is not Ask.STOP:
                raise  # so that the workers are started anew, more or fewer of them
            return True
    return False


def run_assigned(given: WorkerConfig, assigned: Assignment, attempt: str, world: World, heartbeat: Heartbeat) -> None:
    """Run the task within the process group of the job's workers.

    Raises StopRequested if it stopped as it was asked.
    """
    job = assigned.job
    with process_group(given.channel, attempt, world, assigned.backend, workers_on_node(world)):
        run = Storage(assigned.run_dir)
        check_shared(run, assigned.token, str(world))
        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", []))
        send(given.channel, WorkerReady(attempt, world, os.getpid(), gpus, context.get_node_id()), given.number)
        with heartbeat:
            run_task(
                job,
                world,
                run,
                lambda what: send(given.channel, message_of(attempt, what), given.number),
                heartbeat,
                assigned.rows,
            )


def place(workers: int) -> World:
    """This worker's rank and node among the first `workers` of those that were started."""
    context = place_of_this_worker()
    return World(
        rank=context.get_world_rank(),
        world_size=min(workers, context.get_world_size()),
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
        node=ray.util.get_node_ip_address(),
    )


def with_devices(world: World, job: Job) -> World:
    """The world with the devices that the job names, else with as many GPUs as it takes, else with the CPU."""
    if job.devices:
        given = named_devices(job.devices, assigned_devices() if job.own_gpus else None)
    elif job.gpus_per_worker == 0:
        given = [CPU]
    else:
        given = assigned_devices()[: job.num_devices]
    return replace(world, device=given[0], all_devices=tuple(given))


def named_devices(names: Sequence[str], own: Sequence[torch.device] | None) -> list[torch.device]:
    """The devices with these names; with a worker's `own` GPUs, `cuda:i` is the i-th of them.

    All workers of a node see the GPUs of all, and `cuda:0` is the same one to each. Raises JobError if the worker has
    fewer.
    """
    if own is None:
        return [torch.device(name) for name in names]
    gpus = [one for one in own if one.type == "cuda"]
    found = []
    for name in names:
        number = gpu_number(name)
        if number is not None and number >= len(gpus):
            raise JobError(f"devices: {name} is of the worker's own GPUs, of which it has {len(gpus)}")
        found.append(torch.device(name) if number is None else gpus[number])
    return found


def workers_on_node(world: World) -> int:
    """How many workers of the job this worker's node has; Ray Train numbers the workers node by node."""
    first = world.rank - world.local_rank
    started: int = place_of_this_worker().get_local_world_size()
    return min(world.world_size - first, started)


@contextmanager
def reported_errors(
    given: WorkerConfig, attempt: str, world: World, has_progressed: Callable[[], bool]
) -> Iterator[None]:
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
        failed = Failed(attempt, world, kind, text, traceback.format_exc(), frames_of(error))
        send(given.channel, failed, given.number)
        raise WorkerExit(_ending_of(error), text, has_progressed()) from None


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, WorkerError):
        return Ending.LOST_PEER
    passes = isinstance(error, Exception) and not isinstance(error, JobError | QuarantineFull | NotFinite)
    return Ending.RAISED if passes else Ending.MISTAKEN

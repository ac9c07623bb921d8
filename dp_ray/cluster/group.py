"""A worker's place and devices, and the process group of those that work together: on a job, or for modules."""

import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.cloudpickle import CloudPickler
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.cluster.channel import GROUP, OUT, WorkerConfig, send
from dp_ray.cluster.internals.context import assigned_devices, place_of_this_worker
from dp_ray.cluster.membership import Member, View
from dp_ray.engine.user_code import free_memory
from dp_ray.engine.world import (
    CPU,
    Cause,
    World,
    cut_groups,
    failed_collective,
    form_group,
    leave_group,
    text_of,
)
from dp_ray.errors import JobError, WorkerError, frames_of
from dp_ray.job.keys import WorkerKeys, gpu_number
from dp_ray.messages import Ending, Failed, WorkerExit, kind_of
from dp_ray.system.process import environment
from dp_ray.system.threads import if_longer

STUCK_SECONDS = 5.0  # in a collective of a view that is to be left at once, or while the group is left


def place_of_worker(workers: int) -> World:
    """Return this worker's place among the first `workers` of those that were started; a view has its own."""
    place = place_of_this_worker()
    num_here = min(workers, place.get_world_size())
    return World(place.get_world_rank(), num_here, node=ray.util.get_node_ip_address())


def with_devices(world: World, keys: WorkerKeys, num_devices: int) -> World:
    """Return the world with the devices that `keys` name, else with `num_devices` of its GPUs, else with the CPU.

    Raises JobError if the machine has no such device, or the worker too few GPUs of its own.
    """
    if keys.devices:
        from dp_ray.engine.devices import check_machine  # a worker without named devices needs nothing of it

        check_machine("devices", () if keys.own_gpus else keys.devices)
        devices = named_devices(keys.devices, assigned_devices() if keys.own_gpus else None)
    elif keys.gpus_per_worker == 0:
        devices = [CPU]
    else:
        devices = assigned_devices()[:num_devices]
    return replace(world, device=devices[0], all_devices=tuple(devices))


def named_devices(names: Sequence[str], own: Sequence[torch.device] | None) -> list[torch.device]:
    """Return the devices with these names; with a worker's `own` GPUs, `cuda:i` is the i-th of them.

    All workers of a node see the GPUs of all, and `cuda:0` is the same one to each. Raises JobError if the worker has
    fewer.
    """
    if own is None:
        return [torch.device(name) for name in names]
    gpus = [device for device in own if device.type == "cuda"]
    devices = []
    for name in names:
        at = gpu_number(name)
        if at is not None and at >= len(gpus):
            raise JobError(f"devices: {name} is of the worker's own GPUs, of which it has {len(gpus)}")
        devices.append(torch.device(name) if at is None else gpus[at])
    return devices


STORE_TIMEOUT = timedelta(seconds=60)  # until the group is formed
SOON = timedelta(seconds=5)  # the same where workers may be lost meanwhile, and the others form another one

_stores: list[TCPStore] = []  # rank 0 holds the last group's store until the next: others may still read from it


@contextmanager
def process_group(
    worker: WorkerConfig,
    attempt: str,
    world: World,
    backend: str,
    step_seconds: float | None,
    local_world_size: int,
    within: timedelta | None = None,
) -> Iterator[None]:
    """Form the process group of a view's workers, and have the environment tell of it while the block runs.

    It forms `within` a time, if there is one. Rank 0 holds the store. The caller leaves the group. Raises WorkerError
    if it cannot be formed, and JobError if a mistake in the keys is why.
    """
    timeout, channel = within or STORE_TIMEOUT, worker.channel
    with _group_errors():
        if world.rank == 0:
            store = TCPStore(world.node, 0, world.world_size, True, timeout, wait_for_workers=False)
            ray.get(channel.set_store.remote(attempt, world.node, store.port))
            _stores[:] = [store]
        else:
            held = ray.get(channel.store.remote(attempt, worker.view, STORE_TIMEOUT.total_seconds()))
            if held is None:
                raise WorkerError("another worker was lost, or stood still, while the process group was formed")
            host, port = held
            store = TCPStore(host, port, world.world_size, False, timeout, wait_for_workers=False)
    places = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "NODE_RANK": world.node_rank,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": store.port,
        "ACCELERATE_TORCH_DEVICE": world.device,
    }
    with environment({name: str(value) for name, value in places.items()}):
        with _group_errors():
            form_group(backend, store, world, step_seconds, within, CloudPickler)
        yield


@contextmanager
def _group_errors() -> Iterator[None]:
    """Say of an error of the block that the process group could not be formed, or name the key that is wrong."""
    try:
        yield
    except ValueError as error:  # of `device_id`
        raise JobError(f"devices: {error}") from error
    except RuntimeError as error:
        failed = failed_collective(error)
        if failed is None:  # of CUDA, as where the GPU is in use
            raise
        may_be_lost = failed.cause in (Cause.LOST_PEER, Cause.UNKNOWN)
        cause = WorkerError(failed.line) if may_be_lost else failed.error()
        raise type(cause)(f"the process group could not be formed: {cause}") from error


def report(channel: Any, job_number: int, attempt: str, world: World, error: BaseException) -> str:
    """Report a worker's error in a job to the driver, and return its text."""
    kind = kind_of(error)
    text = str(error) if kind else f"{type(error).__name__}: {text_of(error)}"
    send(channel, Failed(attempt, world, kind, text, traceback.format_exc(), frames_of(error)), job_number)
    return text


def next_view(
    worker: WorkerConfig, here: World, progress: int = 0, has_lost_peer: bool = False
) -> tuple[View, World, int] | None:
    """Ask for the next view; return it, this worker's place in it, and how many of its workers are on this node.

    `progress` counts what this worker has finished, -1: it is a newcomer. None if what runs has ended. Raises
    WorkerExit if the others go on without this worker, and WorkerError, with the reason, if all are to end.
    """
    member = Member(worker.name, here.rank, worker.node_id)
    given = worker.number, os.environ[GROUP], member, progress, has_lost_peer, here.world_size
    view: View | str | None = ray.get(worker.channel.ask.remote(*given))
    if view is None:
        return None
    if view == OUT:
        raise WorkerExit(Ending.LOST_PEER, OUT, False)
    if isinstance(view, str):
        raise WorkerError(view)
    at = view.place(member.name)
    world = replace(here, rank=at.rank, world_size=at.world_size, local_rank=at.local_rank, node_rank=at.node_rank)
    return view, world, at.local_world_size


def leave_view(is_broken: bool) -> None:
    """Leave the groups of a view; `is_broken` says that a member was lost."""
    if is_broken:
        cut_groups()  # first: so all others hear of it
    free_memory()  # what of the view refers to its groups, in cycles
    # A sum that gloo has begun may not end even then. One more is dead so, and the others need not wait.
    limit = if_longer(STUCK_SECONDS, lambda: os.kill(os.getpid(), signal.SIGKILL)) if is_broken else nullcontext()
    with limit:
        leave_group()

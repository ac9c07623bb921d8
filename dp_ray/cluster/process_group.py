"""Forms the process group of a job's workers, anew for each job."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import ray
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.errors import JobError, WorkerError
from dp_ray.replica.failed_collective import Cause, error_of, failed_collective
from dp_ray.replica.freed_memory import free_memory
from dp_ray.replica.world import World, form_group
from dp_ray.system.environment import environment
from dp_ray.task.step_control import StopRequested

STORE_TIMEOUT = timedelta(seconds=60)  # until the group is formed

T = TypeVar("T")

_stores: list[TCPStore] = []  # rank 0 holds the last group's store until the next: others may still read from it


@contextmanager
def process_group(channel: Any, attempt: str, world: World, backend: str, local_world_size: int) -> Iterator[None]:
    """The default process group of the job's workers while the block runs.

    Rank 0 holds the store. If the block raises, but for StopRequested, the group stays: peers may wait in it, and the
    process is about to end. Raises WorkerError if the group cannot be formed, and JobError if a mistake in
    the job is why.
    """
    store = _checked(lambda: _open_store(channel, attempt, world))
    places = {
        "RANK": world.rank,
        "WORLD_SIZE": world.world_size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "NODE_RANK": world.node_rank,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": store.port,
        "ACCELERATE_TORCH_DEVICE": world.device,
    }
    with environment({name: str(value) for name, value in places.items()}):
        _checked(lambda: form_group(backend, store, world))
        try:
            yield
        except StopRequested:
            _leave(channel, attempt, world)
            raise
        # DDP's part in C++ must not be the last to hold the group: if the collector frees that, it waits for the
        # group's threads, and they may wait for the interpreter, which the collector holds.
        free_memory()
        _leave(channel, attempt, world)


def _leave(channel: Any, attempt: str, world: World) -> None:
    """Destroy the process group once no peer reads from it any more: that would end the process."""
    ray.get(channel.end.remote(f"{attempt} group", world.rank, world.world_size, True))
    dist.destroy_process_group()


def _checked(form: Callable[[], T]) -> T:
    try:
        return form()
    except ValueError as error:  # of `device_id`
        raise JobError(f"devices: {error}") from error
    except RuntimeError as error:
        failed = failed_collective(error)
        if failed is None:  # of CUDA, as where the GPU is in use
            raise
        may_be_lost = failed.cause in (Cause.LOST_PEER, Cause.UNKNOWN)
        told = WorkerError(failed.line) if may_be_lost else error_of(failed)
        raise type(told)(f"the process group could not be formed: {told}") from error


def _open_store(channel: Any, attempt: str, world: World) -> TCPStore:
    if world.rank == 0:
        store = TCPStore(world.node, 0, world.world_size, True, STORE_TIMEOUT, wait_for_workers=False)
        ray.get(channel.set_store.remote(attempt, world.node, store.port))
        _stores[:] = [store]
        return store
    host, port = ray.get(channel.store.remote(attempt))
    return TCPStore(host, port, world.world_size, False, STORE_TIMEOUT, wait_for_workers=False)

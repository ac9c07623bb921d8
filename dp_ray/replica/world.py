"""A worker's place among the others (rank, node, devices), and collectives that also work in one process."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.errors import DataError
from dp_ray.system.waiting import waiting

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=30)  # of a collective, as Ray Train sets it; `timeouts.step` is usually shorter


@functools.cache
def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU; each look at a device's `type` makes a string."""
    return device.type == "cuda"


@dataclass(frozen=True)
class World:
    """One worker's place, in torch.distributed's and Ray Train's terms; by default a single worker.

    Its inputs go to `device`. If its model is on several devices, `all_devices` lists them.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    node: str = "localhost"
    device: torch.device = CPU
    all_devices: tuple[torch.device, ...] = ()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of the worker's model, at least one."""
        return self.all_devices or (self.device,)

    def with_inputs_on(self, device: torch.device) -> "World":
        """A copy whose inputs go to `device`."""
        return replace(self, device=device)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


def begin_sum(tensor: torch.Tensor) -> dist.Work:
    """Start to sum a tensor over all workers, in place; `dist.all_reduce` does the same after many checks."""
    group = dist.group.WORLD
    assert group is not None
    return group.allreduce([tensor])


def form_group(backend: str, store: TCPStore, world: World) -> None:
    """Form the group of the workers that have the store open.

    The store waits longer from then on: a collective may need it, and workers come to one minutes apart.
    """
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=TIMEOUT,
        device_id=bound_gpu(backend, world),
    )
    store.set_timeout(TIMEOUT)


def bound_gpu(backend: str, world: World) -> torch.device | None:
    """The GPU for which NCCL connects at once, not in the first collective; None if it has to wait for that.

    Where a worker has several GPUs, NCCL connects for each one that is used: a group bound to one refuses the others.
    """
    gpus = {one for one in world.devices if one.type == "cuda"}
    if "nccl" not in backend or len(gpus) != 1 or not dist.is_nccl_available():
        return None
    (gpu,) = gpus
    return gpu if gpu.index is not None else torch.device("cuda", torch.cuda.current_device())


def new_group(backend: str | None = None) -> Any:
    """Another group of all workers, with the same time-out: NCCL's default is 10 minutes. Every rank calls this."""
    return dist.new_group(backend=backend, timeout=TIMEOUT)


def has_peers() -> bool:
    """Whether other workers run beside this one, in its process group."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_rank_0() -> bool:
    """Whether this is rank 0 of the process group; True without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def broadcast(text: str) -> str:
    """Rank 0's text on every rank; without a process group, the text itself. Every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    texts = [text]
    with waiting("rank 0"):
        dist.broadcast_object_list(texts, src=0)
    return texts[0]


def gathered(value: Any) -> list[Any]:
    """Every rank's value on every rank, in rank order; without a process group, one value. Every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with waiting("all ranks"):
        dist.all_gather_object(values, value)
    return values


def check_rows(key: str, rows: int, on_driver: Mapping[str, int]) -> None:
    """Raise DataError, on every rank, unless all ranks and the driver have a dataset of the same length.

    Every rank calls this. `rows` is this rank's length of the dataset `key`. `on_driver` maps keys to the lengths
    that the driver found.
    """
    holders: dict[int, list[str]] = {on_driver[key]: ["the driver"]} if key in on_driver else {}
    for rank, found in enumerate(gathered(rows)):
        holders.setdefault(found, []).append(f"rank {rank}")
    if len(holders) > 1:
        says = "; ".join(f"{found} rows on {', '.join(where)}" for found, where in holders.items())
        raise DataError(f"{key}: its length differs: {says}; all must read the same data: see what each node holds")

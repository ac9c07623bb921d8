"""Where a replica stands among the others: its rank, its node and its devices."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dp_ray.errors import DataError
from dp_ray.system.waiting import waiting

CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """One worker's place, in torch.distributed's and Ray Train's terms; alone in its process by default.

    `device` is where its inputs go; `all_devices`, where the model lies on several, are those.
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
        return self.all_devices or (self.device,)

    def with_inputs_on(self, device: torch.device) -> "World":
        return replace(self, device=device)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


_LOST = re.compile(r"gloo|NCCL|Connection (reset|closed) by peer")


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, which says that another worker, or the way to it, is gone."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or bool(_LOST.search(str(error)))


def is_rank_0() -> bool:
    """Whether this is rank 0 of the process group; without one, everybody is."""
    return not dist.is_initialized() or dist.get_rank() == 0


def broadcast(text: str) -> str:
    """Rank 0's text on every rank; the text itself where there is no process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    texts = [text]
    with waiting("rank 0"):
        dist.broadcast_object_list(texts, src=0)
    return texts[0]


def gathered(value: Any) -> list[Any]:
    """Every rank's value on every rank, in the order of ranks; the value alone where there is no process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with waiting("all ranks"):
        dist.all_gather_object(values, value)
    return values


def check_rows(key: str, rows: int, on_driver: Mapping[str, int]) -> None:
    """Raise DataError, on every rank, unless all ranks and the driver have a dataset of the same length.

    Every rank calls this; `on_driver` has the lengths that the driver found, by the datasets' keys.
    """
    holders: dict[int, list[str]] = {on_driver[key]: ["the driver"]} if key in on_driver else {}
    for rank, found in enumerate(gathered(rows)):
        holders.setdefault(found, []).append(f"rank {rank}")
    if len(holders) > 1:
        says = "; ".join(f"{found} rows on {', '.join(where)}" for found, where in holders.items())
        raise DataError(f"{key}: its length differs: {says}; all must read the same data: see what each node holds")

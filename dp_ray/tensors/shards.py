"""Tensors of which each worker holds rows: torch's DTensors, sharded over dimension 0 by `fully_shard`.

Rank r of W holds rows `r * ceil(rows / W)` to the next rank's; the last ranks may hold fewer or none. This module
does not import DTensor, since its import takes seconds that other jobs need not spend.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dp_ray.system.waiting import waiting


def is_sharded(tensor: Any) -> bool:
    """Whether this worker holds only rows of the tensor."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's rows of a sharded tensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def rows_of(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """The first row of a rank, and its end.

    >>> [rows_of(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    share = -(-rows // world_size)
    return min(rows, share * rank), min(rows, share * (rank + 1))


@torch.no_grad()
def on_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor on rank 0's CPU; every rank calls this for a sharded one, and others get no rows."""
    if not is_sharded(tensor):
        return tensor.detach().cpu()
    is_first = dist.get_rank() == 0
    mine, rows = local(tensor.detach()), tensor.shape[0]
    share = -(-rows // dist.get_world_size())
    padded = mine.new_zeros(share, *tensor.shape[1:])
    padded[: mine.shape[0]] = mine
    if dist.get_backend() == "nccl":
        padded = padded.cuda()
    received = [torch.empty_like(padded) for _ in range(dist.get_world_size())] if is_first else None
    with waiting("the other workers' rows"):
        dist.gather(padded, received, dst=0)
    return torch.cat(received)[:rows].cpu() if received is not None else mine[:0]


def attend_writing(tensors: Mapping[str, torch.Tensor]) -> None:
    """Send this worker's rows of each tensor to rank 0, which reads each twice in `write_tensors`."""
    for _ in range(2):
        for one in filter(is_sharded, tensors.values()):
            on_rank_0(one)

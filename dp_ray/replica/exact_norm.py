"""The norm of a sharded gradient, with the bits that one worker with the whole gradient computes.

A norm's bits depend on the order of its additions. So for each parameter one worker gets the whole gradient, and
computes its norm. The parameters go round: the first to rank 0, the next to rank 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from dp_ray.replica.optimizer import norms_of
from dp_ray.replica.world import World
from dp_ray.system.waiting import waiting
from dp_ray.tensors.shards import rows_of

CHUNK_BYTES = 1 << 25  # of a worker's slices, sent at once


@dataclass(frozen=True)
class Slice:
    """This worker's slice of a gradient, flat, and the gradient's shape."""

    numbers: torch.Tensor
    shape: tuple[int, ...]

    def count(self, world_size: int, rank: int) -> int:
        """How many numbers a rank's slice has."""
        first, end = rows_of(self.shape[0], world_size, rank)
        return (end - first) * torch.Size(self.shape[1:]).numel()


def norms_of_slices(slices: Sequence[Slice], world: World, device: torch.device) -> list[torch.Tensor]:
    """The norm of each whole gradient, of which `slices` are this worker's; every rank calls this."""
    if not slices:
        return []
    found: dict[int, torch.Tensor] = {}
    for start, stop in _chunks(slices):
        mine = range(start + (world.rank - start) % world.world_size, stop, world.world_size)
        whole = _exchanged(slices, start, stop, world, device)
        found |= dict(zip(mine, norms_of(whole) if whole else [], strict=True))
    known = norms_of([slices[0].numbers[:0].to(device)])[0]  # for the dtype
    norms = known.new_zeros(len(slices))
    for number, norm in found.items():
        norms[number] = norm
    with waiting("the other workers' norms"):
        dist.all_reduce(norms)
    return list(norms.unbind())


def _chunks(slices: Sequence[Slice]) -> Iterator[tuple[int, int]]:
    """Ranges of gradients to exchange at once, the same on all workers."""
    cuts, size = [0], 0
    for number, one in enumerate(slices):
        size += torch.Size(one.shape).numel() * one.numbers.itemsize
        if size >= CHUNK_BYTES:
            cuts.append(number + 1)
            size = 0
    yield from pairwise(dict.fromkeys([*cuts, len(slices)]))


def _exchanged(
    slices: Sequence[Slice], start: int, stop: int, world: World, device: torch.device
) -> list[torch.Tensor]:
    """The whole gradients that this worker gets, of those from `start` to `stop`."""
    size, rank = world.world_size, world.rank
    by_owner = [
        [one for at, one in enumerate(slices[start:stop], start) if at % size == owner] for owner in range(size)
    ]
    sent = torch.cat([one.numbers for theirs in by_owner for one in theirs]).to(device)
    counts = [sum(one.numbers.numel() for one in theirs) for theirs in by_owner]
    mine = by_owner[rank]
    from_each = [sum(one.count(size, sender) for one in mine) for sender in range(size)]
    received = sent.new_empty(sum(from_each))
    with waiting("the other workers' gradients"):
        dist.all_to_all_single(received, sent, from_each, counts)
    parts = [
        torch.split(one, [each.count(size, at) for each in mine])
        for at, one in enumerate(torch.split(received, from_each))
    ]
    return [torch.cat([theirs[at] for theirs in parts]).view(one.shape) for at, one in enumerate(mine)]

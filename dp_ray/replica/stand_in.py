"""A batch with which a worker without rows runs the model, because the others cannot gather parameters without it.

Workers that hold parts of a model run it in rounds: in each, all run one shard. One that has fewer shards with rows
than another runs a stand-in in the missing rounds: its own first batch, or else that of another worker. Its
loss counts nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from dp_ray.plan.split import Shard, Split
from dp_ray.plan.work import Done, Work
from dp_ray.replica.carry import CarryingBatch
from dp_ray.replica.read_requests import Indices
from dp_ray.replica.user_code import loaded, place
from dp_ray.replica.world import World, gathered
from dp_ray.tensors.nested import map_leaves
from dp_ray.tensors.raw import moved

Batches = Iterator[tuple[Indices, Any]]


class StandIn(NamedTuple):
    """A batch and its number of rows."""

    batch: Any
    rows: int


def rounds(split: Split, step: int, world_size: int, done: Done | None = None) -> int:
    """How many shards with rows, without those `done`, the worker with most of them has in a step, by the plan."""
    work = (Work(split, world_size, rank, done or Done(), step) for rank in range(world_size))
    return max(len(next(iter(one))[1]) for one in work)


class StandIns:
    """Holds the batch that stands in, and counts the rounds in which it must."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.found: StandIn | None = None
        self._is_agreed = False

    def missing(self, split: Split, step: int, ran: int, done: Done | None = None) -> int:
        """How many rounds of the step this worker, which has run `ran` shards, runs a stand-in."""
        return rounds(split, step, self._world.world_size, done) - ran if self.found is not None else 0

    def look(self, shards: Sequence[Shard], batches: Batches, real: Callable[[Shard], Shard]) -> Batches:
        """The same batches, after the workers have agreed on a stand-in; every rank calls this before each step.

        Until all have one, it loads the whole step, since the first samples may be set aside.
        """
        if self._is_agreed:
            return batches
        first = [loaded(batches, place(shard)) for shard in shards]
        filled = [
            StandIn(batch.batch if isinstance(batch, CarryingBatch) else batch, real(shard).rows)
            for shard, (_, batch) in zip(shards, first, strict=True)
            if real(shard).rows
        ]
        self._agree(filled[0] if filled else None)
        return chain(first, batches)

    def _agree(self, mine: StandIn | None) -> None:
        """Take the worker's own stand-in, or else that of the first rank that has one."""
        have = gathered(mine is not None)
        self._is_agreed = any(have)
        self.found = mine
        if self._is_agreed and not all(have):
            first = have.index(True)
            sent = gathered(_moved(mine, torch.device("cpu")) if self._world.rank == first else None)[first]
            self.found = mine or _moved(sent, self._world.device)


def _moved(one: StandIn | None, device: torch.device) -> StandIn | None:
    return None if one is None else StandIn(map_leaves(lambda leaf: moved(leaf, device), one.batch), one.rows)

"""The forwards of workers that hold a part of the model each: all of them run each one together."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist

from dp_ray.engine.items import PassthroughBatch
from dp_ray.engine.loading import LoadedStep
from dp_ray.engine.replica import DummyBatch, Forwards
from dp_ray.engine.sharded.state import Sharded
from dp_ray.engine.world import CPU, World, everyone, gathered
from dp_ray.plan.split import Work
from dp_ray.system.threads import waiting
from dp_ray.tensors.files import moved_batch

T = TypeVar("T")


class CollectiveForwards(Forwards):
    """The forwards of workers that hold a part of the model each: in each round all of them run it."""

    are_collective = True

    def __init__(self, sharded: Sharded, world: World) -> None:
        self._sharded = sharded
        self._world = world
        self._dummy: DummyBatch | None = None
        self._is_agreed = sharded.round.is_alone  # then nobody waits for this worker: it runs no dummy batch

    def begin(self, loaded: LoadedStep) -> LoadedStep:
        """Return the same step, once the workers have agreed on a dummy batch. Every rank calls this each step.

        Until all have one, it loads the whole step, since the first samples may be set aside.
        """
        if self._is_agreed:
            return loaded
        first = list(loaded.loaded)
        filled = [
            DummyBatch(batch.batch if isinstance(batch, PassthroughBatch) else batch, shard.rows)
            for shard, _, batch in first
            if shard.rows
        ]
        mine = filled[0] if filled else None
        have = gathered(mine is not None)
        self._is_agreed = any(have)
        self._dummy = mine
        if self._is_agreed and not all(have):  # one without rows takes the batch of the first rank that has one
            sender = have.index(True)
            sent = gathered(_moved(mine, CPU) if self._world.rank == sender else None)[sender]
            self._dummy = mine or _moved(sent, self._world.device)
        return loaded._replace(loaded=chain(first))

    def gathering(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function that runs the model, with the parameters outside its blocks gathered."""
        return partial(self._sharded.run, function)

    def dummies(self, work: Work, step: int, ran: int) -> list[DummyBatch]:
        """Return the dummy batch, for each round of the step in which this worker has no rows.

        There are as many rounds as the worker has that has most shards with rows by the plan, without those done.
        """
        if self._dummy is None:
            return []
        size = self._world.world_size
        everybodys = (Work(work.split, size, rank, work.done, step) for rank in range(size))
        return [self._dummy] * (max(len(next(iter(batches))[1]) for batches in everybodys) - ran)

    def agree(self, goes_on: bool) -> bool:
        """Return whether all workers go on; every rank calls this before each step."""
        votes = torch.tensor(int(goes_on))
        with waiting("the other workers to begin the next step"):
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=everyone())
        return bool(votes)

    def end(self) -> bool:
        """Free the parameters that the last forward has left gathered; return True."""
        self._sharded.root.reshard()  # a forward without a backward leaves parameters gathered
        return True


def _moved(batch: DummyBatch | None, device: torch.device) -> DummyBatch | None:
    return None if batch is None else DummyBatch(moved_batch(batch.batch, device), batch.rows)

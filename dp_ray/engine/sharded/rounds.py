"""Run a model whole on each worker (`ddp`), or in rounds if each holds a part of it (`fsdp`).

Workers that hold parts of a model cannot gather its parameters without each other. So they run it in rounds: in each,
all run one shard. One that has fewer shards with rows than another runs a dummy batch in the other rounds: its own
first batch, or else that of another worker. Its loss counts nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dp_ray.engine.items import PassthroughBatch
from dp_ray.engine.sharded.state import Sharded
from dp_ray.engine.world import CPU, World, gathered
from dp_ray.job.job import Job
from dp_ray.job.samples import Indices
from dp_ray.plan.split import Done, Shard, Split, Work
from dp_ray.tensors.files import moved
from dp_ray.tensors.tree import copied, map_leaves

Batches = Iterator[tuple[Indices, Any]]
ShardFilter = Callable[[Shard], Shard]


def sharded_model(job: Job, world: World, note: Callable[[str], None]) -> Sharded | None:
    """Build the job's model, sharded over the workers; None if each worker is to build it whole.

    A single worker holds it whole, unless `fsdp.mixed_precision` changes the numbers. Every rank calls this.
    """
    if not shards_over(job, world):
        return None
    from dp_ray.engine.sharded.build import build_sharded  # here: its imports take seconds

    if job.flops:
        note("flops: not counted: with strategy: fsdp no worker can run a shard alone")
    return build_sharded(job, world, note)


def shards_over(job: Job, world: World) -> bool:
    """Return whether torch's FSDP runs the model: on several workers, or if it computes in other dtypes."""
    return job.is_sharded and (world.world_size > 1 or job.fsdp.mixed_precision is not None)


@contextmanager
def group_of_one(job: Job, world: World) -> Iterator[None]:
    """Have a process group while a job runs, which FSDP needs, on a worker that is alone and has none."""
    if dist.is_initialized() or not shards_over(job, world) or world.world_size > 1:
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Forwards:
    """The forwards of workers that hold the whole model: no worker waits for another."""

    def before(self, shards: Sequence[Shard], batches: Batches, without_set_aside: ShardFilter) -> Batches:
        """Return the batches to go on with, before a step of which this worker has `shards`; all ranks call this."""
        return batches

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model."""
        return function(*args)

    def dummy_batches(self, work: Work, step: int, ran: int) -> Iterator[Any]:
        """Yield a batch for each round that this worker, which has run `ran` shards of a step, runs without rows."""
        return iter(())

    def agree(self, goes_on: bool) -> bool:
        """Return whether to run the next step: this worker's own decision."""
        return goes_on

    def end(self) -> bool:
        """End an evaluation or a prediction, and say that it ran to its end: True."""
        return True


class DummyBatch(NamedTuple):
    """A batch and its number of rows."""

    batch: Any
    rows: int


@dataclass
class DummyBatches:
    """The dummy batch on which the workers have agreed, and the count of the rounds that need it."""

    world: World
    batch: DummyBatch | None = None
    _is_agreed: bool = False

    def rounds_without_rows(self, split: Split, step: int, ran: int, done: Done | None = None) -> int:
        """Return how many rounds of the step this worker, which has run `ran` shards, runs the dummy batch."""
        if self.batch is None:
            return 0
        # As many as the worker has that has most shards with rows by the plan, without those `done`.
        size = self.world.world_size
        work = (Work(split, size, rank, done or Done(), step) for rank in range(size))
        return max(len(next(iter(one))[1]) for one in work) - ran

    def agree(self, shards: Sequence[Shard], batches: Batches, without_set_aside: ShardFilter) -> Batches:
        """Return the same batches, once the workers have agreed on a dummy batch. Every rank calls this each step.

        Until all have one, it loads the whole step, since the first samples may be set aside.
        """
        if self._is_agreed:
            return batches
        first = [next(batches) for _ in shards]
        filled = [
            DummyBatch(batch.batch if isinstance(batch, PassthroughBatch) else batch, without_set_aside(shard).rows)
            for shard, (_, batch) in zip(shards, first, strict=True)
            if without_set_aside(shard).rows
        ]
        mine = filled[0] if filled else None
        have = gathered(mine is not None)
        self._is_agreed = any(have)
        self.batch = mine
        if self._is_agreed and not all(have):  # one without rows takes the batch of the first rank that has one
            sender = have.index(True)
            sent = gathered(_moved(mine, CPU) if self.world.rank == sender else None)[sender]
            self.batch = mine or _moved(sent, self.world.device)
        return chain(first, batches)


class CollectiveForwards(Forwards):
    """The forwards of workers that hold a part of the model each: in each round all of them run it."""

    def __init__(self, sharded: Sharded, world: World) -> None:
        self._sharded = sharded
        self._dummies = DummyBatches(world)

    def before(self, shards: Sequence[Shard], batches: Batches, without_set_aside: ShardFilter) -> Batches:
        """Return the batches to go on with, after the workers have agreed on a dummy batch; every rank calls this."""
        return self._dummies.agree(shards, batches, without_set_aside)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs the model, with the parameters outside its blocks gathered."""
        return self._sharded.run(function, *args)

    def dummy_batches(self, work: Work, step: int, ran: int) -> Iterator[Any]:
        """Yield a copy of the dummy batch, for each round of the step in which this worker has no rows."""
        dummy = self._dummies.batch
        for _ in range(self._dummies.rounds_without_rows(work.split, step, ran, work.done)):
            assert dummy is not None
            yield copied(dummy.batch)  # a model may change its inputs in place

    def agree(self, goes_on: bool) -> bool:
        """Return whether all workers go on; every rank calls this before each step."""
        return all(gathered(goes_on))

    def end(self) -> bool:
        """Free what the last forward has left gathered, and say that it ran to its end: True."""
        self._sharded.root.reshard()  # a forward without a backward leaves parameters gathered
        return True


def forwards_of(sharded: Sharded | None, world: World) -> Forwards:
    """Return the forwards of a model that is sharded, or whole."""
    return Forwards() if sharded is None else CollectiveForwards(sharded, world)


def _moved(one: DummyBatch | None, device: torch.device) -> DummyBatch | None:
    return None if one is None else DummyBatch(map_leaves(lambda leaf: moved(leaf, device), one.batch), one.rows)

"""How the workers hold a model: whole (`ddp`), or a part of it each (`fsdp`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dp_ray.job import Job
from dp_ray.replica.sharded import Sharded
from dp_ray.replica.world import World


def shards_over(job: Job, world: World) -> bool:
    """Whether torch's FSDP runs the model: on several workers, or if it computes in other dtypes."""
    return job.is_sharded and (world.world_size > 1 or job.fsdp.mixed_precision is not None)


@contextmanager
def group_of_one(job: Job, world: World) -> Iterator[None]:
    """While a job runs: a process group, which FSDP needs, for a worker that is alone and has none."""
    if dist.is_initialized() or not shards_over(job, world) or world.world_size > 1:
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_model(job: Job, world: World, note: Callable[[str], None]) -> Sharded | None:
    """The job's model, sharded over the workers; None if each worker is to build it whole.

    A single worker holds it whole, unless `fsdp.mixed_precision` changes the numbers. Every rank calls this.
    """
    if not shards_over(job, world):
        return None
    from dp_ray.replica.sharding import build_sharded  # its imports take seconds

    if job.flops:
        note("flops: not counted: with strategy: fsdp no worker can run a shard alone")
    return build_sharded(job, world, note)

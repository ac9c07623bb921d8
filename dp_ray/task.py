"""One worker's whole task, from its dataset to its committed parts. It knows no Ray: `send` takes the reports."""

from collections.abc import Callable
from typing import Any

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.plan.split import Shard, Split
from dp_ray.plan.work import Done, Work
from dp_ray.replica.data import Indices, load_shards
from dp_ray.replica.loop import predict
from dp_ray.replica.model import build_model, replicate
from dp_ray.replica.targets import build_dataset
from dp_ray.replica.world import World
from dp_ray.results.outputs import PartWriter, done_ranges
from dp_ray.results.recorder import Recorder, Report
from dp_ray.results.shapes import Probe
from dp_ray.storage import Storage

PARTS = "parts"


def split_of(job: Job, dataset: Any) -> Split:
    """How the job cuts an epoch of its dataset."""
    return Split(len(dataset), job.batch_size, job.num_shards, job.drop_last)


def run_task(job: Job, world: World, run: Storage, send: Callable[[Report], None]) -> None:
    """Run this worker's shards of every step, but those that a whole part in the run directory holds."""
    dataset = build_dataset(job)
    model = build_model(job, world.device)
    replica = replicate(model, world)
    parts = run.child(PARTS)
    work = Work(split_of(job, dataset), world.world_size, world.rank, Done(done_ranges(parts)))
    with (
        Recorder(world, send) as recorder,
        Probe(model, job.batch_dim) as probe,
        PartWriter(parts, work.shards, job.batch_dim, before_commit=recorder.flush) as writer,
    ):

        def on_shard(shard: Shard, indices: Indices, outputs: Any) -> None:
            recorder.on_shard(shard, *probe.take())
            try:
                writer.on_shard(shard, indices, outputs)
            except ModelError as error:
                raise ModelError(f"step {shard.step}, shard {shard.shard}: {error}") from error
            except (TypeError, ValueError, RuntimeError) as error:
                what = f"step {shard.step}, shard {shard.shard}: the outputs cannot be kept: {error}"
                raise ModelError(what) from error

        def on_step(step: int) -> None:
            recorder.on_step(step)
            writer.on_step(step)

        predict(replica, work, load_shards(job, dataset, work, world.device), job.call, on_shard, on_step)

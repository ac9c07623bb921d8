"""Report the shapes of a shard that ran through a step, and once a loss that depends on the shards."""

from collections.abc import Callable
from typing import Any

from dp_ray.job import Job
from dp_ray.plan.split import Shard
from dp_ray.replica.loss import of_neighbours
from dp_ray.replica.model import autocast
from dp_ray.replica.step import OnShard, StepOutput
from dp_ray.replica.world import World
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe, Seen, encode_sizes


def reporting(recorder: Recorder, probe: Probe) -> OnShard:
    """A function that records each shard with what the probe saw of it."""

    def on_shard(shard: Shard, batch: Any, step_output: StepOutput) -> None:
        recorder.on_shard(shard, *_seen(probe, shard, batch, step_output))

    return on_shard


def looking_at_loss(job: Job, first: int, world: World, on_shard: OnShard, tell: Callable[[str], None]) -> OnShard:
    """The same function; in shard 0 of the training's `first` step it tells of a loss that depends on the shards.

    A line, not an error: contrastive losses are meant so. A `step` of the user's is not called again.
    """
    if world.rank != 0 or first != 0 or job.num_shards == 1:
        return on_shard

    def looked(shard: Shard, batch: Any, step_output: StepOutput) -> None:
        on_shard(shard, batch, step_output)
        given = step_output
        if (shard.step, shard.shard) != (0, 0) or given.compare is None:
            return
        is_exact = job.precision == "fp32" and world.device.type == "cpu"
        with autocast(job.precision, world.device):
            seen = given.outputs, given.target
            found = of_neighbours(given.compare, given.loss, seen, shard.rows, job.batch_dim, is_exact)
        if found is not None:
            tell(
                f"loss: the loss of a row depends on the other rows of its shard: that of step 0, shard 0 sums up to "
                f"{found.together:.6g}, and with one of its {shard.rows} rows apart to "
                f"{found.first + found.others:.6g}; so each of the {job.num_shards} shards has its own, and their "
                "number counts. With shards: 1 it is that of the whole batch"
            )

    return looked


def _seen(probe: Probe, shard: Shard, batch: Any, step_output: StepOutput) -> tuple[Seen, float]:
    """The sizes that the model saw, and its milliseconds.

    If the user's step bypassed the model's forward: the sizes of the step's batch and loss, and 0.
    """
    if probe.has_seen:
        return probe.take()
    return Seen(encode_sizes(batch), encode_sizes(step_output.loss), shard.rows), 0.0

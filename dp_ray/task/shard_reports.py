"""Report the shapes of a shard that ran through a step."""

from typing import Any

from dp_ray.plan.split import Shard
from dp_ray.replica.step import OnShard, StepOutput
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe, Seen, encode_sizes


def reporting(recorder: Recorder, probe: Probe) -> OnShard:
    """A function that records each shard with what the probe saw of it."""

    def on_shard(shard: Shard, batch: Any, step_output: StepOutput) -> None:
        recorder.on_shard(shard, *_seen(probe, shard, batch, step_output))

    return on_shard


def _seen(probe: Probe, shard: Shard, batch: Any, step_output: StepOutput) -> tuple[Seen, float]:
    """The sizes that the model saw, and its milliseconds.

    If the user's step bypassed the model's forward: the sizes of the step's batch and loss, and 0.
    """
    if probe.has_seen:
        return probe.take()
    return Seen(encode_sizes(batch), encode_sizes(step_output.loss), shard.rows), 0.0

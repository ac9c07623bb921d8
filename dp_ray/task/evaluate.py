"""The task `evaluate`: one worker's part in measuring a model over a dataset."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from dp_ray.job import Job
from dp_ray.job_plan import split_of
from dp_ray.job_target import Target
from dp_ray.plan.split import Shard
from dp_ray.plan.work import Work
from dp_ray.replica.data import load_shards, seeded_dataset
from dp_ray.replica.devices import input_device
from dp_ray.replica.evaluation import Evaluation, build_metrics
from dp_ray.replica.model import build_model, compiled, synchronise
from dp_ray.replica.rng import has_drawn
from dp_ray.replica.step import StepOutput, build_step
from dp_ray.replica.world import World, check_rows
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe
from dp_ray.rundir.weights import describe_start, load_weights, read_start
from dp_ray.storage import Storage
from dp_ray.task.notices import Measured, Note, Send
from dp_ray.task.step_control import StepControl
from dp_ray.task.train import seen


def evaluate(
    job: Job, world: World, run: Storage, send: Send, control: StepControl, rows_on_driver: Mapping[str, int]
) -> None:
    """Run this worker's shards of every step; rank 0 sends the metrics over the whole dataset."""
    dataset = seeded_dataset(job, job.dataset_key)
    check_rows("dataset", len(dataset), rows_on_driver)
    model = started(job, world, run, send)
    world = world.with_inputs_on(input_device(job, model, world.devices))
    called = compiled(model, job)
    work = Work(split_of(job, len(dataset)), world.world_size, world.rank)
    measures, states = build_metrics(job)
    evaluation = Evaluation(job, build_step(job, world), measures, states, world.device)
    batches = load_shards(job, dataset, work, world.device)
    with Recorder(world, send) as recorder, Probe(called, job.batch_dim) as probe:

        def on_shard(shard: Shard, batch: Any, step_output: StepOutput) -> None:
            recorder.on_shard(shard, *seen(probe, shard, batch, step_output))

        def on_step(step: int) -> None:
            recorder.on_step(step)
            control.before(step + 1)

        control.before(0)
        metrics = evaluation.run(called, work, batches, on_shard, on_step)
    if world.rank == 0:
        send(Measured(metrics))
    control.end()


def started(job: Job, world: World, run: Storage, send: Send) -> nn.Module:
    """Build the model with the weights to run, the same on every rank; rank 0 reports untrained weights."""
    model = build_model(job, world.devices)
    if job.init_from is not None:
        load_weights(model, read_start(run, job.init_from)[0], job.init_from)
        if world.rank == 0:
            send(Note(describe_start(run, job.init_from)))
    elif world.rank == 0 and isinstance(job.model, Target) and has_drawn(job.seed):
        send(Note(f"untrained weights: init_from is not set (unless {job.model.label} loads trained ones itself)"))
    synchronise(model)
    return model

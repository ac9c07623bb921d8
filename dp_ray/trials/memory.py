"""Try a step of a job on one worker, to see whether its devices hold it; no worker waits for another meanwhile.

Begin at `why_not`. The model, its gradients, the optimizer's state and the worker's shards are all in memory, as in
the job. The numbers of the step mean nothing. The model is made for the trial, and is gone after it.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn

from dp_ray.engine.clock import StepClock
from dp_ray.engine.evaluation import build_metrics
from dp_ray.engine.forward.buffers import modules_beside
from dp_ray.engine.forward.model import autocast, begin_to_train, evaluating
from dp_ray.engine.forward.replica import Forwards, Replica
from dp_ray.engine.forward.state import EvalState, StepState
from dp_ray.engine.forward.step import PredictInputs, build_step, run_step
from dp_ray.engine.loads.bad_samples import Quarantine
from dp_ray.engine.loads.loading import LoadedStep, Pick, Source, find_reference, load_steps
from dp_ray.engine.placement import Placement, ShardedPlacement, place
from dp_ray.engine.prediction import Prediction, predict
from dp_ray.engine.sums.reduce import Reduction, Trained
from dp_ray.engine.sums.tree_sum import make_gradients_dense
from dp_ray.engine.sums.whole_batch import shard_loss
from dp_ray.engine.update import OptimizerStep
from dp_ray.engine.user_code import free_memory, is_out_of_memory
from dp_ray.engine.world import World
from dp_ray.errors import DataError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Loader
from dp_ray.job.plan import with_schedule
from dp_ray.plan.split import Split, Work, num_filled

HEADROOM = 0.1  # of each GPU, kept free: for other workers' numbers, gaps between tensors, and rows that are larger


class Data(NamedTuple):
    """A dataset to load from, and its split into shards."""

    source: Source
    split: Split


def why_not(job: Job, world: World, data: Data, evaluated: Sequence[Data]) -> str:
    """Return why this worker's devices do not hold its shards of a step; empty if they do. Every rank calls this.

    A training's step runs twice, since the first one makes the optimizer's state. `evaluated` has the data of its
    evaluations, which run a step too. Raises the errors of user code, except for memory.
    """
    try:
        _try(job, world, data, evaluated)
        return ""
    except (RuntimeError, ModelError, DataError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error).splitlines()[0].rstrip(".")
    finally:
        free_memory()  # here, where the frames of the trial, which hold its model, are gone


def _try(job: Job, world: World, data: Data, evaluated: Sequence[Data]) -> None:
    if job.task == "train":
        job = with_schedule(job, data.split)
    placement = place(
        job.model_copy(update={"sync_batchnorm": False, "on_error": None, "skip": None}), world, lambda text: None
    )
    if isinstance(placement, ShardedPlacement):
        placement.sharded.round.is_alone = True
    world, model, called = placement.world, placement.model, placement.called
    forwards = placement.forwards()
    kept_free = []
    for device in world.devices:
        if device.type == "cuda":
            size = int(HEADROOM * torch.cuda.get_device_properties(device).total_memory)
            kept_free.append(torch.empty(size, dtype=torch.uint8, device=device))
    if job.task == "train":
        _train(placement, data)
    elif job.task == "predict":
        _predict(job, world, model, called, forwards, data)
    for judged in [*evaluated, *([data] if job.task == "evaluate" else [])]:
        _evaluate(job, world, model, called, forwards, judged)
    del kept_free  # not before: it keeps its memory free until all has run


def _shards(world: World, data: Data) -> Work:
    """Return the first step's shards of this worker; those of rank 0 if it has none."""
    split = replace(data.split, max_steps=1)
    mine = Work(split, world.world_size, world.rank)
    return mine if any(shards for _, shards in mine) else Work(split, world.world_size)


def _load(world: World, data: Data, pick: Pick | None = None) -> tuple[Work, Generator[LoadedStep, None, None]]:
    """Return the shards of the trial, and the step that loads them on the worker's device, without bad samples."""
    source = data.source
    job = source.job.model_copy(update={"loader": Loader(pin_memory=source.job.loader.pin_memory)})
    work, quarantine = _shards(world, data), None
    if job.on_error is not None:
        quarantine = Quarantine(find_reference(job, source.dataset, source.name), lambda shard, bad: None)
    return work, load_steps(replace(source, job=job), work, world.device, quarantine, pick)


def _train(placement: Placement, data: Data) -> None:
    """Run the first step of a training twice, without other workers; the first time, only its first shard."""
    job, model, world = placement.job, placement.model, placement.world
    if job.bitwise:
        make_gradients_dense(model)
    begin_to_train(model)
    optimizer_step = placement.optimizer_step()
    average = placement.average(optimizer_step)  # it takes memory
    loss_of = shard_loss(placement.called, build_step(job, world), build_metrics(job)[0], job, world.device)
    trained = list(optimizer_step.gradients.trained.values())
    state = StepState(model, placement.parts())
    parts = Trained(loss_of, optimizer_step.gradients.trained, [], placement.sums(trained), state, StepClock())
    reduction = placement.reduction(parts, False, 0) if placement.is_sharded else Reduction(parts)
    beside = EvalState(nn.Module(), loss_of.beside)
    try:
        _run_twice(placement, data, reduction, optimizer_step)
    finally:
        beside.put_back()
    del average


def _run_twice(placement: Placement, data: Data, reduction: Reduction, optimizer_step: OptimizerStep) -> None:
    gradients, world = optimizer_step.gradients, placement.world
    trained = list(gradients.trained.values())
    replica = Replica(placement.job.seed, placement.model, world.device, reduction.trained.state)
    for most in (1, None):  # the first pass makes the optimizer's state
        (planned,) = (shards[:most] for _, shards in _shards(world, data))
        # DDP's buckets: they hold the gradients themselves if the worker runs a single shard.
        has_buckets = not placement.is_sharded and world.world_size > 1
        buckets = [torch.zeros_like(parameter) for parameter in trained] if has_buckets else []
        if buckets and len(planned) == 1:
            for parameter, bucket in zip(trained, buckets, strict=True):
                parameter.grad = bucket
        filled = num_filled(data.split.largest_batch, data.split.shards)
        reduction.begin(0, [shard.shard for shard in planned], filled, len(planned))
        replica.begin(len(planned))
        with closing(_load(world, data)[1]) as steps:
            loaded = next(steps)
            for shard, _, batch, rows in replica.rounds(loaded._replace(loaded=islice(loaded.loaded, most))):
                assert shard is not None
                loss = replica.run(shard, reduction.called, batch, rows, shard.shard)
                gradients.hooks.look()
                reduction.backward(shard.shard, loss, torch.full_like(loss, 1 / data.split.largest_batch))
        if not placement.is_sharded:
            reduction.finish(torch.empty(0))
        reduction.trained.state.finish()
        optimizer_step.rehearse()
        del buckets
    gradients.hooks.put_back()


def _predict(job: Job, world: World, model: nn.Module, called: nn.Module, forwards: Forwards, data: Data) -> None:
    """Run a prediction's step, and compute its outputs to keep."""
    work, steps = _load(world, data, PredictInputs(job, model, lambda text: None))
    prediction = Prediction(job, world.device, work, forwards=forwards)
    with (
        closing(steps),
        prediction.replica(called) as replica,
        closing(predict(prediction, replica, steps)) as finished,
    ):
        for _ in finished:
            pass


def _evaluate(job: Job, world: World, model: nn.Module, called: nn.Module, forwards: Forwards, data: Data) -> None:
    """Run an evaluation's step."""
    step, measures = build_step(job, world), build_metrics(data.source.job)[0]
    run = forwards.gathering(run_step)
    with (
        closing(_load(world, data)[1]) as steps,
        evaluating(model, modules_beside(job, step, measures.functions)) as state,
        torch.no_grad(),
        autocast(job.precision, world.device),
    ):
        replica = Replica(job.seed, model, world.device, state)
        for turn in replica.rounds(next(steps)):
            measures(replica.run(turn.shard, run, step, called, turn.batch), turn.rows)
    forwards.end()

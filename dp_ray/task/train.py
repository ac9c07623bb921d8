"""The task `train`: one worker's part, from its dataset to the final weights, without Ray; `send` takes reports."""

import functools
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext

import torch
from torch import nn

from dp_ray.errors import JobError, StorageError
from dp_ray.job import Job
from dp_ray.job_plan import split_of
from dp_ray.plan.work import Work
from dp_ray.replica.activation_checkpointing import recompute_blocks
from dp_ray.replica.devices import input_device
from dp_ray.replica.evaluation import Evaluation, build_metrics, check_watched
from dp_ray.replica.loss_watch import LossWatch
from dp_ray.replica.model import build_model, compiled, synchronise
from dp_ray.replica.passes import passes_of
from dp_ray.replica.quarantine import load_good
from dp_ray.replica.skipping import Skipping
from dp_ray.replica.step import build_step
from dp_ray.replica.step_clock import clock_on
from dp_ray.replica.step_times import StepTimes
from dp_ray.replica.strategy import sharded_model
from dp_ray.replica.trainer import Trainer
from dp_ray.replica.world import World
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe
from dp_ray.rundir.checkpoint import TrainState
from dp_ray.rundir.ledger import begin_attempt, check_newest
from dp_ray.rundir.sharded_checkpoint import write_best
from dp_ray.rundir.weights import BEST
from dp_ray.rundir.weights_files import parts_of, write_weights
from dp_ray.storage import Storage
from dp_ray.task.checkpointer import Checkpointer, PieceKeeper, writer_of
from dp_ray.task.cut import cut_of
from dp_ray.task.evaluator import Evaluator
from dp_ray.task.notices import Note, Send, WorkerTimes, telling
from dp_ray.task.profiling import StepProfiler
from dp_ray.task.resume import restore
from dp_ray.task.set_aside import forget_from, quarantine_of, set_aside
from dp_ray.task.setup import load_dataset
from dp_ray.task.shard_reports import reporting
from dp_ray.task.slowness import slowed
from dp_ray.task.step_control import StepControl
from dp_ray.task.training_loop import TrainingLoop
from dp_ray.tensors.shards import attend_writing, on_rank_0


def train(
    job: Job, world: World, run: Storage, send: Send, control: StepControl, rows_on_driver: Mapping[str, int]
) -> None:
    """Train from the newest checkpoint, or from the start, to the end; rank 0 writes the weights.

    If any worker is asked to stop, all workers stop after the same step, and its state is kept.
    """
    dataset = load_dataset(job, world, run, rows_on_driver)
    split = split_of(job, len(dataset))
    sharded = sharded_model(job, world, telling(world, send))
    model = whole_model(job, world) if sharded is None else sharded.model
    world = world.with_inputs_on(input_device(job, model, world.devices))
    measures, states = build_metrics(job)
    check_watched(job, states)
    step = build_step(job, world)
    called = compiled(model, job)
    times = StepTimes(clock_on(world.device))
    with closing(Trainer(job, model, called, step, measures, world, times.clock, sharded)) as trainer:
        attempt = begin_attempt(run).attempt
        cut = cut_of(job, split, dataset)
        train_state = restore(job, trainer, split, cut, run, send)
        synchronise(model)
        evaluation = Evaluation(job, step, measures, states, world.device, passes=passes_of(sharded, world))
        forget_from(run, lambda step, _: step < train_state.step)
        quarantine = quarantine_of(set_aside(job, "dataset", dataset, run, send, attempt))
        trainer.watch = LossWatch(world.device, str(run)) if job.stop_on_nan else None
        trainer.real = Skipping(job, dataset) if quarantine is None else quarantine.real
        evaluator = Evaluator(job, called, evaluation, world, run, control, rows_on_driver, send, attempt)
        keep = functools.partial(Checkpointer, job, trainer, split, cut, train_state, run, attempt, send, times)
        checkpointer = checkpointer_of(keep, job, trainer, train_state, run, world)
        profiler = StepProfiler(job, world, run, split.total_steps, send)
        loop = TrainingLoop(trainer, split, train_state, evaluator, checkpointer, control, times, profiler)
        work = Work(split, world.world_size, world.rank, start=train_state.step)
        with (
            closing(load_good(job, dataset, work, world.device, quarantine, times=times)) as batches,
            closing(checkpointer) if checkpointer else nullcontext(),
            Recorder(world, send) as recorder,
            Probe(called, job.batch_dim) as probe,
            slowed(called, control, world),
        ):
            loop.run(work, batches, world, recorder, reporting(recorder, probe))
            send(WorkerTimes(world.rank, times.to_json()))
            if trainer.flops is not None:
                send(trainer.flops)
    if train_state.step < split.total_steps:
        control.leave()
    control.end()
    if world.rank == 0:
        check_newest(run, attempt)
    keep_weights(run, model, train_state, send, world)


def keep_weights(run: Storage, model: nn.Module, train_state: TrainState, send: Send, world: World) -> None:
    """Write the last weights and the best weights to the run directory, on rank 0; the others send it their rows."""
    if world.rank != 0:
        for part in parts_of(tensors_of(model)):
            attend_writing(part)
        return
    write_weights(run, tensors_of(model), whole=on_rank_0)
    keep_best(run, train_state, send)


def checkpointer_of(
    keep: Callable[..., Checkpointer],
    job: Job,
    trainer: Trainer,
    train_state: TrainState,
    run: Storage,
    world: World,
) -> Checkpointer | PieceKeeper | None:
    """What keeps this worker's share of the training's state: all of it on rank 0, unless the model is sharded."""
    if world.rank != 0 and trainer.sharded is None:
        return None
    writer = writer_of(job, trainer, train_state, run, world)
    return keep(writer) if world.rank == 0 else PieceKeeper(trainer, train_state, writer)


def keep_best(run: Storage, train_state: TrainState, send: Send) -> None:
    """Write the best weights, if there are any; a failure is only reported, since the training is done."""
    run.delete(BEST)
    if train_state.best is None or train_state.best_step is None:
        return
    try:
        write_best(run, train_state.best_by[0], train_state.best, train_state.best_step)
    except StorageError as error:
        send(Note(f"the best weights, those after step {train_state.best_step}, cannot be kept: {error}"))


def whole_model(job: Job, world: World) -> nn.Module:
    """The job's model, all of it on this worker."""
    model = recompute_blocks(job, build_model(job, world.devices), world.devices)
    return with_synced_batchnorm(model, job, world)


def with_synced_batchnorm(model: nn.Module, job: Job, world: World) -> nn.Module:
    """Convert BatchNorm layers to SyncBatchNorm if the job asks for it and has several workers.

    Raises JobError on CPUs, where SyncBatchNorm does not run.
    """
    if not job.sync_batchnorm or world.world_size == 1:
        return model
    if world.device.type == "cpu":
        raise JobError("sync_batchnorm: torch's SyncBatchNorm runs on GPUs only")
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return synced


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the module's state_dict, without its other values."""
    return {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}

"""The task `train`: one worker's part, from its dataset to the final weights, without Ray; `send` takes reports."""

import functools
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext

from torch import nn

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.job_plan import split_of, with_schedule
from dp_ray.plan.split import Split
from dp_ray.plan.work import Work
from dp_ray.replica.activation_checkpointing import recompute_blocks
from dp_ray.replica.devices import input_device
from dp_ray.replica.evaluation import Evaluation, build_metrics, check_watched
from dp_ray.replica.loss_watch import LossWatch
from dp_ray.replica.model import build_model, check_all_tensors, compiled
from dp_ray.replica.one_ahead import OneAhead
from dp_ray.replica.passes import passes_of
from dp_ray.replica.quarantine import Quarantine, load_good
from dp_ray.replica.skipping import Skipping
from dp_ray.replica.step import build_step
from dp_ray.replica.step_clock import clock_on
from dp_ray.replica.step_times import StepTimes
from dp_ray.replica.strategy import sharded_model
from dp_ray.replica.trainer import Trainer
from dp_ray.replica.world import World, gathered
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe
from dp_ray.rundir.checkpoint import TrainState
from dp_ray.rundir.ledger import begin_attempt
from dp_ray.storage import Storage
from dp_ray.task.checkpointer import Checkpointer, PieceKeeper, writer_of
from dp_ray.task.cut import cut_of
from dp_ray.task.early_stopping import EarlyStopping
from dp_ray.task.evaluator import Evaluator
from dp_ray.task.final_weights import keep_weights
from dp_ray.task.hooks import Hooks, hooks_of
from dp_ray.task.notices import Send, WorkerTimes, telling
from dp_ray.task.profiling import StepProfiler
from dp_ray.task.resume import restore
from dp_ray.task.set_aside import forget_from, quarantine_of, set_aside
from dp_ray.task.setup import load_dataset
from dp_ray.task.shard_reports import looking_at_loss, reporting
from dp_ray.task.slowness import slowed
from dp_ray.task.step_control import StepControl
from dp_ray.task.training_loop import TrainingLoop


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
    check_all_tensors(model)
    world = world.with_inputs_on(input_device(job, model, world.devices))
    measures, states = build_metrics(job)
    check_watched(job, states)
    step, called = build_step(job, world), compiled(model, job)
    planned = with_schedule(job, split)
    times, ahead = StepTimes(clock_on(world.device)), OneAhead()
    with closing(Trainer(planned, model, called, step, measures, world, times.clock, sharded, ahead.read)) as trainer:
        if (line := trainer.optimizer_step.says_left_out) is not None:
            telling(world, send)(line)
        attempt = begin_attempt(run).attempt
        cut = cut_of(job, split, dataset)
        train_state = restore(job, trainer, split, cut, run, send)
        trainer.synchronise()
        evaluation = Evaluation(job, step, measures, states, world.device, passes=passes_of(sharded, world))
        forget_from(run, lambda step, _: step < train_state.step)
        quarantine = quarantine_of(set_aside(job, "dataset", dataset, run, send, attempt))
        trainer.watch = LossWatch(str(run)) if job.stop_on_nan else None
        trainer.real = Skipping(job, dataset) if quarantine is None else quarantine.real
        evaluator = Evaluator(job, trainer, evaluation, world, run, control, rows_on_driver, send, attempt)
        stopping = EarlyStopping(job, train_state, split.total_steps)
        hooks = hooks_of(job, world, trainer, split, train_state, run)
        keep = functools.partial(Checkpointer, job, trainer, split, cut, train_state, run, attempt, send, times)
        checkpointer = checkpointer_of(keep, job, trainer, train_state, run, world)
        after = (evaluator, stopping, hooks, checkpointer)
        work = Work(split, world.world_size, world.rank, start=stopping.next_step)
        with (
            closing(ahead.passing(load_good(job, dataset, work, world.device, quarantine, times=times))) as batches,
            closing(checkpointer) if checkpointer else nullcontext(),
            Recorder(world, send) as recorder,
            Probe(called, job.batch_dim) as probe,
            slowed(called, control, world),
            StepProfiler(job, world, run, split.total_steps, send) as profiler,
        ):
            loop = TrainingLoop(trainer, split, train_state, *after, control, times, profiler)
            on_shard = looking_at_loss(
                job, stopping.next_step, world, reporting(recorder, probe), telling(world, send)
            )
            loop.run(work, batches, world, recorder, on_shard)
            send_figures(trainer, times, world, send)
    forget_ahead(run, quarantine, train_state.step, split)
    if stopping.next_step < split.total_steps:
        control.leave()
    control.end()
    keep_weights(job, trainer, run, attempt, train_state, send, world)
    tell_end(stopping, hooks, world, send)


def forget_ahead(run: Storage, quarantine: Quarantine | None, steps: int, split: Split) -> None:
    """Forget what was set aside of batches that were read ahead of a training that has ended after `steps`."""
    if quarantine is not None and steps < split.total_steps:
        gathered(None)  # all have read what they read ahead
        forget_from(run, lambda step, _: step < steps)


def tell_end(stopping: EarlyStopping, hooks: Hooks | None, world: World, send: Send) -> None:
    """Say why the training has ended before its last step, if it has; then call the hook of its end."""
    if stopping.has_stopped_early and world.rank == 0:
        send(stopping.stopped())
    if hooks is not None:
        hooks.at_end()


def send_figures(trainer: Trainer, times: StepTimes, world: World, send: Send) -> None:
    """Tell where the time of this worker's loop went and, if the job asks, the operations of a row."""
    send(WorkerTimes(world.rank, times.to_json()))
    if trainer.flops is not None:
        send(trainer.flops)


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

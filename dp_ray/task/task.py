"""One worker's whole task, from its dataset to its committed parts. It knows no Ray: `send` takes the reports."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.errors import ModelError, WorkerError
from dp_ray.job import Job
from dp_ray.job_target import Target
from dp_ray.plan.split import Shard
from dp_ray.plan.work import Done, Work
from dp_ray.replica.data import Indices, load_shards, seeded_dataset
from dp_ray.replica.devices import input_device
from dp_ray.replica.evaluation import Evaluation, build_metrics
from dp_ray.replica.inputs import PredictInputs
from dp_ray.replica.model import build_model, compiled, synchronise
from dp_ray.replica.predict import predict
from dp_ray.replica.rng import has_drawn, preserved
from dp_ray.replica.step import StepOutput, build_step
from dp_ray.replica.world import World, check_rows, is_lost_peer
from dp_ray.results.outputs import PartWriter
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import PARTS
from dp_ray.rundir.weights import describe_start, load_weights, read_start
from dp_ray.storage import Storage
from dp_ray.task.step_control import StepControl
from dp_ray.task.train import Note, Send, begin_attempt, seen, split_of, train

KERNELS = 256  # of one piece of code; a split has up to four sizes of shards, an evaluation as many

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # of which cuBLAS is deterministic


class Measured(NamedTuple):
    """What an evaluation measured, over the whole dataset."""

    metrics: dict[str, float]


def run_task(
    job: Job,
    world: World,
    run: Storage,
    send: Send,
    control: StepControl | None = None,
    rows_on_driver: Mapping[str, int] | None = None,
) -> None:
    """Run the job's task on this worker; `send` takes Reports, and what else there is to tell.

    `rows_on_driver` has the lengths of the datasets, by their keys, that the driver found.
    Raises Yielded where it stopped between two steps, as `control` asked.
    """
    tasks = {"predict": predict_outputs, "evaluate": evaluate, "train": train}
    with preserved(world.device), deterministic(job, world.device), compiling(job):
        try:
            tasks[job.task](job.for_task(), world, run, send, control or StepControl(), rows_on_driver or {})
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise WorkerError(f"another worker was lost: {str(error).splitlines()[0]}") from error


@contextmanager
def deterministic(job: Job, device: torch.device) -> Iterator[None]:
    """Where the job is to be bitwise: one way to compute each thing, with as many threads on every machine."""
    if not job.bitwise:
        yield
        return
    threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fills, tries = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark  # type: ignore[attr-defined]
    torch.set_num_threads(max(1, int(job.cpus_per_worker)))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    sets_workspace = device.type == "cuda" and WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[WORKSPACE] = ":4096:8"
    try:
        yield
    finally:
        if sets_workspace:
            del os.environ[WORKSPACE]
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(algorithms)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = tries


@contextmanager
def compiling(job: Job) -> Iterator[None]:
    """Where a job is compiled and bitwise: a kernel for every shape of a shard, or an error.

    By default torch stops compiling after a few shapes, and a worker that met more of them computes otherwise.
    """
    if not job.compile or not job.bitwise:
        yield
        return
    limits = {"recompile_limit": KERNELS, "accumulated_recompile_limit": 16 * KERNELS}
    with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True}):
        yield


def evaluate(
    job: Job, world: World, run: Storage, send: Send, control: StepControl, rows_on_driver: Mapping[str, int]
) -> None:
    """Run this worker's shards of every step and tell the means over the whole dataset."""
    dataset = seeded_dataset(job, job.dataset_key)
    check_rows("dataset", len(dataset), rows_on_driver)
    model = started(job, world, run, send)
    world = world.with_inputs_on(input_device(job, model, world.devices))
    called = compiled(model, job)
    work = Work(split_of(job, dataset), world.world_size, world.rank)
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
    """The model with the weights to run, the same on every rank; weights that nobody trained are told."""
    model = build_model(job, world.devices)
    if job.init_from is not None:
        load_weights(model, read_start(run, job.init_from)[0], job.init_from)
        if world.rank == 0:
            send(Note(describe_start(run, job.init_from)))
    elif world.rank == 0 and isinstance(job.model, Target) and has_drawn(job.seed):
        send(Note(f"untrained weights: init_from is not set (unless {job.model.label} loads trained ones itself)"))
    synchronise(model)
    return model


def predict_outputs(
    job: Job, world: World, run: Storage, send: Send, control: StepControl, rows_on_driver: Mapping[str, int]
) -> None:
    """Run this worker's shards of every step, but those that a part which counts holds."""
    dataset = seeded_dataset(job)
    check_rows("dataset", len(dataset), rows_on_driver)
    bare = started(job, world, run, send)
    world = world.with_inputs_on(input_device(job, bare, world.devices))
    model = compiled(bare, job)
    parts = run.child(PARTS)
    attempt, committed = begin_attempt(run)
    work = Work(split_of(job, dataset), world.world_size, world.rank, Done(ledger.done_ranges(committed)))
    stopped: list[int] = []

    def tell(text: str) -> None:
        if world.rank == 0:  # every batch has a shard there, so the others would only say the same
            send(Note(text))

    with (
        Recorder(world, send) as recorder,
        Probe(model, job.batch_dim) as probe,
        PartWriter(parts, work.shards, job.batch_dim, recorder.keep, attempt, tell) as writer,
    ):

        def goes_on(step: int) -> bool:
            control.before(step)
            if control.wants_stop:
                stopped.append(step)
            elif control.take_save():
                writer.commit()
            return not stopped

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

        batches = load_shards(job, dataset, work, world.device, PredictInputs(job, bare, tell))
        predict(model, job, world.device, work, batches, on_shard, on_step, goes_on)
        control.through()
    if stopped:
        control.leave()
    control.end()

"""Builders: the only places in the tests that call the constructors of `CONSTRUCTORS`.

A change of one of these constructors needs a change of its builder alone; `tests/test_house.py` enforces it.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dp_ray.engine.forward.model import build_model
from dp_ray.engine.forward.step import Metrics, StepEnd, build_step
from dp_ray.engine.loads.bad_samples import Quarantine
from dp_ray.engine.loads.loader import StepTimes
from dp_ray.engine.loads.loading import LoadedShard, LoadedStep, OverlappedRead, Source, load_steps
from dp_ray.engine.optimizer import Schedule
from dp_ray.engine.placement import Placement
from dp_ray.engine.prediction import PredictedShard, Prediction, predict
from dp_ray.engine.sums.reduce import DdpReduction, Trained
from dp_ray.engine.trainer import Trainer, TrainingStep, Update
from dp_ray.engine.update import OptimizerStep, declared_step
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.job.plan import split_of
from dp_ray.messages import Message
from dp_ray.monitor.attempts import Attempts, NodeControl
from dp_ray.monitor.console import Console
from dp_ray.monitor.monitor import Monitor
from dp_ray.outputs.files import AttemptOutputs, FileMerge
from dp_ray.outputs.merging import AgreedFilePlan, Merger
from dp_ray.outputs.parts import PartWriter, WorkerParts
from dp_ray.plan.order import Order
from dp_ray.plan.split import FilePlan, Split, Work
from dp_ray.rundir import ledger
from dp_ray.rundir.claim import RunDir, Wanted, check_claim, claim
from dp_ray.rundir.lease import held
from dp_ray.rundir.ledger import Ledger
from dp_ray.storage import Storage
from dp_ray.trackers.tensorboard import TensorBoardWriter

CPU = torch.device("cpu")
PREDICTION: dict[str, Any] = {"model": "a:b", "dataset": "a:c", "batch_size": 10, "workers": 2}
CONSTRUCTORS = {
    "dp_ray.engine.loads.loading.OverlappedRead",
    "dp_ray.engine.loads.loading.load_steps",
    "dp_ray.engine.loads.loader.make_loader",
    "dp_ray.engine.prediction.Prediction",
    "dp_ray.engine.prediction.predict",
    "dp_ray.engine.sums.reduce.DdpReduction",
    "dp_ray.engine.sums.reduce.Reduction",
    "dp_ray.engine.sums.tree_sum.ShardSums",
    "dp_ray.engine.sharded.reduce.ShardedReduction",
    "dp_ray.engine.sharded.reduce.TreeShardedReduction",
    "dp_ray.engine.placement.Placement",
    "dp_ray.engine.trainer.Pass",
    "dp_ray.engine.trainer.Trainer",
    "dp_ray.engine.update.OptimizerStep",
    "dp_ray.monitor.attempts.Attempts",
    "dp_ray.monitor.monitor.Monitor",
    "dp_ray.outputs.files.FileMerge",
    "dp_ray.outputs.files.OpenFile",
    "dp_ray.outputs.files.AttemptOutputs",
    "dp_ray.outputs.merging.AgreedFilePlan",
    "dp_ray.outputs.merging.Merger",
    "dp_ray.outputs.parts.PartFile",
    "dp_ray.outputs.parts.PartWriter",
    "dp_ray.outputs.parts.WorkerParts",
    "dp_ray.rundir.claim.claim",
}


def run_dir_of(
    folder: Path | str | Storage,
    job: Job | None = None,
    *,
    overwrite: bool = False,
    rows: Mapping[str, int] | None = None,
    steps: int | None = None,
    resume: bool = False,
) -> RunDir:
    """Claim the job's run directory in a folder; without a job, that of a small prediction named `run`."""
    job = job or Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 1}, "run")
    base, wanted = (
        folder if isinstance(folder, Storage) else Storage(str(folder)),
        Wanted(job, rows or {}, steps, overwrite, resume),
    )
    run = base.child(job.run_name)
    return claim(run, wanted, check_claim(run, wanted))


def held_by(claimed: RunDir) -> AbstractContextManager[None]:
    """Hold the lease of a claimed run directory, in which no step is done."""
    return held(claimed.storage, claimed.token, lambda: claimed.is_ours)


def monitor_of(
    *messages: Message,
    job: Mapping[str, Any] | None = None,
    shapes: bool = False,
    quiet: bool = False,
    nodes: NodeControl | None = None,
    run: RunDir | None = None,
    split: Split = Split(20, 10, 2),  # noqa: B008  # it is frozen
) -> Monitor:
    """Build the monitor of two workers, by default without a run directory; it has taken in the messages."""
    made = Job.make({**PREDICTION, **(job or {})}, "job")
    writers = [TensorBoardWriter(Storage("nowhere"))]
    monitor = Monitor(made, split, writers, Console("job", quiet), shapes, run)
    if nodes is not None:
        monitor.take_control(nodes)
    for message in messages:
        monitor.take(message)
    return monitor


def attempts_of() -> Attempts:
    """Build attempts of which no worker is known yet."""
    return Attempts()


def trainer_of(job: Job, world: World, split: Split, model: nn.Module | None = None) -> Trainer:
    """Build the trainer of the job's model, or of `model`, on one worker, without metrics."""
    model = model or build_model(job, [world.device])
    placement = Placement(job, model, model, world)
    return Trainer(placement, build_step(job, world), Metrics({}, is_sum=job.loss_is_sum), split)


def step_of(trainer: Trainer, loaded: Iterator[LoadedStep]) -> Update:
    """Run the next step of a training that its job declares."""
    read = next(loaded)
    step = TrainingStep(trainer, read.step, read)
    step.backward(trainer.gradient)
    step.update(trainer.optimizer_step)
    return step.end()


def optimizer_step_of(job: Job, model: nn.Module, device: torch.device = CPU) -> OptimizerStep:
    """Build the step of the job's optimizer, on whole parameters."""
    return declared_step(job, model, device)


def update_of(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any, **given: Any
) -> OptimizerStep:
    """Build the update of a model by several optimizers, each with a scheduler."""
    named = dict(model.named_parameters())
    return OptimizerStep(
        model, optimizers, Schedule([("scheduler", scheduler)] * len(optimizers), optimizers), named, **given
    )


def ddp_reduction_of(
    placement: Placement, trained: Trained, finds_unused: bool | str, num_stats: int
) -> DdpReduction:
    """Build the reduction of several workers, for a group of one: the hook, its thread and its stream."""
    return DdpReduction(trained, placement.world, False, num_stats, placement.say)


def loader_of(
    job: Job,
    dataset: Any,
    work: Work | None = None,
    device: torch.device = CPU,
    *,
    quarantine: Quarantine | None = None,
    times: StepTimes | None = None,
) -> Generator[tuple[Any, Any], None, None]:
    """Yield the sample indices and the batch of each shard of `work`, by default all; without a quarantine's samples.

    Close it as `load_steps`.
    """
    work = work or Work(split_of(job, len(dataset)))
    with closing(load_steps(Source(job, dataset), work, device, quarantine, times=times)) as steps:
        for step in steps:
            yield from ((indices, batch) for _, indices, batch in step.loaded)


def steps_of(
    job: Job,
    dataset: Any,
    work: Work | None = None,
    device: torch.device = CPU,
    *,
    quarantine: Quarantine | None = None,
) -> Generator[LoadedStep, None, None]:
    """Load the steps of `work`, by default all; with a quarantine, without the bad samples."""
    return load_steps(Source(job, dataset), work or Work(split_of(job, len(dataset))), device, quarantine)


def read_ahead_of(
    loaded: Generator[LoadedShard, None, None],
) -> tuple[OverlappedRead, Generator[LoadedShard, None, None]]:
    """Build a read of one shard ahead, and the shards that pass through it."""
    ahead = OverlappedRead()
    return ahead, ahead.passing(loaded)


def prediction_of(
    job: Job, model: nn.Module, work: Work, batches: Iterator[tuple[Any, Any]]
) -> Generator[PredictedShard | StepEnd, None, None]:
    """Begin a prediction on the CPU of the shards of `work`, whose indices and batches are given."""
    loaded = (LoadedShard(shard, *next(batches)) for _, shards in work for shard in shards)
    steps = (LoadedStep(step, shards, islice(loaded, len(shards)), work.split.whole(step)) for step, shards in work)
    prediction = Prediction(job, CPU, work)
    with prediction.replica(model) as replica:
        yield from predict(prediction, replica, steps)


def predictions_of(
    job: Job, model: nn.Module, work: Work, batches: Iterator[tuple[Any, Any]]
) -> dict[tuple[int, int], torch.Tensor]:
    """Run a prediction on the CPU; return copies of the outputs by step and shard."""
    return {
        (done.shard.step, done.shard.shard): done.outputs.clone()
        for done in prediction_of(job, model, work, batches)
        if isinstance(done, PredictedShard)
    }


def writer_of(
    parts: Storage,
    shards: int | range = 1,
    plan: FilePlan | Callable[[float], FilePlan | None] | None = None,
    *,
    batch_dim: int = 0,
    before_commit: Callable[[], None] = lambda: None,
    attempt: str = "",
    num_workers: int = 1,
) -> PartWriter:
    """Build the writer of a worker's parts: by default of one shard, in one file of 100 steps."""
    plan = plan or FilePlan(1, 100)
    shards = range(shards) if isinstance(shards, int) else shards
    find_plan = (lambda row_bytes: plan) if isinstance(plan, FilePlan) else plan
    return PartWriter(WorkerParts(parts, shards, attempt, num_workers, batch_dim), find_plan, before_commit)


def file_merge_of(
    run: Storage,
    split: Split,
    order: Order,
    plan: FilePlan | None = None,
    number: int = 0,
    begun: Ledger | None = None,
) -> FileMerge:
    """Build the merging of one file: by default of the only one, by the run's newest attempt."""
    plan = plan or FilePlan(1, split.total_steps)
    return FileMerge(AttemptOutputs(run, begun or ledger.read(run), split, order), plan, number)


def merger_of(
    run: Storage, begun: Ledger, split: Split, order: Order, world: World, is_stopped: Callable[[], bool]
) -> tuple[AgreedFilePlan, Merger]:
    """Build the merging of a worker's share of the files, and the plan on which the workers agree."""
    outputs = AttemptOutputs(run, begun, split, order)
    plan = AgreedFilePlan(outputs, 1, world, is_stopped)
    return plan, Merger(outputs, plan, world)

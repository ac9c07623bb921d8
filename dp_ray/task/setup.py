"""What a task sets up first: its dataset, and the weights to run."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from dp_ray.job import Job
from dp_ray.job_target import Target
from dp_ray.replica.data import seeded_dataset
from dp_ray.replica.model import build_model, synchronise
from dp_ray.replica.rng import has_drawn
from dp_ray.replica.sharded import Sharded
from dp_ray.replica.strategy import sharded_model
from dp_ray.replica.world import World, check_rows
from dp_ray.rundir.sharded_checkpoint import open_start
from dp_ray.rundir.weights import describe_start, load_weights, read_start
from dp_ray.storage import Storage
from dp_ray.task.notices import Note, Send, telling
from dp_ray.task.pins import check_blocks, check_pins


def load_dataset(job: Job, world: World, run: Storage, rows_on_driver: Mapping[str, int]) -> Any:
    """The task's dataset; every rank calls this.

    Raises DataError, on every rank, unless all ranks and the driver have a dataset of the same length, of the files
    with which the run began.
    """
    dataset = seeded_dataset(job, job.dataset_key)
    check_rows("dataset", len(dataset), rows_on_driver)
    check_pins(run, "dataset", dataset, world)
    check_blocks(job, dataset)
    return dataset


def model_to_run(job: Job, world: World, run: Storage, send: Send) -> tuple[nn.Module, Sharded | None]:
    """The model with the weights to run, and how it is sharded; None if each worker holds it whole."""
    sharded = sharded_with_weights(job, world, run, send)
    return (model_with_weights(job, world, run, send) if sharded is None else sharded.model), sharded


def sharded_with_weights(job: Job, world: World, run: Storage, send: Send) -> Sharded | None:
    """The model with the weights to run, sharded over the workers; None if each worker is to hold it whole."""
    tell = telling(world, send)
    sharded = sharded_model(job, world, tell)
    if sharded is None:
        return None
    if job.init_from is not None:
        sharded.load_weights(open_start(run, job.init_from)[0], job.init_from)
        tell(describe_start(run, job.init_from))
    elif isinstance(job.model, Target) and has_drawn(job.seed):
        tell(_untrained(job.model))
    synchronise(sharded.model)
    return sharded


def _untrained(model: Target) -> str:
    return f"untrained weights: init_from is not set (unless {model.label} loads trained ones itself)"


def model_with_weights(job: Job, world: World, run: Storage, send: Send) -> nn.Module:
    """Build the model with the weights to run, the same on every rank; rank 0 reports untrained weights."""
    model = build_model(job, world.devices)
    if job.init_from is not None:
        load_weights(model, read_start(run, job.init_from)[0], job.init_from)
        if world.rank == 0:
            send(Note(describe_start(run, job.init_from)))
    elif world.rank == 0 and isinstance(job.model, Target) and has_drawn(job.seed):
        send(Note(_untrained(job.model)))
    synchronise(model)
    return model

"""Go on from memory where a worker's group changes: begin at `levelled`.

Workers that survive the loss of another one form a new group, a view, and their task is called again with what each
holds (`held.py`). All go on from one state, that of a worker which has finished most. Nothing is read from a
checkpoint then. If no worker holds a state, or the job is such that none can, all read the newest checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dp_ray.engine.update import OptimizerStep
from dp_ray.engine.world import broadcast, everyone, from_rank, gathered, has_peers, own_rank
from dp_ray.errors import ModelError, WorkerError
from dp_ray.job.plan import split_of, with_schedule
from dp_ray.messages import StopRequested
from dp_ray.rundir.checkpoint import pack, unpack
from dp_ray.rundir.files import CHECKPOINTS, steps_of
from dp_ray.system.threads import waiting
from dp_ray.tasks.checkpoints import Training
from dp_ray.tasks.held import Held, most_finished
from dp_ray.tasks.setup import Context

NOBODY = "no worker that is left has the state"
TORN = "a worker was lost in a part of a step that cannot be done again"


def levelled(training: Training) -> Training | None:
    """Return the training at the state of the worker that has finished most; None if none has a state.

    Every rank calls this, at the begin of a view. If the best weights so far are in no checkpoint, since the worker
    that was to write them is gone, all forget what they hold, and raise WorkerError: in another view an earlier
    checkpoint leads to those weights again.
    """
    held, control = training.context.held, training.context.control
    if held is None or training.context.job.why_reads:
        return None
    told, whys = zip(*gathered((held.progress, held.why)), strict=True)
    source = most_finished(told)
    if source is None:
        control.reads(next(filter(None, whys), NOBODY))
        return None
    held.why = ""
    if min(told) < told[source]:
        sent = shared(held.to_send() if own_rank() == source else None, source)
        if held.progress < told[source]:
            held.take(sent)
    best = held.running.best_step
    is_there = best is None or best in steps_of(training.context.run.child(CHECKPOINTS))
    if not broadcast("there" if is_there else ""):
        held.forget(why := "the best weights so far were to be kept by a worker that is lost")
        raise WorkerError(why)
    assert held.state is not None
    training.trainer.load_state_dict(held.state)
    held.state = None  # the trainer has it now
    return replace(training, state=held.running)


def shared(value: Any, source: int) -> Any:
    """Return the value of the rank `source` on every rank; every rank calls this. It is as `pack` takes it."""
    if not has_peers():
        return value
    is_source = own_rank() == source
    plain, tensors = pack(value) if is_source else (None, {})
    with waiting(f"the state of rank {source}"):
        told = [(plain, [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])]
        dist.broadcast_object_list(told, src=source, group=everyone())
        plain, listed = told[0]
        for name, shape, dtype in listed:
            tensors[name] = from_rank(tensors[name] if is_source else torch.empty(shape, dtype=dtype), source)
    return value if is_source else unpack(plain, tensors)


def keep(held: Held, training: Training) -> None:
    """Hold the state of a training whose group ends; what a step in flight has changed is undone.

    If a step cannot be undone, neither state nor model is held.
    """
    placement, running = held.placement, training.state
    held.finished = running.progress
    held.forget(TORN)
    trainer = training.trainer
    is_suspect = training.auditor is not None and training.auditor.since is not None
    if running.is_torn or is_suspect or training.context.job.why_reads:
        return
    assert isinstance(trainer.optimizer_step, OptimizerStep)
    with suppress(ModelError):
        trainer.state.drop()
        trainer.optimizer_step.drop_gradients()
        held.state = trainer.state_dict()
        held.placement, held.running, held.why = placement, running, ""


@contextmanager
def holding(training: Training) -> Iterator[None]:
    """Hold the training's state where the block ends since its group does, or before the group does.

    Of workers that are through, one may still be lost: then the others keep what it was to keep.
    """
    held = training.context.held
    try:
        yield
    except (StopRequested, RuntimeError, WorkerError):
        if held is not None:
            keep(held, training)
        raise
    if held is not None:
        keep(held, training)


def hold_in_memory(context: Context) -> None:
    """Hold what a worker needs that is to join others, while they go on without it: datasets and model.

    A model is built later if the process does not hold it either.
    """
    job = context.job
    dataset = context.dataset(job, job.dataset_key)
    if job.task == "train":
        for evaluation in job.evaluations:
            context.dataset(job.over_eval(evaluation), evaluation.dataset_key)
        job = with_schedule(job, split_of(job, len(dataset)))
    if not job.why_reads:
        replace(context, job=job).place()

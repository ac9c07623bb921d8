"""Where a training starts: at its newest checkpoint, at the checkpoint that `init_from` names, or at step 0."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dp_ray.errors import JobError, ModelError
from dp_ray.job import Job
from dp_ray.job_parts import Scheduler
from dp_ray.plan.split import Split
from dp_ray.replica.trainer import Trainer
from dp_ray.replica.world import World, broadcast, is_rank_0
from dp_ray.rundir.checkpoint import CHECKPOINTS, TrainState, load_checkpoint, newest
from dp_ray.rundir.contents import replacing
from dp_ray.rundir.sharded_checkpoint import newest_open, open_start
from dp_ray.rundir.weights import (
    describe_start,
    first_step,
    load_weights,
    read_start,
)
from dp_ray.storage import Storage
from dp_ray.task.cut import Cut, check_cut
from dp_ray.task.notices import Note, Send, telling
from dp_ray.task.updates import check_updates


def restore(
    job: Job, trainer: Trainer, split: Split, cut: Cut, run: Storage, send: Send, until: int | None = None
) -> TrainState:
    """Load the training's state: of its newest checkpoint, else of `init_from`, else that of step 0.

    With `until`, of the newest checkpoint of so many steps or fewer; only a model that is not sharded takes it.
    Raises JobError if a checkpoint's steps hold other samples than this job's, or if the scheduler ends too soon.
    """
    train_state = _restored(job, trainer, split, cut, run, send, until)
    trainer.schedule.check_lasts(split, train_state.step)
    return train_state


def _restored(
    job: Job, trainer: Trainer, split: Split, cut: Cut, run: Storage, send: Send, until: int | None
) -> TrainState:
    checkpoints = run.child(CHECKPOINTS)

    def fits(about: dict[str, Any]) -> str | None:
        return None if job.has_fingerprint(about.get("fingerprint")) else "it is of a different job"

    if trainer.sharded is not None:
        found = newest_rows(checkpoints, fits, send, trainer.sharded.world)
    elif is_rank_0():
        found = newest(checkpoints, fits, lambda text: send(Note(text)), until)
        name = broadcast(found[0] if found else "")
    else:
        name = broadcast("")
        found = (name, *load_checkpoint(checkpoints, name)) if name else None
    if found:
        advice = f"start anew {replacing(run)}" if until is None else "the dataset or its blocks have changed since"
        check_cut(f"the steps of {checkpoints}/{found[0]}", found[1], cut, advice)
        return resume(job, trainer, found[1], found[2], split, send, plans=until is None)
    if job.init_from is None:
        return TrainState()
    train_state = start_from(job, trainer, split, cut, run, job.init_from, send)
    if is_rank_0():
        send(Note(describe_start(run, job.init_from)))
    return train_state


def newest_rows(
    checkpoints: Storage, fits: Callable[[dict[str, Any]], str | None], send: Send, world: World
) -> tuple[str, dict[str, Any], Any] | None:
    """What `newest` gives, for workers that read a part each: the state's tensors are `Stored`."""
    found = newest_open(checkpoints, fits, telling(world, send), world)
    return None if found is None else (found[0], found[1].about, found[1].state)


def start_from(
    job: Job, trainer: Trainer, split: Split, cut: Cut, run: Storage, location: str, send: Send
) -> TrainState:
    """Start at step 0 from a weights file, or continue another run's checkpoint from its step.

    Raises JobError if the checkpoint's steps or optimizer differ from this job's, or if it leaves no step to run.
    """
    read: Callable[..., Any] = read_start if trainer.sharded is None else open_start
    weights, checkpoint = read(run, location)
    if checkpoint is None:
        if trainer.sharded is None:
            load_weights(trainer.model, weights, location)
        else:
            trainer.sharded.load_weights(weights, location)
        return TrainState()
    about, advice = checkpoint["about"], "to start anew from weights alone, name a weights file"
    check_cut(f"init_from: the steps of {location}", about, cut, advice)
    says = check_updates(f"init_from: {location}", about.get("updates"), job, advice)
    if says is not None and is_rank_0():
        send(Note(says))
    train_state = resume(job, trainer, about, checkpoint["state"], split, send)
    if train_state.step != (named := first_step(run)):
        raise JobError(
            f"init_from: {location} holds step {train_state.step}, but its name says {named}: rename it back"
        )
    if train_state.step >= split.total_steps:
        raise JobError(
            f"init_from: {location} has done {train_state.step} steps, and this job has {split.total_steps}: "
            f"set epochs above {job.epochs}; {advice}"
        )
    return dataclasses.replace(train_state, best=None, best_step=None, stopping={})


def resume(
    job: Job, trainer: Trainer, about: dict[str, Any], state: Any, split: Split, send: Send, plans: bool = True
) -> TrainState:
    """Load a checkpoint into the trainer; if the training has another length now, send a note on the scheduler.

    A scheduler that is made for the training's length is planned anew for that, if it `plans`: a replay goes the way
    that the run went. Raises ModelError if the checkpoint has other parameters than the model.
    """
    if about["parameters"] != trainer.optimizer_step.names:
        raise ModelError("the checkpoint's parameters are not this model's")
    trainer.load_state_dict(state)
    steps, before = split.total_steps, about.get("steps", split.total_steps)
    if steps != before and (says := _planned_anew(job, trainer, plans)) and is_rank_0():
        send(Note(f"{steps} steps now, {before} before: {says}"))
    return TrainState(**about["running"])


def _planned_anew(job: Job, trainer: Trainer, plans: bool) -> str:
    """Plan the scheduler for the training's new length, if it can be; what to say of it."""
    schedule = trainer.schedule
    if plans and isinstance(job.scheduler, Scheduler) and job.scheduler.is_planned:
        before = trainer.learning_rate
        if schedule.begin_anew():
            now = trainer.learning_rate
            return f"the scheduler is planned anew: the learning rate goes on at {now:.4g}, not {before:.4g}"
    return f"the scheduler stays as it was built ({schedule.lengths})" if schedule.lengths else ""

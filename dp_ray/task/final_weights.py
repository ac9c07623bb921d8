"""The weights that a training leaves: the last, the best, and the average of them."""

import json

from dp_ray.errors import StorageError
from dp_ray.job import Job
from dp_ray.replica.model import tensors_of
from dp_ray.replica.trainer import Trainer
from dp_ray.replica.world import World
from dp_ray.rundir.checkpoint import TrainState
from dp_ray.rundir.ledger import check_newest
from dp_ray.rundir.sharded_checkpoint import write_best
from dp_ray.rundir.weights import BEST, EMA
from dp_ray.rundir.weights_files import parts_of, write_weights
from dp_ray.storage import Storage
from dp_ray.task.notices import Note, Send
from dp_ray.tensors.file import write_tensors
from dp_ray.tensors.shards import attend_writing, on_rank_0


def keep_weights(
    job: Job, trainer: Trainer, run: Storage, attempt: str, train_state: TrainState, send: Send, world: World
) -> None:
    """Write the last weights, their average and the best ones, on rank 0; the others send it their rows.

    Raises StorageError on rank 0 if a later attempt than this one has begun.
    """
    tensors, average = tensors_of(trainer.model), {} if trainer.average is None else trainer.average.tensors()
    if world.rank != 0:
        for part in (*parts_of(tensors), average):
            attend_writing(part)
        return
    check_newest(run, attempt)
    write_weights(run, tensors, whole=on_rank_0)
    if job.ema is not None:
        text = json.dumps({"decay": job.ema.decay, "step": train_state.step})
        write_tensors(run, EMA, average, text, whole=on_rank_0)
    keep_best(job, run, train_state, send)


def keep_best(job: Job, run: Storage, train_state: TrainState, send: Send) -> None:
    """Write the best weights, if there are any; a failure is only reported, since the training is done.

    They are those that were evaluated: the average, if the job says so.
    """
    run.delete(BEST)
    if train_state.best is None or train_state.best_step is None:
        return
    is_averaged = job.ema is not None and job.ema.evaluate
    try:
        write_best(run, train_state.best_by[0], train_state.best, train_state.best_step, is_averaged)
    except StorageError as error:
        send(Note(f"the best weights, those after step {train_state.best_step}, cannot be kept: {error}"))

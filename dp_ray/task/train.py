"""One worker's whole training, from its dataset to the final weights. It knows no Ray: `send` takes what it tells."""

import contextlib
import dataclasses
import json
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import nn

from dp_ray.errors import JobError, ModelError, StorageError
from dp_ray.job import Job
from dp_ray.plan.split import Shard, Split
from dp_ray.plan.work import Work
from dp_ray.replica.data import load_shards, seeded_dataset
from dp_ray.replica.devices import input_device
from dp_ray.replica.evaluation import Evaluation, build_metrics, check_measured, check_watched
from dp_ray.replica.model import build_model, compiled, synchronise
from dp_ray.replica.step import StepOutput, build_step
from dp_ray.replica.trainer import Trainer, Update
from dp_ray.replica.user_code import raising
from dp_ray.replica.world import World, broadcast, check_rows, is_rank_0
from dp_ray.results.history import HISTORY, History
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe, Seen, encode_sizes
from dp_ray.rundir import ledger
from dp_ray.rundir.checkpoint import CHECKPOINTS, CheckpointWriter, TrainState, load, newest, pack, steps_of
from dp_ray.rundir.contents import replacing
from dp_ray.rundir.ledger import Ledger, check_newest
from dp_ray.rundir.weights import (
    BEST,
    WEIGHTS,
    describe_start,
    first_step,
    load_weights,
    read_start,
    write_best,
)
from dp_ray.storage import Storage
from dp_ray.task.pace import Pace
from dp_ray.task.step_control import StepControl
from dp_ray.tensors.file import write_tensors

Send = Callable[[Any], None]


class Note(NamedTuple):
    """Something that the user should know."""

    text: str


def split_of(job: Job, dataset: Any) -> Split:
    """How the job cuts its dataset, in all its epochs."""
    cut = Split(len(dataset), job.batch_size, job.num_shards, job.drop_last)
    is_train = job.task == "train"
    return dataclasses.replace(cut, epochs=job.epochs, max_steps=job.max_steps) if is_train else cut


def train(
    job: Job, world: World, run: Storage, send: Send, control: StepControl, rows_on_driver: Mapping[str, int]
) -> None:
    """Train from the last checkpoint, or the start, to the end; rank 0 leaves the weights in the run directory.

    Where any worker is asked to stop, all of them do, after the same step, which is kept.
    """
    dataset = seeded_dataset(job)
    check_rows("dataset", len(dataset), rows_on_driver)
    split = split_of(job, dataset)
    model = with_synced_batchnorm(build_model(job, world.devices), job, world)
    world = world.with_inputs_on(input_device(job, model, world.devices))
    measures, states = build_metrics(job)
    check_watched(job, states)
    step = build_step(job, world)
    called = compiled(model, job)
    with closing(Trainer(job, model, called, step, measures, world)) as trainer:
        attempt = begin_attempt(run).attempt
        train_state = restore(job, trainer, split, run, send)
        synchronise(model)
        evaluation = Evaluation(job, step, measures, states, world.device)
        evaluator = Evaluator(job, called, evaluation, world, control, rows_on_driver)
        checkpointer = Checkpointer(job, trainer, split, train_state, run, attempt, send) if world.rank == 0 else None
        work = Work(split, world.world_size, world.rank, start=train_state.step)
        batches = load_shards(job, dataset, work, world.device)
        with (
            contextlib.closing(checkpointer) if checkpointer else contextlib.nullcontext(),
            Recorder(world, send) as recorder,
            Probe(called, job.batch_dim) as probe,
        ):
            if checkpointer:
                checkpointer.before_commit = recorder.keep

            def on_shard(shard: Shard, batch: Any, step_output: StepOutput) -> None:
                recorder.on_shard(shard, *seen(probe, shard, batch, step_output))

            for number, shards in work:
                control.before(number)
                update = trainer.step(split, number, shards, batches, on_shard, control.wants_stop)
                recorder.on_step(number)
                measured = advance(train_state, split, number, update, trainer, evaluator)
                is_asked = update.stops or (world.world_size == 1 and control.wants_stop)  # alone, at once
                stops = is_asked and number + 1 < split.total_steps
                if checkpointer:
                    checkpointer.after_step(number, update, measured, must_save=stops or control.take_save())
                if stops:
                    break
            control.through()
            if checkpointer:
                checkpointer.finish()
    if train_state.step < split.total_steps:
        control.leave()
    control.end()
    if world.rank == 0:
        check_newest(run, attempt)
        write_tensors(run, WEIGHTS, {name: one.detach().cpu() for name, one in tensors_of(model).items()})
        keep_best(run, train_state, send)


def keep_best(run: Storage, train_state: TrainState, send: Send) -> None:
    """Leave the best weights, if there are any, beside the last; without them a training is done all the same."""
    run.delete(BEST)
    if train_state.best is None or train_state.best_step is None:
        return
    try:
        write_best(run, train_state.best_by[0], train_state.best, train_state.best_step)
    except StorageError as error:
        send(Note(f"the best weights, those after step {train_state.best_step}, cannot be kept: {error}"))


def begin_attempt(run: Storage) -> Ledger:
    """This attempt's name, and the parts that count from before it: what rank 0 finds, on every rank."""
    attempt = uuid.uuid4().hex
    begun = ledger.begin(run, attempt) if is_rank_0() else None
    return Ledger(*json.loads(broadcast(json.dumps(begun))))


def with_synced_batchnorm(model: nn.Module, job: Job, world: World) -> nn.Module:
    """The model whose BatchNorm layers see the whole batch, where the job asks for it."""
    if not job.sync_batchnorm or world.world_size == 1:
        return model
    if world.device.type == "cpu":
        raise JobError("sync_batchnorm: torch's SyncBatchNorm runs on GPUs only")
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return synced


def seen(probe: Probe, shard: Shard, batch: Any, step_output: StepOutput) -> tuple[Seen, float]:
    """What the model saw; of a step of the user's that went past its forward, what the step got and gave."""
    if probe.has_seen:
        return probe.take()
    return Seen(encode_sizes(batch), encode_sizes(step_output.loss), shard.rows), 0.0


def advance(
    train_state: TrainState, split: Split, step: int, update: Update, trainer: Trainer, evaluator: "Evaluator"
) -> dict[str, float]:
    """Count a step that is done; at its turns evaluate, and at an epoch's end step the scheduler."""
    train_state.step = step + 1
    ends_epoch = (step + 1) % split.steps == 0
    train_state.add(update.totals[:2])
    measured = evaluator.after_step(split, step)
    train_state.measured.update(measured)
    if ends_epoch:
        measured = {**measured, "epoch_loss": train_state.end_epoch()}
        with raising(f"step {step}: scheduler"):
            trainer.schedule.after_epoch({**train_state.measured, "loss": measured["epoch_loss"]})
    return measured


class Evaluator:
    """The evaluations of a training, at the steps that the job says and after the last."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        evaluation: Evaluation,
        world: World,
        control: StepControl,
        rows_on_driver: Mapping[str, int],
    ) -> None:
        self._model = model
        self._control = control
        self._evaluation = evaluation
        self._world = world
        self._eval = job.eval
        if job.eval is not None:
            self._job = job.over_eval()
            self._dataset = seeded_dataset(self._job, "eval.dataset")
            check_rows("eval.dataset", len(self._dataset), rows_on_driver)
            self._split = Split(len(self._dataset), self._job.batch_size, job.num_shards)

    def is_due(self, split: Split, step: int) -> bool:
        if self._eval is None:
            return False
        if step + 1 == split.total_steps:
            return True
        epoch, place = split.cursor(step)
        each = self._eval.every_epochs or (None if self._eval.every_steps else 1)
        at_epoch = each is not None and place + 1 == split.steps and (epoch + 1) % each == 0
        return at_epoch or (self._eval.every_steps is not None and (step + 1) % self._eval.every_steps == 0)

    def after_step(self, split: Split, step: int) -> dict[str, float]:
        """What was measured after `step`, by its names in the history; nothing where no evaluation is due."""
        if not self.is_due(split, step):
            return {}
        work = Work(self._split, self._world.world_size, self._world.rank)
        device = self._world.device
        batches = load_shards(self._job, self._dataset, work, device, name="eval.dataset")
        found = self._evaluation.run(self._model, work, batches, on_step=lambda _: self._control.touch())
        measured = {f"eval_{name}": value for name, value in found.items()}
        check_measured(self._job, measured)
        return measured


class Checkpointer:
    """Rank 0's books: the history, the checkpoints and the best of them."""

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        split: Split,
        train_state: TrainState,
        run: Storage,
        attempt: str,
        send: Send,
    ) -> None:
        self.before_commit: Callable[[], None] = lambda: None
        self._job = job
        self._run = run
        self._attempt = attempt
        self._trainer = trainer
        self._split = split
        self._train_state = train_state
        for folder in (HISTORY, CHECKPOINTS):
            run.child(folder).create()
            run.child(folder).remove_unfinished()
        names = ["loss", *trainer.measure_names]
        self._history = History(
            run.child(HISTORY), split, names, ["epoch_loss", *job.eval_names], train_state.step, send
        )
        pack(trainer.state_dict())  # what cannot be kept is said now, and not when hours of training are to be
        self._first = train_state.step
        kept = steps_of(run.child(CHECKPOINTS))
        self._writer = CheckpointWriter(
            run.child(CHECKPOINTS), job.checkpoint.keep, [one for one in kept if one > train_state.step]
        )
        self._begin_best(kept)
        self._saved = train_state.step
        self._pace = Pace(job.checkpoint)

    def after_step(self, step: int, update: Update, measured: dict[str, float], must_save: bool = False) -> None:
        if step == self._first:  # optimizers make their state in the first step
            _, tensors = pack(self._trainer.state_dict())
            self._pace.expect(sum(tensor.nbytes for tensor in tensors.values()))
        self._history.add(step, update, measured)
        is_best = self._note_best(measured)
        if measured:
            self._history.resume_clock()
        every = self._job.checkpoint.every_steps
        at_step = every is not None and (step + 1) % every == 0
        at_epoch = self._pace.is_auto and (step + 1) % self._split.steps == 0
        by_clock = self._pace.is_due(self._writer.seconds, self._writer.is_writing)
        if must_save or is_best or by_clock or at_step or at_epoch:
            self.save()

    def save(self) -> None:
        """Keep the state as it is now."""
        with self._pace.saving():
            self._save()

    def _save(self) -> None:
        about = describe(self._job, self._trainer, self._split, self._train_state)
        state = self._trainer.state_dict()
        write_history = self._history.take()

        def before() -> None:
            check_newest(self._run, self._attempt)
            write_history()
            self.before_commit()

        self._writer.save(self._train_state.step, about, state, self._train_state.best_step, before)
        self._saved = self._train_state.step

    def finish(self) -> None:
        """The training stops here: this is kept too."""
        if self._train_state.step != self._saved:
            self.save()
        self._writer.wait()

    def close(self) -> None:
        self._history.flush()
        self._writer.close()

    def _begin_best(self, kept: Collection[int]) -> None:
        """Go on with the best so far, if it is still asked for, by the same metric and mode, and still there."""
        best, train_state = self._job.checkpoint.best, self._train_state
        by = [] if best is None else [best.metric, best.mode]
        if train_state.best_by != by or train_state.best_step not in kept:
            train_state.best = train_state.best_step = None
        train_state.best_by = by

    def _note_best(self, measured: dict[str, float]) -> bool:
        best = self._job.checkpoint.best
        value = None if best is None else measured.get(best.metric)
        if best is None or value is None or value != value:
            return False
        before = self._train_state.best
        if before is not None and (value >= before if best.mode == "min" else value <= before):
            return False
        self._train_state.best, self._train_state.best_step = value, self._train_state.step
        return True


def describe(job: Job, trainer: Trainer, split: Split, train_state: TrainState) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return {
        "fingerprint": job.fingerprint(),
        "cut": cut_of(job, split),
        "parameters": trainer.parameter_names,
        "running": train_state.to_json(),
    }


def cut_of(job: Job, split: Split) -> dict[str, Any]:
    """What a step of the cursor means."""
    keys = {"seed": job.seed, "shuffle": job.shuffle, "rows": split.rows, "batch_size": split.batch_size}
    return {**keys, "drop_last": split.drop_last}


def check_cut(what: str, about: dict[str, Any], job: Job, split: Split, advice: str) -> None:
    """Raise JobError where a checkpoint's steps are not those of this job."""
    if (there := about.get("cut")) != (here := cut_of(job, split)):
        raise JobError(f"{what} are others: {there} there, {here} here; {advice}")


def restore(job: Job, trainer: Trainer, split: Split, run: Storage, send: Send) -> TrainState:
    """Where the training stands: at its newest checkpoint, where `init_from` says, or at its start."""
    checkpoints = run.child(CHECKPOINTS)
    fingerprint = job.fingerprint()

    def fits(about: dict[str, Any]) -> str | None:
        return None if about.get("fingerprint") == fingerprint else "it is of a different job"

    if is_rank_0():
        found = newest(checkpoints, fits, lambda text: send(Note(text)))
        name = broadcast(found[0] if found else "")
    else:
        name = broadcast("")
        found = (name, *load(checkpoints, name)) if name else None
    if found:
        advice = f"start anew {replacing(run)}"
        check_cut(f"the steps of {checkpoints}/{name}", found[1], job, split, advice)
        return resume(trainer, found[1], found[2])
    if job.init_from is None:
        return TrainState()
    train_state = start_from(job, trainer, split, run, job.init_from)
    if is_rank_0():
        send(Note(describe_start(run, job.init_from)))
    return train_state


def start_from(job: Job, trainer: Trainer, split: Split, run: Storage, location: str) -> TrainState:
    """Start from a file of weights, or carry a checkpoint of another run on, from its step."""
    weights, checkpoint = read_start(run, location)
    if checkpoint is None:
        load_weights(trainer.model, weights, location)
        return TrainState()
    about, advice = checkpoint["about"], "to start anew from weights alone, name a weights file"
    check_cut(f"init_from: the steps of {location}", about, job, split, advice)
    train_state = resume(trainer, about, checkpoint["state"])
    if train_state.step != (says := first_step(run)):
        raise JobError(
            f"init_from: {location} is {train_state.step} steps on, its name says {says}: give it its own name"
        )
    if train_state.step >= split.total_steps:
        raise JobError(
            f"init_from: {location} is {train_state.step} steps on, and this job has {split.total_steps}: "
            f"set epochs above {job.epochs}; {advice}"
        )
    return dataclasses.replace(train_state, best=None, best_step=None)


def resume(trainer: Trainer, about: dict[str, Any], state: Any) -> TrainState:
    if about["parameters"] != trainer.parameter_names:
        raise ModelError("the checkpoint's parameters are not this model's")
    trainer.load_state_dict(state)
    return TrainState(**about["running"])


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state_dict, without what is no tensor."""
    return {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}

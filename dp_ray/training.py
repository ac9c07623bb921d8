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

from dp_ray.border import Border
from dp_ray.errors import JobError, ModelError, StorageError
from dp_ray.holdings import replacing
from dp_ray.job import Job
from dp_ray.plan.split import Shard, Split
from dp_ray.plan.work import Work
from dp_ray.replica.data import load_shards, seeded_dataset
from dp_ray.replica.evaluate import Evaluation, build_measures, check_measured, check_watched
from dp_ray.replica.model import build_model, compiled, synchronise
from dp_ray.replica.pace import Pace
from dp_ray.replica.parallel import input_device
from dp_ray.replica.state import CHECKPOINTS, Running, Saver, load, newest, pack, steps_of
from dp_ray.replica.step import Stepped, build_step
from dp_ray.replica.train import Trainer, Update
from dp_ray.replica.user_code import raising
from dp_ray.replica.weights import (
    BEST,
    WEIGHTS,
    describe_start,
    first_step,
    load_weights,
    read_start,
    write_best,
)
from dp_ray.replica.world import World, broadcast, check_rows, is_rank_0
from dp_ray.results import ledger
from dp_ray.results.history import HISTORY, History
from dp_ray.results.ledger import Ledger, check_newest
from dp_ray.results.recorder import Recorder
from dp_ray.results.shapes import Probe, Seen, encode_sizes
from dp_ray.storage import Storage
from dp_ray.tensorfile import write_tensors

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
    job: Job, world: World, run: Storage, send: Send, border: Border, rows_on_driver: Mapping[str, int]
) -> None:
    """Train from the last checkpoint, or the start, to the end; rank 0 leaves the weights in the run directory.

    Where any worker is asked to stop, all of them do, after the same step, which is kept.
    """
    dataset = seeded_dataset(job)
    check_rows("dataset", len(dataset), rows_on_driver)
    split = split_of(job, dataset)
    model = with_synced_batchnorm(build_model(job, world.devices), job, world)
    world = world.with_inputs_on(input_device(job, model, world.devices))
    measures, states = build_measures(job)
    check_watched(job, states)
    step = build_step(job, world)
    called = compiled(model, job)
    with closing(Trainer(job, model, called, step, measures, world)) as trainer:
        attempt = begin_attempt(run).attempt
        running = restore(job, trainer, split, run, send)
        synchronise(model)
        evaluation = Evaluation(job, step, measures, states, world.device)
        evaluator = Evaluator(job, called, evaluation, world, border, rows_on_driver)
        keeper = Keeper(job, trainer, split, running, run, attempt, send) if world.rank == 0 else None
        work = Work(split, world.world_size, world.rank, start=running.step)
        batches = load_shards(job, dataset, work, world.device)
        with (
            contextlib.closing(keeper) if keeper else contextlib.nullcontext(),
            Recorder(world, send) as recorder,
            Probe(called, job.batch_dim) as probe,
        ):
            if keeper:
                keeper.before_commit = recorder.keep

            def on_shard(shard: Shard, batch: Any, stepped: Stepped) -> None:
                recorder.on_shard(shard, *seen(probe, shard, batch, stepped))

            for number, shards in work:
                border.before(number)
                update = trainer.step(split, number, shards, batches, on_shard, border.wants_stop)
                recorder.on_step(number)
                measured = advance(running, split, number, update, trainer, evaluator)
                is_asked = update.stops or (world.world_size == 1 and border.wants_stop)  # alone, at once
                stops = is_asked and number + 1 < split.total_steps
                if keeper:
                    keeper.after_step(number, update, measured, must_save=stops or border.take_save())
                if stops:
                    break
            border.through()
            if keeper:
                keeper.finish()
    if running.step < split.total_steps:
        border.leave()
    border.end()
    if world.rank == 0:
        check_newest(run, attempt)
        write_tensors(run, WEIGHTS, {name: one.detach().cpu() for name, one in tensors_of(model).items()})
        keep_best(run, running, send)


def keep_best(run: Storage, running: Running, send: Send) -> None:
    """Leave the best weights, if there are any, beside the last; without them a training is done all the same."""
    run.delete(BEST)
    if running.best is None or running.best_step is None:
        return
    try:
        write_best(run, running.best_by[0], running.best, running.best_step)
    except StorageError as error:
        send(Note(f"the best weights, those after step {running.best_step}, cannot be kept: {error}"))


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


def seen(probe: Probe, shard: Shard, batch: Any, stepped: Stepped) -> tuple[Seen, float]:
    """What the model saw; of a step of the user's that went past its forward, what the step got and gave."""
    if probe.has_seen:
        return probe.take()
    return Seen(encode_sizes(batch), encode_sizes(stepped.loss), shard.rows), 0.0


def advance(
    running: Running, split: Split, step: int, update: Update, trainer: Trainer, evaluator: "Evaluator"
) -> dict[str, float]:
    """Count a step that is done; at its turns evaluate, and at an epoch's end step the scheduler."""
    running.step = step + 1
    ends_epoch = (step + 1) % split.steps == 0
    running.add(update.totals[:2])
    measured = evaluator.after_step(split, step)
    running.measured.update(measured)
    if ends_epoch:
        measured = {**measured, "epoch_loss": running.end_epoch()}
        with raising(f"step {step}: scheduler"):
            trainer.schedule.after_epoch({**running.measured, "loss": measured["epoch_loss"]})
    return measured


class Evaluator:
    """The evaluations of a training, at the steps that the job says and after the last."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        evaluation: Evaluation,
        world: World,
        border: Border,
        rows_on_driver: Mapping[str, int],
    ) -> None:
        self._model = model
        self._border = border
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
        found = self._evaluation.run(self._model, work, batches, on_step=lambda _: self._border.touch())
        measured = {f"eval_{name}": value for name, value in found.items()}
        check_measured(self._job, measured)
        return measured


class Keeper:
    """Rank 0's books: the history, the checkpoints and the best of them."""

    def __init__(
        self, job: Job, trainer: Trainer, split: Split, running: Running, run: Storage, attempt: str, send: Send
    ) -> None:
        self.before_commit: Callable[[], None] = lambda: None
        self._job = job
        self._run = run
        self._attempt = attempt
        self._trainer = trainer
        self._split = split
        self._running = running
        for folder in (HISTORY, CHECKPOINTS):
            run.child(folder).create()
            run.child(folder).remove_unfinished()
        names = ["loss", *trainer.measure_names]
        self._history = History(run.child(HISTORY), split, names, ["epoch_loss", *job.eval_names], running.step, send)
        pack(trainer.state_dict())  # what cannot be kept is said now, and not when hours of training are to be
        self._first = running.step
        kept = steps_of(run.child(CHECKPOINTS))
        self._saver = Saver(run.child(CHECKPOINTS), job.checkpoint.keep, [one for one in kept if one > running.step])
        self._begin_best(kept)
        self._saved = running.step
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
        by_clock = self._pace.is_due(self._saver.seconds, self._saver.is_writing)
        if must_save or is_best or by_clock or at_step or at_epoch:
            self.save()

    def save(self) -> None:
        """Keep the state as it is now."""
        with self._pace.saving():
            self._save()

    def _save(self) -> None:
        about = describe(self._job, self._trainer, self._split, self._running)
        state = self._trainer.state_dict()
        write_history = self._history.take()

        def before() -> None:
            check_newest(self._run, self._attempt)
            write_history()
            self.before_commit()

        self._saver.save(self._running.step, about, state, self._running.best_step, before)
        self._saved = self._running.step

    def finish(self) -> None:
        """The training stops here: this is kept too."""
        if self._running.step != self._saved:
            self.save()
        self._saver.wait()

    def close(self) -> None:
        self._history.flush()
        self._saver.close()

    def _begin_best(self, kept: Collection[int]) -> None:
        """Go on with the best so far, if it is still asked for, by the same metric and mode, and still there."""
        best, running = self._job.checkpoint.best, self._running
        by = [] if best is None else [best.metric, best.mode]
        if running.best_by != by or running.best_step not in kept:
            running.best = running.best_step = None
        running.best_by = by

    def _note_best(self, measured: dict[str, float]) -> bool:
        best = self._job.checkpoint.best
        value = None if best is None else measured.get(best.metric)
        if best is None or value is None or value != value:
            return False
        before = self._running.best
        if before is not None and (value >= before if best.mode == "min" else value <= before):
            return False
        self._running.best, self._running.best_step = value, self._running.step
        return True


def describe(job: Job, trainer: Trainer, split: Split, running: Running) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return {
        "fingerprint": job.fingerprint(),
        "cut": cut_of(job, split),
        "parameters": trainer.parameter_names,
        "running": running.to_json(),
    }


def cut_of(job: Job, split: Split) -> dict[str, Any]:
    """What a step of the cursor means."""
    keys = {"seed": job.seed, "shuffle": job.shuffle, "rows": split.rows, "batch_size": split.batch_size}
    return {**keys, "drop_last": split.drop_last}


def check_cut(what: str, about: dict[str, Any], job: Job, split: Split, advice: str) -> None:
    """Raise JobError where a checkpoint's steps are not those of this job."""
    if (there := about.get("cut")) != (here := cut_of(job, split)):
        raise JobError(f"{what} are others: {there} there, {here} here; {advice}")


def restore(job: Job, trainer: Trainer, split: Split, run: Storage, send: Send) -> Running:
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
        return Running()
    running = start_from(job, trainer, split, run, job.init_from)
    if is_rank_0():
        send(Note(describe_start(run, job.init_from)))
    return running


def start_from(job: Job, trainer: Trainer, split: Split, run: Storage, location: str) -> Running:
    """Start from a file of weights, or carry a checkpoint of another run on, from its step."""
    weights, checkpoint = read_start(run, location)
    if checkpoint is None:
        load_weights(trainer.model, weights, location)
        return Running()
    about, advice = checkpoint["about"], "to start anew from weights alone, name a weights file"
    check_cut(f"init_from: the steps of {location}", about, job, split, advice)
    running = resume(trainer, about, checkpoint["state"])
    if running.step != (says := first_step(run)):
        raise JobError(
            f"init_from: {location} is {running.step} steps on, its name says {says}: give it its own name"
        )
    if running.step >= split.total_steps:
        raise JobError(
            f"init_from: {location} is {running.step} steps on, and this job has {split.total_steps}: "
            f"set epochs above {job.epochs}; {advice}"
        )
    return dataclasses.replace(running, best=None, best_step=None)


def resume(trainer: Trainer, about: dict[str, Any], state: Any) -> Running:
    if about["parameters"] != trainer.parameter_names:
        raise ModelError("the checkpoint's parameters are not this model's")
    trainer.load_state_dict(state)
    return Running(**about["running"])


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state_dict, without what is no tensor."""
    return {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}

"""Write a training's checkpoints and its weights, and load the state where a training starts.

Begin at `Checkpointer`: on rank 0 it writes the history and the checkpoints, and tracks the best one.
`CheckpointPace` decides how often: as the job sets, by default as often as costs 1 % of its time. `restored` loads
the newest checkpoint, else the one that `init_from` names; without both, a training starts at step 0.

A checkpoint fits a job if its steps hold the job's samples (`TrainingLayout`), and if its optimizer and scheduler are
the job's: their state is the checkpoint's. At the end `keep_weights` writes the last weights, their average, and the
best.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

import torch

from dp_ray.engine.audit import Auditor
from dp_ray.engine.clock import Part
from dp_ray.engine.forward.weights import advice_on, tensors_of
from dp_ray.engine.loads.loader import StepTimes
from dp_ray.engine.loads.loading import Source
from dp_ray.engine.loads.packing import packings
from dp_ray.engine.sums.votes import LossWatch
from dp_ray.engine.trainer import TrainedModel
from dp_ray.errors import JobError, ModelError, StorageError
from dp_ray.job import keys
from dp_ray.job.files import differences, same
from dp_ray.job.job import Job
from dp_ray.job.plan import checkpoints_of, schedulers_in
from dp_ray.job.samples import describe_order, mixture_of
from dp_ray.messages import Logged
from dp_ray.plan.split import Split
from dp_ray.rundir.checkpoint import Checkpoint, CheckpointWriter, newest, pack
from dp_ray.rundir.files import CHECKPOINTS, replacing, steps_of
from dp_ray.rundir.history import HISTORY, FinishedStep, History, write_piece
from dp_ray.rundir.ledger import fenced
from dp_ray.rundir.start import NEW_HEAD, describe_start, first_step, read_start
from dp_ray.rundir.weights import BEST, EMA, tensors_of_files, write_best, write_weights
from dp_ray.tasks.audits import note_audits, noted_audits
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train_state import TrainState
from dp_ray.tensors.files import attend_writing, on_rank_0, write_tensors
from dp_ray.text import listed

SHARE = 0.01  # of the training's time may go into checkpoints
LATEST = 300.0  # seconds after the last checkpoint, the next one is due at any cost
EXPECTED = 0.005, 200e6  # the first checkpoint's cost: fixed seconds, and bytes a second
TrainingLayout: TypeAlias = dict[str, Any]  # all that decides which samples a step holds
UpdateKeys: TypeAlias = dict[str, Any]  # a job's optimizer and scheduler


@dataclasses.dataclass(frozen=True)
class Training:
    """A training on this worker, as its parts share it: its context, the split of its steps, and its state.

    `watch` is over the losses, if the job ends at one that is not finite; `auditor` is there if it is audited.
    """

    context: Context
    source: Source
    split: Split
    layout: TrainingLayout
    trainer: TrainedModel
    times: StepTimes
    watch: LossWatch | None = None
    state: TrainState = dataclasses.field(default_factory=TrainState)
    auditor: Auditor | None = None


class PieceKeeper:
    """This worker's pieces of a training's checkpoints, on which rank 0's `Checkpointer` decides."""

    def __init__(self, training: Training, writer: CheckpointWriter, before: Callable[[], None]) -> None:
        self._before = before  # called in the writer's thread, before a checkpoint counts
        self._trainer, self._train_state = training.trainer, training.state
        self._writer = writer
        self._first = self._saved = training.state.finished

    def after_step(self, finished: FinishedStep, must_save: bool = False) -> None:
        """Save this worker's piece if rank 0 saves a checkpoint."""
        if finished.number == self._first:
            self._prepare()
        if self._writer.agree(False):
            self.save()

    def _prepare(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the state, and have the writer take memory for them: optimizers make it in a step."""
        _, tensors = pack(self._trainer.state_dict())
        self._writer.prepare(tensors)
        return tensors

    def save(self) -> None:
        """Save this worker's piece of the current state."""
        self._writer.save(self._train_state.step, {}, self._trainer.state_dict(), before=self._before)
        self._saved = self._train_state.step

    def finish(self) -> None:
        """Save the last step, unless it is saved, and wait until it is written."""
        if self._train_state.step != self._saved:
            self.save()
        self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        self._writer.wait()

    def close(self) -> None:
        """End the writer."""
        self._writer.close()


class Checkpointer(PieceKeeper):
    """The history and the checkpoints of a training, and its best checkpoint; only rank 0 has one."""

    def __init__(self, training: Training, writer: CheckpointWriter, before: Callable[[], None]) -> None:
        super().__init__(training, writer, before)
        context, split, trainer, train_state = training.context, training.split, training.trainer, training.state
        job, run = context.job, fenced(context.run, context.attempt)
        self._training = training
        self._times = training.times
        for folder in (HISTORY, CHECKPOINTS):
            run.child(folder).create()
        extra, kept = ["epoch_loss", *job.eval_names], train_state.finished
        if context.held is not None and context.held.running is train_state:
            self._saved = max(steps_of(run.child(CHECKPOINTS)), default=0)  # and not what this worker holds
            # A checkpoint of a step that only a lost worker has finished keeps its rows: a restart may read it.
            kept = max(kept, self._saved)
        pieces, mixture = run.child(HISTORY), mixture_of(training.source.dataset)
        self._history = History(
            *(pieces, split, trainer.measured, extra, kept),
            send=lambda rows: context.send(Logged(tuple(rows))),
            mixture=mixture,
        )
        if context.held is not None:
            context.held.look(run)
            self._history.take_in(context.held.rows)
        pack(trainer.state_dict())  # a state that cannot be saved fails now, not after hours of training
        begin_best(training)
        self._periods = checkpoints_of(job).due.periods(split)
        self._all_agree = trainer.placement.sharers is not None
        # What each checkpoint holds of the job.
        self._about = {
            "fingerprint": job.fingerprint(),
            "cut": training.layout,
            "updates": updates_of(job),
            "steps": split.total_steps,
        }
        self._pace = CheckpointPace(job.checkpoint)

    def after_step(self, finished: FinishedStep, must_save: bool = False) -> None:
        """Add a finished step to the history, and save a checkpoint if one is due or `must_save` asks for it."""
        if finished.number == self._first:
            self._pace.expect(sum(tensor.nbytes for tensor in self._prepare().values()))
        self._history.add(finished)
        is_due = must_save
        if finished.measured:
            is_due = note_best(self._training, finished.measured) or is_due
        for period in self._periods:
            is_due = is_due or (finished.number + 1) % period == 0
        if self._pace.clock() >= self._pace.not_before:
            is_due = self._pace.is_due(self._writer.seconds, self._writer.is_writing) or is_due
        watch = self._training.watch  # with `stop_on_nan`: no state is kept after a loss that is not finite
        is_due = is_due and (watch is None or watch.is_finite())
        if self._writer.agree(is_due) if self._all_agree else is_due:
            self.save()

    def save(self) -> None:
        """Save a checkpoint of the current state."""
        before_save = self._times.clock.enter(Part.CHECKPOINT)
        with self._pace.saving():
            train_state = self._train_state
            # The optimizer's groups may have grown.
            own = {"parameters": self._trainer.optimizer_step.names, "running": train_state.to_json()}
            about = {**self._about, **own}
            state = self._trainer.state_dict()
            rows = self._history.take()
            auditor = self._training.auditor
            noted, floor = (None, None) if auditor is None else (noted_audits(auditor), min(auditor.clean))

            def before_commit() -> None:
                """Write, in the writer's thread, the files that must exist before the checkpoint counts."""
                # A crash after the piece leaves rows without a checkpoint, which the next attempt deletes: it runs
                # their steps again.
                write_piece(self._history.folder, rows)
                if noted is not None:
                    note_audits(self._training.context, noted)
                self._before()

            self._writer.save(train_state.step, about, state, train_state.best_step, before_commit, floor)
            self._saved = train_state.step
        self._times.clock.enter(before_save)

    def close(self) -> None:
        """Send the remaining rows of the history, and end the writer."""
        self._history.flush()
        super().close()


def begin_best(training: Training) -> None:
    """Forget the best value so far unless its checkpoint exists, and it is by the job's metric and mode."""
    best, state = training.context.job.checkpoint.best, training.state
    by = [] if best is None else [best.metric, best.mode]
    if state.best_by != by or state.best_step not in steps_of(training.context.run.child(CHECKPOINTS)):
        state.best = state.best_step = None
    state.best_by = by


def note_best(training: Training, measured: dict[str, float]) -> bool:
    """Note the best value so far; return whether the values measured after this step have it."""
    best, state = training.context.job.checkpoint.best, training.state
    value = None if best is None else measured.get(best.metric)
    if best is None or value is None or value != value:
        return False
    before = state.best
    if before is not None and (value >= before if best.mode == "min" else value <= before):
        return False
    state.best, state.best_step = value, state.step
    return True


@contextmanager
def checkpointing(training: Training, before: Callable[[], None]) -> Iterator[PieceKeeper | None]:
    """Give what keeps this worker's share of the training's state: all of it on rank 0, unless it is sharded.

    `before` is called, in the writer's thread, before a checkpoint counts. Every rank calls this.
    """
    rank, sharers = training.context.world.rank, training.trainer.placement.sharers
    if rank != 0 and sharers is None:
        yield None
        return
    checkpoints = fenced(training.context.run, training.context.attempt).child(CHECKPOINTS)
    passed_over = [step for step in steps_of(checkpoints) if step > training.state.step]
    writer = CheckpointWriter(checkpoints, training.context.job.checkpoint.keep, passed_over, sharers)
    kind = PieceKeeper if rank != 0 else Checkpointer
    with closing(kind(training, writer, before)) as keeper:
        yield keeper


class CheckpointPace:
    """The pace of checkpoints by the clock, from the cost of earlier ones: the loop's wait and the write.

    Each checkpoint writes a piece of the history too, so the next one waits until the run is 1 % longer. Before
    `not_before`, by the clock, none is due: most steps need only this comparison.
    """

    def __init__(self, when: keys.CheckpointKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._is_auto = when.every_seconds == "auto" and when.every_steps is None
        seconds = LATEST if when.every_seconds == "auto" else when.every_seconds
        self._seconds = math.inf if seconds is None else seconds
        self._began = self._saved_at = clock()
        self._saves = 0
        self._in_loop = 0.0
        self._expected = 0.0
        self._plan(0.0)

    def expect(self, num_bytes: int) -> None:
        """Estimate the first checkpoint's cost from the state's size, before one is measured."""
        fixed, bytes_per_second = EXPECTED
        self._expected = fixed + num_bytes / bytes_per_second
        self._plan(0.0)

    def is_due(self, written: float, is_writing: bool) -> bool:
        """Return whether to save now.

        `written` is the seconds spent on writes in the background so far; `is_writing`: a checkpoint is being
        written.
        """
        self._plan(written)
        now = self.clock()
        return now >= self._by_seconds or (now >= self._by_share and not is_writing)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the loop waits for a checkpoint."""
        began = self.clock()
        yield
        self._saved_at = self.clock()
        self._in_loop += self._saved_at - began
        self._saves += 1
        self._plan(0.0)

    def _plan(self, written: float) -> None:
        """Plan the next checkpoint by the seconds spent so far; they may be more by then."""
        spent = self._in_loop + written
        next_cost = spent / self._saves if self._saves else self._expected  # the mean so far, or the estimate
        since_last = (self._saved_at - SHARE * self._began) / (1 - SHARE)
        self._by_share = max(since_last, self._began + (spent + next_cost) / SHARE) if self._is_auto else math.inf
        self._by_seconds = self._saved_at + self._seconds
        self.not_before = min(self._by_share, self._by_seconds)


def restored(training: Training, until: int | None = None) -> Training:
    """Load the training's state: from its newest checkpoint, else from `init_from`, else that of step 0.

    With `until`, of the newest checkpoint of so many steps or fewer. Raises JobError if a checkpoint's steps hold
    other samples than this job's, or if the scheduler ends too soon.
    """
    context, job, run, trainer = training.context, training.context.job, training.context.run, training.trainer
    checkpoints = run.child(CHECKPOINTS)

    def fits(about: dict[str, Any]) -> str | None:
        return None if job.has_fingerprint(about.get("fingerprint")) else "it is of a different job"

    checkpoint = newest(checkpoints, fits, context.say, trainer.placement.sharers, until)
    if checkpoint is not None:
        advice = f"start anew {replacing(run)}" if until is None else "the dataset or its blocks have changed since"
        check_layout(f"the steps of {checkpoints}/{checkpoint.name}", checkpoint.about, training.layout, advice)
        training = dataclasses.replace(training, state=resume(training, checkpoint, plans=until is None))
    elif job.init_from is not None:
        training = dataclasses.replace(training, state=start_from(training, job.init_from))
    trainer.schedule.check_lasts(training.split, training.state.step)
    return training


def start_from(training: Training, location: str) -> TrainState:
    """Start at step 0 from weights, or continue another run's checkpoint from its step; log the file.

    Without `strict` only the weights of a checkpoint are taken. Raises ModelError if they are not the model's, and
    JobError if the checkpoint's steps or optimizer differ from this job's, or if it leaves no step to run.
    """
    context, job, run = training.context, training.context.job, training.context.run
    placement = training.trainer.placement
    weights, checkpoint = read_start(run, location, job.strict, placement.sharers)
    if checkpoint is None or not job.strict:
        loaded = placement.load_weights(weights, location, job.strict, NEW_HEAD)
        if context.world.rank == 0:
            context.say(describe_start(run, location) + loaded)
        return TrainState()
    about, advice = checkpoint.about, "to start anew from weights alone, name a weights file, or set strict: false"
    check_layout(f"init_from: the steps of {location}", about, training.layout, advice)
    says = check_updates(f"init_from: {location}", about.get("updates"), job, advice)
    if says is not None:
        context.say(says)
    try:
        train_state = resume(training, checkpoint)
    except ModelError as error:
        helps = advice_on(tensors_of(placement.model), weights, NEW_HEAD)
        raise ModelError(f"init_from: {location}: {error}{helps}") from None
    named = first_step(run)
    if train_state.step != named:
        raise JobError(
            f"init_from: {location} holds step {train_state.step}, but its name says {named}: rename it back"
        )
    steps = training.split.total_steps
    if train_state.step >= steps:
        raise JobError(
            f"init_from: {location} has done {train_state.step} steps, and this job has {steps}: "
            f"set epochs above {job.epochs}; {advice}"
        )
    if context.world.rank == 0:
        context.say(describe_start(run, location))
    return dataclasses.replace(train_state, best=None, best_step=None, stopping={})


def resume(training: Training, checkpoint: Checkpoint, plans: bool = True) -> TrainState:
    """Load a checkpoint into the trainer; if the training has another length now, send a note on the scheduler.

    A scheduler made for the training's length is built again for it, if it `plans`: a replay goes the way of the run.
    Raises ModelError if the checkpoint has other parameters than the model.
    """
    about, trainer = checkpoint.about, training.trainer
    if about["parameters"] != trainer.optimizer_step.names:
        if training.context.job.loop is not None:
            raise ModelError(
                "the checkpoint's optimizers do not update what those of this loop do: call run.optimizer in the "
                "same order, for the same parameters"
            )
        raise ModelError("the checkpoint's parameters are not this model's")
    trainer.load_state_dict(checkpoint.state)
    steps = training.split.total_steps
    before = about.get("steps", steps)
    if steps != before:
        schedule, rates = trainer.schedule, trainer.optimizer_step.learning_rates
        planned = [key for key, spec in schedulers_in(training.context.job).items() if plans and spec.is_planned]
        says = ""
        if schedule.begin_anew(planned):
            now, then = (_shown(rates) for rates in (trainer.optimizer_step.learning_rates, rates))
            says = f"the scheduler is planned anew: the learning rate goes on at {now}, not {then}"
        elif any(scheduler is not None for scheduler in schedule.schedulers):
            says = "the scheduler stays as it was built"
        if says:
            training.context.say(f"{steps} steps now, {before} before: {says}")
    return TrainState(**about["running"])


def _shown(rates: Sequence[float]) -> str:
    """Return the learning rates of optimizers as text."""
    return ", ".join(f"{rate:.4g}" for rate in rates)


def sample_layout(job: Job, split: Split, dataset: Any) -> TrainingLayout:
    """Return all that decides which samples a step holds; a checkpoint stores it."""
    layout = {"seed": job.seed, "shuffle": job.is_shuffled, "rows": split.rows, "batch_size": split.batch_size}
    layout["drop_last"] = split.drop_last
    packed = {"pack": "; ".join(packing.description for packing in packings(dataset))} if job.pack is not None else {}
    return {**layout, **describe_order(job, dataset), **packed}


def check_layout(what: str, about: dict[str, Any], here: TrainingLayout, advice: str) -> None:
    """Raise JobError if a checkpoint's steps hold other samples than this job's; the error names `what`."""
    there = about.get("cut")
    if there != here:
        if there is not None and all(there.get(key) == here.get(key) for key in {*there, *here} - {"mixture"}):
            changed = listed(differences({"dataset": there.get("mixture")}, {"dataset": here.get("mixture")}))
            raise JobError(f"{what} differ from this job's ({changed}); {advice}")
        raise JobError(f"{what} differ from this job's: {there} there, {here} here; {advice}")


def updates_of(job: Job, form: keys.Form = "now") -> UpdateKeys:
    """Return the job's optimizers and schedulers; a checkpoint stores them. `form` is that of `Job.describe`."""
    described = job.describe(form)
    kept: UpdateKeys = json.loads(
        json.dumps({key: described[key] for key in ("optimizer", "scheduler")}, default=str)
    )
    return kept


def check_updates(what: str, there: UpdateKeys | None, job: Job, advice: str) -> str | None:
    """Return a sentence on a scheduler that is not the checkpoint's, else None. A checkpoint may have no Updates.

    Raises JobError if the optimizers differ, or one side alone has a scheduler: the checkpoint's state would replace
    the job's, learning rate and all.
    """
    if there is None or any(same(there, updates_of(job, form)) for form in keys.FORMS):
        return None
    here = updates_of(job)
    changed = ", ".join(differences(there, here))
    (optimizers, schedulers), (others, their_schedulers) = map(_apart, (here, there))
    alone = [None in pair and pair != (None, None) for pair in zip(schedulers, their_schedulers, strict=False)]
    if not same(optimizers, others) or any(alone):
        raise JobError(
            f"{what} goes on with the optimizer and scheduler that it was trained with, and this job's differ "
            f"({changed}); set them as they were, or {advice}"
        )
    return f"{what}: {changed}; what the scheduler's state holds goes on as it was" if changed else None


def _apart(updates: UpdateKeys) -> tuple[Any, list[Any]]:
    """Return the optimizers without schedulers, and the schedulers of all and of each."""
    optimizer = updates["optimizer"]
    if not isinstance(optimizer, list):
        return optimizer, [updates["scheduler"]]
    schedulers = [each.get("scheduler") for each in optimizer]
    return [{**each, "scheduler": None} for each in optimizer], [updates["scheduler"], *schedulers]


def keep_weights(training: Training) -> None:
    """Write the last weights, their average and the best ones, on rank 0; the others send it their rows.

    Raises StorageError on rank 0 if a later attempt than this one has begun.
    """
    context, trainer = training.context, training.trainer
    trainer.state.compare()  # what only this worker's forwards have changed shows here
    with trainer.optimizer_step.evaluating():
        tensors = tensors_of(trainer.model)
        average = {} if trainer.average is None else trainer.average.tensors()
        if context.world.rank != 0:
            # In the order in which rank 0 writes them below: it gathers each sharded tensor from all workers.
            for part in (*tensors_of_files(tensors), average):
                attend_writing(part)
            return
        run = fenced(context.run, context.attempt)
        write_weights(run, tensors, whole=on_rank_0)
        if context.job.ema is not None:
            text = json.dumps({"decay": context.job.ema.decay, "step": training.state.step})
            write_tensors(run, EMA, average, text, whole=on_rank_0)
        _keep_best(dataclasses.replace(context, run=run), training.state)


def _keep_best(context: Context, state: TrainState) -> None:
    """Write the best weights, if there are any; a failure is only reported, since the training is done.

    They are those that were evaluated: the average, if the job says so.
    """
    job, run = context.job, context.run
    run.before_commit()
    # An earlier file is not the best any more. A crash after this leaves none until the run is resumed.
    run.delete(BEST)
    if state.best is None or state.best_step is None:
        return
    is_averaged = job.ema is not None and job.ema.evaluate
    try:
        write_best(run, state.best_by[0], state.best, state.best_step, is_averaged)
    except StorageError as error:
        context.say(f"the best weights, those after step {state.best_step - 1}, cannot be kept: {error}")

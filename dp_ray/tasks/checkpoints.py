"""Rank 0 writes a training's history and checkpoints, and tracks the best checkpoint.

How often a training saves checkpoints: as the job sets, by default as often as costs 1 % of its time.

Which samples the steps of a checkpoint hold, and whether they are those of a job.

How a job updates the weights, and whether a checkpoint can go on with it: their state is the checkpoint's.

Where a training starts: at its newest checkpoint, at the checkpoint that `init_from` names, or at step 0.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from dp_ray.engine.clock import Part
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.engine.trainer import Trainer, Update
from dp_ray.engine.world import World, broadcast, is_rank_0
from dp_ray.errors import JobError, ModelError
from dp_ray.job.files import differences, same
from dp_ray.job.job import Job
from dp_ray.job.keys import Checkpoint, Scheduler
from dp_ray.job.plan import checkpoints_of
from dp_ray.job.samples import describe_blocks
from dp_ray.plan.split import Split
from dp_ray.rundir.checkpoint import (
    CHECKPOINTS,
    CheckpointWriter,
    TrainState,
    load_checkpoint,
    newest,
    pack,
    steps_of,
)
from dp_ray.rundir.files import replacing
from dp_ray.rundir.history import HISTORY
from dp_ray.rundir.ledger import check_newest
from dp_ray.rundir.start import (
    NEW_HEAD,
    ShardedWriter,
    describe_start,
    first_step,
    load_weights,
    newest_open,
    open_start,
    read_start,
)
from dp_ray.steps.times import History
from dp_ray.storage import Storage
from dp_ray.tasks.hooks import Note, Send, telling

SHARE = 0.01  # of the training's time may go into checkpoints
LATEST = 300.0  # seconds after the last checkpoint, the next one is due at any cost
EXPECTED = 0.005, 200e6  # the first checkpoint's cost: fixed seconds, and bytes a second


class Pace:
    """Decides when a checkpoint is due by the clock, from the cost of earlier ones: the loop's wait and the write.

    Each checkpoint writes a piece of the history too, so the next one waits until the run is 1 % longer.
    """

    def __init__(self, when: Checkpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_auto = when.every_seconds == "auto" and when.every_steps is None
        self._seconds = LATEST if when.every_seconds == "auto" else when.every_seconds
        self._began = self._saved_at = clock()
        self._saves = 0
        self._in_loop = 0.0
        self._expected = 0.0

    def expect(self, num_bytes: int) -> None:
        """Estimate the first checkpoint's cost from the state's size, before one is measured."""
        fixed, bytes_per_second = EXPECTED
        self._expected = fixed + num_bytes / bytes_per_second

    def is_due(self, written: float, is_writing: bool) -> bool:
        """Whether to save now.

        `written` is the seconds spent on writes in the background so far; `is_writing` says that one is under way.
        """
        now = self._clock()
        since = now - self._saved_at
        if self._seconds is not None and since >= self._seconds:
            return True
        if not self.is_auto or is_writing:
            return False
        spent, share = self._in_loop + written, SHARE * (now - self._began)
        return since >= share and spent + self._next(spent) <= share

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure how long the loop waits for a checkpoint."""
        began = self._clock()
        yield
        self._saved_at = self._clock()
        self._in_loop += self._saved_at - began
        self._saves += 1

    def _next(self, spent: float) -> float:
        """The expected cost of the next checkpoint in seconds: the mean so far, or the estimate before the first."""
        return spent / self._saves if self._saves else self._expected


Cut: TypeAlias = dict[str, Any]


def cut_of(job: Job, split: Split, dataset: Any) -> Cut:
    """All that decides which samples a step holds; a checkpoint stores it."""
    keys = {"seed": job.seed, "shuffle": job.is_shuffled, "rows": split.rows, "batch_size": split.batch_size}
    blocks = describe_blocks(job, dataset)
    return {**keys, "drop_last": split.drop_last, **({} if blocks is None else {"blocks": blocks})}


def check_cut(what: str, about: dict[str, Any], here: Cut, advice: str) -> None:
    """Raise JobError if a checkpoint's steps hold other samples than this job's; the error names `what`."""
    if (there := about.get("cut")) != here:
        raise JobError(f"{what} differ from this job's: {there} there, {here} here; {advice}")


Updates: TypeAlias = dict[str, Any]


def updates_of(job: Job, as_objects: bool = False) -> Updates:
    """The job's optimizer and scheduler; a checkpoint stores them. `as_objects` is that of `Job.describe`."""
    described = job.describe(as_objects)
    kept: Updates = json.loads(json.dumps({key: described[key] for key in ("optimizer", "scheduler")}, default=str))
    return kept


def check_updates(what: str, there: Updates | None, job: Job, advice: str) -> str | None:
    """What to say of another scheduler than the checkpoint's; None if nothing. A checkpoint may have no Updates.

    Raises JobError if the optimizers differ, or one side alone has a scheduler: the checkpoint's state would take
    the place of what the job says, learning rate and all.
    """
    if there is None or same(there, updates_of(job, as_objects=True)):  # as an earlier version told them
        return None
    here = updates_of(job)
    changed = ", ".join(differences(there, here))
    alone = (there["scheduler"] is None) != (here["scheduler"] is None)
    if not same(there["optimizer"], here["optimizer"]) or alone:
        raise JobError(
            f"{what} goes on with the optimizer and scheduler that it was trained with, and this job's differ "
            f"({changed}); set them as they were, or {advice}"
        )
    return f"{what}: {changed}; what the scheduler's state holds goes on as it was" if changed else None


class Keeper:
    """Writes a training's checkpoints, or this worker's part of them, by a `writer`."""

    def __init__(self, trainer: Trainer, train_state: TrainState, writer: CheckpointWriter) -> None:
        self.before_commit: Callable[[], None] = lambda: None
        self._trainer = trainer
        self._train_state = train_state
        self._writer = writer
        self._saved = train_state.step

    def log(self, step: int, update: Update) -> None:
        """Add a step that ends the training to the history, on rank 0."""

    def save(self) -> None:
        """Save a checkpoint of the current state."""
        raise NotImplementedError

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


class Checkpointer(Keeper):
    """Writes the history and the checkpoints, and tracks the best checkpoint; only rank 0 has one."""

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        split: Split,
        cut: Cut,
        train_state: TrainState,
        run: Storage,
        attempt: str,
        send: Send,
        times: StepTimes,
        writer: CheckpointWriter,
    ) -> None:
        super().__init__(trainer, train_state, writer)
        self._clock = times.clock
        self._job = job
        self._run = run
        self._attempt = attempt
        self._split = split
        self._cut = cut
        for folder in (HISTORY, CHECKPOINTS):
            run.child(folder).create()
            run.child(folder).remove_unfinished()
        names = ["loss", *trainer.measure_names]
        extra = ["epoch_loss", *job.eval_names]
        self._history = History(run.child(HISTORY), split, names, extra, train_state.step, send, times.new_data_wait)
        pack(trainer.state_dict())  # a state that cannot be saved fails now, not after hours of training
        self._first = train_state.step
        self._begin_best(steps_of(run.child(CHECKPOINTS)))
        self._due = checkpoints_of(job).due
        self._pace = Pace(job.checkpoint)

    def after_step(self, step: int, update: Update, measured: dict[str, float], must_save: bool = False) -> None:
        """Add a finished step to the history, and save a checkpoint if one is due or `must_save` asks for it."""
        if step == self._first:  # optimizers create their state in the first step
            _, tensors = pack(self._trainer.state_dict())
            self._pace.expect(sum(tensor.nbytes for tensor in tensors.values()))
        self._history.add(step, update, measured)
        is_best = self._note_best(measured)
        if measured:
            self._history.resume_clock()
        by_step = self._due.recurs(self._split, step)
        by_clock = self._pace.is_due(self._writer.seconds, self._writer.is_writing)
        if self._writer.agree((must_save or is_best or by_clock or by_step) and self._is_sound()):
            self.save()

    def log(self, step: int, update: Update) -> None:
        self._history.add(step, update, {})

    def _is_sound(self) -> bool:
        """Whether the state may be kept; with `stop_on_nan` not after a loss that is not finite."""
        watch = self._trainer.watch
        return watch is None or watch.is_finite()

    def save(self) -> None:
        """Save a checkpoint of the current state."""
        before = self._clock.enter(Part.CHECKPOINT)
        with self._pace.saving():
            self._save()
        self._clock.enter(before)

    def _save(self) -> None:
        about = describe(self._job, self._trainer, self._split, self._cut, self._train_state)
        state = self._trainer.state_dict()
        write_history = self._history.take()

        def before() -> None:
            check_newest(self._run, self._attempt)
            write_history()
            self.before_commit()

        self._writer.save(self._train_state.step, about, state, self._train_state.best_step, before)
        self._saved = self._train_state.step

    def close(self) -> None:
        """Send the remaining rows of the history, and end the writer."""
        self._history.flush()
        super().close()

    def _begin_best(self, kept: Collection[int]) -> None:
        """Keep the best so far if its checkpoint exists and the job's metric and mode are the same; else reset it."""
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


class PieceKeeper(Keeper):
    """Writes another rank's pieces of the checkpoints that rank 0's `Checkpointer` decides on."""

    def after_step(self, step: int, update: Update, measured: dict[str, float], must_save: bool = False) -> None:
        """Save this worker's piece if rank 0 saves a checkpoint."""
        if self._writer.agree(False):
            self.save()

    def save(self) -> None:
        """Save this worker's piece of the current state."""
        self._writer.save(self._train_state.step, {}, self._trainer.state_dict(), before=self.before_commit)
        self._saved = self._train_state.step


def writer_of(job: Job, trainer: Trainer, train_state: TrainState, run: Storage, world: World) -> CheckpointWriter:
    """What writes the checkpoints: on all ranks if each holds a part of the model, else on rank 0.

    Every rank calls this.
    """
    checkpoints = run.child(CHECKPOINTS)
    passed_over = [one for one in steps_of(checkpoints) if one > train_state.step]
    if trainer.sharded is None:
        return CheckpointWriter(checkpoints, job.checkpoint.keep, passed_over)
    return ShardedWriter(checkpoints, job.checkpoint.keep, world, passed_over)


def describe(job: Job, trainer: Trainer, split: Split, cut: Cut, train_state: TrainState) -> dict[str, Any]:
    """A checkpoint's description: the job's fingerprint, cut and updates, parameters, steps and running values."""
    return {
        "fingerprint": job.fingerprint(),
        "cut": cut,
        "updates": updates_of(job),
        "parameters": trainer.optimizer_step.names,
        "steps": split.total_steps,
        "running": train_state.to_json(),
    }


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
    return start_from(job, trainer, split, cut, run, job.init_from, send)


def newest_rows(
    checkpoints: Storage, fits: Callable[[dict[str, Any]], str | None], send: Send, world: World
) -> tuple[str, dict[str, Any], Any] | None:
    """What `newest` gives, for workers that read a part each: the state's tensors are `Stored`."""
    found = newest_open(checkpoints, fits, telling(world, send), world)
    return None if found is None else (found[0], found[1].about, found[1].state)


def start_from(
    job: Job, trainer: Trainer, split: Split, cut: Cut, run: Storage, location: str, send: Send
) -> TrainState:
    """Start at step 0 from weights, or continue another run's checkpoint from its step; a note says from which file.

    Without `strict` only the weights of a checkpoint are taken. Raises ModelError if they are not the model's, and
    JobError if the checkpoint's steps or optimizer differ from this job's, or if it leaves no step to run.
    """
    read: Callable[..., Any] = read_start if trainer.sharded is None else open_start
    weights, checkpoint = read(run, location, job.strict)
    if checkpoint is None or not job.strict:
        if trainer.sharded is None:
            loaded = load_weights(trainer.model, weights, location, job.strict)
        else:
            loaded = trainer.sharded.load_weights(weights, location, job.strict, NEW_HEAD)
        if is_rank_0():
            send(Note(describe_start(run, location) + loaded))
        return TrainState()
    about, advice = checkpoint["about"], "to start anew from weights alone, name a weights file, or set strict: false"
    check_cut(f"init_from: the steps of {location}", about, cut, advice)
    says = check_updates(f"init_from: {location}", about.get("updates"), job, advice)
    if says is not None and is_rank_0():
        send(Note(says))
    try:
        train_state = resume(job, trainer, about, checkpoint["state"], split, send)
    except ModelError as error:
        raise ModelError(f"init_from: {location}: {error}{NEW_HEAD}") from None
    if train_state.step != (named := first_step(run)):
        raise JobError(
            f"init_from: {location} holds step {train_state.step}, but its name says {named}: rename it back"
        )
    if train_state.step >= split.total_steps:
        raise JobError(
            f"init_from: {location} has done {train_state.step} steps, and this job has {split.total_steps}: "
            f"set epochs above {job.epochs}; {advice}"
        )
    if is_rank_0():
        send(Note(describe_start(run, location)))
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

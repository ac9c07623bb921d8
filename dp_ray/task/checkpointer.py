"""Rank 0 writes a training's history and checkpoints, and tracks the best checkpoint."""

from collections.abc import Callable, Collection
from typing import Any

from dp_ray.job import Job
from dp_ray.job_plan import checkpoints_of
from dp_ray.plan.split import Split
from dp_ray.replica.step_clock import Part
from dp_ray.replica.step_times import StepTimes
from dp_ray.replica.trainer import Trainer, Update
from dp_ray.replica.world import World
from dp_ray.results.history import History
from dp_ray.rundir.checkpoint import CHECKPOINTS, CheckpointWriter, TrainState, pack, steps_of
from dp_ray.rundir.history_file import HISTORY
from dp_ray.rundir.ledger import check_newest
from dp_ray.rundir.sharded_checkpoint import ShardedWriter
from dp_ray.storage import Storage
from dp_ray.task.cut import Cut
from dp_ray.task.notices import Send
from dp_ray.task.pace import Pace
from dp_ray.task.updates import updates_of


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

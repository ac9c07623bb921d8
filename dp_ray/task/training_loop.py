"""The loop of a training: its steps, and what follows each."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dp_ray.plan.split import Split
from dp_ray.plan.work import Work
from dp_ray.replica.loss_watch import NotFinite
from dp_ray.replica.read_requests import Indices
from dp_ray.replica.step import OnShard
from dp_ray.replica.step_clock import Part
from dp_ray.replica.step_times import StepTimes
from dp_ray.replica.trainer import Trainer, Update
from dp_ray.replica.user_code import raising
from dp_ray.replica.world import World, gathered
from dp_ray.results.shape_recorder import Recorder
from dp_ray.rundir.checkpoint import TrainState
from dp_ray.task.checkpointer import Checkpointer, PieceKeeper
from dp_ray.task.early_stopping import EarlyStopping
from dp_ray.task.hooks import Hooks
from dp_ray.task.profiling import StepProfiler
from dp_ray.task.step_control import StepControl


class Evaluates(Protocol):
    """What evaluates during a training."""

    def is_due(self, split: Split, step: int) -> bool:
        """Whether to evaluate after a step."""

    def measure(self, step: int) -> dict[str, float]:
        """The metrics after a step, by their names in the history."""


class TrainingLoop:
    """Runs the steps of a training. After each it counts, evaluates, runs the scheduler, and keeps the state."""

    def __init__(
        self,
        trainer: Trainer,
        split: Split,
        train_state: TrainState,
        evaluator: Evaluates,
        early_stopping: EarlyStopping,
        hooks: Hooks | None,
        checkpointer: Checkpointer | PieceKeeper | None,
        control: StepControl,
        times: StepTimes,
        profiler: StepProfiler,
    ) -> None:
        self._trainer = trainer
        self._split = split
        self._train_state = train_state
        self._evaluator = evaluator
        self._early_stopping = early_stopping
        self._hooks = hooks
        self._checkpointer = checkpointer
        self._control = control
        self._times = times
        self._clock = times.clock
        self._profiler = profiler

    def run(
        self, work: Work, batches: Iterator[tuple[Indices, Any]], world: World, recorder: Recorder, on_shard: OnShard
    ) -> None:
        """Run the steps of `work` to the last, or to the one after which the workers stop; keep the state."""
        if self._checkpointer:
            self._checkpointer.before_commit = recorder.keep
        self._times.begin()
        for step, shards in work:
            self._control.before(step)
            self._profiler.before(step)
            update = self._trainer.step(self._split, step, shards, batches, on_shard, self._control.wants_stop)
            recorder.on_step(step)
            stops = self._after(step, update, is_alone=world.world_size == 1)
            self._profiler.after(step)
            timed = self._clock.end_step(step, recorder.take_rows())
            self._profiler.on_times(timed)
            recorder.on_times(timed)
            if stops:
                break
        if self._trainer.watch is not None:
            self._end_at_loss(self._trainer.watch.check_all)
        self._profiler.close()
        recorder.on_times(self._clock.rest())
        self._control.through()
        if self._checkpointer:
            self._checkpointer.finish()

    def _after(self, step: int, update: Update, is_alone: bool) -> bool:
        """Process a finished `step`; return whether the training stops here, in which case its state is kept.

        A worker that `is_alone` stops as soon as it is asked; several stop after the step on which they agree.
        """
        self._check_loss(step, update)
        measured = self._measure(step, update)
        if self._hooks is not None:
            self._hooks.after_step(step, update, measured)
        is_asked = update.stops or (is_alone and self._control.wants_stop)
        stops = (is_asked or self._early_stopping.has_stopped) and step + 1 < self._split.total_steps
        if self._checkpointer:
            must_save = stops or self._control.take_save()
            self._checkpointer.after_step(step, update, measured, must_save)
        return stops

    def _check_loss(self, step: int, update: Update) -> None:
        """With `stop_on_nan`, end here if a loss is not finite: before any evaluation; the history has the step."""
        watch = self._trainer.watch
        if watch is None or not watch.has_found:
            return
        if self._checkpointer:
            self._checkpointer.log(step, update)
        self._end_at_loss(watch.check)

    def _end_at_loss(self, check: Callable[[], None]) -> None:
        """Let a `check` raise NotFinite only once all workers have written what they keep: the first to end ends all.

        Every rank calls this after the same step.
        """
        try:
            check()
        except NotFinite:
            if self._checkpointer:
                self._checkpointer.wait()
            gathered(None)
            raise

    def _measure(self, step: int, update: Update) -> dict[str, float]:
        """The values measured after the step: an evaluation's metrics and, at an epoch's end, the epoch's loss."""
        train_state = self._train_state
        train_state.step = step + 1
        train_state.add(update.sums)
        is_evaluated = self._evaluator.is_due(self._split, step)
        measured = self._evaluate(step) if is_evaluated else {}
        if (step + 1) % self._split.steps == 0:
            measured = {**measured, "epoch_loss": train_state.end_epoch()}
            with raising(f"step {step}: scheduler"):
                self._trainer.schedule.after_epoch({**train_state.measured, "loss": measured["epoch_loss"]})
        if self._early_stopping.take(measured) and not is_evaluated:
            measured |= self._evaluate(step)  # as after the last step
        return measured

    def _evaluate(self, step: int) -> dict[str, float]:
        self._clock.enter(Part.EVALUATION)
        measured = self._evaluator.measure(step)
        self._clock.enter(Part.OTHER)
        self._train_state.measured.update(measured)
        return measured

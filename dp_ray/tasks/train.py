"""The task `train` on one worker, from its dataset to the final weights: begin at `train`.

`TrainingLoop` runs the steps, and after each evaluates, stops early, calls hooks and keeps the state. At the end
`keep_weights` writes the last weights, their average, and the best.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dp_ray.engine.bad_samples import Quarantine
from dp_ray.engine.clock import Part, clock_on
from dp_ray.engine.evaluation import Evaluated, Evaluation, build_metrics, check_watched
from dp_ray.engine.loading import LoadedStep, OverlappedRead, Source, load_steps, seeded_dataset
from dp_ray.engine.model import check_all_tensors, tensors_of
from dp_ray.engine.placement import place
from dp_ray.engine.step import OnShard, StepEnd, build_step
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.engine.trainer import Trainer, Update
from dp_ray.engine.user_code import reraise_as
from dp_ray.engine.votes import LossWatch, NotFinite
from dp_ray.engine.world import broadcast, check_rows, gathered
from dp_ray.errors import JobError, StorageError
from dp_ray.job import keys
from dp_ray.job.job import Job
from dp_ray.job.plan import evaluations_of, split_of, with_schedule
from dp_ray.messages import FlopsCounted, StoppedEarly, WorkerTimes
from dp_ray.plan.split import Split, Work
from dp_ray.rundir.checkpoint import TrainState
from dp_ray.rundir.ledger import begin_attempt, check_newest
from dp_ray.rundir.start import BEST, EMA, parts_of, write_best, write_weights
from dp_ray.steps.shapes import Probe, Recorder
from dp_ray.storage import Storage
from dp_ray.tasks.checkpoints import PieceKeeper, Training, checkpointing, layout_of, restore
from dp_ray.tasks.hooks import Hooks, shape_reporter, slow_forward, with_loss_check
from dp_ray.tasks.profiling import StepProfiler
from dp_ray.tasks.setup import Context, check_unchanged, forget_from, load_dataset, quarantine_of, set_aside
from dp_ray.tensors.files import attend_writing, on_rank_0, write_tensors


def train(context: Context) -> None:
    """Train from the newest checkpoint, or from the start, to the end; rank 0 writes the weights.

    If any worker is asked to stop, all workers stop after the same step, and its state is kept.
    """
    job, run, send, control = context.job, context.run, context.send, context.control
    dataset = load_dataset(context)
    split = split_of(job, len(dataset))
    placement = place(with_schedule(job, split), context.world, context.notify)
    check_all_tensors(placement.model)
    world = placement.world
    measures, states = build_metrics(job)
    check_watched(job, states)
    step, times, ahead = build_step(job, world), StepTimes(clock_on(world.device)), OverlappedRead()
    watch = LossWatch(str(run)) if job.stop_on_nan else None
    control.runs_on(times.clock)
    with closing(Trainer(placement, step, measures, split, times.clock, ahead, watch)) as trainer:
        if trainer.optimizer_step.says_left_out is not None:
            context.notify(trainer.optimizer_step.says_left_out)
        context = replace(context, world=world, attempt=begin_attempt(run).attempt)
        training = Training(context, split, layout_of(job, split, dataset))
        train_state = restore(training, trainer)
        trainer.synchronise()
        hooks = Hooks(job, trainer, split, train_state, run) if world.rank == 0 and job.hooks.given else None
        forwards, trial = placement.forwards(), placement.row_trial()
        evaluation = Evaluation(job, step, measures, states, world.device, forwards, trainer.over_batch, trial=trial)
        forget_from(run, lambda step, _: step < train_state.step)
        quarantine = quarantine_of(set_aside(context, "dataset", dataset))
        stopping = EarlyStopping.of(job, train_state)
        start = split.total_steps if stopping is not None and stopping.has_stopped else train_state.step
        source, work = Source(job, dataset), Work(split, world.world_size, world.rank, start=start)
        with (
            closing(load_steps(source, work, world.device, quarantine, times=times, ahead=ahead)) as steps,
            Recorder(world, send, attempt=control.attempt) as recorder,
            checkpointing(training, trainer, train_state, times, recorder.keep) as checkpointer,
            Probe(placement.called, job.batch_dim) as probe,
            slow_forward(placement.called, control, world),
            StepProfiler(job, world, run, split.total_steps, send) as profiler,
        ):
            evaluator = None if job.eval is None else Evaluator(context, trainer, evaluation, source.told)
            tracing = profiler if profiler.is_wanted else None
            loop = TrainingLoop(
                context, trainer, split, train_state, evaluator, times, stopping, hooks, checkpointer, tracing
            )
            on_shard = shape_reporter(recorder, probe)
            on_shard = with_loss_check(job, start, world, on_shard, context.notify)
            loop.run(steps, start, split.total_steps, recorder, on_shard)
            send(WorkerTimes(world.rank, times.to_json()))
            if trainer.gradient.flops is not None:
                send(FlopsCounted(trainer.gradient.flops))
    forget_ahead(run, quarantine, train_state.step, split)
    has_stopped = stopping is not None and stopping.has_stopped
    if train_state.step < split.total_steps and not has_stopped:
        control.leave()
    control.end()
    keep_weights(training, trainer, train_state)
    if stopping is not None and has_stopped and train_state.step < split.total_steps and world.rank == 0:
        send(stopping.stopped())
    if hooks is not None:
        hooks.at_end()


def forget_ahead(run: Storage, quarantine: Quarantine | None, steps: int, split: Split) -> None:
    """Forget what was set aside of batches that were read ahead of a training that has ended after `steps`."""
    if quarantine is not None and steps < split.total_steps:
        gathered(None)  # all have read what they read ahead
        forget_from(run, lambda step, _: step < steps)


class Evaluates(Protocol):
    """An evaluator of a training, or the recorded values of one."""

    def is_due(self, split: Split, step: int) -> bool:
        """Return whether to evaluate after a step."""

    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics after a step, by their names in the history."""


class Evaluator:
    """The evaluations of a training: at the steps that the job sets, and after the last step.

    They evaluate the average of the weights if the job says so, and else what the optimizer evaluates.
    """

    def __init__(
        self, context: Context, trainer: Trainer, evaluation: Evaluation, told: dict[int, int] | None = None
    ) -> None:
        job = context.job
        average = trainer.average if job.ema is not None and job.ema.evaluate else None
        self._model = trainer.called if average is None else average.called(trainer.called)
        self._in_place = trainer.optimizer_step.evaluating if average is None else average.in_place
        self._control = context.control
        self._evaluation = evaluation
        self._world = context.world
        self._told = {} if told is None else told  # the dataset may be that of the training
        self._job = job.over_eval()
        self._dataset = seeded_dataset(self._job, "eval.dataset")
        check_rows("eval.dataset", len(self._dataset), context.rows_on_driver)
        check_unchanged(context, "eval.dataset", self._dataset)
        self._planned = evaluations_of(job, len(self._dataset))
        self._set_aside = set_aside(replace(context, job=self._job), "eval.dataset", self._dataset)

    def is_due(self, split: Split, step: int) -> bool:
        """Return whether to evaluate after `step`."""
        return self._planned.due.after(split, step)

    def measure(self, step: int) -> dict[str, float]:
        """Evaluate after `step`; return the metrics by their names in the history."""
        work = Work(self._planned.split, self._world.world_size, self._world.rank)
        device = self._world.device
        if self._set_aside is not None:
            self._set_aside.files.after = step
        quarantine = quarantine_of(self._set_aside)
        source = Source(self._job, self._dataset, "eval.dataset", is_evaluation=True, told=self._told)
        with (
            self._in_place(),
            closing(load_steps(source, work, device, quarantine)) as steps,
            closing(self._evaluation.run(self._model, work, steps)) as evaluated,
        ):
            for done in evaluated:
                if isinstance(done, StepEnd):
                    self._control.touch()
        assert isinstance(done, Evaluated)
        metrics = done.metrics if quarantine is None else {**done.metrics, "rows": done.rows}
        measured = {f"eval_{name}": value for name, value in metrics.items()}
        for where, name in self._job.watched.items():
            if name not in measured:
                raise JobError(f"{where}: eval measures {', '.join(measured)}; got {name!r}")
        return measured


@dataclass(frozen=True)
class EarlyStopping:
    """The step after which a training stops early. The counts are in the training's state, so a resume keeps them.

    All workers decide by rank 0's numbers, and so stop after the same step.
    """

    wanted: keys.EarlyStopping
    train_state: TrainState

    @staticmethod
    def of(job: Job, train_state: TrainState) -> "EarlyStopping | None":
        """Return the job's, or None; counts of another metric, or of an earlier `early_stopping`, begin anew."""
        wanted = job.early_stopping
        by = [] if wanted is None else [wanted.column, wanted.mode, wanted.min_delta]
        if wanted is None:
            train_state.stopping = {}
            return None
        if train_state.stopping.get("by") != by:
            train_state.stopping = {"by": by, "best": None, "times": 0}
        return EarlyStopping(wanted, train_state)

    @property
    def has_stopped(self) -> bool:
        """Whether the training ends here, as the metric has not improved for too long."""
        return bool(self.train_state.stopping["times"] >= self.wanted.patience)

    def take(self, measured: dict[str, float]) -> bool:
        """Take in what was measured after a step; return whether the training stops. Every rank calls this."""
        if self.wanted.column not in measured:
            return False
        value = float(json.loads(broadcast(json.dumps(measured[self.wanted.column]))))
        counts = self.train_state.stopping
        best = counts["best"]
        gain = 0.0 if best is None else best - value if self.wanted.mode == "min" else value - best
        if value == value and (best is None or gain > self.wanted.min_delta):  # NaN never improves
            counts |= {"best": value, "times": 0}
        else:
            counts["times"] += 1
        return self.has_stopped

    def stopped(self) -> StoppedEarly:
        """Return why the training has stopped."""
        counts: dict[str, Any] = self.train_state.stopping
        column, mode, min_delta = counts["by"]
        return StoppedEarly(self.train_state.step, column, mode, min_delta, counts["best"], counts["times"])


@dataclass(frozen=True)
class TrainingLoop:
    """The steps of a training. After each it counts, evaluates, runs the scheduler, and keeps the state.

    What a job does not use is None, and no step asks for it.
    """

    context: Context
    trainer: Trainer
    split: Split
    train_state: TrainState
    evaluator: Evaluates | None
    times: StepTimes
    early_stopping: EarlyStopping | None = None
    hooks: Hooks | None = None
    checkpointer: PieceKeeper | None = None
    profiler: StepProfiler | None = None

    def run(self, steps: Iterator[LoadedStep], start: int, end: int, recorder: Recorder, on_shard: OnShard) -> None:
        """Run the steps from `start` to before `end`, or to the one after which all workers stop; keep the state."""
        trainer, checkpointer = self.trainer, self.checkpointer
        control, clock = self.context.control, self.times.clock
        is_alone = self.context.world.world_size == 1  # it stops as soon as it is asked; several agree on a step
        self.times.begin()
        for step in range(start, end):
            control.before(step)
            if self.profiler is not None:
                self.profiler.before(step)
            update = trainer.step(step, steps, on_shard, control.wants_stop)
            recorder.on_step(step)
            if trainer.watch is not None and trainer.watch.not_finite is not None:
                # With `stop_on_nan`, end before any evaluation, with the step logged.
                if checkpointer is not None:
                    checkpointer.log(step, update)
                self._end_at_loss(trainer.watch.check)
            measured = self._measure(step, update)
            if self.hooks is not None:
                self.hooks.after_step(step, update, measured)
            stops = update.stops or (is_alone and control.wants_stop)
            stops = stops or (self.early_stopping is not None and self.early_stopping.has_stopped)
            stops = stops and step + 1 < self.split.total_steps
            if checkpointer is not None:
                checkpointer.after_step(step, update, measured, stops or control.take_save())
            timed = clock.end_step(step, recorder.take_rows())
            recorder.on_times(timed)
            if self.profiler is not None:
                self.profiler.after(step, timed)
            if stops:
                break
        if trainer.watch is not None:
            self._end_at_loss(trainer.watch.check_all)
        if self.profiler is not None:
            self.profiler.close()
        recorder.on_times(clock.rest())
        control.through()
        if checkpointer is not None:
            checkpointer.finish()

    def _end_at_loss(self, check: Callable[[], None]) -> None:
        """Let a `check` raise NotFinite only once all workers have written what they keep: the first to end ends all.

        Every rank calls this after the same step.
        """
        try:
            check()
        except NotFinite:
            if self.checkpointer is not None:
                self.checkpointer.wait()
            gathered(None)
            raise

    def _measure(self, step: int, update: Update) -> dict[str, float]:
        """Return the values measured after the step: an evaluation's metrics and, at an epoch's end, its loss."""
        train_state = self.train_state
        train_state.step = step + 1
        train_state.add(update.sums)
        is_evaluated = self.evaluator is not None and self.evaluator.is_due(self.split, step)
        measured = self._evaluate(step) if is_evaluated else {}
        if (step + 1) % self.split.steps == 0:
            measured = {**measured, "epoch_loss": train_state.end_epoch()}
            with reraise_as(f"step {step}: scheduler"):
                self.trainer.schedule.after_epoch({**train_state.measured, "loss": measured["epoch_loss"]})
        if self.early_stopping is not None and self.early_stopping.take(measured) and not is_evaluated:
            measured |= self._evaluate(step)  # as after the last step
        return measured

    def _evaluate(self, step: int) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        self.times.clock.enter(Part.EVALUATION)
        measured = self.evaluator.measure(step)
        self.times.clock.enter(Part.OTHER)
        self.train_state.measured.update(measured)
        return measured


def keep_weights(training: Training, trainer: Trainer, train_state: TrainState) -> None:
    """Write the last weights, their average and the best ones, on rank 0; the others send it their rows.

    Raises StorageError on rank 0 if a later attempt than this one has begun.
    """
    with trainer.optimizer_step.evaluating():
        _keep_weights(training, trainer, train_state)


def _keep_weights(training: Training, trainer: Trainer, train_state: TrainState) -> None:
    context, job, run = training.context, training.context.job, training.context.run
    tensors = tensors_of(trainer.model)
    average = {} if trainer.average is None else trainer.average.tensors()
    if context.world.rank != 0:
        for part in (*parts_of(tensors), average):
            attend_writing(part)
        return
    check_newest(run, context.attempt)
    write_weights(run, tensors, whole=on_rank_0)
    if job.ema is not None:
        text = json.dumps({"decay": job.ema.decay, "step": train_state.step})
        write_tensors(run, EMA, average, text, whole=on_rank_0)
    keep_best(context, train_state)


def keep_best(context: Context, train_state: TrainState) -> None:
    """Write the best weights, if there are any; a failure is only reported, since the training is done.

    They are those that were evaluated: the average, if the job says so.
    """
    job, run = context.job, context.run
    run.delete(BEST)
    if train_state.best is None or train_state.best_step is None:
        return
    is_averaged = job.ema is not None and job.ema.evaluate
    try:
        write_best(run, train_state.best_by[0], train_state.best, train_state.best_step, is_averaged)
    except StorageError as error:
        context.notify(f"the best weights, those after step {train_state.best_step - 1}, cannot be kept: {error}")

"""The task `train` on one worker, from its dataset to the final weights: begin at `train`.

`begun_training` sets a training up where its newest checkpoint ends. `TrainingRun.steps` gives its steps, also to a
loop of the user's (`own_loop.py`). `declared` makes what is a declared training's own. `AfterStep` counts each step,
and evaluates after it.
"""

import itertools
import json
import operator
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.evaluation import Evaluation, build_metrics, check_watched
from dp_ray.engine.forward.model import has_own_modes
from dp_ray.engine.forward.step import Metrics, OnShard, Step, build_step
from dp_ray.engine.forward.weights import check_all_tensors
from dp_ray.engine.loads.bad_samples import Quarantine
from dp_ray.engine.loads.loading import LoadedStep, Source, load_steps
from dp_ray.engine.placement import Placement
from dp_ray.engine.sums.votes import LossWatch, NotFinite
from dp_ray.engine.trainer import TrainedModel, Trainer, TrainingStep, Update
from dp_ray.engine.user_code import reraise_as
from dp_ray.engine.world import broadcast, gathered
from dp_ray.job.plan import split_of, with_schedule
from dp_ray.job.samples import mixture_of
from dp_ray.plan.split import Split, Work
from dp_ray.rundir.history import FinishedStep
from dp_ray.rundir.ledger import begin_attempt
from dp_ray.tasks.audits import begun_auditor, rewinding
from dp_ray.tasks.checkpoints import (
    PieceKeeper,
    Training,
    begin_best,
    checkpointing,
    keep_weights,
    note_best,
    restored,
    sample_layout,
)
from dp_ray.tasks.early_stopping import Stopping
from dp_ray.tasks.evaluate import Evaluator
from dp_ray.tasks.hooks import HookCalls
from dp_ray.tasks.loop import Run, times_of
from dp_ray.tasks.preflight import Answers, before_training, with_checks
from dp_ray.tasks.setup import Context, begin_quarantine, drop_set_aside, load_dataset
from dp_ray.tasks.views import holding, levelled

M = TypeVar("M", bound=TrainedModel)


def train(context: Context) -> None:
    """Train from the newest checkpoint, or from the start, to the end; rank 0 writes the weights.

    If any worker is asked to stop, all workers stop after the same step, and its state is kept.
    """
    with begun_training(place_training(context), declared) as run, closing(run.steps()) as steps:
        gradient, optimizer = run.trainer.gradient, run.trainer.optimizer_step
        for step in steps:
            step.backward(gradient)  # forward and backward of the shards, and the sum over all workers
            step.update(optimizer)  # of the mean's gradient: hooks, clip, optimizer, scheduler


def declared(placed: "PlacedTraining", step: Step, measures: Metrics, clock: StepClock) -> Trainer:
    """Return the model of a training as its job declares it: one loss, one optimizer."""
    return Trainer(placed.placement, step, measures, placed.split, clock)


@dataclass(frozen=True)
class TrainingRun(Generic[M]):
    """A training that has begun, or goes on, and the loop over its steps; `trainer` is what they train."""

    training: Training
    trainer: M
    evaluations: Sequence[Evaluation]
    answers: Answers

    def steps(self, stopping: Stopping | None = None) -> Generator[TrainingStep, None, None]:
        """Yield the steps that are left, to run passes and updates, and do after each what follows it.

        These are its reports, evaluations, hooks, history and checkpoint; after the last one the weights are kept.
        `stopping` is by default the job's.
        """
        training, trainer = self.training, self.trainer
        context, state, split = training.context, training.state, training.split
        world, control, watch = context.world, context.control, training.watch
        source, times = training.source, training.times
        may_stop = stopping is not None or context.job.early_stopping is not None
        stopping = stopping or Stopping(context.job, state)
        start = split.total_steps if stopping.has_stopped else state.step
        hooks = HookCalls(training) if world.rank == 0 and context.job.hooks.given else None
        # Before any sample is set aside, also in an evaluation: it removes those of all later steps.
        quarantine = begin_quarantine(context, source.dataset, lambda step, _: step < state.step)
        auditor = training.auditor
        work = Work(split, world.world_size, world.rank, start=start)
        if auditor is not None:
            work = auditor.plan.work(world.rank, start)
        with (
            closing(load_steps(source, work, world.device, quarantine, times=times, ahead=trainer.ahead)) as loaded,
            Run(context, trainer.called, split, times) as run,
            # Within the run: the writer's thread has the recorder send, also after an error.
            checkpointing(training, run.recorder.keep) as checkpointer,
        ):
            evaluators = [Evaluator(training, evaluation, self.answers) for evaluation in self.evaluations]
            after = AfterStep(training, evaluators, stopping if may_stop else None)
            steps, on_first = self._asking(loaded, run.on_shard)
            unfinished = [] if state.unfinished is None else [state.step - 1]
            for number in itertools.chain(unfinished, run.steps(start)):
                if state.unfinished is None:
                    on_shard = run.on_shard if number else on_first
                    audit = None if auditor is None else auditor.of_step(number, trainer)
                    step = TrainingStep(trainer, number, next(steps), on_shard, control.wants_stop, audit)
                    yield step  # its loop runs passes and updates
                    state.is_torn = True  # until the step is counted
                    update = step.end()
                    if watch is not None and step.totals is not None:
                        watch.take(number, step.totals.loss)
                    # Before the step is kept, since its reports are kept with it; and before an evaluation, which
                    # may take long.
                    run.recorder.on_step(number)
                else:
                    # The step has ended among other workers, who may have been asked to stop.
                    update = state.unfinished._replace(stops=False)
                finished = FinishedStep(number, update, {}, time.perf_counter(), times.data_wait)
                if watch is not None and watch.not_finite is not None:
                    end_at_loss(watch.check, checkpointer, finished)
                # Counts it, evaluates, steps schedules.
                finished = finished._replace(measured=after.take(number, update))
                if hooks is not None:
                    hooks.after_step(finished)
                # A single worker stops as soon as it is asked; several agree on a step.
                stops = update.stops or after.stops or (world.world_size == 1 and control.wants_stop)
                run.stops = stops and number + 1 < split.total_steps
                self._keep(finished, run, checkpointer)
            self._through(run, checkpointer)
        end(training, stopping, hooks, quarantine)  # nothing is read or written in the background any more

    def _asking(self, loaded: Iterator[LoadedStep], on_shard: OnShard) -> tuple[Iterator[LoadedStep], OnShard]:
        """Have a declared training ask what it must know, before its next step and in its very first one.

        A loop's passes ask at their first occurrence.
        """
        trainer = self.trainer
        if not isinstance(trainer, Trainer):
            return loaded, on_shard
        on_first = with_checks(self.training.context, trainer.measures, on_shard)
        return before_training(self.answers, trainer, loaded), on_first

    def _keep(self, finished: FinishedStep, run: Run, checkpointer: PieceKeeper | None) -> None:
        """Write the step into the history, and a checkpoint if one is due; hold it for another group."""
        training, context = self.training, self.training.context
        job, held = context.job, context.held
        if checkpointer is not None:
            # Not to join others, if this worker holds the state.
            must_save = run.stops and not (context.control.is_to_rejoin and held is not None and not job.why_reads)
            checkpointer.after_step(finished, must_save or context.control.take_save())
        elif finished.measured and held is not None:
            note_best(training, finished.measured)  # as rank 0 does
        training.state.unfinished, training.state.is_torn = None, False
        if held is not None:
            held.rows.append(finished)
            if len(held.rows) > held.most_rows:
                held.look(context.run)

    def _through(self, run: Run, checkpointer: PieceKeeper | None) -> None:
        """Keep what is left after the last step."""
        context, watch = self.training.context, self.training.watch
        if watch is not None:
            end_at_loss(watch.check_all, checkpointer)
        run.close()  # before the last step is kept: its times are kept with it
        context.control.through()  # writing the rest has no time limit
        if checkpointer is not None:
            if run.stops and context.control.is_to_rejoin and not context.job.why_reads:
                checkpointer.wait()
            else:
                checkpointer.finish()
        run.send_times()


def end(training: Training, stopping: Stopping, hooks: HookCalls | None, quarantine: Quarantine | None) -> None:
    """End a training whose steps and writer have ended: keep its weights, or leave it if it was stopped."""
    context, state, split = training.context, training.state, training.split
    ends_early = state.step < split.total_steps
    if ends_early:
        if quarantine is not None:  # of batches that were read ahead, nothing was set aside after all
            gathered(None)  # all workers have read what they had begun to read ahead
            drop_set_aside(context.run, lambda step, _: step < state.step)
        if not stopping.has_stopped:
            # Raises StopRequested, once all have kept their work: a training that goes on later has no weights yet.
            context.control.leave()
    context.control.through()  # writing the weights has no time limit either
    keep_weights(training)  # after the writer's end: the best ones are those of a checkpoint
    if ends_early and stopping.has_stopped and context.world.rank == 0:
        context.send(stopping.stopped())
    if hooks is not None:
        hooks.at_end()


class PlacedTraining(NamedTuple):
    """What a training begins with: its dataset, how its steps are cut, and its model, whose world `context` has."""

    context: Context
    dataset: Any
    split: Split
    placement: Placement


def place_training(context: Context) -> PlacedTraining:
    """Load the dataset and build the model; every rank calls this."""
    job, dataset = context.job, load_dataset(context)
    split = split_of(job, len(dataset))
    placement = replace(context, job=with_schedule(job, split)).place()
    check_all_tensors(placement.model)
    return PlacedTraining(replace(context, world=placement.world), dataset, split, placement)


@contextmanager
def begun_training(
    placed: PlacedTraining, trainer_of: Callable[[PlacedTraining, Step, Metrics, StepClock], M]
) -> Iterator[TrainingRun[M]]:
    """Give a training at the state where it begins or goes on. Every rank calls this.

    `trainer_of` makes what it trains, of the job's step and metrics: all that is its own beside other trainings.
    """
    context, dataset, split, placement = placed
    job, world = context.job, context.world
    measures, states = build_metrics(job, mixture_of(dataset))
    check_watched(job, states)
    step, times = build_step(job, world), times_of(context)
    with closing(trainer_of(placed, step, measures, times.clock)) as trainer:
        if trainer.optimizer_step.says_left_out is not None:
            context.say(trainer.optimizer_step.says_left_out)
        # Only now, as a job that cannot be built supersedes no attempt; and before the checkpoints are looked at.
        context = replace(context, attempt=begin_attempt(context.run).attempt)
        layout = sample_layout(job, split, dataset)
        watch = LossWatch(str(context.run)) if job.stop_on_nan else None
        training = Training(context, Source(job, dataset), split, layout, trainer, times, watch)
        training = levelled(training) or restored(training)
        auditor = begun_auditor(context, training.source, split, training.state.step)
        training = replace(training, auditor=auditor)
        with holding(training), rewinding(context, auditor):
            if context.held is not None:
                begin_best(training)
                context.held.begin(training.state.step)
            trainer.synchronise()  # with the restored state: the average of the weights begins with it
            parts = job, step, measures, states, placement, trainer.over_batch
            evaluations = [Evaluation(*parts, named=named) for named in job.evaluations]
            with trainer.advising():
                yield TrainingRun(training, trainer, evaluations, Answers(context))


def end_at_loss(
    check: Callable[[], None], checkpointer: PieceKeeper | None, finished: FinishedStep | None = None
) -> None:
    """Raise a `check`'s NotFinite only once all workers have written their files: the first to end ends all.

    Every rank calls this after the same step. One that has `finished` is logged before; no state is kept any more.
    """
    if finished is not None and checkpointer is not None:
        checkpointer.after_step(finished)
    try:
        check()
    except NotFinite:
        if checkpointer is not None:
            checkpointer.wait()
        gathered(None)
        raise


class Evaluates(Protocol):
    """An evaluator of a training, or the recorded values of them all."""

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after a step."""

    def recurs(self, step: int) -> bool:
        """Return whether to evaluate after a step also if the training goes on."""

    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics after a step, by their names in the history."""


class AfterStep:
    """The work after each step of a training: count it, evaluate if it is due, and step schedules.

    `stops` is set once the training is to stop early.
    """

    def __init__(self, training: Training, evaluators: Sequence[Evaluates], stopping: Stopping | None = None) -> None:
        self._state, self._split, self._schedule = training.state, training.split, training.trainer.schedule
        self._clock = training.times.clock
        self._rounds = has_own_modes(training.trainer.model)  # whether an evaluation may round the weights
        self._evaluators = evaluators
        self._stopping = stopping
        self.stops = False

    def take(self, step: int, update: Update) -> dict[str, float]:
        """Count a step; return the measurements after it: of an evaluation, and an epoch's loss at its end."""
        state = self._state
        if state.step == step:  # else it is counted, and what follows it was begun among other workers
            state.count(update)
        due = list(map(operator.methodcaller("is_due", step), self._evaluators))
        measured = self._evaluate(step, itertools.compress(self._evaluators, due)) if any(due) else {}
        if (step + 1) % self._split.steps == 0:
            measured = {**measured, "epoch_loss": state.end_epoch()}
            with reraise_as(f"step {step}: scheduler"):
                self._schedule.after_epoch({**state.at_end, **state.measured, "loss": measured["epoch_loss"]})
        regular = measured if not state.at_end else {name: measured[name] for name in measured.keys() - state.at_end}
        if self._stopping is not None and self._stopping.take(regular, update):
            self.stops = state.is_torn = True
            # As after the last step: what is not evaluated yet.
            measured |= self._evaluate(step, itertools.compress(self._evaluators, map(operator.not_, due)))
        return measured

    def _evaluate(self, step: int, evaluators: Iterable[Evaluates]) -> dict[str, float]:
        measured: dict[str, float] = {}
        self._state.is_torn |= self._rounds
        for evaluator in evaluators:
            self._clock.enter(Part.EVALUATION)
            # Rank 0's: a metric of the user's may give another number elsewhere, and all decide alike by these.
            found: dict[str, float] = json.loads(broadcast(json.dumps(evaluator.measure(step))))
            self._clock.enter(Part.OTHER)
            for name in found:
                self._state.at_end.pop(name, None)
            (self._state.measured if evaluator.recurs(step) else self._state.at_end).update(found)
            measured |= found
        return measured

"""Run a step of a training again in this process, from the nearest checkpoint before it; nothing is written.

Begin at `run_again`; it gives a `Replayed`. `LoopAgain` is for a loop of the user's, whose passes are looked at.
"""

import dataclasses
import math
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dp_ray.engine.evaluation import build_metrics
from dp_ray.engine.forward.model import set_modes
from dp_ray.engine.forward.step import build_step
from dp_ray.engine.loads.loader import StepTimes
from dp_ray.engine.loads.loading import LoadedStep, Source, load_steps
from dp_ray.engine.loop_model import LoopModel
from dp_ray.engine.placement import place_whole
from dp_ray.engine.sums.votes import Totals
from dp_ray.engine.trainer import TrainedModel, Trainer, TrainingStep, Update
from dp_ray.errors import JobError
from dp_ray.job.keys import NamedEval, measured_by
from dp_ray.job.plan import due_of, split_of, with_schedule
from dp_ray.plan.split import Split, Work
from dp_ray.replay.inspect_step import (
    Debug,
    Findings,
    InspectedModel,
    StepInspection,
    StepIsThrough,
    looked,
)
from dp_ray.results.replayed import Replayed, ReplayedLoop, ReplayedNumber
from dp_ray.rundir.history import StepRows
from dp_ray.tasks.checkpoints import Training, restored, sample_layout
from dp_ray.tasks.own_loop import Loop, call_loop
from dp_ray.tasks.preflight import Answers, before_training
from dp_ray.tasks.setup import Context, load_dataset, unkept_quarantine
from dp_ray.tasks.train import AfterStep, PlacedTraining
from dp_ray.text import counted

LINE_SECONDS = 10.0


class StepChoice(NamedTuple):
    """A step, counted from the training's start; and the shard to look at, None for all."""

    step: int
    shard: int | None = None


class Rerun(NamedTuple):
    """A step that was run again: its values, and the findings in its shards and in the model."""

    replayed: Replayed
    findings: Findings
    look: StepInspection


@contextmanager
def run_again(context: Context, history: StepRows, choice: StepChoice) -> Iterator[Rerun]:
    """Run the steps of a training up to the chosen one again, and inspect it; the process has the job's settings.

    `history` is the run's. Within the block, the model has the state before the step. Raises JobError if the training
    has no such step or shard.
    """
    placed = _placed_whole(context, choice)
    context, dataset, split, placement = placed
    job = context.job
    step, (measures, _) = build_step(job, context.world), build_metrics(job)
    with closing(Trainer(placement, step, measures, split)) as trainer:
        training = _restored(placed, trainer, choice)
        begun = training.state.step
        loaded = _run_steps_before(training, history, choice.step)
        look = StepInspection(trainer.gradient)
        filled = [part for part in loaded.loaded if part.shard.rows]
        findings = look.find(filled, split.whole(choice.step), choice.shard)
        values = _values_of_step(training, choice, begun, history)
        yield Rerun(Replayed(**values, loss=findings.loss, **looked(findings, dataset)), findings, look)


class LoopAgain(Loop):
    """A loop that runs again from the newest checkpoint up to a step, and through it; `run` does it once.

    In the step, each pass is looked at before it runs. `history` is the run's. Raises JobError as `run_again` does,
    and if the loop stops before the step.
    """

    _kind = InspectedModel

    def __init__(self, context: Context, history: StepRows, choice: StepChoice) -> None:
        super().__init__(_placed_whole(context, choice))
        self._history, self._choice = history, choice
        self._debug: tuple[int, Debug] | None = None
        self._replayed: ReplayedLoop | None = None

    def run(self) -> ReplayedLoop:
        """Return what the step gave."""
        with suppress(StepIsThrough):
            call_loop(self)
        assert self._replayed is not None
        return self._replayed

    def debug(self, place: int, call: Debug) -> None:
        """Call a function in the pass at a place of the step, before that runs, with what was found; end there."""
        self._debug = place, call
        with suppress(StepIsThrough):
            call_loop(self)

    @contextmanager
    def _begun(self) -> Iterator[tuple[LoopModel, Iterator[TrainingStep]]]:
        placed = self._placed
        step, (measures, _) = build_step(placed.context.job, placed.context.world), build_metrics(placed.context.job)
        with closing(self._model_of(placed, step, measures, StepTimes().clock)) as trainer:
            assert isinstance(trainer, InspectedModel)
            training = _restored(placed, trainer, self._choice)
            self._reached = training.state
            with closing(self._steps_to(training, trainer)) as steps:
                yield trainer, steps

    def _steps_to(self, training: Training, trainer: InspectedModel) -> Generator[TrainingStep]:
        choice, begun = self._choice, training.state.step
        self._check_goes_on(training.state.stopping.get("reason"), begun - 1)
        for step in _steps_again(training, self._history, choice.step):
            if step.number == choice.step:
                trainer.looks, trainer.shard, trainer.dataset = True, choice.shard, training.source.dataset
                trainer.debugs_in = self._debug
            yield step
            if step.number == choice.step:
                self._replayed = _replayed_loop(training, choice, begun, step.end(), self._history)
                raise StepIsThrough
            self._check_goes_on(self._reason, step.number)

    def _check_goes_on(self, reason: str | None, step: int) -> None:
        if reason:
            raise JobError(f"--step {self._choice.step}: the loop stops after step {step}: {reason}")


def _placed_whole(context: Context, choice: StepChoice) -> PlacedTraining:
    """Load the dataset and build the model, whole; raises JobError if there is no such step or shard."""
    job, dataset = context.job, load_dataset(context)
    split = split_of(job, len(dataset))
    check(choice, split)
    # On one worker, whole: a sharded model's shards are run one by one too.
    placement = place_whole(with_schedule(job, split), context.world)
    return PlacedTraining(dataclasses.replace(context, world=placement.world), dataset, split, placement)


def _restored(placed: PlacedTraining, trainer: TrainedModel, choice: StepChoice) -> Training:
    """Return the training at the newest state that is not after the chosen step."""
    context, dataset, split, _ = placed
    layout = sample_layout(context.job, split, dataset)
    training = Training(context, Source(context.job, dataset), split, layout, trainer, StepTimes())
    training = restored(training, until=choice.step)
    trainer.synchronise()
    if training.state.step > choice.step:
        raise JobError(f"--step {choice.step}: the training began at step {training.state.step}, from init_from")
    return training


def check(choice: StepChoice, split: Split) -> None:
    """Raise JobError if the training has no such step, or the step no such shard with rows."""
    if choice.step >= split.total_steps:
        raise JobError(f"--step {choice.step}: the training has {split.total_steps} steps, counted from 0")
    if choice.shard is None:
        return
    filled = [part.shard for part in split.worker(1, 0, choice.step)]
    if choice.shard not in filled:
        raise JobError(
            f"--shard {choice.shard}: step {choice.step} has {counted(len(filled), 'shard')}, counted from 0"
        )


def _check_watched(trainer: TrainedModel, first: int, wanted: int, history: StepRows) -> None:
    """Raise JobError if a scheduler needs an evaluation that the history does not have."""
    watched = [metric for metric in trainer.schedule.watched.values() if metric != "loss"]
    lacking = [step for step in range(first, wanted) if watched and step not in history]
    if lacking:
        raise JobError(
            f"--step {wanted}: the scheduler watches {watched[0]}, and the run's history lacks step {lacking[0]}"
        )


@dataclass(frozen=True)
class RecordedEvaluations:
    """A run's evaluations by one of its `eval`, from its history.

    A scheduler that watches them goes the same way again, and a model whose own `eval()` changes its weights.
    """

    training: Training
    history: StepRows
    named: NamedEval

    def is_due(self, step: int) -> bool:
        """Return whether the run measured anything after the step."""
        return bool(self._measured(step))

    def recurs(self, step: int) -> bool:
        """Return whether the run would have measured after the step also if it went on."""
        return due_of(self.named).recurs(self.training.split, step)

    def measure(self, step: int) -> dict[str, float]:
        """Return the values that the run measured after the step."""
        with self.training.trainer.evaluating() as model:
            set_modes(model, False)
        return self._measured(step)

    def _measured(self, step: int) -> dict[str, float]:
        row, evaluations = self.history.row(step), self.training.context.job.evaluations
        measured = {name: value for name, value in row.items() if value is not None}
        return {name: value for name, value in measured.items() if measured_by(evaluations, name) == self.named}


def _run_steps_before(training: Training, history: StepRows, wanted: int) -> LoadedStep:
    """Run the steps from the restored one up to the wanted one again; return that one, loaded."""
    trainer = training.trainer
    assert isinstance(trainer, Trainer)
    with closing(_steps_again(training, history, wanted)) as steps, trainer.advising():
        for step in steps:
            if step.number == wanted:
                break
            step.backward(trainer.gradient)
            step.update(trainer.optimizer_step)
        return step.loaded._replace(loaded=list(step.loaded.loaded))


def _steps_again(training: Training, history: StepRows, wanted: int) -> Generator[TrainingStep]:
    """Yield the steps from the restored one to the wanted one; nothing is reported or kept of them."""
    context, begun, source, trainer = training.context, training.state.step, training.source, training.trainer
    _check_watched(trainer, begun, wanted, history)
    quarantine = unkept_quarantine(context.job, "dataset", source.dataset, context.run)
    context.say(f"from the state after {counted(begun, 'step')}: {counted(wanted - begun, 'step')} to run again")
    recorded = [RecordedEvaluations(training, history, named) for named in context.job.evaluations]
    progress, said = AfterStep(training, recorded), time.monotonic()
    until = Work(dataclasses.replace(training.split, max_steps=wanted + 1), start=begun)
    with closing(load_steps(source, until, context.world.device, quarantine)) as loaded:
        steps: Iterator[LoadedStep] = loaded
        if isinstance(trainer, Trainer):
            steps = before_training(Answers(context, keeps=False), trainer, loaded)
        for number in range(begun, wanted + 1):
            if time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                context.say(f"step {number}, up to {wanted}")
            step = TrainingStep(trainer, number, next(steps))
            yield step
            if number < wanted:
                progress.take(number, step.end())


def _values_of_step(training: Training, choice: StepChoice, begun: int, history: StepRows) -> dict[str, Any]:
    """Return the values of a `ReplayedStep` but for its loss."""
    context, split = training.context, training.split
    return {
        "run_dir": str(context.run),
        "step": choice.step,
        "epoch": split.cursor(choice.step)[0],
        "shard": choice.shard,
        "shards": split.shards,
        "start": begun,
        "bitwise": context.job.bitwise,
        "device": str(context.world.device),
        "history_loss": history.row(choice.step).get("loss"),
    }


def _replayed_loop(
    training: Training, choice: StepChoice, begun: int, update: Update, history: StepRows
) -> ReplayedLoop:
    trainer, known = training.trainer, history.row(choice.step)
    assert isinstance(trainer, InspectedModel)
    means, _ = Totals.means(update.sums.tolist(), update.is_sum)
    measured = [math.nan if mean is None else mean for mean in means]
    logged = dict(zip(trainer.measured, measured, strict=True))
    loss = logged.pop("loss")
    return ReplayedLoop(
        **_values_of_step(training, choice, begun, history),
        loss=loss,
        logged={name: ReplayedNumber(number, known.get(name)) for name, number in logged.items()},
        passes=tuple(trainer.found),
    )

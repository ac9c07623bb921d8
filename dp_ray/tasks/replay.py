"""Run a step of a training again in this process, from the nearest checkpoint before it; nothing is written.

Begin at `run_again`; it gives a `Replayed`.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from dp_ray.engine.evaluation import build_metrics
from dp_ray.engine.inspect_step import Findings, ModulePlace, StepInspection
from dp_ray.engine.loading import LoadedShard, LoadedStep, Source, load_steps
from dp_ray.engine.placement import place_whole
from dp_ray.engine.step import build_step
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.engine.trainer import Trainer, TrainingStep
from dp_ray.errors import JobError
from dp_ray.job.plan import split_of, with_schedule
from dp_ray.plan.split import Split, Work
from dp_ray.results.replayed import Replayed, ReplayedRow
from dp_ray.rundir.history import StepRows
from dp_ray.tasks.checkpoints import Training, restored, sample_layout
from dp_ray.tasks.setup import Context, load_dataset, unkept_quarantine
from dp_ray.tasks.train import AfterStep
from dp_ray.tensors.tree import copied
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
    job, dataset = context.job, load_dataset(context)
    split = split_of(job, len(dataset))
    check(choice, split)
    # On one worker, whole: a sharded model's shards are run one by one too.
    placement = place_whole(with_schedule(job, split), context.world)
    context = dataclasses.replace(context, world=placement.world)
    step, (measures, _) = build_step(job, context.world), build_metrics(job)
    with closing(Trainer(placement, step, measures, split)) as trainer:
        layout = sample_layout(job, split, dataset)
        training = Training(context, Source(job, dataset), split, layout, trainer, StepTimes())
        training = restored(training, until=choice.step)
        trainer.synchronise()
        begun = training.state.step
        if begun > choice.step:
            raise JobError(f"--step {choice.step}: the training began at step {begun}, from init_from")
        loaded = _run_steps_before(training, history, choice.step)
        look = StepInspection(job, placement.model, step, context.world.device, trainer.gradient.loss)
        loss = None
        if choice.shard is None:
            with look.unchanged():
                copies = [LoadedShard(part.shard, part.indices, copied(part.batch)) for part in loaded.loaded]
                again = TrainingStep(trainer, choice.step, loaded._replace(loaded=iter(copies)))
                with trainer.advising():
                    total, weight, *_ = map(float, again.backward(trainer.gradient))
                trainer.optimizer_step.skip()
                loss = total / weight if weight else float("nan")
        filled = [part for part in loaded.loaded if part.shard.rows]
        findings = look.find(filled, split, choice.shard)
        replayed = _replayed(training, choice, begun, loss, findings, history.row(choice.step).get("loss"))
        yield Rerun(replayed, findings, look)


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


def _check_watched(trainer: Trainer, first: int, wanted: int, history: StepRows) -> None:
    """Raise JobError if the scheduler needs an evaluation that the history does not have."""
    schedule = trainer.schedule
    if not schedule.watches or schedule.metric == "loss":
        return
    lacking = [step for step in range(first, wanted) if step not in history]
    if lacking:
        raise JobError(
            f"--step {wanted}: the scheduler watches {schedule.metric}, and the run's history lacks step {lacking[0]}"
        )


@dataclass(frozen=True)
class RecordedEvaluations:
    """The evaluations of a run, from its history: a scheduler that watches one goes the same way again."""

    history: StepRows

    def is_due(self, step: int) -> bool:
        """Return whether the run measured anything after the step."""
        return bool(self.measure(step))

    def measure(self, step: int) -> dict[str, float]:
        """Return the values that the run measured after the step."""
        row = self.history.row(step)
        return {name: value for name, value in row.items() if name.startswith("eval_") and value is not None}


def _run_steps_before(training: Training, history: StepRows, wanted: int) -> LoadedStep:
    """Run the steps from the restored one up to the wanted one again; return that one, loaded."""
    context, begun, trainer, source = training.context, training.state.step, training.trainer, training.source
    assert isinstance(trainer, Trainer)
    _check_watched(trainer, begun, wanted, history)
    quarantine = unkept_quarantine(context.job, "dataset", source.dataset, context.run)
    context.notify(f"from the state after {counted(begun, 'step')}: {counted(wanted - begun, 'step')} to run again")
    progress, said = AfterStep(training, RecordedEvaluations(history)), time.monotonic()
    until = Work(dataclasses.replace(training.split, max_steps=wanted + 1), start=begun)
    with closing(load_steps(source, until, context.world.device, quarantine)) as steps, trainer.advising():
        for number in range(begun, wanted):  # nothing is reported or kept of them
            if time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                context.notify(f"step {number}, up to {wanted}")
            step = TrainingStep(trainer, number, next(steps))
            step.backward(trainer.gradient)
            step.update(trainer.optimizer_step)
            progress.take(number, step.end())
        loaded = next(steps)
        return loaded._replace(loaded=list(loaded.loaded))


def _replayed(
    training: Training,
    choice: StepChoice,
    begun: int,
    loss: float | None,
    findings: Findings,
    history_loss: float | None,
) -> Replayed:
    context, split = training.context, training.split
    rows = []
    for row, losses in findings.rows:
        for at, (sample, position) in enumerate(zip(row.indices.tolist(), row.shard.positions, strict=True)):
            number = losses.values[at] if losses.values else None
            place = sample, row.shard.shard, position
            if losses.of_batch is None:
                rows.append(ReplayedRow(number, *place))
            else:
                rows.append(ReplayedRow(losses.of_batch, *place, number))
    rows.sort(key=_largest_first)
    return Replayed(
        run_dir=str(context.run),
        step=choice.step,
        epoch=split.cursor(choice.step)[0],
        shard=choice.shard,
        shards=split.shards,
        start=begun,
        bitwise=context.job.bitwise,
        device=str(context.world.device),
        loss=loss,
        history_loss=history_loss,
        row_losses="; ".join(dict.fromkeys(losses.how for _, losses in findings.rows)),
        rows=tuple(rows),
        weights=findings.weights,
        batch=findings.batch,
        output=_described(findings.output),
        gradient=_described(findings.gradient),
    )


def _largest_first(row: ReplayedRow) -> tuple[int, float]:
    """Order rows: NaN first, then infinities and numbers downwards, then unknown values."""
    number = row.loss if row.gradient is None else row.gradient
    if number is None:
        return 2, 0.0
    return (0, 0.0) if math.isnan(number) else (1, -number)


def _described(place: ModulePlace | None) -> dict[str, Any] | None:
    return None if place is None else {**place._asdict(), "text": str(place)}

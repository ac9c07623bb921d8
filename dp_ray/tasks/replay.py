"""Run a step of a training again in this process, from the nearest checkpoint before it; nothing is written.

Begin at `run_again`. `Replayed` is what it gives: the step's loss beside the history's, its rows, and what was not
finite.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from dp_ray.engine.evaluation import build_metrics
from dp_ray.engine.inspect_step import Findings, Place, StepInspection
from dp_ray.engine.loading import LoadedShard, LoadedStep, Source, load_steps
from dp_ray.engine.placement import place_whole
from dp_ray.engine.step import build_step
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.engine.trainer import Trainer
from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.plan import split_of, with_schedule
from dp_ray.messages import Note
from dp_ray.plan.split import Split, Work
from dp_ray.results.text import aligned
from dp_ray.rundir.history import StepRows
from dp_ray.storage import Storage
from dp_ray.tasks.checkpoints import Training, layout_of, restored
from dp_ray.tasks.loop import Run
from dp_ray.tasks.setup import Context, load_dataset, unkept_quarantine
from dp_ray.tasks.train import Progress
from dp_ray.tensors.tree import copied
from dp_ray.text import counted, relative

ROUNDING = 3e-7  # relative: a few units in the last place of fp32
SHOWN_ROWS = 20
EQUAL = "bitwise equal"
LINE_SECONDS = 10.0
Say = Callable[[str], None]


class Row(NamedTuple):
    """A row of a step: its loss, None if not known, the sample's index, its shard, its position in the epoch.

    If the loss is over the batch, it is that of the batch, and `gradient` the norm of its gradient by the row's
    outputs.
    """

    loss: float | None
    sample: int
    shard: int
    position: int
    gradient: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; without `gradient` if there is none."""
        return {key: value for key, value in self._asdict().items() if key != "gradient" or value is not None}


@dataclass(frozen=True)
class Replayed:
    """A step that was run again from the state after `start` steps.

    `loss` is None if only a shard ran, `history_loss` if the history does not have the step. The rows are ordered by
    their losses, the largest first; `row_losses` says in words what these are. `weights`, `batch`, `output` and
    `gradient` are the first places that are not finite.
    """

    run_dir: str
    step: int
    epoch: int
    shard: int | None
    shards: int
    start: int
    bitwise: bool
    device: str
    loss: float | None
    history_loss: float | None
    row_losses: str
    rows: tuple[Row, ...]
    weights: str | None
    batch: str | None
    output: dict[str, Any] | None
    gradient: dict[str, Any] | None

    @property
    def compared(self) -> str:
        """How the step's loss compares with the history's."""
        return compared(self.loss, self.history_loss)

    @property
    def relative_difference(self) -> float | None:
        """The losses' difference, relative to the history's; None where there are not two finite ones."""
        here, there = self.loss, self.history_loss
        if here is None or there is None or not math.isfinite(here) or not math.isfinite(there):
            return None
        return abs(here - there) / abs(there) if there else abs(here)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; numbers that JSON does not have are text: "nan", "inf", "-inf"."""
        values = {**asdict(self), "rows": [one.to_json() for one in self.rows]}
        values |= {"compared": self.compared, "difference": self.relative_difference}
        return {key: _plain(value) for key, value in values.items()}

    def lines(self) -> Iterator[str]:
        """Yield the same for people."""
        earlier = f", steps {self.start} to {self.step - 1} run again" if self.start < self.step else ""
        began = f"from the state after {counted(self.start, 'step')}{earlier},"
        yield f"step {self.step} (epoch {self.epoch}) of {relative(self.run_dir)}, {began} on {self.device}"
        yield self._loss_line()
        if self.bitwise and self.loss is not None and self.history_loss is not None and self.compared != EQUAL:
            yield "the run is bitwise: code, data, versions or hardware are not those of the run"
        yield from self._not_finite_lines()
        yield from self._row_lines()

    def _loss_line(self) -> str:
        if self.loss is None:
            return f"shard {self.shard} of {self.shards} alone: its loss is not compared with the history's"
        there = "the history does not have it"
        if self.history_loss is not None:
            there = f"{self.history_loss!r} in the history"
        apart = "" if not self.relative_difference else f" ({self.relative_difference:.2g} relative)"
        return f"loss {self.loss!r} here, {there}: {self.compared}{apart}"

    def _not_finite_lines(self) -> Iterator[str]:
        """Yield the first of each kind that is not finite; one line if there is none."""
        places = {
            "weights before the step": self.weights,
            "batch": self.batch,
            "output": self.output and self.output["text"],
            "gradient": self.gradient and self.gradient["text"],
        }
        for kind, place in places.items():
            if place is not None:
                yield f"not finite, first {kind}: {place}"
        if all(place is None for place in places.values()):
            yield "finite: the weights before the step, its batch, all outputs and gradients"

    def _row_lines(self) -> Iterator[str]:
        is_gradient = bool(self.rows) and self.rows[0].gradient is not None
        what = "gradient" if is_gradient else "loss"
        yield f"{counted(len(self.rows), 'row')}, the largest {what} first: {self.row_losses}"
        table = [(what, "sample", "shard", "position")]
        for one in self.rows[:SHOWN_ROWS]:
            number = one.gradient if is_gradient else one.loss
            text = "unknown" if number is None else f"{number:.9g}"
            table.append((text, str(one.sample), str(one.shard), str(one.position)))
        yield aligned(table)
        more = len(self.rows) - SHOWN_ROWS
        if more > 0:
            yield f"and {more:,} more, which --json has"


def compared(here: float | None, there: float | None) -> str:
    """Say how a loss compares with the history's: `bitwise equal`, `within rounding`, `differs`, `not compared`."""
    if here is None or there is None:
        return "not compared"
    if here == there or (math.isnan(here) and math.isnan(there)):
        return EQUAL
    if math.isfinite(there) and abs(here - there) <= ROUNDING * abs(there):
        return f"within rounding, {ROUNDING:g} relative"
    return "differs"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class ReplayContext(NamedTuple):
    """A training to replay: where it runs now, its run directory and history, and a function that shows lines."""

    job: Job
    world: World
    run: Storage
    history: StepRows
    say: Say


class StepChoice(NamedTuple):
    """A step, counted from the training's start; and the shard to look at, None for all."""

    step: int
    shard: int | None = None


class Rerun(NamedTuple):
    """A step that was run again: its values, the findings in its shards, and the look at the model."""

    replayed: Replayed
    findings: Findings
    look: StepInspection


@contextmanager
def run_again(context: ReplayContext, choice: StepChoice) -> Iterator[Rerun]:
    """Run the steps of a training up to the chosen one again, and look at that; the process has the job's settings.

    Within the block, the model has the state before the step. Raises JobError if the training has no such step or
    shard.
    """
    job = context.job
    task = Context(job, context.world, context.run, send=lambda message: _show(context.say, message))
    dataset = load_dataset(task)
    split = split_of(job, len(dataset))
    check(choice, split)
    # On one worker, whole: a sharded model's shards are run one by one too.
    alone = with_schedule(job, split)
    placement = place_whole(alone, context.world)
    world = placement.world
    task, context = dataclasses.replace(task, world=world), context._replace(world=world)
    step, (measures, _) = build_step(job, world), build_metrics(job)
    with closing(Trainer(placement, step, measures, split)) as trainer:
        layout = layout_of(job, split, dataset)
        start = Training(task, Source(job, dataset), split, layout, trainer, StepTimes())
        training = restored(start, until=choice.step)
        trainer.synchronise()
        begun = training.state.step
        if begun > choice.step:
            raise JobError(f"--step {choice.step}: the training began at step {begun}, from init_from")
        loaded = _run_steps_before(context, training, choice.step)
        look = StepInspection(job, placement.model, step, world.device, trainer.gradient.loss)
        loss = None
        if choice.shard is None:
            with look.unchanged():
                copies = [LoadedShard(one.shard, one.indices, copied(one.batch)) for one in loaded.loaded]
                total, weight, *_ = trainer.sums_of(loaded._replace(loaded=iter(copies)))
                loss = total / weight if weight else float("nan")
        filled = [one for one in loaded.loaded if one.shard.rows]
        findings = look.find(filled, split, choice.shard)
        yield Rerun(_replayed(context, split, choice, begun, loss, findings), findings, look)


def _show(say: Say, message: object) -> None:
    if isinstance(message, Note):
        say(message.text)


def check(choice: StepChoice, split: Split) -> None:
    """Raise JobError if the training has no such step, or the step no such shard with rows."""
    if choice.step >= split.total_steps:
        raise JobError(f"--step {choice.step}: the training has {split.total_steps} steps, counted from 0")
    if choice.shard is None:
        return
    filled = [one.shard for one in split.worker(1, 0, choice.step)]
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

    def is_due(self, split: Split, step: int) -> bool:
        """Return whether the run measured anything after the step."""
        return bool(self.measure(step))

    def measure(self, step: int) -> dict[str, float]:
        """Return the values that the run measured after the step."""
        row = self.history.row(step)
        return {name: value for name, value in row.items() if name.startswith("eval_") and value is not None}


@dataclass(eq=False)
class ProgressLines(StepControl):
    """A line every few seconds on how far the steps before the chosen one are."""

    wanted: int
    say: Say
    _shown: float = field(default_factory=time.monotonic)

    def before(self, step: int) -> None:
        """Show the step that begins, if it is time to."""
        if time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            self.say(f"step {step}, up to {self.wanted}")


def _run_steps_before(context: ReplayContext, training: Training, wanted: int) -> LoadedStep:
    """Run the steps from the restored one up to the wanted one again; return that one, loaded."""
    begun, trainer, source, times = training.state.step, training.trainer, training.source, training.times
    _check_watched(trainer, begun, wanted, context.history)
    quarantine = unkept_quarantine(context.job, "dataset", source.dataset, context.run)
    context.say(f"from the state after {counted(begun, 'step')}: {counted(wanted - begun, 'step')} to run again")
    progress = Progress(training, RecordedEvaluations(context.history))
    control = ProgressLines(wanted, context.say)
    silent = dataclasses.replace(training.context, send=lambda _: None, control=control)
    until = Work(dataclasses.replace(training.split, max_steps=wanted + 1), start=begun)
    before = dataclasses.replace(training.split, max_steps=wanted)
    with (
        closing(load_steps(source, until, training.context.world.device, quarantine, times=times)) as steps,
        Run(silent, trainer.called, before, times) as run,
    ):
        for step in run.steps(begun):
            progress.take(step, trainer.step(step, steps, lambda *_: None))
        loaded = next(steps)
        return loaded._replace(loaded=list(loaded.loaded))


def _replayed(
    context: ReplayContext, split: Split, choice: StepChoice, begun: int, loss: float | None, findings: Findings
) -> Replayed:
    job, world, run, history, _ = context
    rows = []
    for one, losses in findings.rows:
        for at, (sample, position) in enumerate(zip(one.indices.tolist(), one.shard.positions, strict=True)):
            number = losses.values[at] if losses.values else None
            place = sample, one.shard.shard, position
            rows.append(Row(number, *place) if losses.of_batch is None else Row(losses.of_batch, *place, number))
    rows.sort(key=_largest_first)
    return Replayed(
        run_dir=str(run),
        step=choice.step,
        epoch=split.cursor(choice.step)[0],
        shard=choice.shard,
        shards=split.shards,
        start=begun,
        bitwise=job.bitwise,
        device=str(world.device),
        loss=loss,
        history_loss=history.row(choice.step).get("loss"),
        row_losses="; ".join(dict.fromkeys(losses.how for _, losses in findings.rows)),
        rows=tuple(rows),
        weights=findings.weights,
        batch=findings.batch,
        output=_described(findings.output),
        gradient=_described(findings.gradient),
    )


def _largest_first(row: Row) -> tuple[int, float]:
    """Order rows: NaN first, then infinities and numbers downwards, then what is not known."""
    number = row.loss if row.gradient is None else row.gradient
    if number is None:
        return 2, 0.0
    return (0, 0.0) if math.isnan(number) else (1, -number)


def _described(place: Place | None) -> dict[str, Any] | None:
    return None if place is None else {**place._asdict(), "text": str(place)}

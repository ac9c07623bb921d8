"""Runs a step of a training again in this process, from the nearest checkpoint before it, and writes nothing."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.job_plan import split_of, with_schedule
from dp_ray.plan.split import Split
from dp_ray.plan.work import Work
from dp_ray.replica.devices import input_device
from dp_ray.replica.evaluation import build_metrics
from dp_ray.replica.look import Findings, Loaded, Look
from dp_ray.replica.model import compiled, synchronise
from dp_ray.replica.not_finite import Place
from dp_ray.replica.quarantine import load_good
from dp_ray.replica.skipping import Skipping
from dp_ray.replica.step import build_step
from dp_ray.replica.step_times import StepTimes
from dp_ray.replica.trainer import Trainer
from dp_ray.replica.world import World
from dp_ray.results.replayed import Replayed, Row, largest_first
from dp_ray.results.shape_recorder import Recorder
from dp_ray.rundir.checkpoint import TrainState
from dp_ray.rundir.history_file import StepRows
from dp_ray.storage import Storage
from dp_ray.task.cut import cut_of
from dp_ray.task.early_stopping import EarlyStopping
from dp_ray.task.notices import Note
from dp_ray.task.profiling import StepProfiler
from dp_ray.task.resume import restore
from dp_ray.task.set_aside import unkept_quarantine
from dp_ray.task.setup import load_dataset
from dp_ray.task.step_control import StepControl
from dp_ray.task.train import whole_model
from dp_ray.task.training_loop import TrainingLoop
from dp_ray.tensors.nested import copied
from dp_ray.text import counted

TELL_SECONDS = 10.0

Say = Callable[[str], None]


class Given(NamedTuple):
    """The training, where it runs now, its run directory and history, and what takes lines for the user."""

    job: Job
    world: World
    run: Storage
    history: StepRows
    say: Say


class Wanted(NamedTuple):
    """A step, counted from the training's start; and the shard to look at, None for all."""

    step: int
    shard: int | None = None


class Again(NamedTuple):
    """A step that was run again: what it gave, what the shards hold, and what looks at them."""

    replayed: Replayed
    findings: Findings
    look: Look


@contextmanager
def run_again(given: Given, wanted: Wanted) -> Iterator[Again]:
    """Run the steps of a training up to the wanted one again, and look at that; the process has the job's settings.

    Within the block, the model has the state before the step. Raises JobError if the training has no such step or
    shard.
    """
    job, world, run = given.job, given.world, given.run
    dataset = load_dataset(job, world, run, {})
    split = split_of(job, len(dataset))
    check(wanted, split)
    model = whole_model(job, world)
    world = world.with_inputs_on(input_device(job, model, world.devices))
    step, (measures, _) = build_step(job, world), build_metrics(job)
    with closing(Trainer(with_schedule(job, split), model, compiled(model, job), step, measures, world)) as trainer:
        state = restore(job, trainer, split, cut_of(job, split, dataset), run, _noting(given.say), until=wanted.step)
        synchronise(model)
        if (begun := state.step) > wanted.step:
            raise JobError(f"--step {wanted.step}: the training began at step {begun}, from init_from")
        given = given._replace(world=world)
        loaded = _steps_before(given, trainer, split, state, dataset, wanted.step)
        look = Look(job, model, step, world.device)
        loss = None
        if wanted.shard is None:
            with look.unchanged():
                loss = _loss(trainer, split, wanted.step, loaded)
        filled = [one for one in loaded if one.shard.rows and wanted.shard in (None, one.shard.shard)]
        findings = look.find(filled, split, wanted.step)
        yield Again(_replayed(given, split, wanted, begun, loss, findings), findings, look)


def check(wanted: Wanted, split: Split) -> None:
    """Raise JobError if the training has no such step, or the step no such shard with rows."""
    if wanted.step >= split.total_steps:
        raise JobError(f"--step {wanted.step}: the training has {split.total_steps} steps, counted from 0")
    if wanted.shard is None:
        return
    filled = [one.shard for one in split.worker(1, 0, wanted.step)]
    if wanted.shard not in filled:
        raise JobError(
            f"--shard {wanted.shard}: step {wanted.step} has {counted(len(filled), 'shard')}, counted from 0"
        )


class Recorded:
    """The evaluations of the run, from its history: a scheduler that watches one goes the same way again."""

    def __init__(self, history: StepRows) -> None:
        self._history = history

    def is_due(self, split: Split, step: int) -> bool:
        """Whether the run measured anything after the step."""
        return bool(self.measure(step))

    def measure(self, step: int) -> dict[str, float]:
        """What the run measured after the step."""
        row = self._history.row(step)
        return {name: value for name, value in row.items() if name.startswith("eval_") and value is not None}


class Telling(StepControl):
    """Tells every few seconds how far the steps before the wanted one are."""

    def __init__(self, wanted: int, say: Say) -> None:
        self._wanted = wanted
        self._say = say
        self._told = time.monotonic()

    def before(self, step: int) -> None:
        """Tell the step that begins, if it is time to."""
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._say(f"step {step}, up to {self._wanted}")


def _steps_before(
    given: Given, trainer: Trainer, split: Split, state: TrainState, dataset: Any, wanted: int
) -> list[Loaded]:
    """Run the steps from the restored one up to the wanted one again; return the shards of that one, loaded."""
    job, world, run, history, say = given
    _check_watched(trainer, state.step, wanted, history)
    quarantine = unkept_quarantine(job, "dataset", dataset, run)
    trainer.real = Skipping(job, dataset) if quarantine is None else quarantine.real
    say(f"from the state after {counted(state.step, 'step')}: {counted(wanted - state.step, 'step')} to run again")
    until, times = Work(dataclasses.replace(split, max_steps=wanted + 1), start=state.step), StepTimes()
    before = Work(dataclasses.replace(split, max_steps=wanted), start=state.step)
    control, profiler = Telling(wanted, say), StepProfiler(job, world, run, split.total_steps, _nobody)
    goes_on = EarlyStopping(job.model_copy(update={"early_stopping": None}), state, split.total_steps)
    loop = TrainingLoop(trainer, split, state, Recorded(history), goes_on, None, None, control, times, profiler)
    with (
        closing(load_good(job, dataset, until, world.device, quarantine, times=times)) as batches,
        Recorder(world, _nobody) as recorder,
    ):
        loop.run(before, batches, world, recorder, lambda *_: None)
        found = [(shard, *next(batches)) for shard in split.worker(1, 0, wanted)]
    return [Loaded(trainer.real(shard), samples, batch) for shard, samples, batch in found]


def _check_watched(trainer: Trainer, first: int, wanted: int, history: StepRows) -> None:
    """Raise JobError if the scheduler needs an evaluation that the history does not have."""
    schedule = trainer.schedule
    if not schedule.watches or schedule.metric == "loss":
        return
    if lacking := [step for step in range(first, wanted) if step not in history]:
        raise JobError(
            f"--step {wanted}: the scheduler watches {schedule.metric}, and the run's history lacks step {lacking[0]}"
        )


def _loss(trainer: Trainer, split: Split, step: int, loaded: Sequence[Loaded]) -> float:
    """The loss of the whole batch, as the history has it."""
    copies = iter([(one.samples, copied(one.batch)) for one in loaded])
    total, weight, *_ = trainer.sums_of(split, step, [one.shard for one in loaded], copies)
    return total / weight if weight else float("nan")


def _replayed(
    given: Given, split: Split, wanted: Wanted, begun: int, loss: float | None, findings: Findings
) -> Replayed:
    job, world, run, history, _ = given
    rows = [row for one, losses in findings.rows for row in _rows(one, losses.values)]
    return Replayed(
        run_dir=str(run),
        step=wanted.step,
        epoch=split.cursor(wanted.step)[0],
        shard=wanted.shard,
        shards=split.shards,
        start=begun,
        bitwise=job.bitwise,
        device=str(world.device),
        loss=loss,
        history_loss=history.row(wanted.step).get("loss"),
        row_losses="; ".join(dict.fromkeys(losses.how for _, losses in findings.rows)),
        rows=largest_first(rows),
        weights=findings.weights,
        batch=findings.batch,
        output=_described(findings.output),
        gradient=_described(findings.gradient),
    )


def _rows(one: Loaded, losses: list[float]) -> Iterator[Row]:
    for at, (sample, position) in enumerate(zip(one.samples.tolist(), one.shard.positions, strict=True)):
        yield Row(losses[at] if losses else None, sample, one.shard.shard, position)


def _described(found: Place | None) -> dict[str, Any] | None:
    return None if found is None else {**found._asdict(), "text": str(found)}


def _noting(say: Say) -> Callable[[Any], None]:
    """What takes a task's notices: its lines are said, the rest is for nobody."""
    return lambda what: say(what.text) if isinstance(what, Note) else None


def _nobody(what: Any) -> None:
    """Takes what a task sends, where nobody listens."""

"""The task `predict` on one worker: run a model over a dataset and write its outputs."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dp_ray.engine.clock import Part
from dp_ray.engine.forward.step import PredictInputs, StepEnd
from dp_ray.engine.loads.loading import LoadedShard, LoadedStep, Source, load_steps
from dp_ray.engine.placement import Placement
from dp_ray.engine.prediction import PredictedShard, Prediction, predict
from dp_ray.engine.user_code import ShardSize, advised, location
from dp_ray.engine.world import World
from dp_ray.errors import DataError, ModelError
from dp_ray.job.plan import split_of
from dp_ray.job.samples import order_of
from dp_ray.messages import Note
from dp_ray.outputs.files import AttemptOutputs, drop_lost
from dp_ray.outputs.merging import AgreedFilePlan, Merger
from dp_ray.outputs.parts import PartWriter, WorkerParts
from dp_ray.outputs.previews import ROWS, Previews
from dp_ray.plan.split import Done, Shard, Work
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, OUTPUTS, PARTS, begin_attempt
from dp_ray.rundir.quarantine import QUARANTINE, RecordFiles
from dp_ray.storage import Storage
from dp_ray.tasks.loop import Run, shards_of_step, times_of
from dp_ray.tasks.preflight import Answers, Facts, before_prediction
from dp_ray.tasks.setup import Context, begin_quarantine, load_dataset, model_to_run


def predict_outputs(context: Context) -> None:
    """Run this worker's shards of every step and write their outputs; committed shards are skipped."""
    dataset, control = load_dataset(context), context.control
    placement = model_to_run(context)
    begun = _begin(context.run, placement.world)
    context = replace(context, world=placement.world, attempt=begun.attempt)
    job, world = context.job, context.world
    split = split_of(job, len(dataset))
    work = Work(split, world.world_size, world.rank, Done(ledger.done_ranges(begun.parts)))
    quarantine = begin_quarantine(context, dataset, lambda step, shard: Shard(step, int(shard), 0, 0) in work.done)
    aside = RecordFiles(context.run.child(QUARANTINE))
    missing = partial(list, aside.positions()) if quarantine is None else aside.positions
    outputs = AttemptOutputs(context.run, begun, split, order_of(job, dataset), missing)
    plan = AgreedFilePlan(outputs, job.outputs.file_bytes, world, lambda: control.wants_stop)
    parts = WorkerParts(context.run.child(PARTS), work.shards, begun.attempt, world.world_size, job.batch_dim)
    times, previews = times_of(context), Previews(context.run, split.rows_kept, job.batch_dim)
    inputs = PredictInputs(job, placement.model, context.say)
    prediction, answers = Prediction(job, world.device, work, times.clock, placement.forwards()), Answers(context)
    with Merger(outputs, plan, world) as merger:
        with (
            Run(context, placement.called, split, times) as run,
            # Rank 0 has a shard of every batch, so its lines are enough.
            PartWriter(parts, plan.agree, run.recorder.keep, context.say, world.device) as writer,
        ):
            with (
                closing(load_steps(Source(job, dataset), work, world.device, quarantine, inputs, times)) as steps,
                closing(_ran(answers, prediction, placement, _previewed(steps, previews))) as ran,
            ):
                keeper = OutputKeeper(context, run, prediction, writer, merger, ran)
                for step in run.steps(goes_on=keeper.goes_on):
                    for shard in shards_of_step(step, ran):
                        keeper.take(shard)
                        del shard  # its outputs: a name would keep their memory while the next shard runs
                    keeper.end(step)
                if not run.stops:
                    next(ran, None)  # past the last step, the parameters gathered for it are freed
            for note in prediction.select.take_notes():
                context.send(Note(note))
            run.close()  # before the writer commits its last part: its times are kept with it
            control.through()  # writing the rest has no time limit
            if quarantine is not None and not run.stops:
                plan.agree(0.0)  # by rank 0, if all its rows were set aside
        is_whole = not run.stops and merger.finish(control)  # after the writer's end, which commits its last part
    run.send_times()
    if not is_whole:
        control.leave()  # raises StopRequested, once all have kept their work


def _ran(
    answers: Answers, prediction: Prediction, placement: Placement, steps: Iterator[LoadedStep]
) -> Generator[Facts | PredictedShard | StepEnd, None, None]:
    """Yield what is known before the first shard; then what `predict` does."""
    with prediction.replica(placement.called) as replica:
        placement.watch_attributes(replica.state)
        facts, steps = before_prediction(answers, prediction, replica, steps, placement.why_not_alone)
        yield facts
        yield from predict(prediction, replica, steps, facts.rows)


def _previewed(steps: Iterator[LoadedStep], previews: Previews) -> Iterator[LoadedStep]:
    """Yield the same steps; inputs to preview are looked at when they are loaded, since the model may change them."""

    def seen(loaded: LoadedShard) -> LoadedShard:
        if loaded.shard.rows:
            previews.on_inputs(loaded.shard, loaded.indices, loaded.batch)
        return loaded

    for step in steps:
        is_shown = step.whole.start < ROWS or step.whole.stop > previews.total_rows - ROWS
        yield step._replace(loaded=map(seen, step.loaded)) if is_shown else step


def _begin(run: Storage, world: World) -> ledger.Ledger:
    """Make the folders that the workers write to, and begin an attempt."""
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    if world.rank == 0:
        # Before the attempt reads which steps are done: those of lost files are to run again.
        drop_lost(run)
    return begin_attempt(run)


@dataclass(frozen=True)
class OutputKeeper:
    """Writes and reports each shard of a prediction, and ends it before the next step if the worker is to stop."""

    context: Context
    run: Run
    prediction: Prediction
    writer: PartWriter
    merger: Merger
    ran: Iterator[Any]

    def goes_on(self, step: int) -> bool:
        """Return whether to run `step`; this worker may have no shards left in it. False ends all workers."""
        has_shards = self.prediction.work.has(step)
        if has_shards:
            self.context.control.before(step)
        if step == 0:
            next(self.ran)  # all ask what must be known first, also those that are to stop
        return self.prediction.forwards.agree(not has_shards or self._begin(step))

    def _begin(self, step: int) -> bool:
        """Commit the outputs if they are asked for, or if merging is far behind; False if the worker is to stop."""
        control, clock = self.context.control, self.prediction.clock
        if self.merger.is_far_behind:
            before = clock.enter(Part.OUTPUTS)
            self.merger.make_room(self.writer.commit, control)
            clock.enter(before)
        if control.wants_stop:
            return False
        if control.take_save():
            self.writer.commit()
        if self.run.profiler is not None:
            self.run.profiler.before(step)
        return True

    def take(self, done: PredictedShard) -> None:
        """Report a shard's shapes, and write its outputs and carried values."""
        shard = done.shard
        self.run.recorder.on_shard(shard, *self.run.probe.take(shard.rows))
        try:
            self.writer.on_shard(shard, done.indices, done.outputs, done.carried)
        except (ModelError, DataError, TypeError, ValueError, RuntimeError) as error:
            where, split = location(shard), self.prediction.work.split
            size = ShardSize(shard.planned_rows, split.largest_batch, split.shards)
            with advised(self.context.job, where, size):
                if isinstance(error, ModelError | DataError):
                    raise type(error)(f"{where}: {error}") from error
                raise ModelError(f"{where}: the outputs cannot be kept: {error}") from error

    def end(self, step: int) -> None:
        """Note that this worker has finished its shards of `step`."""
        self.run.recorder.on_step(step)  # first: when it commits the step, the writer keeps the recorded reports
        self.writer.on_step(step)
        self.merger.on_step(step)

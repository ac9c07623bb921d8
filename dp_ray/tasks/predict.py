"""The task `predict` on one worker: run a model over a dataset and write its outputs."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from dp_ray.engine.clock import Part, clock_on
from dp_ray.engine.loading import LoadedShard, LoadedStep, Source, load_steps
from dp_ray.engine.model import ShardSize, advised
from dp_ray.engine.prediction import PredictedShard, Prediction, predict
from dp_ray.engine.step import PredictInputs
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.engine.user_code import location
from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World
from dp_ray.errors import DataError, ModelError
from dp_ray.job.plan import split_of
from dp_ray.messages import FlopsCounted, Note, Send, WorkerTimes
from dp_ray.outputs.files import OUTPUTS, Outputs, forget_lost
from dp_ray.outputs.merging import AgreedFilePlan, Merger
from dp_ray.outputs.parts import PartWriter, WorkerParts
from dp_ray.outputs.read import Previews
from dp_ray.plan.order import Order
from dp_ray.plan.split import Done, Shard, Work
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, PARTS, begin_attempt
from dp_ray.rundir.quarantine import QUARANTINE, RecordFiles
from dp_ray.steps.shapes import Probe, Recorder
from dp_ray.storage import Storage
from dp_ray.tasks.hooks import slow_forward
from dp_ray.tasks.profiling import StepProfiler
from dp_ray.tasks.setup import Context, forget_from, load_dataset, model_to_run, quarantine_of, set_aside


def predict_outputs(context: Context) -> None:
    """Run this worker's shards of every step and write their outputs; committed shards are skipped."""
    job, world, run, send, control = context.job, context.world, context.run, context.send, context.control
    dataset = load_dataset(context)
    placement = model_to_run(context)
    world, bare, model = placement.world, placement.model, placement.called
    begun = _begin(run, world)
    split = split_of(job, len(dataset))
    done = Done(ledger.done_ranges(begun.parts))
    work = Work(split, world.world_size, world.rank, done)
    forget_from(run, lambda step, shard: Shard(step, int(shard), 0, 0) in done)
    quarantine = quarantine_of(set_aside(replace(context, attempt=begun.attempt), "dataset", dataset))
    aside = RecordFiles(run.child(QUARANTINE))
    missing = partial(list, aside.positions()) if quarantine is None else aside.positions
    outputs = Outputs(run, begun, split, Order(split.rows, job.seed, 0, job.is_shuffled), missing)
    plan = AgreedFilePlan(outputs, job.outputs.file_bytes, world, lambda: control.wants_stop)
    parts = WorkerParts(run.child(PARTS), work.shards, begun.attempt, world.world_size, job.batch_dim)
    with Merger(outputs, plan, world) as merger:
        with (
            Recorder(world, send, attempt=control.attempt) as recorder,
            Probe(model, job.batch_dim) as probe,
            slow_forward(model, control, world),
            StepProfiler(job, world, run, split.total_steps, send) as profiler,
            # Rank 0 has a shard of every batch, so its lines are enough.
            PartWriter(parts, plan.agree, recorder.keep, context.notify, world.device) as writer,
        ):
            times, inputs = StepTimes(clock_on(world.device)), PredictInputs(job, bare, context.notify)
            control.runs_on(times.clock)
            forwards = placement.forwards()
            prediction = Prediction(job, world.device, work, times.clock, forwards, placement.counts_flops)
            prediction = replace(prediction, trial=placement.row_trial())
            keeper = OutputKeeper(prediction, recorder, probe, writer, merger, control, profiler, send)
            previews = Previews(run, split.rows_kept, job.batch_dim)
            times.clock.restart()
            with (
                closing(load_steps(Source(job, dataset), work, world.device, quarantine, inputs, times)) as steps,
                closing(predict(prediction, model, _previewed(steps, previews))) as ran,
            ):
                goes_on = keeper.goes_on(0)
                for finished in ran if goes_on else ():
                    if isinstance(finished, PredictedShard):
                        keeper.take(finished)
                    else:
                        keeper.end(finished.step)
                        goes_on = keeper.goes_on(finished.step + 1)
                        if not goes_on:
                            break
                    del finished  # its outputs: a name would keep their memory while the next shard runs
            keeper.close()
            control.through()
            if quarantine is not None and goes_on:
                plan.agree(0.0)  # by rank 0, if all its rows were set aside
        is_whole = goes_on and merger.finish(control)
    send(WorkerTimes(world.rank, times.to_json()))
    if not is_whole:
        control.leave()
    control.end()


def _previewed(steps: Iterator[LoadedStep], previews: Previews) -> Iterator[LoadedStep]:
    """Yield the same steps; each shard's inputs are looked at when it is loaded: the model may change them."""

    def seen(one: LoadedShard) -> LoadedShard:
        if one.shard.rows:
            previews.on_inputs(one.shard, one.indices, one.batch)
        return one

    for step in steps:
        yield step._replace(loaded=map(seen, step.loaded))


def _begin(run: Storage, world: World) -> ledger.Ledger:
    """Make the folders that the workers write to, and begin an attempt."""
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    if world.rank == 0:
        forget_lost(run)
    return begin_attempt(run)


@dataclass(frozen=True)
class OutputKeeper:
    """Writes and reports each shard of a prediction, and ends it before the next step if the worker is to stop."""

    prediction: Prediction
    recorder: Recorder
    probe: Probe
    writer: PartWriter
    merger: Merger
    control: StepControl
    profiler: StepProfiler
    send: Send

    def goes_on(self, step: int) -> bool:
        """Return whether to run `step`, of which this worker may have no shards left; False ends all workers."""
        work = self.prediction.work
        if step >= work.split.total_steps:
            return True
        return self.prediction.forwards.agree(not work.has(step) or self._begin(step))

    def _begin(self, step: int) -> bool:
        """Commit the outputs if they are asked for, or if merging is far behind; False if the worker is to stop."""
        clock = self.prediction.clock
        self.control.before(step)
        if self.merger.is_far_behind:
            before = clock.enter(Part.OUTPUTS)
            self.merger.make_room(self.writer.commit, self.control)
            clock.enter(before)
        if self.control.wants_stop:
            return False
        if self.control.take_save():
            self.writer.commit()
        self.profiler.before(step)
        return True

    def take(self, done: PredictedShard) -> None:
        """Report a shard's shapes, and write its outputs, with what is carried beside them."""
        job, split, shard = self.prediction.job, self.prediction.work.split, done.shard
        if done.flops is not None:
            self.send(FlopsCounted(done.flops))
        self._send_notes()
        size = ShardSize(shard.stop - shard.start, split.largest_batch, split.shards)
        with advised(job, location(shard), size):
            self.recorder.on_shard(shard, *self.probe.take(shard.rows))
            try:
                self.writer.on_shard(shard, done.indices, done.outputs, done.carried)
            except (ModelError, DataError) as error:
                raise type(error)(f"{location(shard)}: {error}") from error
            except (TypeError, ValueError, RuntimeError) as error:
                raise ModelError(f"{location(shard)}: the outputs cannot be kept: {error}") from error

    def end(self, step: int) -> None:
        """Note that this worker has finished its shards of `step`."""
        self.profiler.after(step)
        self.recorder.on_step(step)
        self.writer.on_step(step)
        self.merger.on_step(step)
        if rows := self.recorder.take_rows():
            self.recorder.on_times(self.prediction.clock.end_step(step, rows))

    def _send_notes(self, wait: bool = False) -> None:
        for note in self.prediction.notes.take(wait):
            self.send(Note(note))

    def close(self) -> None:
        """Record the times and notes that are left, and end a trace that goes on."""
        self._send_notes(wait=True)
        self.recorder.on_times(self.prediction.clock.rest())
        self.profiler.close()

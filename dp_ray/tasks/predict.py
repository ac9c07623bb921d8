"""The task `predict` on one worker: run a model over a dataset and write its outputs."""

from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from dp_ray.engine.clock import Part, StepClock, clock_on
from dp_ray.engine.items import Plain
from dp_ray.engine.prediction import predict
from dp_ray.engine.quarantine import keep_all, load_good
from dp_ray.engine.step import PredictInputs
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.engine.user_code import location
from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World
from dp_ray.errors import DataError, ModelError
from dp_ray.job.plan import split_of
from dp_ray.job.samples import Indices
from dp_ray.outputs.files import OUTPUTS, forget_lost
from dp_ray.outputs.merging import AgreedFilePlan, Merger
from dp_ray.outputs.parts import PartWriter
from dp_ray.outputs.read import Previews
from dp_ray.plan.order import Order
from dp_ray.plan.split import Done, Shard, Work
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, PARTS, begin_attempt
from dp_ray.rundir.quarantine import Missing
from dp_ray.steps.shapes import Probe, Recorder
from dp_ray.storage import Storage
from dp_ray.tasks.hooks import Note, WorkerTimes, slow_forward
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
    missing = Missing(run, grows=quarantine is not None)
    plan = AgreedFilePlan(run, begun, split, job.outputs.file_bytes, world, lambda: control.wants_stop)
    order = Order(split.rows, job.seed, 0, job.is_shuffled)
    parts, note = run.child(PARTS), context.notify  # rank 0 has a shard of every batch
    with Merger(run, begun, split, order, plan, world, missing) as merger:
        with (
            Recorder(world, send) as recorder,
            Probe(model, job.batch_dim) as probe,
            slow_forward(model, control, world),
            StepProfiler(job, world, run, split.total_steps, send) as profiler,
            PartWriter(
                parts, work.shards, plan.agree, job.batch_dim, recorder.keep, begun.attempt, note, world.world_size
            ) as writer,
        ):
            times, inputs = StepTimes(clock_on(world.device)), PredictInputs(job, bare, note)
            keeper = OutputKeeper(recorder, probe, writer, merger, control, times.clock, profiler)
            times.clock.restart()
            previews = Previews(run, split.rows_kept, job.batch_dim)
            with closing(load_good(job, dataset, work, world.device, quarantine, inputs, times=times)) as batches:
                keeper.stops = not predict(
                    model,
                    job,
                    world.device,
                    work,
                    batches,
                    keeper.on_shard,
                    keeper.on_step,
                    keeper.goes_on,
                    without_set_aside=keep_all if quarantine is None else quarantine.without_set_aside,
                    tell=lambda text: send(Note(text)),
                    clock=times.clock,
                    on_inputs=previews.on_inputs,
                    on_flops=send if job.flops and world.rank == 0 and not placement.is_sharded else None,
                    forwards=placement.forwards(),
                )
            keeper.close()
            control.through()
            if quarantine is not None and not keeper.stops:
                plan.agree(0.0)  # by rank 0, if all its rows were set aside
        is_whole = not keeper.stops and merger.finish(control)
    send(WorkerTimes(world.rank, times.to_json()))
    if not is_whole:
        control.leave()
    control.end()


def _begin(run: Storage, world: World) -> ledger.Ledger:
    """Make the folders that the workers write to, and begin an attempt."""
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    if world.rank == 0:
        forget_lost(run)
    return begin_attempt(run)


@dataclass
class OutputKeeper:
    """Writes and reports each shard of a prediction, and ends it before the next step if the worker is to stop."""

    recorder: Recorder
    probe: Probe
    writer: PartWriter
    merger: Merger
    control: StepControl
    clock: StepClock
    profiler: StepProfiler
    stops: bool = False

    def goes_on(self, step: int) -> bool:
        """Return whether to run `step`; commit the outputs if that is asked for, or if the merging is far behind."""
        self.control.before(step)
        if self.merger.is_far_behind:
            before = self.clock.enter(Part.OUTPUTS)
            self.merger.make_room(self.writer.commit, self.control)
            self.clock.enter(before)
        if self.control.wants_stop:
            self.stops = True
        elif self.control.take_save():
            self.writer.commit()
        if not self.stops:
            self.profiler.before(step)
        return not self.stops

    def on_shard(self, shard: Shard, indices: Indices, outputs: Any, carried: dict[str, list[Plain]]) -> None:
        """Report a shard's shapes, and write its outputs, with what is carried beside them."""
        self.recorder.on_shard(shard, *self.probe.take())
        try:
            self.writer.on_shard(shard, indices, outputs, carried)
        except (ModelError, DataError) as error:
            raise type(error)(f"{location(shard)}: {error}") from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(f"{location(shard)}: the outputs cannot be kept: {error}") from error

    def on_step(self, step: int) -> None:
        """Note that this worker has finished its shards of `step`."""
        self.profiler.after(step)
        self.recorder.on_step(step)
        self.writer.on_step(step)
        self.merger.on_step(step)
        if rows := self.recorder.take_rows():
            self.recorder.on_times(self.clock.end_step(step, rows))

    def close(self) -> None:
        """Record the times that are left, and end a trace that goes on."""
        self.recorder.on_times(self.clock.rest())
        self.profiler.close()

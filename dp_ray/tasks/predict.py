"""The task `predict`: one worker's part in running a model over a dataset and writing its outputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from dp_ray.engine.clock import Part, StepClock, clock_on
from dp_ray.engine.items import Plain
from dp_ray.engine.model import compiled, input_device
from dp_ray.engine.prediction import predict
from dp_ray.engine.quarantine import as_planned, load_good
from dp_ray.engine.sharded.rounds import passes_of
from dp_ray.engine.step import PredictInputs
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.engine.user_code import place
from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World
from dp_ray.errors import DataError, ModelError
from dp_ray.job.job import Job
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
from dp_ray.tasks.hooks import Note, Send, WorkerTimes, slowed
from dp_ray.tasks.profiling import StepProfiler
from dp_ray.tasks.setup import forget_from, load_dataset, model_to_run, quarantine_of, set_aside


def predict_outputs(
    job: Job, world: World, run: Storage, send: Send, control: StepControl, rows_on_driver: Mapping[str, int]
) -> None:
    """Run this worker's shards of every step and write their outputs; committed shards are skipped."""
    dataset = load_dataset(job, world, run, rows_on_driver)
    bare, sharded = model_to_run(job, world, run, send)
    world = world.with_inputs_on(input_device(job, bare, world.devices))
    model = compiled(bare, job)
    begun = _begin(run, world)
    split = split_of(job, len(dataset))
    done = Done(ledger.done_ranges(begun.parts))
    work = Work(split, world.world_size, world.rank, done)
    forget_from(run, lambda step, shard: Shard(step, int(shard), 0, 0) in done)
    quarantine = quarantine_of(set_aside(job, "dataset", dataset, run, send, begun.attempt))
    real = as_planned if quarantine is None else quarantine.real
    missing = Missing(run, grows=quarantine is not None)
    cut = AgreedFilePlan(run, begun, split, job.outputs.file_bytes, world, lambda: control.wants_stop)
    order = Order(split.rows, job.seed, 0, job.is_shuffled)

    tell, note = _tellers(world, send)
    with Merger(run, begun, split, order, cut, world, missing) as merger:
        with (
            Recorder(world, send) as recorder,
            Probe(model, job.batch_dim) as probe,
            slowed(model, control, world),
            StepProfiler(job, world, run, split.total_steps, send) as profiler,
            PartWriter(
                *(run.child(PARTS), work.shards, cut.agree, job.batch_dim, recorder.keep, begun.attempt, note),
                num_workers=world.world_size,
            ) as writer,
        ):
            times, inputs = StepTimes(clock_on(world.device)), PredictInputs(job, bare, note)
            keeper = OutputKeeper(recorder, probe, writer, merger, control, times.clock, profiler)
            previews = Previews(run, split.rows_kept, job.batch_dim)
            on = keeper.on_shard, keeper.on_step, keeper.goes_on, real, tell, times.clock, previews.on_inputs
            on_flops = send if job.flops and world.rank == 0 and sharded is None else None
            passes = passes_of(sharded, world)
            with closing(load_good(job, dataset, work, world.device, quarantine, inputs, times=times)) as batches:
                keeper.stops = not predict(model, job, world.device, work, batches, *on, on_flops, passes)
            keeper.close()
            control.through()
            if quarantine is not None and not keeper.stops:
                cut.agree(0.0)  # by rank 0, if all its rows were set aside
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


def _tellers(world: World, send: Send) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """What sends a line for the user, and what sends one on rank 0 alone."""

    def tell(text: str) -> None:
        send(Note(text))

    def note(text: str) -> None:
        if world.rank == 0:  # rank 0 has a shard of every batch, so other ranks would only repeat it
            tell(text)

    return tell, note


class OutputKeeper:
    """Writes and reports each shard of a prediction, and ends it before the next step if the worker is to stop."""

    def __init__(
        self,
        recorder: Recorder,
        probe: Probe,
        writer: PartWriter,
        merger: Merger,
        control: StepControl,
        clock: StepClock,
        profiler: StepProfiler,
    ) -> None:
        self.stops = False
        self._recorder = recorder
        self._probe = probe
        self._writer = writer
        self._merger = merger
        self._control = control
        self._clock = clock
        self._profiler = profiler
        self._clock.restart()

    def goes_on(self, step: int) -> bool:
        """Whether to run `step`; commits the outputs so far if that is asked for, or if the merging is far behind."""
        self._control.before(step)
        if self._merger.is_far_behind:
            before = self._clock.enter(Part.OUTPUTS)
            self._merger.make_room(self._writer.commit, self._control)
            self._clock.enter(before)
        if self._control.wants_stop:
            self.stops = True
        elif self._control.take_save():
            self._writer.commit()
        if not self.stops:
            self._profiler.before(step)
        return not self.stops

    def on_shard(self, shard: Shard, indices: Indices, outputs: Any, carried: dict[str, list[Plain]]) -> None:
        """Report a shard's shapes, and write its outputs, with what is carried beside them."""
        self._recorder.on_shard(shard, *self._probe.take())
        with naming(shard):
            self._writer.on_shard(shard, indices, outputs, carried)

    def on_step(self, step: int) -> None:
        """Note that this worker has finished its shards of `step`."""
        self._profiler.after(step)
        self._recorder.on_step(step)
        self._writer.on_step(step)
        self._merger.on_step(step)
        if rows := self._recorder.take_rows():
            self._recorder.on_times(self._clock.end_step(step, rows))

    def close(self) -> None:
        """Record the times that are left, and end a trace that goes on."""
        self._recorder.on_times(self._clock.rest())
        self._profiler.close()


@contextmanager
def naming(shard: Shard) -> Iterator[None]:
    """Turn an error about a shard's outputs into a ModelError that names step and shard."""
    try:
        yield
    except (ModelError, DataError) as error:
        raise type(error)(f"{place(shard)}: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{place(shard)}: the outputs cannot be kept: {error}") from error

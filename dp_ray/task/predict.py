"""The task `predict`: one worker's part in running a model over a dataset and writing its outputs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.job_plan import split_of
from dp_ray.plan.order import Order
from dp_ray.plan.split import Shard
from dp_ray.plan.work import Done, Work
from dp_ray.replica.data import load_shards
from dp_ray.replica.devices import input_device
from dp_ray.replica.inputs import PredictInputs
from dp_ray.replica.model import compiled
from dp_ray.replica.predict import predict
from dp_ray.replica.read_requests import Indices
from dp_ray.replica.step_times import StepTimes
from dp_ray.replica.world import World
from dp_ray.results.manifest import OUTPUTS, forget_lost
from dp_ray.results.outputs import PartWriter
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, PARTS, begin_attempt
from dp_ray.storage import Storage
from dp_ray.task.merging import AgreedCut, Merger
from dp_ray.task.notices import Note, Send, WorkerTimes
from dp_ray.task.setup import load_dataset, model_with_weights
from dp_ray.task.step_control import StepControl


def predict_outputs(
    job: Job, world: World, run: Storage, send: Send, control: StepControl, rows_on_driver: Mapping[str, int]
) -> None:
    """Run this worker's shards of every step and write their outputs; committed shards are skipped."""
    dataset = load_dataset(job, world, run, rows_on_driver)
    bare = model_with_weights(job, world, run, send)
    world = world.with_inputs_on(input_device(job, bare, world.devices))
    model = compiled(bare, job)
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    if world.rank == 0:
        forget_lost(run)
    begun = begin_attempt(run)
    split = split_of(job, len(dataset))
    work = Work(split, world.world_size, world.rank, Done(ledger.done_ranges(begun.parts)))
    cut = AgreedCut(run, begun, split, job.outputs.file_bytes, world, lambda: control.wants_stop)
    order = Order(split.rows, job.seed, 0, job.is_shuffled)

    def note(text: str) -> None:
        if world.rank == 0:  # rank 0 has a shard of every batch, so other ranks would only repeat it
            send(Note(text))

    with Merger(run, begun, split, order, cut, world) as merger:
        with (
            Recorder(world, send) as recorder,
            Probe(model, job.batch_dim) as probe,
            PartWriter(
                *(run.child(PARTS), work.shards, cut.find, job.batch_dim, recorder.keep, begun.attempt, note),
                num_workers=world.world_size,
            ) as writer,
        ):
            keeper = OutputKeeper(recorder, probe, writer, merger, control)
            times = StepTimes()
            batches = load_shards(job, dataset, work, world.device, PredictInputs(job, bare, note), times=times)
            predict(model, job, world.device, work, batches, keeper.on_shard, keeper.on_step, keeper.goes_on)
            control.through()
        is_whole = not keeper.stops and merger.finish(control)
    send(WorkerTimes(world.rank, times.to_json()))
    if not is_whole:
        control.leave()
    control.end()


class OutputKeeper:
    """Writes and reports each shard of a prediction, and ends it before the next step if the worker is to stop."""

    def __init__(
        self, recorder: Recorder, probe: Probe, writer: PartWriter, merger: Merger, control: StepControl
    ) -> None:
        self.stops = False
        self._recorder = recorder
        self._probe = probe
        self._writer = writer
        self._merger = merger
        self._control = control

    def goes_on(self, step: int) -> bool:
        """Whether to run `step`; commits the outputs so far if that is asked for."""
        self._control.before(step)
        if self._control.wants_stop:
            self.stops = True
        elif self._control.take_save():
            self._writer.commit()
        return not self.stops

    def on_shard(self, shard: Shard, indices: Indices, outputs: Any) -> None:
        """Report a shard's shapes, and write its outputs."""
        self._recorder.on_shard(shard, *self._probe.take())
        with naming(shard):
            self._writer.on_shard(shard, indices, outputs)

    def on_step(self, step: int) -> None:
        """Note that this worker has finished its shards of `step`."""
        self._recorder.on_step(step)
        self._writer.on_step(step)
        self._merger.on_step(step)


@contextmanager
def naming(shard: Shard) -> Iterator[None]:
    """Turn an error about a shard's outputs into a ModelError that names step and shard."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"step {shard.step}, shard {shard.shard}: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"step {shard.step}, shard {shard.shard}: the outputs cannot be kept: {error}"
        raise ModelError(what) from error

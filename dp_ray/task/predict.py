"""The task `predict`: one worker's part in running a model over a dataset and writing its outputs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dp_ray.errors import ModelError
from dp_ray.job import Job
from dp_ray.job_plan import split_of
from dp_ray.plan.split import Shard
from dp_ray.plan.work import Done, Work
from dp_ray.replica.data import Indices, load_shards, seeded_dataset
from dp_ray.replica.devices import input_device
from dp_ray.replica.inputs import PredictInputs
from dp_ray.replica.model import compiled
from dp_ray.replica.predict import predict
from dp_ray.replica.world import World, check_rows
from dp_ray.results.outputs import PartWriter
from dp_ray.results.shape_recorder import Recorder
from dp_ray.results.shapes import Probe
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import PARTS, begin_attempt
from dp_ray.storage import Storage
from dp_ray.task.evaluate import started
from dp_ray.task.notices import Note, Send
from dp_ray.task.step_control import StepControl


def predict_outputs(
    job: Job, world: World, run: Storage, send: Send, control: StepControl, rows_on_driver: Mapping[str, int]
) -> None:
    """Run this worker's shards of every step and write their outputs; committed shards are skipped."""
    dataset = seeded_dataset(job)
    check_rows("dataset", len(dataset), rows_on_driver)
    bare = started(job, world, run, send)
    world = world.with_inputs_on(input_device(job, bare, world.devices))
    model = compiled(bare, job)
    parts = run.child(PARTS)
    attempt, committed = begin_attempt(run)
    work = Work(split_of(job, len(dataset)), world.world_size, world.rank, Done(ledger.done_ranges(committed)))
    is_stopped = False

    def note(text: str) -> None:
        if world.rank == 0:  # rank 0 has a shard of every batch, so other ranks would only repeat it
            send(Note(text))

    with (
        Recorder(world, send) as recorder,
        Probe(model, job.batch_dim) as probe,
        PartWriter(parts, work.shards, job.batch_dim, recorder.keep, attempt, note) as writer,
    ):

        def goes_on(step: int) -> bool:
            nonlocal is_stopped
            control.before(step)
            if control.wants_stop:
                is_stopped = True
            elif control.take_save():
                writer.commit()
            return not is_stopped

        def on_shard(shard: Shard, indices: Indices, outputs: Any) -> None:
            recorder.on_shard(shard, *probe.take())
            with naming(shard):
                writer.on_shard(shard, indices, outputs)

        def on_step(step: int) -> None:
            recorder.on_step(step)
            writer.on_step(step)

        batches = load_shards(job, dataset, work, world.device, PredictInputs(job, bare, note))
        predict(model, job, world.device, work, batches, on_shard, on_step, goes_on)
        control.through()
    if is_stopped:
        control.leave()
    control.end()


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

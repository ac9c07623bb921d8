"""The task `evaluate` on one worker: measure a model over a dataset."""

from contextlib import closing

from dp_ray.engine.clock import clock_on
from dp_ray.engine.evaluation import Evaluated, EvaluatedShard, Evaluation, build_metrics
from dp_ray.engine.loading import Source, load_steps
from dp_ray.engine.model import synchronise
from dp_ray.engine.step import StepEnd, build_step
from dp_ray.engine.timed_loader import StepTimes
from dp_ray.job.plan import split_of
from dp_ray.messages import Measured, WorkerTimes
from dp_ray.plan.split import Work
from dp_ray.steps.shapes import Probe, Recorder
from dp_ray.tasks.hooks import shape_reporter, slow_forward
from dp_ray.tasks.profiling import StepProfiler
from dp_ray.tasks.setup import Context, forget_from, load_dataset, model_to_run, quarantine_of, set_aside


def evaluate(context: Context) -> None:
    """Run this worker's shards of every step; rank 0 sends the metrics over the whole dataset."""
    job, world, run, send, control = context.job, context.world, context.run, context.send, context.control
    dataset = load_dataset(context)
    placement = model_to_run(context)
    world, called = placement.world, placement.called
    work = Work(split_of(job, len(dataset)), world.world_size, world.rank)
    measures, states = build_metrics(job)
    clock, forwards = clock_on(world.device), placement.forwards()
    control.runs_on(clock)
    step, trial = build_step(job, world), placement.row_trial()
    evaluation = Evaluation(job, step, measures, states, world.device, forwards, clock=clock, trial=trial)
    for module in evaluation.beside.values():
        synchronise(module)
    forget_from(run, lambda *_: False)
    quarantine = quarantine_of(set_aside(context, "dataset", dataset))
    times = StepTimes(clock)
    source = Source(job, dataset, is_evaluation=True)
    with (
        closing(load_steps(source, work, world.device, quarantine, times=times)) as steps,
        Recorder(world, send, attempt=control.attempt) as recorder,
        Probe(called, job.batch_dim) as probe,
        slow_forward(called, control, world),
        StepProfiler(job, world, run, work.split.total_steps, send) as profiler,
        closing(evaluation.run(called, work, steps)) as evaluated,
    ):
        on_shard = shape_reporter(recorder, probe)
        control.before(0)
        profiler.before(0)
        clock.restart()
        for done in evaluated:
            if isinstance(done, EvaluatedShard):
                on_shard(*done)
            elif isinstance(done, StepEnd):
                recorder.on_step(done.step)
                recorder.on_times(clock.end_step(done.step, recorder.take_rows()))
                profiler.after(done.step)
                control.before(done.step + 1)
                profiler.before(done.step + 1)
        recorder.on_times(clock.rest())
        profiler.close()
    send(WorkerTimes(world.rank, times.to_json()))
    if world.rank == 0:
        assert isinstance(done, Evaluated)
        send(Measured(done.metrics))
    control.end()

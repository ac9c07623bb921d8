"""Measure a model over a dataset on one worker: the task `evaluate`, and the evaluations of a training."""

from contextlib import closing
from dataclasses import replace

from dp_ray.engine.evaluation import Evaluated, Evaluation, build_metrics
from dp_ray.engine.forward.step import StepEnd, build_step
from dp_ray.engine.forward.weights import synchronise
from dp_ray.engine.loads.loading import Source, load_steps
from dp_ray.errors import JobError
from dp_ray.job.keys import measured_by
from dp_ray.job.plan import evaluations_of, split_of
from dp_ray.job.samples import mixture_of
from dp_ray.messages import Measured
from dp_ray.plan.split import Work
from dp_ray.tasks.checkpoints import Training
from dp_ray.tasks.loop import Run, shards_of_step, times_of
from dp_ray.tasks.preflight import Answers, evaluated
from dp_ray.tasks.setup import (
    Context,
    begin_quarantine,
    check_same_rows,
    check_unchanged,
    load_dataset,
    model_to_run,
    set_aside,
)


def evaluate(context: Context) -> None:
    """Run this worker's shards of every step; rank 0 sends the metrics over the whole dataset."""
    dataset = load_dataset(context)
    placement = model_to_run(context)
    context = replace(context, world=placement.world)
    job, world, called, control = context.job, context.world, placement.called, context.control
    split, times = split_of(job, len(dataset)), times_of(context)
    work = Work(split, world.world_size, world.rank)
    measures, states = build_metrics(job)
    evaluation = Evaluation(job, build_step(job, world), measures, states, placement, clock=times.clock)
    answers = Answers(context)
    for module in evaluation.beside.values():
        synchronise(module)
    quarantine = begin_quarantine(context, dataset, lambda *_: False)
    source = Source(job, dataset, of="evaluation ")
    with (
        closing(load_steps(source, work, world.device, quarantine, times=times)) as loaded,
        Run(context, called, split, times) as run,
        evaluation.replica(called, work) as replica,
        closing(evaluated(answers, evaluation, replica, loaded, mixture_of(dataset))) as ran,
    ):
        placement.watch_attributes(replica.state)
        for number in run.steps():
            for shard in shards_of_step(number, ran):
                run.on_shard(*shard)
            run.recorder.on_step(number)
        control.before(split.total_steps)  # the workers wait for each other's sums, and for no step any more
        # All workers come here, also those without a shard in the last step: it sums over all of them.
        measured = next(ran)
        run.close()
    run.send_times()
    if world.rank == 0:
        assert isinstance(measured, Evaluated)
        context.send(Measured(measured.metrics))
    control.through()


class Evaluator:
    """The evaluations of a training by one of its `eval`: at the steps that the job sets, and after the last step.

    They evaluate the average of the weights if the job says so, else the optimizer's weights to evaluate.
    """

    def __init__(self, training: Training, evaluation: Evaluation, answers: Answers) -> None:
        assert evaluation.named is not None
        named = evaluation.named
        context, trainer = training.context, training.trainer
        job = context.job
        self._trainer, self._control, self._split = trainer, context.control, training.split
        self._evaluation, self._answers = evaluation, answers
        self._world = context.world
        self._told = training.source.told  # the dataset may be that of the training
        self._named, self._job = named, job.over_eval(named)
        self._dataset = context.dataset(self._job, named.dataset_key)
        check_same_rows(named.dataset_key, len(self._dataset), context.rows_on_driver)
        check_unchanged(context, named.dataset_key, self._dataset)
        self._planned = evaluations_of(job, named, len(self._dataset))
        self._quarantine, self._files = set_aside(replace(context, job=self._job), named.dataset_key, self._dataset)

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after `step`."""
        return self._planned.due.after(self._split, step)

    def recurs(self, step: int) -> bool:
        """Return whether to evaluate after `step` also if the training goes on."""
        return self._planned.due.recurs(self._split, step)

    def measure(self, step: int) -> dict[str, float]:
        """Evaluate after `step`; return the metrics by their names in the history."""
        work = Work(self._planned.split, self._world.world_size, self._world.rank)
        if self._files is not None:
            self._files.after = step
        named = self._named
        source = Source(self._job, self._dataset, named.dataset_key, named.of, self._told)
        with (
            self._trainer.evaluating() as model,
            closing(load_steps(source, work, self._world.device, self._quarantine)) as steps,
            self._evaluation.replica(model, work) as replica,
            closing(evaluated(self._answers, self._evaluation, replica, steps, mixture_of(self._dataset))) as ran,
        ):
            for done in ran:
                if isinstance(done, StepEnd):
                    self._control.touch()
        assert isinstance(done, Evaluated)
        metrics = done.metrics if self._quarantine is None else {**done.metrics, "rows": done.rows}
        measured = {f"{named.prefix}{name}": value for name, value in metrics.items()}
        for where, name in self._job.watched.items():
            if name not in measured and measured_by(self._job.evaluations, name) == named:
                raise JobError(f"{where}: eval measures {', '.join(measured)}; got {name!r}")
        return measured

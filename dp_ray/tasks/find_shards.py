"""Find the number of shards of a job with `shards: auto`: the first with which a step fits on all workers."""

from dataclasses import replace

from dp_ray.engine.loads.loading import Source, seeded_dataset
from dp_ray.engine.user_code import ShardSize, advice
from dp_ray.engine.world import gathered
from dp_ray.errors import JobError
from dp_ray.job.plan import evaluations_in, evaluations_of, split_of
from dp_ray.messages import ShardsFound
from dp_ray.plan.costs import shard_counts
from dp_ray.plan.split import chunk_sizes
from dp_ray.tasks.setup import Context, check_same_rows, load_dataset
from dp_ray.text import counted
from dp_ray.trials.memory import Data, why_not


def find_shards(context: Context) -> None:
    """Try a step with more and more shards; rank 0 sends the first number that fits on all workers.

    Each worker tries by itself, and all of them agree after each number. The numbers depend on the job alone, not on
    how many workers there are now. Raises JobError if a shard of a single row does not fit.
    """
    job, world = context.job, context.world
    data, evaluated = _data(context)
    rows = data.split.largest_batch
    worst = ""
    for count in shard_counts(rows, job.max_workers):
        trial = _with_shards(data, count)
        trial_evaluated = [_with_shards(each, count) for each in evaluated]
        reasons = gathered(why_not(trial.source.job, world, trial, trial_evaluated))
        worst = next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")
        fits = "fits" if count == 1 else "fit"
        if worst:
            fits = f"{'does' if count == 1 else 'do'} not fit: {worst}"
        shard_rows = counted(chunk_sizes(rows, count)[0], "row")
        context.say(f"shards: auto: {counted(count, 'shard')} of at most {shard_rows} {fits}")
        if not worst:
            if world.rank == 0:
                context.send(ShardsFound(count))
            context.control.through()
            return
    raise JobError(
        f"shards: auto: a shard of a single row does not fit: {worst}; {advice(job, ShardSize(1, rows, count))}"
    )


def _data(context: Context) -> tuple[Data, list[Data]]:
    """Return the task's data, and that of a training's evaluations."""
    job, dataset = context.job, load_dataset(context)
    of = "evaluation " if job.task == "evaluate" else ""
    data = Data(Source(job, dataset, job.dataset_key, of), split_of(job, len(dataset)))
    evaluated = []
    for evaluation in evaluations_in(job):
        over_eval, key = job.over_eval(evaluation), evaluation.dataset_key
        of_eval = seeded_dataset(over_eval, key)
        check_same_rows(key, len(of_eval), context.rows_on_driver)
        planned = evaluations_of(job, evaluation, len(of_eval))
        evaluated.append(Data(Source(over_eval, of_eval, key, evaluation.of), planned.split))
    return data, evaluated


def _with_shards(data: Data, count: int) -> Data:
    """Return the data of a trial with so many shards."""
    source = replace(data.source, job=data.source.job.model_copy(update={"shards": count}))
    return Data(source, replace(data.split, shards=count))

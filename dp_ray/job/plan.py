"""Make the plan of a job: what a run will do, from the job's keys and the lengths of its datasets. See `plan_of`."""

from collections.abc import Iterable, Mapping

from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import NamedEval, Scheduler
from dp_ray.job.targets import unmeasured
from dp_ray.plan import costs
from dp_ray.plan.split import Split, chunk_sizes
from dp_ray.text import counted


def plan_of(job: Job, rows: Mapping[str, int], more_remarks: Iterable[str] = ()) -> costs.Plan:
    """Return the plan of a job over datasets of these lengths, by key: `dataset`, and of a training's evaluations.

    Raises DataError if no step is left, and JobError if workers without rows would deadlock SyncBatchNorm.
    """
    split = split_of(job, rows["dataset"])
    evaluations = tuple(evaluations_of(job, each, rows[each.dataset_key]) for each in evaluations_in(job))
    checkpoints = checkpoints_of(job) if job.task == "train" else None
    late = list(unmeasured(job))
    _check(job, split)
    about = costs.remarks(split, job.max_workers)
    if job.finds_shards:
        about.append(costs.what_auto_does(split.largest_batch, job.max_workers))
    if job.skipped:
        about.append(f"skip: {counted(len(job.skipped), 'sample')} of the dataset left out, in each epoch")
    for key, scheduler in schedulers_in(job).items():
        # A scheduler of torch's may state a length that is not the training's.
        name = scheduler.label.partition(":")[2] if scheduler.is_torchs else ""
        num = costs.num_scheduled(split, scheduler.per)
        mismatch = costs.ends_elsewhere(name, scheduler.args, num, scheduler.per, job.epochs)
        about += [f"{key}: {mismatch}"] if mismatch else []
    return costs.Plan(
        split=split,
        min_workers=job.min_workers,
        max_workers=job.max_workers,
        evaluations=evaluations,
        checkpoints=checkpoints,
        remarks=(*about, *late, *more_remarks),
    )


def split_of(job: Job, rows: int) -> Split:
    """Return how the job cuts a dataset of `rows` samples into steps and shards, over all of its epochs."""
    epochs, max_steps = (job.epochs, job.max_steps) if job.task == "train" else (1, None)
    return Split(rows, job.batch_size, job.num_shards, job.drop_last, epochs, max_steps)


def with_schedule(job: Job, split: Split) -> Job:
    """Return the job, its schedulers with the length of this training in place of `auto`.

    The run's own job keeps `auto`, so that a longer training is the same one; only what builds the schedulers takes
    this one.
    """
    planned = {
        key: scheduler.planned(max(1, costs.num_scheduled(split, scheduler.per)))
        for key, scheduler in job.schedulers
        if isinstance(scheduler, Scheduler) and scheduler.is_planned
    }
    if not planned:
        return job
    if "scheduler" in planned:
        return job.model_copy(update=planned)
    own = [(each, planned.get(f"{key}.scheduler")) for key, each in job.optimizers]
    optimizers = tuple(each if new is None else each.model_copy(update={"scheduler": new}) for each, new in own)
    return job.model_copy(update={"optimizer": optimizers})


def schedulers_in(job: Job) -> dict[str, Scheduler]:
    """Return the schedulers of a training that its job tells by keys, each by its dotted key."""
    schedulers = dict(job.schedulers) if job.task == "train" else {}
    return {key: scheduler for key, scheduler in schedulers.items() if isinstance(scheduler, Scheduler)}


def evaluations_in(job: Job) -> tuple[NamedEval, ...]:
    """Return how the job evaluates its model while it trains; nothing of another task."""
    return job.evaluations if job.task == "train" else ()


def evaluations_of(job: Job, evaluation: NamedEval, rows: int) -> costs.Evaluations:
    """Return the evaluations of a training by one of its `evaluations`, whose dataset has `rows` samples."""
    split = Split(rows, job.over_eval(evaluation).batch_size, job.num_shards)
    return costs.Evaluations(split, due_of(evaluation), evaluation.name)


def due_of(evaluation: NamedEval) -> costs.Due:
    """Return after which steps of a training an evaluation is due: by default at the end of each epoch."""
    keys = evaluation.keys
    return costs.Due(keys.every_steps, keys.every_epochs or (None if keys.every_steps else 1))


def checkpoints_of(job: Job) -> costs.Checkpoints:
    """Return when a training writes checkpoints: by default at the end of each epoch, and more by the clock."""
    when = job.checkpoint
    is_auto = when.every_seconds == "auto" and when.every_steps is None
    due = costs.Due(when.every_steps, 1 if is_auto else None)
    return costs.Checkpoints(due, when.keep, when.every_seconds, when.best.metric if when.best else None)


def _check(job: Job, split: Split) -> None:
    """Raise JobError or DataError if the job and the length of its dataset do not fit together."""
    try:
        if job.profile is not None:
            costs.profiled_of(job.profile, split.total_steps)
    except ValueError as error:
        raise JobError(f"profile: {error}") from None
    if job.skipped:
        if (last := job.skipped[-1]) >= split.rows:
            raise JobError(f"skip: there is no sample {last}: the dataset has {split.rows}, counted from 0")
        if len(job.skipped) == split.rows:
            raise JobError(f"skip: leaves out all {split.rows} samples of the dataset; leave some of them in")
    for key, scheduler in schedulers_in(job).items() if split.steps > 0 else ():
        # One that ends before the training raises an error when it is stepped further.
        most, needed = scheduler.most_steps, costs.num_scheduled(split, scheduler.per)
        if most is not None and most < needed:
            raise JobError(f"{key}: {costs.too_short(most, needed, scheduler.per)}")
        warmup = scheduler.args.get("warmup") if scheduler.label == Scheduler.SHAPED else None
        if isinstance(warmup, int) and warmup >= needed:
            raise JobError(
                f"{key}.warmup: {counted(warmup, 'update')}, and the training has {needed}; set fewer, or a "
                "share below 1, like 0.05"
            )
    if split.steps == 0:
        raise DataError(
            f"drop_last: drops all {split.rows} rows, because batch_size is {split.batch_size}; "
            "set a smaller batch_size, or drop_last: false"
        )
    if job.sync_batchnorm and any(0 in chunk_sizes(rows, split.shards) for _, rows in split.batch_sizes()):
        raise JobError(
            "sync_batchnorm: the last batch leaves workers empty, and empty workers would deadlock SyncBatchNorm; "
            "set drop_last"
        )

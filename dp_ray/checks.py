"""Checks a job before anything starts: that its targets exist, and how its data is cut."""

import torch

from dp_ray.errors import DataError, JobError
from dp_ray.job import Job
from dp_ray.job_target import Target
from dp_ray.plan.split import Split, chunk_sizes
from dp_ray.replica.data import seeded_dataset
from dp_ray.replica.devices import with_devices
from dp_ray.replica.model import check_model
from dp_ray.replica.optimizer import check_optimizer, check_unbuilt
from dp_ray.replica.targets import bind, resolve
from dp_ray.task.cut import split_of


def check_targets(job: Job) -> tuple[Split, dict[str, int]]:
    """Check the job's targets; return how its dataset is cut, and the rows of each dataset by its key.

    Raises an Error of dp_ray.errors, such as JobError or DataError, that names the key at fault.
    """
    for key, target in job.targets.items():
        if key == "model":
            check_model(target)
        elif key == "optimizer":
            check_unbuilt(target)
        if isinstance(target, Target) and key in ("model", "eval.dataset"):
            bind(key, with_devices(target, ()) if key == "model" else target)
        elif isinstance(target, Target) and key in ("optimizer", "scheduler"):
            if key == "optimizer":
                check_optimizer(resolve(key, target))
            bind(key, target, leading=1)
        elif isinstance(target, Target):
            resolve(key, target)
    for name in (*(job.devices or ()), *([job.input_device] if job.input_device else ())):
        try:
            torch.device(name)
        except RuntimeError as error:
            raise JobError(f"devices: {name!r} is no device of torch: {error}") from None
    dataset = seeded_dataset(job, job.dataset_key)
    rows, split = {"dataset": len(dataset)}, split_of(job, dataset)
    if job.task == "train" and job.eval is not None:
        rows["eval.dataset"] = len(seeded_dataset(job.over_eval(), "eval.dataset"))
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
    return split, rows

"""Check a job before anything starts, for `dp-ray plan` and for a run alike.

`check_targets` looks at the job itself, `lacking_here` at this machine.
"""

from collections.abc import Iterator

import torch

from dp_ray.cluster.ray_version import check_ray
from dp_ray.engine.devices import devices_here
from dp_ray.engine.forward.model import check_model
from dp_ray.engine.optimizer import check_optimizer, check_scheduler
from dp_ray.engine.selection import check_after
from dp_ray.errors import Error, JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.targets import bind, check_args, resolve
from dp_ray.system.imports import check_installed
from dp_ray.tasks.hooks import check_hook


def check_targets(job: Job) -> None:
    """Check the job's targets, with their args, and devices; raises JobError that names the key at fault."""
    for key, target in job.targets.items():
        if key == "model":
            check_model(target)
        elif key in dict(job.optimizers):
            check_optimizer(key, target)
        elif key in dict(job.schedulers):
            check_scheduler(key, target)
        elif key == "outputs.after" and target is not None:
            check_after(target)
        elif key.startswith("hooks."):
            check_hook(key, target)
        elif isinstance(target, Target) and key in job.dataset_keys:
            bind(key, target)
            made = resolve(key, target)
            if "with_sources" in getattr(made, "__dict__", ()):  # a mixture, which checks more without its sources
                made.check(**target.args)
        elif isinstance(target, Target):
            check_args(key, target)
    for key, names in (("devices", job.devices), ("input_device", [job.input_device] if job.input_device else None)):
        for name in names or ():
            try:
                torch.device(name)
            except RuntimeError as error:
                raise JobError(f"{key}: {name!r} is no device of torch: {error}") from None


def lacking_here(job: Job) -> Iterator[Error]:
    """Yield an error for each thing that a run of the job needs and this machine lacks: packages, Ray, GPUs."""
    for tracker in job.trackers or ():
        if tracker != "tensorboard":  # its package is no extra
            try:
                check_installed(f"trackers: {tracker}", tracker, tracker)
            except JobError as error:
                yield error
    try:
        if job.max_workers > 0:
            check_ray()
        else:
            devices_here(job)
    except Error as error:
        yield error

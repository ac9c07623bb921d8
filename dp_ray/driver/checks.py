"""Check a job before anything starts: that its targets and devices exist and can be what they are for."""

import torch

from dp_ray.engine.model import check_model, with_devices
from dp_ray.engine.optimizer import check_optimizer, check_unbuilt
from dp_ray.engine.prediction import check_after
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.job.targets import bind, resolve
from dp_ray.tasks.hooks import check_hook


def check_targets(job: Job) -> None:
    """Check the job's targets and devices; raises JobError that names the key at fault."""
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
        elif key == "outputs.after" and target is not None:
            check_after(target)
        elif key.startswith("hooks."):
            check_hook(key, target)
        elif isinstance(target, Target):
            resolve(key, target)
    for name in (*(job.devices or ()), *([job.input_device] if job.input_device else ())):
        try:
            torch.device(name)
        except RuntimeError as error:
            raise JobError(f"devices: {name!r} is no device of torch: {error}") from None

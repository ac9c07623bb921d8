"""The function that Ray Train runs on every worker: one job after another, or parallel modules.

What runs there is in `cluster/worker.py`; a worker imports that, and the task that it is for.
"""

import gc
import os
from contextlib import suppress
from importlib import import_module

import ray
import torch

from dp_ray.cluster.channel import GROUP, Ask, WorkerConfig
from dp_ray.cluster.internals.context import assigned_devices, place_of_this_worker
from dp_ray.errors import JobError
from dp_ray.messages import Ending, WorkerExit
from dp_ray.system.imports import end_imports
from dp_ray.system.linux import keep_freed_memory


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> None:
    """Run the session's jobs, and serve its modules, one after another, until the session ends."""
    worker = config["worker"]
    import_module(worker.imports)
    end_imports()
    keep_freed_memory()
    with suppress(JobError):  # a job may be told to run on the CPU nevertheless; another one raises it again
        first = assigned_devices()[0]
        if first.type == "cuda" and torch.cuda.is_available():
            with suppress(RuntimeError):  # of a GPU that is busy or broken: a job that needs it meets that
                torch.cuda.set_device(first)
    place, job_number = place_of_this_worker(), 0
    rank, here = place.get_world_rank(), (os.environ[GROUP], place.get_world_rank(), place.get_world_size())
    while (answer := ray.get(worker.channel.next_job.remote(job_number, *here))) is not Ask.STOP:
        if answer is Ask.RESTART:
            raise WorkerExit(Ending.STOPPED, "asked to leave while no job runs", False)
        terms, given = answer
        worker.channel.has_job.remote(rank)
        job_number = terms.number
        gc.freeze()  # what earlier jobs have imported: to look at it at each job's end takes half a second
        if rank < terms.workers:
            import_module("dp_ray.cluster.worker").run_job(worker, terms, *given)

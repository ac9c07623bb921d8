"""One worker's whole task, from its dataset to its committed parts. It knows no Ray: `send` takes the reports."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from dp_ray.errors import WorkerError
from dp_ray.job import Job
from dp_ray.replica.rng import preserved
from dp_ray.replica.world import World, is_lost_peer
from dp_ray.storage import Storage
from dp_ray.task.evaluate import evaluate
from dp_ray.task.notices import Send
from dp_ray.task.predict import predict_outputs
from dp_ray.task.step_control import StepControl
from dp_ray.task.train import train

KERNELS = 256  # of one piece of code; a split has up to four sizes of shards, an evaluation as many

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # of which cuBLAS is deterministic


def run_task(
    job: Job,
    world: World,
    run: Storage,
    send: Send,
    control: StepControl | None = None,
    rows_on_driver: Mapping[str, int] | None = None,
) -> None:
    """Run the job's task on this worker; `send` takes Reports, and what else there is to tell.

    `rows_on_driver` has the lengths of the datasets, by their keys, that the driver found.
    Raises StopRequested where it stopped between two steps, as `control` asked.
    """
    tasks = {"predict": predict_outputs, "evaluate": evaluate, "train": train}
    with preserved(world.device), deterministic(job, world.device), compiling(job):
        try:
            tasks[job.task](job.for_task(), world, run, send, control or StepControl(), rows_on_driver or {})
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise WorkerError(f"another worker was lost: {str(error).splitlines()[0]}") from error


@contextmanager
def deterministic(job: Job, device: torch.device) -> Iterator[None]:
    """Where the job is to be bitwise: one way to compute each thing, with as many threads on every machine."""
    if not job.bitwise:
        yield
        return
    threads, algorithms = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fills, tries = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark  # type: ignore[attr-defined]
    torch.set_num_threads(max(1, int(job.cpus_per_worker)))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    sets_workspace = device.type == "cuda" and WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[WORKSPACE] = ":4096:8"
    try:
        yield
    finally:
        if sets_workspace:
            del os.environ[WORKSPACE]
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(algorithms)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = tries


@contextmanager
def compiling(job: Job) -> Iterator[None]:
    """Where a job is compiled and bitwise: a kernel for every shape of a shard, or an error.

    By default torch stops compiling after a few shapes, and a worker that met more of them computes otherwise.
    """
    if not job.compile or not job.bitwise:
        yield
        return
    limits = {"recompile_limit": KERNELS, "accumulated_recompile_limit": 16 * KERNELS}
    with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True}):
        yield

"""Run one worker's task, from its dataset to its committed files: begin at `run_task`.

It knows no Ray: `send` takes the reports. While a task runs, the process has the job's settings (`settings_of`).
torch's deterministic algorithms are switched without the import of torch's compiler, which takes 1.3 s of a core.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from dp_ray.engine.placement import shards_over
from dp_ray.engine.random import preserved
from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World, alone, error_of, failed_in_group
from dp_ray.job.job import Job
from dp_ray.messages import Send
from dp_ray.storage import Storage
from dp_ray.system.process import environment, patched
from dp_ray.tasks.evaluate import evaluate
from dp_ray.tasks.find_shards import find_shards
from dp_ray.tasks.numerics import check_numerics
from dp_ray.tasks.predict import predict_outputs
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import train

COMPILER = "torch._inductor.config"
SWITCH = "TORCHINDUCTOR_DETERMINISTIC"  # the environment variable that the compiler reads when it is imported
KERNELS = 256  # for one piece of code; a split has up to four shard sizes, an evaluation as many
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS is deterministic only with this set


def run_task(
    job: Job,
    world: World,
    run: Storage,
    send: Send,
    control: StepControl | None = None,
    rows_on_driver: Mapping[str, int] | None = None,
) -> None:
    """Run the job's task on this worker; `send` takes shape Reports, notices and rows of the history.

    A job with `shards: auto` has no number of shards yet: it finds it, and does nothing else.
    `rows_on_driver` has the lengths of the datasets, by their keys, as the driver found them.
    Raises StopRequested if it stopped between two steps because `control` asked for it, and WorkerError if another
    worker was lost. Raises JobError if the workers cannot talk to each other because of a mistake in the job, or if
    they would give a bitwise job different bits.
    """
    tasks = {"predict": predict_outputs, "evaluate": evaluate, "train": train}
    task = find_shards if job.finds_shards else tasks[job.task]
    control = control or StepControl()
    with settings_of(job, world):
        try:
            check_numerics(job, world, send, control)
            task(Context(job.for_task(), world, run, send, control, rows_on_driver or {}))
        except RuntimeError as error:
            failed = failed_in_group(error)
            if failed is None:
                raise
            raise error_of(failed) from error


@contextmanager
def settings_of(job: Job, world: World) -> Iterator[None]:
    """Set what a job needs of its process while it runs: generators, GPUs, and what makes torch deterministic."""
    gpus = [one for one in world.devices if one.type == "cuda"]
    grouped = alone(needs_group=shards_over(job, world))
    with preserved(*gpus), gpus_ready(gpus), deterministic(job), compiling(job), grouped:
        yield


@contextmanager
def gpus_ready(gpus: Sequence[torch.device]) -> Iterator[None]:
    """Have user code mean the first GPU by "cuda" while a job runs, and cuBLAS be deterministic.

    cuBLAS is so for a job that is not bitwise too: torch reads the variable at a process's first matrix product
    only, and a bitwise job may be the process's second one.
    """
    if not gpus:
        yield
        return
    with torch.cuda.device(gpus[0]), environment({} if WORKSPACE in os.environ else {WORKSPACE: ":4096:8"}):
        yield


@contextmanager
def deterministic(job: Job) -> Iterator[None]:
    """Make torch deterministic while a bitwise job runs, with the same number of threads on every machine.

    Attention layers that evaluate take another path where modules have hooks, as sharded ones have: here none does.
    """
    if not job.bitwise:
        yield
        return
    threads, algorithms = torch.get_num_threads(), deterministic_algorithms()
    torch.set_num_threads(max(1, int(job.cpus_per_worker)))
    use_deterministic_algorithms(True)
    try:
        with (
            environment({SWITCH: "1"}),
            # Filled memory only shows reads of what was never written; it costs a pass over each new tensor.
            patched(torch.utils.deterministic, fill_uninitialized_memory=False),
            patched(torch.backends.cudnn, benchmark=False),
            patched(torch.backends.mha, _is_fastpath_enabled=False),
        ):
            yield
    finally:
        torch.set_num_threads(threads)
        use_deterministic_algorithms(*algorithms)


@contextmanager
def compiling(job: Job) -> Iterator[None]:
    """Have a compiled job that is bitwise or sharded compile a kernel for every shard shape and every block.

    By default torch stops compiling after a few, and runs the rest uncompiled. Workers that saw more shapes would
    compute differently, so a bitwise job then raises an error. Its model is one graph: torch cuts a graph where DDP's
    buckets end, but a single worker has no DDP, and other graphs round otherwise. Of a sharded model, the blocks of a
    class share one limit.
    """
    if not job.compile or not (job.bitwise or job.is_sharded):
        yield
        return
    limits = {"recompile_limit": KERNELS, "accumulated_recompile_limit": 16 * KERNELS}
    strict = {"fail_on_recompile_limit_hit": True, "optimize_ddp": False} if job.bitwise else {}
    with torch._dynamo.config.patch({**limits, **strict}):
        yield


def deterministic_algorithms() -> tuple[bool, bool]:
    """Return whether torch uses deterministic algorithms only, and whether it but warns where there is none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def use_deterministic_algorithms(only: bool, warns: bool = False) -> None:
    """Do what torch's function of this name does. If the compiler is not there yet, SWITCH has to say it."""
    if COMPILER in sys.modules:
        torch.use_deterministic_algorithms(only, warn_only=warns)
    else:
        torch.set_deterministic_debug_mode(("warn" if warns else "error") if only else "default")

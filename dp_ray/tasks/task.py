"""Run one worker's task, from its dataset to its committed files: begin at `run_task`.

It knows no Ray: `send` takes the reports. While a task runs, the process has the job's settings (`settings_of`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from dp_ray.engine.placement import shards_over
from dp_ray.engine.random import preserved
from dp_ray.engine.world import Trouble, World, alone, failed_in_group, text_of, trouble_of
from dp_ray.errors import Error, ModelError
from dp_ray.job.job import Job
from dp_ray.messages import Note, Send, StepControl
from dp_ray.process.determinism import deterministic, of_cublas
from dp_ray.process.modes import as_in_script
from dp_ray.process.numerics import check_numerics
from dp_ray.rundir.claim import kept_modes
from dp_ray.storage import Storage
from dp_ray.system.process import environment
from dp_ray.tasks.evaluate import evaluate
from dp_ray.tasks.find_shards import find_shards
from dp_ray.tasks.held import Held
from dp_ray.tasks.own_loop import train_by_loop
from dp_ray.tasks.predict import predict_outputs
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import train
from dp_ray.tasks.views import hold_in_memory
from dp_ray.text import listed

KERNELS = 256  # for one piece of code; a split has up to four shard sizes, an evaluation as many


def run_task(
    job: Job,
    world: World,
    run: Storage,
    send: Send,
    control: StepControl | None = None,
    rows_on_driver: Mapping[str, int] | None = None,
    held: Held | None = None,
) -> None:
    """Run the job's task on this worker; `send` takes shape Reports, notices and rows of the history.

    A job with `shards: auto` has no number of shards yet: it finds it, and does nothing else.
    `rows_on_driver` has the lengths of the datasets, by their keys, as the driver found them. `held` is what the
    process holds of the job, if it may be called again for another group.
    Raises StopRequested if it stopped between two steps because `control` asked for it, and WorkerError if another
    worker was lost. Raises JobError if the workers cannot talk to each other because of a mistake in the job, or if
    they would give a bitwise job different bits.
    """
    tasks = {"predict": predict_outputs, "evaluate": evaluate, "train": train if job.loop is None else train_by_loop}
    task = find_shards if job.finds_shards else tasks[job.task]
    control = control or StepControl()
    with broken_gpu_named(world), settings_of(job, world, kept_modes(run)), retries_told(job, world, send):
        try:
            if job.why_reads:
                control.reads(job.why_reads)
            # Before the first step: of workers that compute otherwise, each step would give other bits.
            check_numerics(job, world, send, control)
            task(Context(job.for_task(), world, run, send, control, rows_on_driver or {}, held=held))
        except RuntimeError as error:
            failed = failed_in_group(error)
            if failed is None:
                raise
            raise failed.error() from error


def hold_in_advance(job: Job, here: World, run: Storage, held: Held) -> None:
    """Build what a newcomer will need, while the others train without it."""
    job = job.for_task()
    with settings_of(job, here, kept_modes(run)):
        hold_in_memory(Context(job, here, run, lambda _: None, held=held))


@contextmanager
def broken_gpu_named(world: World) -> Iterator[None]:
    """Name the worker's GPUs in an error of a broken one; CUDA does not name the one of several."""
    try:
        yield
    except Exception as error:
        gpus = [gpu for gpu in world.devices if gpu.type == "cuda"]
        if not gpus or trouble_of(error) is not Trouble.BROKEN_GPU:
            raise
        kind = type(error) if isinstance(error, Error) else ModelError
        text = str(error) if isinstance(error, Error) else text_of(error)
        raise kind(
            f"{text}; {'the GPU is' if len(gpus) == 1 else 'it is one of'} {listed(map(_gpu, gpus))}"
        ) from error


def _gpu(device: torch.device) -> str:
    """Return a GPU's name here, its model, and the UUID by which nvidia-smi knows it."""
    with suppress(RuntimeError, AssertionError):  # torch knows them since the job began
        card = torch.cuda.get_device_properties(device)
        return f"{device} ({card.name}, GPU-{card.uuid})"
    return str(device)


@contextmanager
def retries_told(job: Job, world: World, send: Send) -> Iterator[None]:
    """Tell the user at the end if a GPU of a bitwise job had too little memory: cuDNN may have gone on otherwise.

    It asks for the workspace of one algorithm after another until it gets one, and each adds in an order of its own.
    """
    gpus = [gpu for gpu in world.devices if gpu.type == "cuda"] if job.bitwise and not job.finds_shards else []

    def retried() -> list[int]:
        return [torch.cuda.memory_stats(gpu).get("num_alloc_retries", 0) for gpu in gpus]

    before = retried()
    try:
        yield
    finally:
        tight = [str(gpu) for gpu, earlier, now in zip(gpus, before, retried(), strict=True) if now > earlier]
        if tight:
            what = f"bitwise: {world}: {listed(tight)} had too little memory for an allocation at first"
            send(Note(f"{what}; if cuDNN took another algorithm for that, the bits are others: set more shards"))


@contextmanager
def settings_of(job: Job, world: World, modes: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Set up the process for a job while it runs: generators, GPUs, the script's `modes`, determinism."""
    gpus = [gpu for gpu in world.devices if gpu.type == "cuda"]
    grouped = alone(needs_group=shards_over(job, world))
    threads = max(1, int(job.cpus_per_worker))
    with (
        preserved(*gpus),
        gpus_ready(gpus),
        as_in_script(modes or {}),
        deterministic(threads) if job.bitwise else nullcontext(),
        compiling(job),
        grouped,
    ):
        yield


@contextmanager
def gpus_ready(gpus: Sequence[torch.device]) -> Iterator[None]:
    """Have user code mean the first GPU by "cuda" while a job runs, and cuBLAS be deterministic."""
    if not gpus:
        yield
        return
    with torch.cuda.device(gpus[0]), environment(of_cublas()):
        yield


@contextmanager
def compiling(job: Job) -> Iterator[None]:
    """Have a compiled job that is bitwise or sharded compile a kernel for every shard shape and every block.

    By default torch stops compiling after a few, and runs the rest uncompiled. Workers that saw more shapes would
    compute differently, so a bitwise job then raises an error. Its model is one graph: torch cuts a graph where DDP's
    buckets end, but a single worker has no DDP, and other graphs round otherwise. The blocks of a class of a sharded
    model share one limit.
    """
    if not job.compile or not (job.bitwise or job.is_sharded):
        yield
        return
    limits = {"recompile_limit": KERNELS, "accumulated_recompile_limit": 16 * KERNELS}
    strict = {"fail_on_recompile_limit_hit": True, "optimize_ddp": False} if job.bitwise else {}
    with torch._dynamo.config.patch({**limits, **strict}):
        yield

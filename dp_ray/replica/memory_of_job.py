"""The memory of a job's workers, by each strategy and on each number of workers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.job_parts import Loader
from dp_ray.job_plan import split_of
from dp_ray.job_target import Target
from dp_ray.plan.memory import USABLE, DeviceMemory, MemoryPlan, WorkerMemory, shards_of_worker, worker_counts
from dp_ray.plan.split import Split, chunk_sizes, worker_shards
from dp_ray.plan.work import Work
from dp_ray.replica.data import load_shards, seeded_dataset
from dp_ray.replica.fake_model import fake_devices, fake_model
from dp_ray.replica.fake_pass import FakeShard, Held
from dp_ray.replica.inputs import PredictInputs
from dp_ray.replica.reducer import ShardSums
from dp_ray.replica.rng import preserved
from dp_ray.replica.strategy import shards_over
from dp_ray.replica.world import CPU, World
from dp_ray.tensors.nested import map_leaves


def plan_memory(job: Job, gpu_bytes: int | None) -> MemoryPlan:
    """The memory of the workers of a job whose GPUs have `gpu_bytes`, if that is known.

    Raises JobError if the model cannot be built, or run, without memory.
    """
    with preserved(CPU):
        dataset = seeded_dataset(job, job.dataset_key)
        split = split_of(job, len(dataset))
        rows = chunk_sizes(split.largest_batch, split.shards)[0]
        shard = FakeShard(job, _batch(job, dataset, split), rows, gpu_bytes is not None)
        whole = shard.whole()
        ddp = list(_whole(job, whole, split))
        fsdp = _sharded(job, shard, whole, ddp[0], split)
        return MemoryPlan(rows, (*ddp, *fsdp), gpu_bytes, tuple(_remarks(job)))


def shards_that_fit(job: Job, split: Split, workers: int, batch: Any, rows: int, room: int) -> int | None:
    """The fewest shards, more than there are, with which each of the workers holds a step in `room` bytes.

    `batch` is a shard of `rows` rows, by which memory is estimated; activations are in proportion to the rows.
    None if there is no such number, or if the model cannot be built or run without memory.
    """
    if not isinstance(job.model, Target):  # it is the object that is trained
        return None
    try:
        with preserved(CPU):
            here = map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, batch)
            held = FakeShard(job, here, rows, True).whole()
    except Exception:  # an estimate must not take the place of the error that counts
        return None
    (at,) = map(str, fake_devices(1))
    for fewer in range(rows - 1, 0, -1):
        shards = -(-split.largest_batch // fewer)
        less = replace(held, activations=Counter({at: held.activations[at] * fewer // rows}))
        copies = _copies_of_gradient(job, workers, shards)
        if shards > split.shards and _device(less, at, at, copies, False, _averages(job)).total <= USABLE * room:
            return shards
    return None


def _batch(job: Job, dataset: Any, split: Split) -> Any:
    """The first shard of the first batch, as a worker gets it; there is no larger one."""
    alone = job.model_copy(update={"loader": Loader(pin_memory=False), "on_error": None, "skip": None})
    pick = None
    if job.task == "predict":
        model = fake_model(job, fake_devices(job.num_devices), FakeTensorMode())
        pick = PredictInputs(job, model, lambda _: None)
    return next(load_shards(alone, dataset, Work(split), CPU, pick))[1]


def _remarks(job: Job) -> Iterator[str]:
    if job.compile:
        yield "memory: that of the model without compile, whose kernels may hold less"
    if job.eval is not None and job.over_eval().batch_size > job.batch_size:
        yield "memory: evaluations have larger batches, and are not counted"


def _most_filled(split: Split, workers: int) -> int:
    """How many shards with rows a worker runs at most."""
    return shards_of_worker(split.largest_batch, split.shards, workers)


def _whole(job: Job, held: Held, split: Split) -> Iterator[WorkerMemory]:
    """The memory of workers that hold the whole model each."""
    names = job.devices or [f"cuda:{number}" for number in range(job.num_devices)]
    places = list(zip(map(str, fake_devices(job.num_devices)), names, strict=True))
    for workers in worker_counts(job.max_workers):
        shards, copies = _most_filled(split, workers), _copies_of_gradient(job, workers, split.shards)
        # A single worker's only shard makes gradients while activations are freed; else their memory is there before.
        grows = workers == 1 and shards == 1
        devices = tuple(_device(held, at, name, copies, grows, _averages(job)) for at, name in places)
        yield WorkerMemory("ddp", workers, shards, devices)


def _averages(job: Job) -> bool:
    return job.ema is not None and job.task == "train"


def _device(held: Held, at: str, name: str, copies: int, grows: bool, averages: bool) -> DeviceMemory:
    """What a device holds; `copies` are the gradients of all parameters that are there at a time.

    A job that `averages` holds parameters and buffers twice.
    """
    average = held.parameters[at] + held.buffers[at] if averages else 0
    gradients = copies * held.gradients[at]
    before = held.parameters[at] + held.buffers[at] + gradients
    peak = held.peak[at] if grows else before + held.activations[at]
    kinds = (held.parameters[at] + average, gradients, held.optimizer[at], held.buffers[at], held.activations[at])
    return DeviceMemory(name, *kinds, max(peak + held.optimizer[at], held.step_peak[at]) + average)


def _copies_of_gradient(job: Job, workers: int, shards: int) -> int:
    """How many gradients of all parameters a worker holds at a time, at most."""
    mine = max((worker_shards(shards, workers, rank) for rank in range(workers)), key=len)
    sums, most = ShardSums([], shards), 1
    for node in sums.leaves(mine) if job.bitwise else ():
        most = max(most, 1 + len(sums.held))
        sums.take(node)
    return most + (workers > 1 and len(mine) > 1)  # DDP's buckets, into which the last shard's sums are copied


def _sharded(job: Job, shard: FakeShard, whole: Held, alone: WorkerMemory, split: Split) -> Iterator[WorkerMemory]:
    """The memory of workers that hold a part of the model each; none if the job cannot run so."""
    try:
        job = Job.make({**dict(job), "strategy": "fsdp"}, job.run_name)
    except JobError:
        return
    counts = worker_counts(job.max_workers)
    sharding = [workers for workers in counts if shards_over(job, World(world_size=workers))]
    if sharding != counts:
        yield replace(alone, strategy="fsdp")  # one worker holds the whole model
    # With bitwise each round exchanges; else gradients add up whole until the last.
    rounds_of = {one: 1 if job.bitwise else min(_most_filled(split, one), 2) for one in sharding}
    for rounds in dict.fromkeys(rounds_of.values()):
        some = [workers for workers in sharding if rounds_of[workers] == rounds]
        held = replace(shard, job=job).sharded(some[0], rounds)
        for workers in some:
            device = _part(job, held, whole, some[0], workers, shard.on_gpu)
            yield WorkerMemory("fsdp", workers, _most_filled(split, workers), (device,))


def _part(job: Job, held: Held, whole: Held, seen: int, workers: int, on_gpu: bool) -> DeviceMemory:
    """What one of `workers` holds, by a pass that has seen what one of another number of them holds.

    What is sharded is in inverse proportion to the workers, and nothing else depends on them.
    """
    (at,), ratio = map(str, fake_devices(1)), seen / workers
    parameters, gradients = round(held.parameters[at] * ratio), round(held.gradients[at] * ratio)
    buffers = held.buffers[at]
    share = gradients / max(1, whole.gradients[at])
    optimizer = round(whole.optimizer[at] * share)
    needs = whole.step_peak[at] - whole.parameters[at] - whole.gradients[at] - whole.buffers[at]
    peak = max(round(growing * ratio) + most for growing, most in held.growing)
    # With bitwise a worker keeps the sums of a branch of the tree from round to round, of its own slice.
    sums = (job.num_shards - 1).bit_length() * gradients if job.bitwise and job.num_shards > workers else 0
    total = parameters + buffers + max(peak + optimizer + sums, gradients + round(needs * share))
    if job.fsdp.offload and on_gpu:
        parameters = gradients = optimizer = 0
        total = buffers + held.activations[at]
    if _averages(job):
        parameters, total = 2 * parameters, total + parameters + buffers
    name = (job.devices or ["cuda:0"])[0]
    return DeviceMemory(name, parameters, gradients + sums, optimizer, buffers, held.activations[at], total)

"""Plan the memory of a job's workers, by each strategy and on each number of workers.

Begin at `plan_memory`. A step runs on fake tensors, which have devices, sizes and types but no memory; the bytes of
the live ones are counted.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dp_ray.engine.clock import StepClock
from dp_ray.engine.devices import input_device
from dp_ray.engine.evaluation import build_metrics
from dp_ray.engine.forward.model import autocast, begin_to_train, build_model, call_model, set_modes
from dp_ray.engine.forward.recompute import recompute_blocks
from dp_ray.engine.forward.state import StepState
from dp_ray.engine.forward.step import PredictInputs, build_step, run_step
from dp_ray.engine.loads.loading import Source, load_steps, seeded_dataset
from dp_ray.engine.optimizer import build_optimizers
from dp_ray.engine.placement import shards_over
from dp_ray.engine.random import preserved
from dp_ray.engine.sharded.build import build_on_meta, recasts, replace_tensors, shard_in_place
from dp_ray.engine.sharded.reduce import ShardedReduction
from dp_ray.engine.sharded.state import Sharded, SumScatter
from dp_ray.engine.sums.reduce import Reduction, Trained
from dp_ray.engine.sums.tree_sum import ShardSums
from dp_ray.engine.sums.whole_batch import shard_loss
from dp_ray.engine.world import CPU, World, pretended
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Loader, Target
from dp_ray.job.plan import split_of
from dp_ray.plan.costs import DeviceMemory, MemoryPlan, WorkerMemory, shards_of_worker, worker_counts
from dp_ray.plan.split import Split, Work, chunk_sizes, worker_shards
from dp_ray.system.process import patched
from dp_ray.tensors.files import is_sharded, local, moved_batch
from dp_ray.tensors.tree import holds_objects, map_leaves

BytesByDevice: TypeAlias = Counter[str]  # by device
RunShard: TypeAlias = Callable[[bool], None]  # of a shard, which may be the last of its step
OF_NCCL = "memory: of what is left of a GPU NCCL takes 0.3 to 0.6 GB"  # for the channels of a group


def plan_memory(job: Job, gpu_bytes: int | None) -> MemoryPlan:
    """Plan the memory of the workers of a job whose GPUs have `gpu_bytes`, if that is known.

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
        remarks = []
        if job.compile:
            remarks.append("memory: that of the model without compile, whose kernels may hold less")
        if any(job.over_eval(evaluation).batch_size > job.batch_size for evaluation in job.evaluations):
            remarks.append("memory: evaluations have larger batches, and are not counted")
        if gpu_bytes is not None and job.max_workers > 1:
            # `TreeReducer` has a group of its own.
            second = ", and as much again with ddp and bitwise on 3 workers and more"
            has_second = job.task == "train" and job.bitwise and job.max_workers > 2
            remarks.append(f"{OF_NCCL}{second if has_second else ''}")
        return MemoryPlan(rows, (*ddp, *fsdp), gpu_bytes, tuple(remarks))


def _batch(job: Job, dataset: Any, split: Split) -> Any:
    """Load the first shard of the first batch, as a worker gets it: the largest one."""
    alone = job.model_copy(update={"loader": Loader(pin_memory=False), "on_error": None, "skip": None})
    pick = None
    if job.task == "predict":
        model = fake_model(job, fake_devices(job.num_devices), FakeTensorMode())
        pick = PredictInputs(job, model, lambda _: None)
    with closing(load_steps(Source(alone, dataset), Work(split), CPU, pick=pick)) as steps:
        return next(iter(next(steps).loaded)).batch


@dataclass(frozen=True)
class ShardMemory:
    """The bytes that a pass over one shard held, by device.

    `peak` is the most in a forward and a backward without the optimizer's state, and `step_peak` the most in the
    optimizer's step. `activations` are the peak of all tensors but parameters, buffers and gradients. `growing` are
    the bytes of gradients during the pass on the first device, each with the most activations beside them.
    """

    parameters: BytesByDevice
    gradients: BytesByDevice
    buffers: BytesByDevice
    activations: BytesByDevice
    peak: BytesByDevice
    optimizer: BytesByDevice
    step_peak: BytesByDevice
    growing: tuple[tuple[int, int], ...] = ()


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A count, within the block, of the bytes of all tensors that operations make, by device, until they are freed.

    `keep` marks tensors that outlive a step (parameters, gradients); all others count as activations.
    """

    # torch's MemTracker, which is private, counts the same peaks within 3 %. It takes seven times as long, imports
    # torch._inductor, and has no count of activations beside each number of kept bytes, which fsdp needs.

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.activations: Counter[str] = Counter()
        self.peak_activations: Counter[str] = Counter()
        # The most activations there were beside each number of bytes that are kept.
        self.beside: dict[tuple[str, int], int] = {}
        self._sizes: dict[int, tuple[str, int]] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._kept: set[int] = set()
        self._resize: Any = torch.UntypedStorage.resize_

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors as kept; they may have been counted as activations before."""
        for tensor in tensors:
            self._see(tensor)
            number = id(tensor.untyped_storage())
            if number not in self._kept:
                self._kept.add(number)
                device, size = self._sizes[number]
                self.activations[device] -= size

    def __enter__(self) -> "LiveMemory":
        # FSDP frees and makes a gathered block's memory by it, which no operation shows.
        torch.UntypedStorage.resize_ = lambda *args: self._resized(*args)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and not is_sharded(leaf):
                self._see(leaf)
        return results

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number = id(storage)
        if number not in self._references:
            self._sizes[number] = (str(tensor.device), 0)
            self._references[number] = weakref.ref(storage, lambda _: self._forget(number))
            self._set(number, storage.nbytes())

    def _forget(self, number: int) -> None:
        self._set(number, 0)
        del self._references[number], self._sizes[number]
        self._kept.discard(number)

    def _set(self, number: int, size: int) -> None:
        device, before = self._sizes[number]
        self._sizes[number] = (device, size)
        self.live[device] += size - before
        self.peak[device] = max(self.peak[device], self.live[device])
        if number not in self._kept:
            now = self.activations[device] = self.activations[device] + size - before
            self.peak_activations[device] = max(self.peak_activations[device], now)
            kept = (device, self.live[device] - now)
            self.beside[kept] = max(self.beside.get(kept, 0), now)

    def _resized(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        self._resize(storage, size)
        if id(storage) in self._references:
            self._set(id(storage), storage.nbytes())
        return storage


@dataclass(frozen=True)
class FakeShard:
    """A job's largest shard: its batch, as the worker gets it, and its rows. `on_gpu` says where it is to run."""

    job: Job
    batch: Any
    rows: int
    on_gpu: bool

    def whole(self) -> ShardMemory:
        """Return what a worker holds that has the whole model."""
        with _fake(self.job) as mode:
            devices = fake_devices(self.job.num_devices)
            model = recompute_blocks(self.job, fake_model(self.job, devices, mode), devices)
            with mode, LiveMemory() as live:
                run = self._runner(model, devices, mode)
                held = _forward_backward(model, live, [run])
                return held if self.job.task != "train" else self._with_optimizer(model, live, held)

    def sharded(self, workers: int, shards: int) -> ShardMemory:
        """Return what one of `workers` holds that shard the model; it runs `shards` of a batch, one after another."""
        world, adding = World(world_size=workers), self.job.model_copy(update={"bitwise": False})
        with _fake(self.job) as mode, pretended(workers):
            model = fake_model(self.job, fake_devices(1), mode)
            root, current = shard_in_place(adding, world, model)  # its mesh of workers needs numbers
            sharded = Sharded(model, root, current, world, recasts(self.job))
            with mode, LiveMemory() as live:
                _tell_gradients(sharded, live)
                run = self._runner(model, fake_devices(1), mode, sharded)
                return _forward_backward(model, live, [run] * shards, sharded)

    def _runner(
        self, model: nn.Module, devices: Sequence[torch.device], mode: FakeTensorMode, sharded: Sharded | None = None
    ) -> RunShard:
        """Return a function that runs the shard as the job's task does; the last of a step's exchanges gradients."""
        job, rows = self.job, self.rows
        world = World(device=input_device(job, model, devices), all_devices=tuple(devices))
        if holds_objects(self.batch):
            says = "the collate makes objects whose tensors cannot be replaced by ones without memory"
            raise JobError(f"collate: {says}, so memory is not planned")
        fake = map_leaves(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, self.batch)
        batch, step = moved_batch(fake, world.device), build_step(job, world)
        if job.task == "train":
            begin_to_train(model)
            loss = shard_loss(model, step, build_metrics(job)[0], job, world.device)
            trained = Trained(loss, {}, [], None, StepState(model), StepClock())
            reduction = Reduction(trained) if sharded is None else ShardedReduction(trained, sharded, False)

            def train(is_last: bool) -> None:
                reduction.begin(0, [0], 1, rounds=1 if is_last else 2)
                loss = reduction.called(batch, rows, 0)
                reduction.backward(0, loss, torch.ones_like(loss))

            return train
        set_modes(model, False)
        predicts = job.task == "predict"
        function: Callable[..., Any] = call_model if predicts else run_step
        args = (model, batch, job.call) if predicts else (step, model, batch)
        run = partial(function, *args) if sharded is None else partial(sharded.run, function, *args)

        def infer(_: bool) -> None:
            with torch.no_grad(), autocast(job.precision, world.device, keeps=not predicts):  # copies of weights
                run()

        return infer

    def _with_optimizer(self, model: nn.Module, live: LiveMemory, held: ShardMemory) -> ShardMemory:
        """Run the optimizers' steps on the present gradients, to measure their state and their peak."""
        optimizers = build_optimizers(self.job.optimizers, model)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if self.on_gpu and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # torch's choice for parameters on a GPU
        before, live.peak = Counter(live.live), Counter(live.live)
        for optimizer in optimizers:
            optimizer.step()
        state = live.live - before
        return replace(held, optimizer=state, step_peak=Counter(live.peak))


def _whole(job: Job, held: ShardMemory, split: Split) -> Iterator[WorkerMemory]:
    """Yield the memory of workers that hold the whole model each."""
    names = job.devices or [f"cuda:{number}" for number in range(job.num_devices)]
    places = list(zip(map(str, fake_devices(job.num_devices)), names, strict=True))
    for workers in worker_counts(job.max_workers):
        shards = shards_of_worker(split.largest_batch, split.shards, workers)
        copies = _copies_of_gradient(job, workers, split.shards)
        # A single worker's only shard makes gradients while activations are freed; else their memory is there before.
        grows = workers == 1 and shards == 1
        devices = tuple(_device(held, at, name, copies, grows, _averages(job)) for at, name in places)
        yield WorkerMemory("ddp", workers, shards, devices)


def _device(held: ShardMemory, at: str, name: str, copies: int, grows: bool, averages: bool) -> DeviceMemory:
    """Return what a device holds; `copies` are the gradients of all parameters that are there at a time.

    A job that `averages` holds parameters and buffers twice.
    """
    average = held.parameters[at] + held.buffers[at] if averages else 0
    gradients = copies * held.gradients[at]
    before = held.parameters[at] + held.buffers[at] + gradients
    peak = held.peak[at] if grows else before + held.activations[at]
    kinds = (held.parameters[at] + average, gradients, held.optimizer[at], held.buffers[at], held.activations[at])
    return DeviceMemory(name, *kinds, max(peak + held.optimizer[at], held.step_peak[at]) + average)


def _averages(job: Job) -> bool:
    return job.ema is not None and job.task == "train"


def _copies_of_gradient(job: Job, workers: int, shards: int) -> int:
    """Return how many gradients of all parameters a worker holds at a time, at most."""
    mine = max((worker_shards(shards, workers, rank) for rank in range(workers)), key=len)
    sums, most = ShardSums([], shards), 1
    for node in sums.leaves(mine) if job.bitwise else ():
        most = max(most, 1 + len(sums.held))
        sums.move(node)
    most += workers > 1 and len(mine) > 1  # DDP's buckets, into which the last shard's sums are copied
    return max(most, 2) if job.audit is not None else most  # an auditor's own stand beside the sums


def _sharded(
    job: Job, shard: FakeShard, whole: ShardMemory, alone: WorkerMemory, split: Split
) -> Iterator[WorkerMemory]:
    """Yield the memory of workers that hold a part of the model each; nothing if the job cannot run so."""
    try:
        job = Job.make({**dict(job), "strategy": "fsdp"}, job.run_name)
    except JobError:
        return
    counts = worker_counts(job.max_workers)
    sharding = [workers for workers in counts if shards_over(job, World(world_size=workers))]
    if sharding != counts:
        yield replace(alone, strategy="fsdp")  # one worker holds the whole model
    # With bitwise each round exchanges; else gradients add up whole until the last.
    rounds_of = {
        workers: 1 if job.bitwise else min(shards_of_worker(split.largest_batch, split.shards, workers), 2)
        for workers in sharding
    }
    for rounds in dict.fromkeys(rounds_of.values()):
        some = [workers for workers in sharding if rounds_of[workers] == rounds]
        held = replace(shard, job=job).sharded(some[0], rounds)
        for workers in some:
            device = _part(job, held, whole, some[0], workers, shard.on_gpu)
            yield WorkerMemory(
                "fsdp", workers, shards_of_worker(split.largest_batch, split.shards, workers), (device,)
            )


def _part(job: Job, held: ShardMemory, whole: ShardMemory, seen: int, workers: int, on_gpu: bool) -> DeviceMemory:
    """Return what one of `workers` holds, by a pass that has seen what one of another number of them holds.

    Sharded tensors are in inverse proportion to the workers; nothing else depends on them.
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


def _forward_backward(
    model: nn.Module, live: LiveMemory, runs: Sequence[RunShard], sharded: Sharded | None = None
) -> ShardMemory:
    """Run the shards of a step one after another, and count."""
    parameters, buffers = list(map(local, model.parameters())), list(map(local, model.buffers()))
    live.keep([*parameters, *buffers])
    live.peak, live.peak_activations, static = Counter(live.live), Counter(), Counter(live.live)
    live.beside.clear()
    for parameter in model.parameters():
        if sharded is None and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda param: live.keep([param.grad]))  # type: ignore[no-untyped-call]
    for number, run in enumerate(runs, 1):
        run(number == len(runs))
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    sizes = (_bytes(parameters), _bytes(gradients), _bytes(buffers))
    growing = tuple((kept - static[at], most) for (at, kept), most in live.beside.items())
    return ShardMemory(*sizes, Counter(live.peak_activations), Counter(live.peak), Counter(), Counter(), growing)


def _tell_gradients(sharded: Sharded, live: LiveMemory) -> None:
    """Count what FSDP's reduce-scatter gives as kept: they are this worker's gradients."""

    class Telling(SumScatter):
        def __call__(self, output_tensor: torch.Tensor, *args: Any, **keys: Any) -> dist.Work | None:
            live.keep([output_tensor])
            return super().__call__(output_tensor, *args, **keys)

    for module in sharded.root.modules():
        if (setter := getattr(module, "set_custom_reduce_scatter", None)) is not None:
            setter(Telling(sharded.round, ""))
    sharded.round.ask = lambda: None  # type: ignore[method-assign]  # whether others run the same blocks


def _bytes(tensors: Iterable[torch.Tensor]) -> BytesByDevice:
    """Return the bytes of tensors by device; memory that they share counts once."""
    storages = {id(storage := tensor.untyped_storage()): (str(tensor.device), storage) for tensor in tensors}
    sizes: BytesByDevice = Counter()
    for device, storage in storages.values():
        sizes[device] += storage.nbytes()
    return sizes


@contextmanager
def _fake(job: Job) -> Iterator[FakeTensorMode]:
    """Give a mode of fake tensors; an operation of the model that needs numbers becomes a JobError that names it."""
    try:
        yield FakeTensorMode()
    except JobError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        says = f"model: {_label(job)} cannot run without numbers, so its memory is not planned: {reason}"
        raise JobError(says) from error


def fake_devices(count: int) -> list[torch.device]:
    """Return devices for fake tensors, which tell a worker's devices apart on a machine without them."""
    return [CPU] if count == 1 else [torch.device("cpu", number) for number in range(count)]


def fake_model(job: Job, devices: Sequence[torch.device], mode: FakeTensorMode) -> nn.Module:
    """Build the job's model, never in memory: of fake tensors on `devices`, as `build_model` places it.

    Raises JobError, which names the model and the reason, if its constructor needs numbers of its tensors.
    """

    def apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        replace_tensors(module, function, recurse)
        return module

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=devices[0])

    if not isinstance(job.model, Target):
        replace_tensors(job.model, mode.from_tensor)
    try:
        if isinstance(job.model, Target) and len(devices) == 1:
            model = build_on_meta(job)
            with mode:
                replace_tensors(model, faked)
            return model
        with mode, patched(nn.Module, _apply=apply):  # `module.to` cannot change fake tensors in place
            return build_model(job, devices)
    except JobError as error:
        reason = str(error).splitlines()[0]
        says = f"model: {_label(job)} cannot be built without memory, so its memory is not planned: {reason}"
        raise JobError(says) from None


def _label(job: Job) -> str:
    return job.model.label if isinstance(job.model, Target) else type(job.model).__qualname__

"""What a step takes on a worker's devices: its operations run on fake tensors, and what lives is counted."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.job_target import Target
from dp_ray.replica.activation_checkpointing import recompute_blocks
from dp_ray.replica.devices import input_device
from dp_ray.replica.evaluation import build_metrics
from dp_ray.replica.fake_model import fake_devices, fake_model
from dp_ray.replica.live_memory import LiveMemory
from dp_ray.replica.model import autocast, call_model
from dp_ray.replica.optimizer import build_optimizer
from dp_ray.replica.scatter import SumScatter
from dp_ray.replica.shard_loss import ShardLoss
from dp_ray.replica.sharded import Sharded, casting_anew
from dp_ray.replica.sharded_reduction import ShardedReduction
from dp_ray.replica.sharding import recasts, shard_in_place
from dp_ray.replica.step import build_step, run_step
from dp_ray.replica.world import World
from dp_ray.tensors.nested import map_leaves
from dp_ray.tensors.shards import local

Bytes: TypeAlias = Counter[str]  # by device


@dataclass(frozen=True)
class Held:
    """What a pass over one shard held, in bytes by device.

    `peak` is the most in a forward and a backward without the optimizer's state, and `step_peak` the most in the
    optimizer's step. `activations` are the most of all that is neither parameter, buffer nor gradient. `growing` are
    the bytes of gradients during the pass on the first device, each with the most activations beside them.
    """

    parameters: Bytes
    gradients: Bytes
    buffers: Bytes
    activations: Bytes
    peak: Bytes
    optimizer: Bytes
    step_peak: Bytes
    growing: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class FakeShard:
    """A job's largest shard: its batch, as the worker gets it, and its rows. `on_gpu` says where it is to run."""

    job: Job
    batch: Any
    rows: int
    on_gpu: bool

    def whole(self) -> Held:
        """What a worker holds that has the whole model."""
        with _fake(self.job) as mode:
            devices = fake_devices(self.job.num_devices)
            model = recompute_blocks(self.job, fake_model(self.job, devices, mode), devices)
            with mode, LiveMemory() as live:
                run = self._runner(model, devices, mode)
                held = _forward_backward(model, live, [run])
                return held if self.job.task != "train" else self._with_optimizer(model, live, held)

    def sharded(self, workers: int, shards: int) -> Held:
        """What one of `workers` holds that shard the model; it runs `shards` of a batch, one after another."""
        world, adding = World(world_size=workers), self.job.model_copy(update={"bitwise": False})
        with _fake(self.job) as mode, _fake_group(workers):
            model = fake_model(self.job, fake_devices(1), mode)
            root, current, replicated = shard_in_place(adding, world, model)  # its mesh of workers needs numbers
            sharded = Sharded(model, root, replicated, current, world, recasts(self.job))
            with mode, LiveMemory() as live:
                _tell_gradients(sharded, live)
                run = self._runner(model, fake_devices(1), mode, sharded)
                return _forward_backward(model, live, [run] * shards, sharded)

    def _runner(
        self, model: nn.Module, devices: Sequence[torch.device], mode: FakeTensorMode, sharded: Sharded | None = None
    ) -> "Runner":
        """What runs the shard: a training's loss, or the model alone."""
        world = World(device=input_device(self.job, model, devices), all_devices=tuple(devices))

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf).to(world.device) if isinstance(leaf, torch.Tensor) else leaf

        return Runner(self.job, model, world, map_leaves(fake, self.batch), self.rows, sharded)

    def _with_optimizer(self, model: nn.Module, live: LiveMemory, held: Held) -> Held:
        """Run the optimizer's step on the gradients that there are, to see its state and what it needs."""
        optimizer = build_optimizer(self.job.optimizer, model)
        for group in optimizer.param_groups:
            if self.on_gpu and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # torch's choice for parameters on a GPU
        before, live.peak = Counter(live.live), Counter(live.live)
        optimizer.step()
        state = live.live - before
        return Held(**{**vars(held), "optimizer": state, "step_peak": Counter(live.peak)})


class Runner:
    """Runs the shard of a worker, as its task does."""

    def __init__(
        self, job: Job, model: nn.Module, world: World, batch: Any, rows: int, sharded: Sharded | None
    ) -> None:
        self._job = job
        self._model = model
        self._batch = batch
        self._rows = rows
        self._world = world
        self._step = build_step(job, world)
        self._sharded = sharded
        self._loss = ShardLoss(model, self._step, build_metrics(job)[0], job, world.device)
        self._reduction = None if sharded is None else ShardedReduction(self._loss, sharded, False)

    def __call__(self, is_last: bool) -> None:
        """Forward and, in a training, backward; `is_last` of a step's shards exchanges gradients."""
        if self._job.task != "train":
            self._infer()
        elif self._reduction is None:
            self._train(self._loss, nullcontext())
        else:
            self._reduction.begin([0], 1)
            self._train(self._reduction.replica, self._reduction.shard(is_last))

    def _train(self, loss: Callable[[Any, int], torch.Tensor], rounds: AbstractContextManager[Any]) -> None:
        if not self._model.training:
            self._model.train()
        with rounds:
            loss(self._batch, self._rows).backward()  # type: ignore[no-untyped-call]

    def _infer(self) -> None:
        self._model.eval()
        run = (lambda function, *args: function(*args)) if self._sharded is None else self._sharded.run
        # A prediction runs in inference mode, in which autocast keeps no copies of weights.
        casting = casting_anew() if self._job.task == "predict" else nullcontext()
        with torch.no_grad(), casting, autocast(self._job.precision, self._world.device):
            if self._job.task == "predict":
                run(call_model, self._model, self._batch, self._job.call)
            else:
                run(run_step, self._step, self._model, self._batch)


def _forward_backward(
    model: nn.Module, live: LiveMemory, runs: Sequence[Runner], sharded: Sharded | None = None
) -> Held:
    """Run the shards of a step one after another, and count."""
    parameters, buffers = [local(one) for one in model.parameters()], [local(one) for one in model.buffers()]
    live.keep([*parameters, *buffers])
    live.peak, live.peak_activations, static = Counter(live.live), Counter(), Counter(live.live)
    live.beside.clear()
    for one in model.parameters():
        if sharded is None and one.requires_grad:
            one.register_post_accumulate_grad_hook(lambda one: live.keep([one.grad]))  # type: ignore[no-untyped-call]
    for number, run in enumerate(runs, 1):
        run(number == len(runs))
    gradients = [local(one.grad) for one in model.parameters() if one.grad is not None]
    sizes = (_bytes(parameters), _bytes(gradients), _bytes(buffers))
    growing = tuple((kept - static[at], most) for (at, kept), most in live.beside.items())
    return Held(*sizes, Counter(live.peak_activations), Counter(live.peak), Counter(), Counter(), growing)


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


def _bytes(tensors: Iterable[torch.Tensor]) -> Bytes:
    """The bytes of tensors by device; memory that they share counts once."""
    storages = {id(storage := one.untyped_storage()): (str(one.device), storage) for one in tensors}
    sizes: Bytes = Counter()
    for device, storage in storages.values():
        sizes[device] += storage.nbytes()
    return sizes


@contextmanager
def _fake(job: Job) -> Iterator[FakeTensorMode]:
    """A mode of fake tensors; what the model does that needs numbers becomes a JobError that names it."""
    try:
        yield FakeTensorMode()
    except JobError:
        raise
    except Exception as error:
        what = job.model.label if isinstance(job.model, Target) else type(job.model).__qualname__
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise JobError(f"model: {what} cannot run without numbers, so its memory is not planned: {reason}") from error


@contextmanager
def _fake_group(workers: int) -> Iterator[None]:
    """A process group of `workers`, of which this process is rank 0 and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        yield
    finally:
        dist.destroy_process_group()

"""The models, the rows and the two loops of the benchmark `train`."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.turns import Baton, Loop, Turns, take_turns
from dp_ray.engine.clock import Part, StepClock, TimedStep
from dp_ray.engine.world import CPU, World, form_group
from dp_ray.job.job import Job
from dp_ray.messages import Send, StepControl
from dp_ray.rundir.checkpoint import CheckpointWriter
from dp_ray.storage import Storage
from dp_ray.system.linux import keep_freed_memory
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import train

ROWS, BATCH = 40_960, 1024
BLOCK = 5  # steps in a turn, of which the first is not measured
WARM, ROUNDS, ROUND = 4, 3, 15  # turns of each side that are not measured; rounds that are, of so many turns each
PAIRS = ROUNDS * ROUND
STEPS = BLOCK * (WARM + PAIRS) + 1
EPOCHS = -(-STEPS * BATCH // ROWS)
Rates = list[tuple[float, float]]


class Images(Dataset[Any]):
    """Rows of 784 normal numbers and a class of 10."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(ROWS, 784, generator=generator)
        self.targets = torch.randint(10, (ROWS,), generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


def mlp() -> nn.Module:
    """1.3 M parameters."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 10)),
    )


def linear() -> nn.Module:
    """8 thousand parameters: a step is little more than reading its samples."""
    return nn.Linear(784, 10)


MODELS = {"mlp": mlp, "conv": conv, "linear": linear}


def ours(model: str, keys: dict[str, Any], world: World, control: StepControl, send: Send = lambda _: None) -> None:
    """dp_ray's own training loop on this worker, with all that it reports and keeps but the checkpoints.

    Checkpoints have a row of their own. The run's devices, if the job names some, are all the CPU.
    """
    job = job_of(model, keys, world)
    world = replace(world, all_devices=(CPU,) * len(keys.get("devices", ())))
    with TemporaryDirectory() as folder:
        train(Context(job, world, Storage(folder), send, control))


def job_of(model: str, keys: dict[str, Any], world: World) -> Job:
    """The job of both sides' loops."""
    return Job.make(
        {
            "task": "train",
            "model": {"target": f"benchmarks.training:{model}"},
            "dataset": {"target": "benchmarks.training:Images"},
            "batch_size": BATCH,
            "workers": world.world_size,
            "shuffle": True,
            "epochs": EPOCHS,
            "max_steps": STEPS,
            "loss": "torch.nn:CrossEntropyLoss",
            "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.01, "momentum": 0.9}},
            "checkpoint": {"every_seconds": None, "every_steps": STEPS},
            **keys,
        },
        "benchmark",
    )


class SilentClock(StepClock):
    """A clock that measures nothing."""

    def enter(self, part: Part) -> Part:
        """Return the part itself."""
        return part

    def end_step(self, step: int, rows: int) -> list[TimedStep]:
        """Return no steps."""
        return []


def unsplit(model: str, keys: dict[str, Any], world: World, control: StepControl) -> None:
    """The same loop, which does not split the time of its steps; the other side has its clock already."""
    with mock.patch("dp_ray.tasks.loop.clock_on", return_value=SilentClock()):
        ours(model, keys, world, control)


def plain(model: str, micro_batches: int, world: World, control: StepControl) -> None:
    """The loop that torch's documentation shows: the mean loss and, over several workers, DDP."""
    torch.manual_seed(0)
    replica = MODELS[model]()
    if world.world_size > 1:
        replica = DistributedDataParallel(replica)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    batches = plain_batches(world, BATCH // world.world_size // micro_batches)
    for step in range(STEPS):
        control.before(step)
        optimizer.zero_grad()
        for number in range(micro_batches):
            inputs, targets = next(batches)
            with _unsynced(replica, number < micro_batches - 1):
                (loss(replica(inputs), targets) / micro_batches).backward()
        optimizer.step()


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss over the whole batch: rows of one class are to be alike."""
    embedded = functional.normalize(outputs, dim=1)
    likeness = (embedded @ embedded.T / 0.2).log_softmax(1)
    alike = (targets[:, None] == targets).float()
    return -((likeness * alike).sum(1) / alike.sum(1)).mean()


def plain_contrastive(world: World, control: StepControl) -> None:
    """DDP with a differentiable all_gather by hand, as open implementations of such losses have it."""
    torch.manual_seed(0)
    replica = MODELS["mlp"]()
    if world.world_size > 1:
        replica = DistributedDataParallel(replica)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)
    batches = plain_batches(world, BATCH // world.world_size)
    for step in range(STEPS):
        control.before(step)
        optimizer.zero_grad()
        inputs, targets = next(batches)
        outputs = replica(inputs)
        if world.world_size > 1:
            outputs = torch.cat(all_gather(outputs))  # type: ignore[no-untyped-call]
            everybodys = [torch.empty_like(targets) for _ in range(world.world_size)]
            dist.all_gather(everybodys, targets)
            targets = torch.cat(everybodys)
        contrastive(outputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def plain_batches(world: World, size: int) -> Iterator[Any]:
    """The batches of one worker's DataLoader, epoch after epoch."""
    dataset = Images()
    sampler: Any = DistributedSampler(dataset, world.world_size, world.rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


@contextlib.contextmanager
def _unsynced(replica: Any, waits: bool) -> Iterator[None]:
    with replica.no_sync() if waits else contextlib.nullcontext():
        yield


WorldLoop = Callable[[World, StepControl], None]


def as_a_worker(keeps_memory: bool = True) -> None:
    """Set this process up as one of dp_ray's workers of one CPU, whichever side runs in it."""
    torch.set_num_threads(1)
    if keeps_memory:
        keep_freed_memory()


def joined(rank: int, port: int, world_size: int) -> World:
    """Join the other processes: by torch's default group for plain loops, and by a group beside it for dp_ray's."""
    as_a_worker()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    world = World(rank, world_size)
    with mock.patch("dp_ray.engine.world.show_alone"):  # the plain loops need all of them
        form_group("gloo", dist.distributed_c10d._get_default_store(), world)
    return world


def worker(rank: int, port: int, world_size: int, mine: WorldLoop, theirs: WorldLoop, told: Any) -> None:
    """One of the processes in which both sides take turns; rank 0 puts the seconds of their steps into `told`."""
    world = joined(rank, port, world_size)
    costs = take_turns(
        lambda control: mine(world, control), lambda control: theirs(world, control), BLOCK, dist.barrier
    )
    if rank == 0:
        told.put([(ours.wall, theirs.wall) for ours, theirs in costs])
    dist.barrier()
    dist.destroy_process_group()


def allocating(rank: int, batons: tuple[Baton, Baton], loop: Loop, told: Any) -> None:
    """One of two processes that take turns at the same loop; the first keeps freed memory as dp_ray's workers do."""
    as_a_worker(keeps_memory=rank == 0)
    turns = Turns(BLOCK, batons[rank], batons[1 - rank])
    turns.run(loop)
    told.put((rank, [cost.wall for cost in turns.costs]))


def blocked(folder: Path, megabytes: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds for which a loop waits for a checkpoint: dp_ray's, and `torch.save`, in turns."""
    state = {"model": {f"layer{number}": torch.randn(megabytes * 2**20 // 40) for number in range(10)}}
    storage = Storage(str(folder))
    writer = CheckpointWriter(storage, keep=1)
    pairs = []
    for step in range(repeats + 1):
        started = time.perf_counter()
        writer.save(step, {}, state)
        mine = time.perf_counter() - started
        writer.wait()
        started = time.perf_counter()
        torch.save(state, folder / "plain.pt")
        pairs.append((mine, time.perf_counter() - started))
    writer.close()
    return pairs[1:]

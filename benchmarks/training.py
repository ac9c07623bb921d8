"""The models, the rows and the two loops of the benchmark `train`."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dp_ray.cluster.heartbeat import Heartbeat
from dp_ray.job import Job
from dp_ray.replica.world import World
from dp_ray.results.history import Logged
from dp_ray.storage import Storage
from dp_ray.system.memory import keep_freed_memory
from dp_ray.task.step_control import StepControl
from dp_ray.task.train import train

ROWS, BATCH, STEPS, WARM = 40_960, 1024, 40, 8


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


MODELS = {"mlp": mlp, "conv": conv}


def ours(model: str, world: World, control: StepControl | None = None, **keys: Any) -> float:
    """Rows a second of dp_ray's own training loop on this worker, with all that it keeps and reports."""
    job = Job.make(
        {
            "task": "train",
            "model": {"target": f"benchmarks.training:{model}"},
            "dataset": {"target": "benchmarks.training:Images"},
            "batch_size": BATCH,
            "workers": world.world_size,
            "shuffle": True,
            "max_steps": STEPS,
            "loss": "torch.nn:CrossEntropyLoss",
            "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.01, "momentum": 0.9}},
            **keys,
        },
        "benchmark",
    )
    took: list[float] = []

    def send(what: Any) -> None:
        if isinstance(what, Logged):
            took.extend(row["rows"] / row["rows_per_second"] for row in what.rows)

    with TemporaryDirectory() as folder:
        train(job, world, Storage(folder), send, control or StepControl(), {})
    return BATCH / median(took[WARM:]) if took else 0.0


def pulsed(channel: Any) -> float:
    """Seconds of a step of one worker, with all by which faults are found and survived."""
    world = World()
    with Heartbeat(channel, 0, "benchmark", world, 600.0) as heartbeat:
        return BATCH / ours("mlp", world, control=heartbeat)


def unpulsed() -> float:
    return BATCH / ours("mlp", World())


def plain(model: str, world: World, micro_batches: int = 1) -> float:
    """Rows a second of the loop that torch's documentation shows: DDP, DistributedSampler, the mean loss."""
    torch.manual_seed(0)
    replica = DistributedDataParallel(MODELS[model]())
    dataset = Images()
    sampler: Any = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=BATCH // world.world_size // micro_batches, sampler=sampler)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    took = []
    batches = iter(loader)
    for _ in range(STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        for number in range(micro_batches):
            inputs, targets = next(batches)
            with _unsynced(replica, number < micro_batches - 1):
                (loss(replica(inputs), targets) / micro_batches).backward()
        optimizer.step()
        took.append(time.perf_counter() - started)
    return BATCH / median(took[WARM:])


@contextlib.contextmanager
def _unsynced(replica: DistributedDataParallel, waits: bool) -> Iterator[None]:
    with replica.no_sync() if waits else contextlib.nullcontext():
        yield


def worker(
    rank: int, ports: list[int], repeats: int, model: str, keys: dict[str, Any], micro_batches: int, told: Any
) -> None:
    """One of four processes: two of dp_ray's, two plain ones, which take turns."""
    torch.set_num_threads(1)
    is_ours, place = divmod(rank, 2)
    if is_ours:
        keep_freed_memory()
    turns = TCPStore("127.0.0.1", ports[0], 4, is_master=rank == 0)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{ports[1 + is_ours]}", rank=place, world_size=2)
    world = World(place, 2)
    rates = []
    for turn in range(2 * repeats):
        if turn % 2 == is_ours:
            rates.append(ours(model, world, **keys) if is_ours else plain(model, world, micro_batches))
        _meet(turns, turn)
    if place == 0:
        told.put((is_ours, rates))
    _meet(turns, 2 * repeats)
    dist.destroy_process_group()


def _meet(turns: TCPStore, turn: int) -> None:
    """Wait for the other three processes."""
    if turns.add(f"came {turn}", 1) == 4:
        turns.set(f"all came {turn}", "")
    turns.wait([f"all came {turn}"])


def blocked(folder: Path, megabytes: int, repeats: int) -> list[tuple[float, float]]:
    """Seconds for which a loop waits for a checkpoint: dp_ray's, and `torch.save`, in turns."""
    from dp_ray.rundir.checkpoint import CheckpointWriter

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

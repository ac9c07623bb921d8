"""The model and the loops of the benchmark `sharding`: dp_ray's, and FSDP2 by hand."""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.measure import grown
from benchmarks.training import joined
from benchmarks.turns import take_turns
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import StepControl
from dp_ray.rundir.checkpoint import CheckpointWriter
from dp_ray.storage import Storage
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import train

WORDS, LENGTH, WIDTH, LAYERS = 8192, 64, 512, 8
ROWS, BATCH = 4096, 8
BLOCK = 3  # steps in a turn, of which the first is not measured
WARM, PAIRS = 1, 7
STEPS = BLOCK * (WARM + PAIRS) + 1
LR = 1e-4


class Tokens(Dataset[Any]):
    """Rows of tokens; the targets are the next ones."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Gpt(nn.Module):
    """30 M parameters: tokens [rows, length] to logits [rows, words, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits.transpose(1, 2)


def ours(keys: dict[str, Any], steps: int, world: World, control: StepControl) -> None:
    """dp_ray's own training loop on this worker, with all that it reports; it keeps one checkpoint, at its end."""
    job = Job.make(
        {
            "task": "train",
            "model": {"target": "benchmarks.sharded:Gpt"},
            "dataset": {"target": "benchmarks.sharded:Tokens"},
            "batch_size": BATCH,
            "workers": world.world_size,
            "shuffle": True,
            "epochs": -(-steps * BATCH // ROWS),
            "max_steps": steps,
            "loss": "torch.nn:CrossEntropyLoss",
            "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": LR}},
            "checkpoint": {"every_seconds": None, "every_steps": steps},
            "strategy": "fsdp",
            **keys,
        },
        "benchmark",
    )
    with TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        train(Context(job, world, Storage(shared[0]), lambda _: None, control))
        dist.barrier()


def by_hand() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer as torch's documentation of FSDP2 shows."""
    torch.manual_seed(0)
    model = Gpt()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


def plain(steps: int, keeps: bool, world: World, control: StepControl) -> None:
    """The loop that torch's documentation shows; with `keeps`, an asynchronous checkpoint at its end."""
    model, optimizer = by_hand()
    loss = nn.CrossEntropyLoss()
    batches = _batches(world)
    for step in range(steps):
        control.before(step)
        optimizer.zero_grad()
        inputs, targets = next(batches)
        loss(model(inputs), targets).backward()
        optimizer.step()
    if keeps:
        with TemporaryDirectory() as folder:
            _async_save(model, optimizer, folder).result()
            dist.barrier()


def _batches(world: World) -> Iterator[Any]:
    dataset = Tokens()
    sampler: Any = DistributedSampler(dataset, world.world_size, world.rank, shuffle=True)
    yield from DataLoader(dataset, batch_size=BATCH // world.world_size, sampler=sampler)


def _async_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> Any:
    shared = [folder]
    dist.broadcast_object_list(shared)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return async_save(state, checkpoint_id=shared[0])


def turns(rank: int, port: int, world_size: int, keys: dict[str, Any], told: Any) -> None:
    """One of the processes in which both sides take turns; rank 0 puts the costs of their steps into `told`."""
    world = joined(rank, port, world_size)
    pairs = take_turns(
        lambda control: ours(keys, STEPS, world, control),
        lambda control: plain(STEPS, False, world, control),
        BLOCK,
        dist.barrier,
    )
    if rank == 0:
        told.put(pairs[WARM:])
    dist.barrier()
    dist.destroy_process_group()


def peak(rank: int, port: int, world_size: int, is_ours: bool, keys: dict[str, Any], told: Any) -> None:
    """One of the processes of one side; rank 0 puts by how many bytes its memory grew into `told`."""
    world = joined(rank, port, world_size)
    steps, control = 4, StepControl()
    size = grown(lambda: ours(keys, steps, world, control) if is_ours else plain(steps, True, world, control))
    if rank == 0:
        told.put(size)
    dist.barrier()
    dist.destroy_process_group()


def blocked(rank: int, port: int, world_size: int, folder: str, repeats: int, told: Any) -> None:
    """Rank 0 puts the seconds for which the loop waits for a checkpoint: dp_ray's, and `async_save`, in turns."""
    world = joined(rank, port, world_size)
    model, optimizer = by_hand()
    inputs, targets = next(_batches(world))
    nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    writer = CheckpointWriter(Storage(f"{folder}/ours"), 1, sharers=world)
    pairs = []
    for step in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        writer.save(step, {}, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        mine = time.perf_counter() - started
        writer.wait()
        dist.barrier()
        started = time.perf_counter()
        saving = _async_save(model, optimizer, str(Path(folder, f"plain-{step}")))
        pairs.append((mine, time.perf_counter() - started))
        saving.result()
    if rank == 0:
        told.put(pairs[1:])
    writer.close()
    dist.barrier()
    dist.destroy_process_group()

"""The loop that a user of Ray Train writes by hand, with checkpoints, and the dataset that tells when it is read."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.cluster import NUM_CPUS

BATCH = 24
MOST_IN_A_STEP = 16  # samples that one of two workers reads: two of three shards


class Ticking(Dataset[Any]):
    """480 pairs of numbers; each read takes a few milliseconds, and is written down with its process."""

    def __init__(self, ticks: str) -> None:
        self.ticks = ticks
        self.data = torch.randn(480, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.008)
        with open(self.ticks, "a") as file:
            file.write(f"{time.time()} {os.getpid()}\n")
        return self.data[index], self.data[index, :1]


def model() -> nn.Module:
    return nn.Linear(8, 1)


def run(ticks: Path, workers: int | tuple[int, int], steps: int) -> None:
    TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"ticks": str(ticks), "steps": steps},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=f"bare-{ticks.name}", storage_path=str(ticks.parent), failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()


def train_loop_per_worker(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    world_size = context.get_world_size()
    replica = prepare_model(model())
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    first = _restore(replica)
    dataset = Ticking(config["ticks"])
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world_size, context.get_world_rank())
    batches = iter(DataLoader(dataset, BATCH // world_size, sampler=sampler))
    for step in range(first, config["steps"]):
        batch = next(batches, None)
        if batch is None:
            batches = iter(DataLoader(dataset, BATCH // world_size, sampler=sampler))
            batch = next(batches)
        optimizer.zero_grad()
        loss: Any = nn.functional.mse_loss(replica(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            _report(replica, step + 1, context.get_world_rank())


def _restore(replica: nn.Module) -> int:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        kept = torch.load(Path(folder) / "state.pt")
    replica.load_state_dict(kept["model"])
    return int(kept["step"])


def _report(replica: nn.Module, step: int, rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save({"model": replica.state_dict(), "step": step}, Path(folder) / "state.pt")
        ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def main() -> None:
    """Train in a process of its own, on the Ray at this address; `local` is one of its own."""
    ticks, workers, steps, address = json.loads(sys.argv[1])
    ray.init(address, num_cpus=NUM_CPUS if address == "local" else None, log_to_driver=False)
    run(Path(ticks), tuple(workers) if isinstance(workers, list) else workers, steps)


if __name__ == "__main__":
    main()

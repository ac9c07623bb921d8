"""The tutorial's job on a bare TorchTrainer: what a user of Ray Train would write."""

from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.utils.data import DataLoader, DistributedSampler

from jobs.tutorial import Model, RandomDataset

ROWS = 100
BATCH_SIZE = 30


def run(folder: Path, workers: int) -> torch.Tensor:
    """Run it, and put the ranks' outputs together in the dataset's order."""
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="bare", storage_path=str(folder)),
    )
    trainer.fit()
    parts = [torch.load(part) for part in sorted(folder.glob("*.pt"))]
    outputs = torch.cat([part["outputs"] for part in parts])
    merged = torch.empty_like(outputs)
    merged[torch.cat([part["indices"] for part in parts])] = outputs
    return merged


def train_loop_per_worker(config: dict[str, Any]) -> None:
    rank, world_size = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = prepare_model(Model(5, 2)).eval()
    dataset = RandomDataset(5, ROWS)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world_size, rank, shuffle=False)
    outputs = []
    with torch.inference_mode():
        for batch in DataLoader(dataset, batch_size=BATCH_SIZE // world_size, sampler=sampler):
            outputs.append(model(batch))
            ray.train.report({"input_size": list(batch.shape), "output_size": list(outputs[-1].shape)})
    found = {"indices": torch.tensor(list(sampler)), "outputs": torch.cat(outputs)}
    torch.save(found, config["folder"] / f"rank-{rank}.pt")

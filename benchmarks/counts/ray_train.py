"""Ray Train, as its guide for PyTorch has it: `prepare_model`, `prepare_data_loader`, a checkpoint for each epoch."""

from pathlib import Path

import ray.train
import ray.train.torch
from ray.train import ScalingConfig

from benchmarks.counts.ddp import TOLD as OF_DDP
from benchmarks.counts.ddp import run_prepared
from benchmarks.counts.programs import Program, Results
from benchmarks.counts.side import NO_WAY, Told, run_all

STARTS_WITH = "python"
GUIDE = "https://docs.ray.io/en/latest/train/getting-started-pytorch.html"
TOLD = {
    **{name: told._replace(page=GUIDE) for name, told in OF_DDP.items()},
    "resume": Told(
        NO_WAY,
        "checkpoints are shown between epochs",
        "https://docs.ray.io/en/latest/train/user-guides/checkpoints.html",
    ),
    "predictions": Told(NO_WAY, "it sends to Ray Data", "https://docs.ray.io/en/latest/data/batch_inference.html"),
}


def main(folder: Path, count: int) -> None:
    """Start the workers."""
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "count": count},
        scaling_config=ScalingConfig(num_workers=count),
        run_config=ray.train.RunConfig(storage_path=str(folder), name=f"on {count}"),
    )
    trainer.fit()


def train(config: dict[str, object]) -> None:
    """Be one of the workers."""
    is_first = ray.train.get_context().get_world_rank() == 0
    run_all(run, Path(str(config["folder"])), int(str(config["count"])), is_first, TOLD)


def run(program: Program, kept: Path, leaves: bool) -> Results | None:
    """What the program ends with, on this worker of several."""
    prepared, part = ray.train.torch.prepare_model, ray.train.torch.prepare_data_loader
    return run_prepared(program, kept, leaves, prepared, part)

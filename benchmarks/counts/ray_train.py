"""Ray Train, as its guide for PyTorch has it: `prepare_model`, `prepare_data_loader`, a checkpoint for each epoch.

Predictions are Ray Data's.
"""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import Tensor

from benchmarks.counts.ddp import CLASS, Ways, run
from benchmarks.counts.programs import Program
from benchmarks.counts.side import NO_WAY, SETS, Told, run_all

STARTS_WITH = "python"
DOCS = "https://docs.ray.io/en/latest"
API = f"{DOCS}/train/api/doc/ray.train.torch"
TOLD = {
    "dropout": Told("by design", "fully reproducible results are not promised", f"{API}.enable_reproducibility.html"),
    "BatchNorm": Told("by design", "the model is DDP's; SyncBatchNorm is for GPUs", f"{API}.prepare_model.html"),
    "uneven": Told("rows twice", "`DistributedSampler` is put into the loader", f"{API}.prepare_data_loader.html"),
    "tokens": Told("by design", "the model is DDP's, whose gradient is the mean of the processes' ones", CLASS),
    "contrastive": Told("by design", "the model is DDP's, whose gradient is the mean of the processes' ones", CLASS),
    "resume": Told(NO_WAY, "checkpoints are shown between epochs", f"{DOCS}/train/user-guides/checkpoints.html"),
    "augmentation": Told(
        "by design", "fully reproducible results are not promised", f"{API}.enable_reproducibility.html"
    ),
    "metric": Told("rows twice", "`DistributedSampler` is put into the loader", f"{API}.prepare_data_loader.html"),
    "killed": Told(
        "", "all workers start again, from the latest checkpoint", f"{DOCS}/train/user-guides/fault-tolerance.html"
    ),
}


def main(folder: Path, count: int, of: str) -> None:
    """Start the workers: once, but for programs that keep each epoch, as a checkpoint is one of a whole training."""
    ray.init("local", num_cpus=count + 2, include_dashboard=False, log_to_driver=False)
    for only in SETS[of] if of == "killed" else [None]:
        name = f"{of}, {only.name if only else 'all'}, on {count}"
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"folder": str(folder), "count": count, "of": of, "only": only and only.name},
            scaling_config=ScalingConfig(num_workers=count),
            run_config=RunConfig(
                storage_path=str(folder), name=name, failure_config=FailureConfig(max_failures=1 if only else 0)
            ),
        )
        trainer.fit()
    for program in SETS[of]:
        if program.does == "predict":
            torch.save({"outputs": predicted(program, count)}, folder / f"{program.name} on {count}.pt")
    ray.shutdown()


def predicted(program: Program, count: int) -> Tensor:
    """What Ray Data's guide for batch inference has, with its option to preserve the order."""

    class Predictor:
        def __init__(self) -> None:
            self.model = program.model().eval()

        @torch.inference_mode()
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"outputs": self.model(torch.from_numpy(batch["inputs"])).numpy()}

    ray.data.DataContext.get_current().execution_options.preserve_order = True
    rows = program.rows()
    items = [{"inputs": rows[index][0].numpy()} for index in range(len(rows))]  # type: ignore[arg-type]
    size = program.batch_size // count
    found = ray.data.from_items(items).map_batches(Predictor, batch_size=size, concurrency=count).take_all()
    return torch.stack([torch.from_numpy(row["outputs"]) for row in found])


def train(config: dict[str, Any]) -> None:
    """Be one of the workers."""
    ray.train.torch.enable_reproducibility()
    torch.set_num_threads(1)
    is_first = ray.train.get_context().get_world_rank() == 0
    ways = Ways(
        ray.train.torch.prepare_model,
        ray.train.torch.prepare_data_loader,
        lambda *_: nullcontext(),
        lambda outputs, target: (outputs, target),
        load,
        save,
    )
    run_all(
        lambda program, *what: run(ways, program, *what) if program.does != "predict" else None,
        Path(config["folder"]),
        config["count"],
        config["of"],
        is_first,
        TOLD,
        config["only"],
    )


def load(kept: Path) -> dict[str, Any] | None:
    """What another training has kept, from the path that it was given, or the latest checkpoint of this one."""
    checkpoint = Checkpoint.from_directory(kept.parent) if kept.exists() else ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        state: dict[str, Any] = torch.load(Path(folder, kept.name))
    return state


def save(state: dict[str, Any], kept: Path, leaves: bool) -> None:
    """Report a checkpoint; another training is given a path."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            for path in [Path(folder, kept.name), *([kept] if leaves else [])]:
                torch.save(state, path)
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({}, checkpoint=checkpoint)

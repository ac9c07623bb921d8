"""Ray's own gate `torch_mnist_cpu`: an MLP, SGD, batches of 64, 4 epochs with a validation each, on 2 workers.

Both sides of Ray's gate stand in its `torch_benchmark.py` and are run from there: `train_func` under torchrun, and
under TorchTrainer, for which it takes the older of Ray Train's two versions. The images are made: 19,200 for
training, 3,200 for validation.
"""

import json
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.cluster import scratch
from benchmarks.compare import at_most
from benchmarks.peers.needed import environment, script
from benchmarks.peers.sides import Timed, in_turns, rows, timed
from benchmarks.start import ROOT
from benchmarks.table import Row

SCRIPT = "release/air_tests/air_benchmarks/workloads/torch_benchmark.py"
RAY = ("ray-project/ray", "6cea64e272db4291b227df9296b129cd48630d3c", SCRIPT)
DATA = Path("/tmp/data_fashion_mnist")  # where the script looks
BATCH, EPOCHS, RATE = 64, 4, 1e-3
CONFIG = {"lr": RATE, "batch_size": BATCH, "epochs": EPOCHS}
UNDER_DDP = f"""
import torch.distributed, torch_benchmark
torch.distributed.init_process_group("gloo")
torch_benchmark.train_func(use_ray=False, config={CONFIG})
torch.distributed.destroy_process_group()
"""
UNDER_RAY = (
    f"import torch_benchmark; torch_benchmark.train_torch_ray_air(config={CONFIG}, num_workers=2, cpus_per_worker=1)"
)
JOB: dict[str, Any] = {
    "task": "train",
    "model": "torch_benchmark:NeuralNetwork",
    "dataset": {"target": "benchmarks.peers.gate:Images", "args": {"train": True}},
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": RATE}},
    "batch_size": BATCH,
    "epochs": EPOCHS,
    "metrics": {"accuracy": "benchmarks.peers.gate:accuracy"},
    "eval": {"dataset": {"target": "benchmarks.peers.gate:Images", "args": {"train": False}}},
    "workers": 2,
}


class Images(Dataset[Any]):
    """The images, as the script reads them."""

    def __init__(self, train: bool) -> None:
        from torchvision.datasets import FashionMNIST
        from torchvision.transforms import ToTensor

        self.images = FashionMNIST(root=str(DATA), train=train, transform=ToTensor())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index]


def accuracy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 for a row whose class is right, else 0."""
    return (outputs.argmax(1) == target).float()


def measure() -> Iterator[Row]:
    python, folder = environment("vision", "torchvision==0.28.0"), script(*RAY).parent
    make_data()
    with scratch() as runs:
        script_of_ddp, job = Path(runs, "under_ddp.py"), Path(runs, "gate.json")
        script_of_ddp.write_text(UNDER_DDP)
        job.write_text(json.dumps({**JOB, "storage": str(runs)}))
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

        def run(*words: object, **variables: str) -> Timed:
            return timed([python, *words], ROOT, PYTHONPATH=f"{folder}:{ROOT}", **variables)

        sides = {
            "dp_ray": partial(run, "-m", "dp_ray", "run", job, "--quiet", "--overwrite"),
            "torchrun": partial(run, *launcher, script_of_ddp),
            "TorchTrainer": partial(run, "-c", UNDER_RAY, RAY_TRAIN_V2_ENABLED="0"),
        }
        found = in_turns(sides)
    what = "peers: Ray's torch_mnist_cpu, 2 workers"
    limits = {"torchrun": at_most(1.1), "TorchTrainer": at_most(1.1)}
    yield from rows(f"{what}: a step", found, lambda of: of.step, limits)
    yield from rows(
        f"{what}: from the first step to the last, with validations", found, lambda of: of.stepping, limits
    )
    yield from rows(f"{what}: the whole command", found, lambda of: of.whole, {"TorchTrainer": at_most(1.0, "ahead")})
    yield from rows(
        f"{what}: until the first step", found, lambda of: of.start, {"TorchTrainer": at_most(1.0, "ahead")}
    )


def make_data() -> None:
    """The files of FashionMNIST, with images that are drawn."""
    made = torch.Generator().manual_seed(0)
    folder = DATA / "FashionMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 19_200), ("t10k", 3_200)):
        images = torch.randint(256, (count, 28, 28), generator=made, dtype=torch.uint8)
        classes = torch.randint(10, (count,), generator=made, dtype=torch.uint8)
        folder.joinpath(f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 2051, *images.shape) + images.numpy().tobytes()
        )
        folder.joinpath(f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 2049, count) + classes.numpy().tobytes()
        )

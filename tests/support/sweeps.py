"""The job of the tests' sweeps, its traps, and what tests read of a sweep and its runs."""

import json
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from dp_ray.rundir.files import ABOUT_JSON
from dp_ray.storage import Storage
from tests.support import forked, training

NUMBERS = (1, 2, 3, 4)
GRID = ("--over", "optimizer.args.lr=1e-1,3e-2", "--over", "batch_size=16,32")
VALUES = [(lr, size) for lr in (0.1, 0.03) for size in (16, 32)]  # of GRID, by number


class Trapped(training.Pairs):
    """101 pairs; the read of number `at` in this process sends itself the signal that the file `trap` names."""

    reads: ClassVar[int] = 0

    def __init__(self, folder: str, at: int) -> None:
        super().__init__()
        self.trap, self.at = Path(folder) / "trap", at

    def __getitem__(self, index: int) -> Any:
        Trapped.reads += 1
        if Trapped.reads == self.at and self.trap.exists():
            name = self.trap.read_text()
            self.trap.unlink()
            os.kill(os.getpid(), signal.Signals[name])
        return super().__getitem__(index)


class Parabola(nn.Module):
    """Gives `x` for each row; no row with x above 8."""

    def __init__(self, x: float, y: float = 0.0) -> None:
        super().__init__()
        self.x, self.y = nn.Parameter(torch.tensor(float(x))), y

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.x > 8:
            raise ValueError(f"{self.x.item()} is above 8")
        return (self.x + self.y).expand(len(inputs))


def squared(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(x - 3)^2 for each row."""
    return (outputs - 3) ** 2


def written(folder: Path, **keys: Any) -> str:
    """A job file with these keys; JSON is YAML."""
    file = folder / "job.yaml"
    file.write_text(json.dumps(keys))
    return str(file)


def training_job(folder: Path, at: int = 0, **others: Any) -> str:
    """A job file of a bitwise training of 2 epochs over 101 pairs, whose read number `at` meets the trap."""
    keys = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": {"target": "tests.support.sweeps:Trapped", "args": {"folder": str(folder), "at": at}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}},
        "batch_size": 8,
        "epochs": 2,
        "shards": 2,
        "bitwise": True,
        "workers": 0,
        "checkpoint": {"every_steps": 2},
        "storage": str(folder / "runs"),
    }
    return written(folder, **{**keys, **others})


def evaluation_job(folder: Path, **others: Any) -> str:
    """A job file of an evaluation whose loss is (x - 3)^2."""
    keys = {
        "task": "evaluate",
        "model": {"target": "tests.support.sweeps:Parabola", "args": {"x": 0.0}},
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": 4}},
        "loss": "tests.support.sweeps:squared",
        "batch_size": 4,
        "workers": 0,
        "storage": str(folder / "runs"),
    }
    return written(folder, **{**keys, **others})


def swept(*args: str) -> forked.Ended:
    """`dp-ray sweep` with these arguments, in a process of its own."""
    return forked.ended(forked.dp_ray_program, "sweep", *args)


def kept(base: Storage, name: str = "job-sweep") -> list[dict[str, Any]]:
    """The trials that a sweep's file tells."""
    found: list[dict[str, Any]] = json.loads(base.child(name).read_text("sweep.json"))["trials"]
    return found


def states(base: Storage, name: str = "job-sweep") -> list[str]:
    return [trial["state"] for trial in kept(base, name)]


def drivers(base: Storage, name: str = "job-sweep") -> list[int]:
    """How many drivers each of the four runs has had, as the runs' own records tell."""
    return [len(ABOUT_JSON.read(base.child(f"{name}-{number}")).drivers) for number in NUMBERS]

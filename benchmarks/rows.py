"""The rows and the model that all sides of `predict` run over."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH = 256
CLASSES = 10
BATCH_SIZE = 1024


@dataclass(frozen=True)
class Work:
    """What every side does: the file of rows, how often it is gone over, in global batches of which size, by whom."""

    path: str
    times: int
    batch_size: int
    workers: int


def make_rows(path: Path, rows: int) -> None:
    """Write `rows` rows of normal numbers, a few at a time; every process then maps them into its memory."""
    numbers = np.random.default_rng(0)
    with path.open("wb") as file:
        for first in range(0, rows, 10_000):
            numbers.standard_normal((min(10_000, rows - first), WIDTH), np.float32).tofile(file)


class Rows(Dataset[torch.Tensor]):
    """The rows in one tensor, gone over `times` times; many are read at once by torch's own `__getitems__`."""

    def __init__(self, path: str, times: int = 1) -> None:
        size = Path(path).stat().st_size // 4
        self.data = torch.from_file(path, size=size, dtype=torch.float32).reshape(-1, WIDTH)
        self.times = times

    def __len__(self) -> int:
        return self.times * len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index % len(self.data)]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(self.data[torch.tensor(indices) % len(self.data)])


class Mlp(nn.Module):
    """256-512-10; where `stamps` names a folder, each process keeps there when its loop began and how far it is."""

    def __init__(self, stamps: str | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 512), nn.ReLU(), nn.Linear(512, CLASSES))
        self.stamps = stamps
        self.stamp: Any = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.stamps and self.stamp is None:
            self.stamp = np.memmap(f"{self.stamps}/{os.getpid()}", np.float64, "w+", shape=(3,))
            self.stamp[0] = time.time()
        outputs: torch.Tensor = self.layers(inputs)
        if self.stamp is not None:
            self.stamp[1:] = time.time(), self.stamp[2] + len(inputs)
        return outputs


class Wide(nn.Module):
    """Each row four times over: 4 kB of output a row, to see what the driver does with much of it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.repeat(1, 4)


def loop_rate(stamps: Path) -> float:
    """Rows a second of the processes' loops together, each from its first forward to its last."""
    found = [np.fromfile(stamp, np.float64) for stamp in stamps.iterdir()]
    return float(sum(rows / (ended - began) for began, ended, rows in found))

"""A training that marks the end of each step. It runs beside an earlier commit too, so it imports torch alone."""

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


class Slow(Dataset[Any]):
    """480 pairs of numbers; each read takes a few milliseconds."""

    loader_context = "fork"

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.004)
        return torch.full((8,), index / 480), torch.ones(1)


def model() -> nn.Module:
    return nn.Linear(8, 1)


class MarkedSGD(torch.optim.SGD):
    """SGD that writes down when which process has finished a step."""

    def __init__(self, params: Any, marks: str, lr: float) -> None:
        super().__init__(params, lr)
        self._marks = marks

    def step(self, *args: Any, **keys: Any) -> Any:
        found = super().step(*args, **keys)
        with open(self._marks, "a") as file:
            file.write(f"{time.time()} {os.getpid()}\n")
        return found

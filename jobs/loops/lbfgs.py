"""LBFGS, which computes the loss of the whole batch several times in an update: a curve through noisy points."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import dp_ray


class Curve(Dataset[Any]):
    """Items are (x [1], sin(3 x) and noise [1])."""

    def __init__(self, points: int = 512) -> None:
        draws = torch.Generator().manual_seed(0)
        self.x = torch.rand(points, 1, generator=draws) * 4 - 2
        self.y = (3 * self.x).sin() + 0.05 * torch.randn(points, 1, generator=draws)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Net(nn.Sequential):
    """x [rows, 1] to y [rows, 1]."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def train(run: dp_ray.Loop) -> None:
    """Take an update of ten evaluations in each step, whose batch is the whole dataset."""
    update = run.optimizer(torch.optim.LBFGS(run.model.parameters(), max_iter=10, line_search_fn="strong_wolfe"))

    def loss(batch: Any) -> torch.Tensor:
        x, y = batch
        losses: torch.Tensor = (run.model(x) - y).square()
        return losses

    for step in run.steps():
        update.step(closure=lambda step=step: step.backward(loss, run.model))  # type: ignore[misc]

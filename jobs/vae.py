"""A variational autoencoder on scikit-learn's digits: its loss is a sum over the batch, as in PyTorch's examples."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Vae(nn.Module):
    """Images [rows, 1, 8, 8] to their pixels [rows, 64] made anew, and the mean and log-variance of their codes."""

    def __init__(self, width: int = 128, code: int = 8) -> None:
        super().__init__()
        self.seen = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, code), nn.Linear(width, code)
        self.made = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid())

    def drawn(self, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
        return mean + torch.randn_like(mean) * (log_variance / 2).exp()

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen = self.seen(images)
        mean, log_variance = self.mean(seen), self.log_variance(seen)
        return self.made(self.drawn(mean, log_variance)), mean, log_variance


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the sum over a shard's rows: of the pixels' cross entropy, and of how far the codes are from normal."""
    images, _ = batch
    made, mean, log_variance = model(images)
    of_pixels: torch.Tensor = F.binary_cross_entropy(made, images.flatten(1), reduction="sum")
    distance: torch.Tensor = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return of_pixels + distance

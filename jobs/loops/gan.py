"""A GAN: a generator of points on a circle, and a critic that tells them from real ones."""

import math

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import Dataset

import dp_ray

NOISE = 8  # numbers of which a point is made


class Circle(Dataset[torch.Tensor]):
    """Points near a circle of radius 1, each float32 [2]."""

    def __init__(self, points: int = 4096) -> None:
        draws = torch.Generator().manual_seed(0)
        angles = torch.rand(points, generator=draws) * 2 * math.pi
        noise = 0.05 * torch.randn(points, 2, generator=draws)
        self.points = torch.stack([angles.cos(), angles.sin()], 1) + noise

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index]


def layers(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Return three linear layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class Gan(nn.Module):
    """Both parts, so that one checkpoint and one weights file hold them; called, it makes points of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = layers(NOISE, 2), layers(2, 1)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Make points [rows, 2] of noise [rows, NOISE]."""
        made: torch.Tensor = self.generator(noise)
        return made


def train(run: dp_ray.Loop) -> None:
    """Train the critic and then the generator, in each step."""
    critic, generator = run.model.critic, run.model.generator
    of_critic = run.optimizer(torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.99)))
    of_generator = run.optimizer(torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.99)))

    def make(rows: int) -> torch.Tensor:
        made: torch.Tensor = generator(torch.randn(rows, NOISE, device=run.device))
        return made

    def tells_apart(real: torch.Tensor) -> torch.Tensor:
        losses: torch.Tensor = softplus(-critic(real)) + softplus(critic(make(len(real))))
        return losses[:, 0]

    def fools(real: torch.Tensor) -> torch.Tensor:
        return softplus(-critic(make(len(real))))[:, 0]

    for step in run.steps():
        told = step.backward(tells_apart, critic)
        of_critic.step()
        fooled = step.backward(fools, generator)
        of_generator.step()
        step.log(critic=told, generator=fooled)

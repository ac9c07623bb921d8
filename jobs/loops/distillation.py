"""Distillation: a small model learns the digits by their labels, and by what a larger one answers."""

from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import dp_ray
from jobs.digits import Net


class Pair(nn.Module):
    """A teacher, whose weights are those of jobs/digits.yaml, and its student; called, it is the student."""

    def __init__(self, teacher: str, width: int = 16) -> None:
        super().__init__()
        self.teacher = Net()
        self.teacher.load_state_dict(load_file(teacher))
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the student's logits [rows, 10] of images [rows, 1, 8, 8]."""
        logits: torch.Tensor = self.student(images)
        return logits


def train(run: dp_ray.Loop) -> None:
    """Train the student alone: what a pass does not name is constant."""
    student, teacher = run.model.student, run.model.teacher
    update = run.optimizer(torch.optim.AdamW(student.parameters(), 3e-3))

    def loss(batch: Any) -> torch.Tensor:
        images, labels = batch
        answers, soft = student(images), teacher(images).softmax(1)
        apart = F.kl_div(answers.log_softmax(1), soft, reduction="none").sum(1)
        return 0.7 * apart + 0.3 * F.cross_entropy(answers, labels, reduction="none")

    for step in run.steps():
        step.backward(loss, student)
        update.step(clip=1.0)

"""Losses, steps and metrics with a state of their own, and the plain loop of a training with them."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.training import plain_batches
from tests.support.writing import set_state, state_of


class Centred(nn.Module):
    """Cross entropy of outputs less a centre, which follows their mean; and a frozen teacher, which follows too.

    With `over_batch` the mean over rows, else one number for each. A `width` of 300 makes the teacher not small.
    """

    centre: torch.Tensor
    seen: torch.Tensor
    hidden: torch.Tensor | None

    def __init__(self, over_batch: bool = False, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", None, persistent=False)
        self.teacher = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        with torch.no_grad():
            for at, parameter in enumerate(self.teacher.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) / (at + 1))
        self.teacher.requires_grad_(False)
        self.classes = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="none")
        self.reduces = over_batch

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = outputs.mean(0)
            self.centre = self.centre * 0.8 + mean * 0.2
            self.seen += len(outputs)
            self.hidden = mean if self.hidden is None else self.hidden * 0.5 + mean
            for parameter in self.teacher.parameters():
                parameter.mul_(0.95).add_(0.1 * mean.mean())
        rows = outputs.repeat(2, 1)  # BatchNorm wants two
        taught = self.teacher(rows).mean(1).tanh()[: len(outputs)] / self.seen
        losses: torch.Tensor = self.classes(outputs - self.centre * 0.5 + self.hidden, target) + taught
        return losses.mean() if self.reduces else losses


class CentredStep(nn.Module):
    """A step that is a module, or has one whose method it is."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Centred()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0])
        return {"loss": (self.loss(outputs, batch[1]).sum(), len(outputs)), "outputs": outputs, "target": batch[1]}


class HoldsAStep:
    """An object, no module, that is called; its loss is an attribute."""

    def __init__(self) -> None:
        self.step = CentredStep()

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.step(model, batch)

    def method(self, model: nn.Module, batch: Any) -> Any:
        return self.step(model, batch)


def with_loss(model: nn.Module, batch: Any, loss: nn.Module) -> Any:
    outputs = model(batch[0])
    return loss(outputs, batch[1]).sum(), len(outputs)


def closure() -> Callable[[nn.Module, Any], Any]:
    loss = Centred()

    def step(model: nn.Module, batch: Any) -> Any:
        return with_loss(model, batch, loss)

    return step


def loss_closure() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A loss that no deepcopy copies, with a row for each class in its batches of 3: it is tried."""
    loss = Centred()

    def compare(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses: torch.Tensor = loss(outputs, target)
        return losses

    return compare


STEPS: dict[str, Callable[[], Any]] = {
    "module": CentredStep,
    "method": lambda: CentredStep().forward,
    "object": HoldsAStep,
    "method of an object": lambda: HoldsAStep().method,
    "partial": lambda: functools.partial(with_loss, loss=Centred()),
    "closure": closure,
}


class Distance(nn.Module):
    """A metric that measures by the mean of what it has seen."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(outputs.mean(0), 0.3)
        return (outputs - self.mean).abs().mean(1)


class Arc(nn.Module):
    """A step with weights of its own, which nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        outputs = self.head(model(batch[0]))
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def plain_training(
    model: nn.Module,
    loss: nn.Module,
    dataset: Any,
    batch_size: int,
    shards: int,
    epochs: int,
    over_batch: bool = False,
    metric: nn.Module | None = None,
) -> tuple[list[float], list[float]]:
    """The oracle: each shard from the values before the step, after which those of shard 0 stay, or of the batch.

    Returns the losses and the means of the metric.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    losses, means = [], []
    for _, inputs, targets in plain_batches(dataset, batch_size, epochs):
        beside = [one for one in (loss, metric) if one is not None]
        before, kept, total, measured = [state_of(one) for one in beside], None, 0.0, 0.0
        optimizer.zero_grad()
        if over_batch:
            value = loss(model(inputs), targets)
            value.backward()
            total, kept = value.item(), [state_of(one) for one in beside]
        for chunk, target in () if over_batch else zip(inputs.chunk(shards), targets.chunk(shards), strict=True):
            for one, state in zip(beside, copy.deepcopy(before), strict=True):
                set_state(one, state)
            outputs = model(chunk)
            value = loss(outputs, target).sum() / len(targets)
            if metric is not None:
                measured += metric(outputs.detach(), target).sum().item() / len(targets)
            kept = kept or [state_of(one) for one in beside]
            value.backward()
            total += value.item()
        assert kept is not None
        for one, state in zip(beside, kept, strict=True):
            set_state(one, state)
        optimizer.step()
        losses.append(total)
        means.append(measured)
    return losses, means

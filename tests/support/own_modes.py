"""Models whose `train()` and `eval()` do more than to set modes, and a plain training that calls them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dp_ray
from tests.support.training import Pairs, plain_loop
from tests.support.trainings import mean_loss

LR = 0.02
WIDE = 300  # so wide that frozen weights are not copied in each step


class Adapted(nn.Linear):
    """A frozen weight and a product beside it, which `eval()` adds to it and `train()` takes out, as in loralib."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2, scale: float = 1.0) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(rank, inputs)), nn.Parameter(torch.randn(outputs, rank))
        self.scale, self.merged = scale, False

    def train(self, mode: bool = True) -> "Adapted":
        super().train(mode)
        if mode and self.merged:
            self.weight.data -= self.scale * (self.up @ self.down)
        elif not mode and not self.merged:
            self.weight.data += self.scale * (self.up @ self.down)
        self.merged = not mode
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs if self.merged else outputs + self.scale * (inputs @ self.down.T @ self.up.T)


class StillStatistics(nn.Sequential):
    """Its BatchNorm is never in train mode, by the usual override."""

    def train(self, mode: bool = True) -> "StillStatistics":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class Checked(StillStatistics):
    """Raises once its statistics are trained."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self[1].training:
            raise ValueError("its statistics are trained")
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


class Noted(nn.Sequential):
    """Notes the calls of its `eval()` and `train(mode)`."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.calls: list[str] = []

    def eval(self) -> "Noted":
        self.calls.append("eval")
        return super().eval()

    def train(self, mode: bool = True) -> "Noted":
        self.calls.append(f"train({mode})")
        return super().train(mode)


def by_row(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, target, reduction="none")


def loop(run: dp_ray.Loop) -> None:
    """Train as the declared training does."""
    update = run.optimizer(torch.optim.SGD([each for each in run.model.parameters() if each.requires_grad], LR))
    for step in run.steps():
        step.backward(lambda batch: by_row(run.model(batch[0]), batch[1]), of=run.model)
        update.step()


def adapted(in_eval: str = "", seed: int | None = None, wide: int = WIDE) -> nn.Module:
    """A model with an adapter; "all" of it or the adapter alone is built in eval mode, merged."""
    if seed is not None:
        torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(6, wide), Adapted(wide, wide), nn.Tanh(), nn.Linear(wide, 3))
    with torch.no_grad():
        model[1].up.mul_(0.1)
    if in_eval:
        (model if in_eval == "all" else model[1]).eval()
    made: nn.Module = model
    return made


class Rounds(nn.Linear):
    """Its weight loses digits in each evaluation."""

    def train(self, mode: bool = True) -> "Rounds":
        if mode != self.training:
            self.weight.data += -1000 if mode else 1000
        super().train(mode)
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight - (0 if self.training else 1000), self.bias)


def rounds() -> nn.Module:
    return nn.Sequential(Rounds(6, 16), nn.Tanh(), nn.Linear(16, 3))


def still(in_eval: str = "") -> nn.Module:
    """A model whose statistics stay as they are: by its own `train()`, or since it is built so."""
    kind = nn.Sequential if in_eval else StillStatistics
    model: Any = kind(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with torch.no_grad():
        model[1].running_mean.add_(0.5)
    if in_eval:
        model[1].eval()
    made: nn.Module = model
    return made


def checked() -> nn.Module:
    return Checked(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def plain_training(
    model: nn.Module,
    epochs: int,
    back: Callable[[], object],
    every: int = 2,
    evaluated: nn.Module | None = None,
    after_step: Callable[[], object] = lambda: None,
    in_place: Callable[[], AbstractContextManager[Any]] = nullcontext,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[list[float], list[float]]:
    """Train on 42 pairs, 7 a step, with an evaluation every few steps; the losses of steps and evaluations.

    After each evaluation, `back` has the model train again.
    """
    judged, data, steps, found = evaluated or model, Pairs(20), 0, []

    def after() -> None:
        nonlocal steps
        after_step()
        steps += 1
        if steps % every == 0:
            with in_place():
                judged.eval()
                with torch.no_grad():
                    found.append(cross_entropy(judged(data.inputs), data.targets).item())
                back()

    class AsItIs(nn.Module):
        """Keeps `plain_loop` from calling `train()`."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return model(inputs)  # type: ignore[no-any-return]

    back()
    optimizer = optimizer or torch.optim.SGD([each for each in model.parameters() if each.requires_grad], LR)
    return plain_loop(AsItIs(), Pairs(42), 7, epochs, mean_loss, optimizer, after_step=after), found

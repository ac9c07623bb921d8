"""A schedule-free SGD as an optimizer that switches the weights, and the same as a plain loop's three sequences."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

BETA = 0.9


class ScheduleFree(torch.optim.Optimizer):
    """z is stepped, x is the mean of z, and gradients are those of y between them (Defazio et al. 2024).

    The parameters are y in train mode, and x in eval mode. The state keeps z alone, as the package schedulefree does.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    def train(self) -> None:
        self._switch(True, 1 - BETA)

    def eval(self) -> None:
        self._switch(False, 1 - 1 / BETA)

    @torch.no_grad()
    def _switch(self, train_mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = train_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "the optimizer was not in train mode"
            share, group["k"] = 1 / (group["k"] + 1), group["k"] + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(z, share)
                param.add_(param.grad, alpha=group["lr"] * (BETA * (1 - share) - 1))
                z.sub_(param.grad, alpha=group["lr"])


def plain_schedule_free(
    model: nn.Module, batches: Iterator[Any], loss_of: Callable[[nn.Module, Any], torch.Tensor], lr: float
) -> Iterator[dict[str, torch.Tensor]]:
    """The oracle: x, y and z each on its own, in fp64; yields x after each step."""
    x = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    z = {name: value.clone() for name, value in x.items()}
    for step, batch in enumerate(batches):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_((1 - BETA) * z[name] + BETA * x[name])
        gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        for name, gradient in zip(x, gradients, strict=True):
            z[name] = z[name] - lr * gradient
            x[name] = x[name] + (z[name] - x[name]) / (step + 1)
        yield {name: value.clone() for name, value in x.items()}

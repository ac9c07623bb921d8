"""Models, data, schedulers and optimizers with a trap in them."""

from typing import Any

import numpy as np
import torch
from torch import nn

from dp_ray.engine.world import own_rank
from tests.support.patchwork import Observer
from tests.support.training import Pairs


def fails(*_: Any) -> None:
    """A loss, or a step, that fails."""
    raise LookupError("nothing there")


class Unordered(nn.ModuleDict):
    """Layers made in an order that differs from process to process, as that of a set of names does."""

    def __init__(self) -> None:
        names = ["alpha", "beta", "gamma"]
        turn = own_rank()
        super().__init__({name: nn.Linear(6, 3) for name in names[turn:] + names[:turn]})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(inputs) for layer in self.values()]).sum(0)


class RandomPairs(Pairs):
    """Pairs that are drawn, and by nobody seeded."""

    def __init__(self, length: int = 20) -> None:
        self.inputs = torch.randn(length, 6)
        self.targets = torch.randint(3, (length,))
        self.augment = False


class OwnNoise(Pairs):
    """Pairs with noise from a generator of the dataset's own."""

    def __init__(self, length: int = 20) -> None:
        super().__init__(length)
        self.generator = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + torch.from_numpy(self.generator.normal(size=6)).float(), target


class Observed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Observer(), nn.Linear(6, 3))


class Extra(nn.Linear):
    """A layer whose extra state is an object."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def get_extra_state(self) -> Any:
        return object()

    def set_extra_state(self, state: Any) -> None:
        pass


class Count(nn.Linear):
    """A layer whose extra state is a count, alone in a dict or as a tensor."""

    def __init__(self, is_tensor: bool) -> None:
        super().__init__(6, 3)
        self.calls, self.is_tensor = 0, is_tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.calls) if self.is_tensor else {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state) if self.is_tensor else state["calls"]


class Counted(nn.Sequential):
    """A model with a `Count` in it."""

    def __init__(self, is_tensor: bool = False) -> None:
        super().__init__(Count(is_tensor))


class Double(nn.Linear):
    """A layer with a complex number of 128 bits."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.phase = nn.Parameter(torch.ones((), dtype=torch.complex128))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.phase.abs().float()


class Expanded(nn.Linear):
    """A layer whose rows of weights are one row."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.weight = nn.Parameter(torch.randn(1, 6).expand(3, 6))


class FunctionScheduler(torch.optim.lr_scheduler.StepLR):
    """A scheduler that keeps a function."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.function = lambda step: step
        super().__init__(optimizer, 2)


class ObjectSGD(torch.optim.SGD):
    """SGD that keeps an object for each parameter, from the first step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = object()

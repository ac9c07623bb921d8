"""Modules for the tests of `dp_ray.DataParallel`, which workers import by name."""

import threading
from typing import Any, NamedTuple

import torch
from torch import nn


class Elementwise(nn.Module):
    """Of each element alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * inputs * self.scale + self.shift


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


class Nested(nn.Module):
    """Of everything that inputs and outputs may be."""

    def forward(self, inputs: dict[str, Any], scale: torch.Tensor, name: str, only: Any) -> dict[str, Any]:
        ones, (numbers,) = inputs["pair"]
        assert only is None
        pair = Pair(numbers + ones.long(), [ones])
        return {"scaled": inputs["x"] * scale, "pair": pair, "name": name, "whole": scale * len(numbers)}


class Adds(nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other


class RaisesFrom(nn.Module):
    """Raises if an input is as large as `limit`."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.max() >= self.limit:
            raise LookupError("too large")
        return inputs


class Tutorial(nn.Module):
    """The model of PyTorch's DataParallel tutorial."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc(inputs)
        print("\tIn Model: input size", inputs.size(), "output size", output.size())
        return output


class Locked(nn.Module):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

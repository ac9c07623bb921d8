"""Models that look at torch's settings while a bitwise job runs."""

import sys

import torch
from torch import nn

COMPILER = "torch._inductor.config"


class Deterministic(nn.Module):
    """Needs deterministic algorithms, and torch's compiler not imported; with `imports` it imports it and looks."""

    def __init__(self, imports: bool = False) -> None:
        super().__init__()
        self.imports = imports

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert torch.are_deterministic_algorithms_enabled()
        if self.imports:
            from torch._inductor import config

            assert config.deterministic
        else:
            assert COMPILER not in sys.modules
        return rows

"""A model in two parts on two devices of one worker, as in PyTorch's model parallel tutorial, over the digits."""

from collections.abc import Sequence

import torch
from torch import nn


class TwoParts(nn.Module):
    """`net1` on the first device, `net2` on the last: images [rows, 1, 8, 8] to logits [rows, 10]."""

    def __init__(self, width: int = 64, devices: Sequence[torch.device] = (torch.device("cpu"),)) -> None:
        super().__init__()
        self.first, self.last = devices[0], devices[-1]
        self.net1 = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU()).to(self.first)
        self.net2 = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)).to(self.last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.net1(images.to(self.first))
        logits: torch.Tensor = self.net2(hidden.to(self.last))
        return logits


class Stack(nn.Sequential):
    """The same as one Sequential, for `device_map: auto` to place."""

    def __init__(self, width: int = 64) -> None:
        layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(width, 10))

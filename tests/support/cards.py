"""Models on a device whose memory holds so many rows: they raise torch's own error if they get more."""

import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dp_ray.engine.world import everyone, own_rank
from tests.support import training

ROWS = "ROWS_OF_THE_CARD"
FULL = "CUDA out of memory. Tried to allocate 20.00 MiB."


def is_last() -> bool:
    """Whether this is the last rank."""
    return (group := everyone()) is None or group.rank() == group.size() - 1


class Card(nn.Module):
    """It holds `most` rows, by default what the environment says, and on rank 1 `most_on_1`.

    With `counts` each row weighs one, and so do two things beside it: gradients that are there when a forward
    begins, and weights that an optimizer has changed, so that it has a state. Dropout draws random numbers.
    """

    def __init__(self, most: int | None = None, most_on_1: int | None = None, counts: bool = False) -> None:
        super().__init__()
        self.layers = training.mlp()
        self.dropout = nn.Dropout(0.1)
        most = int(os.environ[ROWS]) if most is None else most
        self.most = most_on_1 if most_on_1 is not None and own_rank() == 1 else most
        self.counts = counts
        self.first = [parameter.detach().clone() for parameter in self.parameters()]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        size = len(inputs)
        if self.counts and torch.is_grad_enabled():
            size += any(parameter.grad is not None for parameter in self.parameters())
            pairs = zip(self.parameters(), self.first, strict=True)
            size += any(not torch.equal(pair.detach(), before) for pair, before in pairs)
        if size > self.most:
            raise torch.OutOfMemoryError(FULL)
        outputs: torch.Tensor = self.layers(self.dropout(inputs))
        return outputs


class Stopped(Card):
    """It stops its process by a signal in its first forward, and leaves a file; with the file it goes on."""

    def __init__(self, file: str, signal: int, most_on_1: int = 3) -> None:
        super().__init__(3, most_on_1)
        self.file = Path(file)
        self.signal = signal

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.file.exists() and is_last():
            self.file.touch()
            os.kill(os.getpid(), self.signal)
        return super().forward(inputs)


class CardOfBlocks(training.Blocks):
    """A language model of blocks. Its second one holds `most` rows, and so many on rank 1.

    One such model fits at a time.
    """

    def __init__(self, most: int, most_on_1: int) -> None:
        if any(one() is not None for one in _made):
            raise torch.OutOfMemoryError(FULL)
        super().__init__()
        _made.append(weakref.ref(self))
        self.most = most_on_1 if own_rank() == 1 else most
        self.layers[1].register_forward_pre_hook(self._check)

    def _check(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args[0]) > self.most:
            raise torch.OutOfMemoryError(FULL)


_made: "list[weakref.ref[CardOfBlocks]]" = []  # in this process


class Wide(nn.Module):
    """It takes 256 MB of the system for each row, and leaves nearly all of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        room = torch.empty(len(inputs), 2**26)[:, :3].zero_()
        outputs: torch.Tensor = self.layer(inputs) + room
        return outputs


def card(kind: str = "Card", **args: Any) -> dict[str, Any]:
    """The target of a model."""
    return {"target": f"tests.support.cards:{kind}", "args": args}

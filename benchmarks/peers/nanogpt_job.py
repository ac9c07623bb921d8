"""dp_ray's side of `nanogpt`, as a user writes it: its model, its windows of the text, its step and schedule.

`model` is nanoGPT's model.py, which stands in the folder of the command, as it does for train.py.
"""

import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset


def gpt(**sizes: Any) -> nn.Module:
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    vocabulary = pickle.loads(Path("data/shakespeare_char/meta.pkl").read_bytes())
    torch.manual_seed(1337)  # as train.py has it
    built: nn.Module = GPT(GPTConfig(vocab_size=vocabulary["vocab_size"], **sizes))
    return built


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `length` characters of a file; the target of each character is the next one."""

    def __init__(self, file: str, length: int) -> None:
        self.data = torch.from_numpy(np.fromfile(file, dtype=np.uint16).astype(np.int64))
        self.length = length
        self.starts: Sequence[int] = range(0, len(self.data) - length, length)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.data[self.starts[index] : self.starts[index] + self.length + 1]
        return window[:-1], window[1:]


class Drawn(Windows):
    """The windows that train.py draws in one process, in its order.

    It draws the first batch after the model's weights, then those of an evaluation, then all other batches.
    """

    def __init__(self, file: str, batches: int, batch_size: int, evaluated: int, **sizes: Any) -> None:
        super().__init__(file, sizes["block_size"])
        gpt(**sizes)
        draw = [torch.randint(len(self.data) - self.length, (batch_size,)) for _ in range(2 * evaluated + batches)]
        self.starts = torch.cat([draw[0], *draw[2 * evaluated + 1 :]]).tolist()


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    inputs, targets = batch
    _, loss = model(inputs, targets)
    return loss * targets.numel(), targets.numel()


def schedule(optimizer: Optimizer, warmup: int, least: float, total: int) -> LambdaLR:
    """A warm-up, then a cosine down to a share of the rate, as train.py's get_lr."""

    def share(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (update - warmup) / (total - warmup)))

    return LambdaLR(optimizer, share)

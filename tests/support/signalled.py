"""Runs whose reading sends their own process signals, at a known read."""

import signal
from pathlib import Path
from typing import Any

import torch

from tests.support import models

NEVER = {"every_steps": None, "every_seconds": None}


class Signals(models.SlowPairs):
    """96 pairs; their reading sends this process the signals that the file `signals` lists, one for each read."""

    def __init__(self, folder: str, at: int) -> None:
        super().__init__(0.0)
        self.folder, self.at, self.reads = Path(folder), at, 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        pending = (self.folder / "signals").read_text().split() if (self.folder / "signals").exists() else []
        if self.reads >= self.at and pending:
            (self.folder / "signals").write_text(" ".join(pending[1:]))
            signal.raise_signal(signal.Signals[pending[0]])
        return super().__getitem__(index)


class SignalledInputs(Signals):
    """The inputs alone."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0]


def training(folder: Path, at: int = 0, *signals: str, **others: Any) -> dict[str, Any]:
    """A training of 48 steps of 6 rows, which gets `signals` from its read number `at` on."""
    (folder / "signals").write_text(" ".join(signals))
    target = {"target": "tests.support.signalled:Signals", "args": {"folder": str(folder), "at": at}}
    keys = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": target,
        "loss": "torch.nn:CrossEntropyLoss",
    }
    optimizer = {"target": "torch.optim:AdamW", "args": {"lr": 0.01}}
    given = {"optimizer": optimizer, "batch_size": 6, "epochs": 3, "shuffle": True, "bitwise": True}
    where = {"name": "run", "storage": str(folder), "workers": 0, "quiet": True}
    return {**keys, **given, **where, "checkpoint": NEVER, **others}


def predicting(folder: Path, at: int, *signals: str, **others: Any) -> dict[str, Any]:
    (folder / "signals").write_text(" ".join(signals))
    target = {"target": "tests.support.signalled:SignalledInputs", "args": {"folder": str(folder), "at": at}}
    keys = {"model": "tests.support.training:mlp", "dataset": target, "batch_size": 6, "shards": 2}
    return {**keys, "name": "run", "storage": str(folder), "workers": 0, "quiet": True, **others}

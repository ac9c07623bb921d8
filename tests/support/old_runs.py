"""The jobs of the runs in tests/kept, which an earlier version began and did not end."""

import os
import signal
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

KILLED_AT = "OLD_RUNS_KILLED_AT"  # the call of the model at which its process kills itself


class Pairs(Dataset[Any]):
    """40 pairs of 6 normal numbers and a class of 3."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(40, 6, generator=generator)
        self.targets = torch.randint(3, (40,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class Net(nn.Module):
    """6 numbers to 3 logits, with dropout; it kills its process at the call that the environment says."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        Net.calls += 1
        if os.environ.get(KILLED_AT) == str(Net.calls):
            os.kill(os.getpid(), signal.SIGKILL)
        logits: torch.Tensor = self.layers(inputs)
        return logits


DATA: dict[str, Any] = {
    "model": "tests.support.old_runs:Net",
    "dataset": "tests.support.old_runs:Pairs",
    "batch_size": 8,
    "shards": 2,
    "workers": 0,
    "retries": 0,
}
TRAINING: dict[str, Any] = {
    **DATA,
    "task": "train",
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.01}},
    "scheduler": {"target": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 3}},
    "shuffle": True,
    "bitwise": True,
    "epochs": 2,
    "checkpoint": {"every_steps": 2, "keep": 2},
}
JOBS: dict[str, dict[str, Any]] = {
    "ddp": TRAINING,
    "fsdp": {**TRAINING, "strategy": "fsdp", "fsdp": {"blocks": ["Linear"]}},
    "predict": {**DATA, "task": "predict", "outputs": {"file_bytes": 200}},
    "sweep": TRAINING,
}
AXIS = "optimizer.args.lr=0.01,0.02"

"""One job file for three tasks."""

from typing import Any

UNTRAINED = "untrained weights: init_from is not set"


# The file of a training: its evaluation's dataset is another one than that which it trains on.
FILE: dict[str, Any] = {
    "task": "train",
    "model": "tests.support.training:mlp",
    "dataset": {"target": "tests.support.training:Pairs", "args": {"length": 101}},
    "loss": "torch.nn:CrossEntropyLoss",
    "metrics": {"right": "tests.support.training:right"},
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.01}},
    "eval": {
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}},
        "batch_size": 6,
        "every_steps": 4,
    },
    "checkpoint": {"every_steps": 2, "best": "eval_loss"},
    "batch_size": 22,
    "shards": 3,
    "shuffle": True,
    "drop_last": True,
    "epochs": 3,
}

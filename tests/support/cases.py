"""Trainings of a model that is pieced together, and the plain process that they are compared with."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.job.job import Job
from tests.support.patchwork import Noisy, Patchwork, put, train_plainly
from tests.support.training import Pairs, warm_up
from tests.support.trainings import initial

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5}),
    "SGD with decay": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "weight_decay": 0.1}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "fused": True}),
    "noisy": (Noisy, {"lr": 0.05}),
}


def job_for(case: dict[str, Any], workers: int, strategy: str = "ddp") -> Job:
    cls, args = OPTIMIZERS[case["optimizer"]]
    evaluation = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": case["eval_rows"]}}}
    keys = {
        "task": "train",
        "model": {"target": "tests.support.patchwork:Patchwork", "args": {"has": case["has"]}},
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": case["rows"]}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": f"{cls.__module__}:{cls.__qualname__}", "args": args},
        "workers": workers,
        "strategy": strategy,
        "epochs": 2,
        "shuffle": True,
        "checkpoint": {"every_steps": case["kept"]},
        "find_unused_parameters": case["finds_unused"],
        "eval": {**evaluation, "batch_size": 4, "every_steps": 3} if case["eval_rows"] else None,
    }
    same = ("batch_size", "shards", "scheduler", "grad_clip", "bitwise", "precision")
    return Job.make({**keys, **{name: case[name] for name in same}}, "job")


def plainly(case: dict[str, Any]) -> tuple[nn.Module, list[float]]:
    """What one process of plain torch comes to."""
    model = initial(Patchwork, case["has"])
    cls, args = OPTIMIZERS[case["optimizer"]]
    optimizer = cls([one for one in model.parameters() if one.requires_grad], **args)
    scheduler = warm_up(optimizer) if case["scheduler"] else None
    sizes = case["batch_size"], case["shards"], 2
    return model, train_plainly(model, Pairs(case["rows"]), optimizer, scheduler, *sizes, case["grad_clip"])


def evaluated(model: nn.Module, rows: int, shards: int) -> float:
    """The mean loss in eval mode, each shard from the same buffers."""
    data = Pairs(rows)
    batches = [(data.inputs[at : at + 4], data.targets[at : at + 4]) for at in range(0, rows, 4)]
    model = copy.deepcopy(model).eval()
    before, total = copy.deepcopy(dict(model.named_buffers())), 0.0
    for batch in batches:
        for x, y in zip(*(column.chunk(shards) for column in batch), strict=True):
            put(model, before)
            total += nn.functional.cross_entropy(model(x), y, reduction="sum").item()
    return total / rows


def compare(case: dict[str, Any], weights: dict[str, torch.Tensor], history: list[dict[str, Any]]) -> None:
    model, losses = plainly(case)
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=2e-4, abs=1e-5)
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        apart = (weights[name] - tensor).abs().max().item() if tensor.numel() else 0.0
        assert apart <= 1e-4 + 1e-3 * tensor.abs().max().item(), f"{name}: {apart}"
    if case["eval_rows"]:
        assert history[-1]["eval_loss"] == pytest.approx(
            evaluated(model, case["eval_rows"], case["shards"]), rel=2e-4
        )


USUAL: dict[str, Any] = {
    "has": [],
    "rows": 34,
    "batch_size": 10,
    "shards": 8,
    "workers": [2, 3],
    "strategies": ["ddp", "ddp"],
    "optimizer": "SGD",
    "scheduler": None,
    "grad_clip": None,
    "bitwise": True,
    "precision": "fp32",
    "kept": 2,
    "stops": 5,
    "eval_rows": None,
    "finds_unused": "auto",
}

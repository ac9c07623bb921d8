"""Trainings of a model that is pieced together, and the plain process that they are compared with."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.job.job import Job
from tests.support.patchwork import Noisy, Patchwork, train_plainly
from tests.support.training import Pairs, warm_up
from tests.support.trainings import initial
from tests.support.writing import set_state, state_of

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5}),
    "SGD with decay": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "weight_decay": 0.1}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "fused": True}),
    "noisy": (Noisy, {"lr": 0.05}),
}
SOME: dict[str, Callable[[list[Any]], list[Any]]] = {
    "the first": lambda given: given[:1],
    "the last two": lambda given: given[-2:],
    "every second": lambda given: given[::2],
    "all but the first": lambda given: given[1:],
}
LR = "torch.optim.lr_scheduler"
EPOCHS = 2
SCHEDULERS: dict[str, Any] = {
    "warm-up": "tests.support.training:warm_up",
    "cosine": {"target": f"{LR}:CosineAnnealingLR", "args": {"T_max": "auto"}},
    "cosine of epochs": {"target": f"{LR}:CosineAnnealingLR", "args": {"T_max": "auto"}, "per": "epoch"},
    "one cycle": {"target": f"{LR}:OneCycleLR", "args": {"max_lr": 0.1, "total_steps": "auto"}},
    "0.25, cosine": {"warmup": 0.25, "shape": "cosine"},
    "0.4, linear": {"warmup": 0.4, "shape": "linear"},
    "1, constant": {"warmup": 1, "shape": "constant"},
    "0, cosine": {"shape": "cosine"},
}


def of_some(parameters: Iterable[nn.Parameter], optimizer: str, some: str) -> torch.optim.Optimizer:
    """An optimizer of some of the parameters."""
    cls, args = OPTIMIZERS[optimizer]
    made: torch.optim.Optimizer = cls(SOME[some](list(parameters)), **args)
    return made


def scheduler_of(name: str | None, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """The scheduler of a plain loop of so many steps, stepped after each."""
    lr = torch.optim.lr_scheduler
    if name is None:
        return None
    if name == "warm-up":
        return warm_up(optimizer)
    if name == "cosine":
        return lr.CosineAnnealingLR(optimizer, steps)
    if name == "cosine of epochs":
        each = steps // EPOCHS
        return lr.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * (step // each) / EPOCHS)) / 2)
    if name == "one cycle":
        return lr.OneCycleLR(optimizer, 0.1, steps)
    share, shape = name.split(", ")
    rises = 1 if share == "1" else round(float(share) * steps)
    left = steps - rises
    shapes: dict[str, Callable[[int], float]] = {
        "cosine": lambda step: (1 + math.cos(math.pi * step / left)) / 2,
        "linear": lambda step: 1 - step / left,
        "constant": lambda step: 1.0,
    }
    return lr.LambdaLR(
        optimizer, lambda step: (step + 1) / (rises + 1) if step < rises else shapes[shape](min(step - rises, left))
    )


def job_for(case: dict[str, Any], workers: int, strategy: str = "ddp") -> Job:
    cls, args = OPTIMIZERS[case["optimizer"]]
    optimizer = {"target": f"{cls.__module__}:{cls.__qualname__}", "args": args}
    if case["some"]:
        given = {"optimizer": case["optimizer"], "some": case["some"]}
        optimizer = {"target": "tests.support.cases:of_some", "args": given}
    evaluation = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": case["eval_rows"]}}}
    keys = {
        "task": "train",
        "model": {"target": "tests.support.patchwork:Patchwork", "args": {"has": case["has"]}},
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": case["rows"]}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": optimizer,
        "scheduler": SCHEDULERS[case["scheduler"]] if case["scheduler"] else None,
        "workers": workers,
        "strategy": strategy,
        "epochs": EPOCHS,
        "shuffle": True,
        "checkpoint": {"every_steps": case["kept"]},
        "find_unused_parameters": case["finds_unused"],
        "eval": {**evaluation, "batch_size": 4, "every_steps": 3} if case["eval_rows"] else None,
    }
    same = ("batch_size", "shards", "grad_clip", "bitwise", "precision", "flops")
    return Job.make({**keys, **{name: case[name] for name in same}}, "job")


def plainly(case: dict[str, Any]) -> tuple[nn.Module, list[dict[str, float]]]:
    """What one process of plain torch comes to."""
    model = initial(Patchwork, case["has"])
    cls, args = OPTIMIZERS[case["optimizer"]]
    given = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = cls(SOME[case["some"]](given) if case["some"] else given, **args)
    scheduler = scheduler_of(case["scheduler"], optimizer, -(-case["rows"] // case["batch_size"]) * EPOCHS)
    sizes = case["batch_size"], case["shards"], EPOCHS
    return model, train_plainly(model, Pairs(case["rows"]), optimizer, scheduler, *sizes, case["grad_clip"])


def evaluated(model: nn.Module, rows: int, shards: int) -> float:
    """The mean loss in eval mode, each shard from the same buffers and parameters."""
    data = Pairs(rows)
    batches = [(data.inputs[at : at + 4], data.targets[at : at + 4]) for at in range(0, rows, 4)]
    model = copy.deepcopy(model).eval()
    before, total = state_of(model), 0.0
    for batch in batches:
        for x, y in zip(*(column.chunk(shards) for column in batch), strict=True):
            set_state(model, before)
            total += nn.functional.cross_entropy(model(x.clone()), y, reduction="sum").item()
    return total / rows


def compare(case: dict[str, Any], weights: dict[str, torch.Tensor], history: list[dict[str, Any]]) -> None:
    model, rows = plainly(case)
    for name, near in (("loss", 2e-4), ("learning_rate", 1e-6), ("gradient_norm", 1e-3)):
        assert [row[name] for row in history] == pytest.approx([row[name] for row in rows], rel=near, abs=1e-5), name
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
    "some": None,
    "scheduler": None,
    "flops": False,
    "grad_clip": None,
    "bitwise": True,
    "precision": "fp32",
    "kept": 2,
    "stops": 5,
    "eval_rows": None,
    "finds_unused": "auto",
}

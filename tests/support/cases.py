"""Trainings of a model that is pieced together, and the plain process that they are compared with."""

import copy
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dp_ray.job.job import Job
from tests.support.group import history_of, weights_of
from tests.support.patchwork import Noisy, Patchwork, train_plainly
from tests.support.schedule_free import ScheduleFree
from tests.support.training import Pairs, warm_up
from tests.support.trainings import initial
from tests.support.writing import set_state, state_of

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5}),
    "SGD with decay": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "weight_decay": 0.1}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "fused": True}),
    "noisy": (Noisy, {"lr": 0.05}),
    "schedule-free": (ScheduleFree, {"lr": 0.05}),
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
        "ema": {"decay": case["ema"]} if case["ema"] else None,
        "eval": {**evaluation, "batch_size": 4, "every_steps": case["eval_every"]} if case["eval_rows"] else None,
    }
    same = ("batch_size", "shards", "grad_clip", "bitwise", "precision", "flops")
    return Job.make({**keys, **{name: case[name] for name in same}}, "job")


class Plainly:
    """What one process of plain torch comes to: a model, rows, evaluations, and an average of parameters."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.model = case, initial(Patchwork, case["has"])
        cls, args = OPTIMIZERS[case["optimizer"]]
        given = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = cls(SOME[case["some"]](given) if case["some"] else given, **args)
        self.steps = -(-case["rows"] // case["batch_size"]) * EPOCHS
        self.step, self.average = 0, dict[str, torch.Tensor]()
        self.evaluations: list[float] = []
        scheduler = scheduler_of(case["scheduler"], self.optimizer, self.steps)
        self.model.begin()  # type: ignore[operator]
        self.switch("train")
        sizes = case["batch_size"], case["shards"], EPOCHS
        data = Pairs(case["rows"])
        self.rows = train_plainly(
            self.model, data, self.optimizer, scheduler, *sizes, case["grad_clip"], self.after_step
        )
        self.switch("eval")  # whose weights are kept

    def switch(self, mode: str) -> None:
        """Have a schedule-free optimizer set the weights to train, or to evaluate."""
        if isinstance(self.optimizer, ScheduleFree):
            getattr(self.optimizer, mode)()

    def after_step(self) -> None:
        self.step += 1
        parameters = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        if self.case["ema"]:
            share = 1 - self.case["ema"] if self.average else 1.0
            for name, now in parameters.items():
                self.average[name] = now if share == 1 else self.average[name].lerp(now, share)
        if self.case["eval_rows"] and (self.step % self.case["eval_every"] == 0 or self.step == self.steps):
            self.switch("eval")
            judged = copy.deepcopy(self.model)
            self.switch("train")
            for name, parameter in judged.named_parameters() if self.average else ():
                parameter.data.copy_(self.average[name])
            self.evaluations.append(evaluated(judged, self.case["eval_rows"], self.case["shards"]))


def evaluated(model: nn.Module, rows: int, shards: int) -> float:
    """The mean loss in eval mode, each shard from the same buffers and parameters."""
    data = Pairs(rows)
    batches = [(data.inputs[at : at + 4], data.targets[at : at + 4]) for at in range(0, rows, 4)]
    model = model.eval()
    before, total = state_of(model), 0.0
    for batch in batches:
        for x, y in zip(*(column.chunk(shards) for column in batch), strict=True):
            set_state(model, before)
            total += nn.functional.cross_entropy(model(x.clone()), y, reduction="sum").item()
    return total / rows


def compare(case: dict[str, Any], folder: Path) -> None:
    plain, history = Plainly(case), history_of(folder)
    for name, near in (("loss", 2e-4), ("learning_rate", 1e-6), ("gradient_norm", 1e-3)):
        assert [row[name] for row in history] == pytest.approx(
            [row[name] for row in plain.rows], rel=near, abs=1e-5
        ), name
    expected = plain.model.state_dict()
    assert_near(weights_of(folder), expected)
    if case["ema"]:
        assert_near(load_file(folder / "ema.safetensors"), {**expected, **plain.average})
    found = [row["eval_loss"] for row in history if row.get("eval_loss") is not None]
    assert found == pytest.approx(plain.evaluations, rel=2e-4, abs=1e-5)


def assert_near(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        apart = (weights[name] - tensor).abs().max().item() if tensor.numel() else 0.0
        assert apart <= 1e-4 + 1e-3 * tensor.abs().max().item(), f"{name}: {apart}"


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
    "eval_every": 3,
    "ema": None,
    "finds_unused": "auto",
}

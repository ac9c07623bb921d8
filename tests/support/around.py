"""What stands around a model in a training: losses and metrics with a state, hooks, targets to ignore, epochs.

`plainly` is the oracle: one process of plain torch.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from dp_ray.plan.order import Order
from tests.support.trainings import initial

HERE = "tests.support.around"
EPOCHS = 2
IGNORED = -100
PROTOTYPES = 4


class Data(Dataset[Any]):
    """`length` pairs of 6 numbers, other ones in each epoch if it is told, and a class of 3, or IGNORED for some."""

    def __init__(self, length: int, has: list[str]) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(length, 6, generator=generator, dtype=torch.float64)
        self.noise = torch.randn(EPOCHS, length, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(3, (length,), generator=generator)
        if "ignored" in has:
            self.targets[torch.rand(length, generator=generator) < 0.6] = IGNORED
        self.epoch: int | None = None
        if "epochs" in has:
            self.set_epoch = self._set_epoch

    def _set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        added = 0.0 if self.epoch is None else self.noise[self.epoch, index]
        return self.inputs[index] + added, self.targets[index]


class Model(nn.Module):
    """6 numbers a row to 3, in float64; with `over` prototypes and a scale beside them; hooks on gradients."""

    def __init__(self, has: list[str]) -> None:
        super().__init__()
        self.has = set(has)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        if "over" in has:
            self.prototypes, self.scale = nn.Parameter(torch.randn(PROTOTYPES, 3)), nn.Parameter(torch.tensor(1.5))
        self.double()
        if "clamp" in has:
            self.body.weight.register_hook(clamped)  # type: ignore[no-untyped-call]
        if "after" in has:
            self.head.bias.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]

    def forward(self, inputs: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.body(inputs)))
        if "over" not in self.has:
            return logits
        return {"logits": logits, "prototypes": self.prototypes * 1.0, "scale": self.scale.exp()}


def clamped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.02, 0.02)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Centred(nn.Module):
    """Cross entropy of the outputs without their running mean, which is the loss's own."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(outputs - self.centre, target, reduction="none")
        with torch.no_grad():
            self.centre.mul_(0.8).add_(outputs.mean(0), alpha=0.2)
        return losses


class Contrast(nn.Module):
    """One number for a whole batch: how its rows, without their mean and its running mean, are near to prototypes."""

    centre: torch.Tensor

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.moves = moves
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: Any, target: torch.Tensor) -> torch.Tensor:
        rows = outputs["logits"] - outputs["logits"].mean(0) - self.centre
        if self.moves:
            with torch.no_grad():
                self.centre.mul_(0.8).add_(outputs["logits"].mean(0), alpha=0.2)
        return functional.cross_entropy(rows @ outputs["prototypes"].t() * outputs["scale"], target)


class Weighing(nn.Module):
    """A metric that counts a row by what it has seen before."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones((), dtype=torch.float64))

    def forward(self, outputs: Any, target: torch.Tensor) -> torch.Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
        measured: torch.Tensor = (logits.argmax(1) == target) * self.seen
        self.seen.add_(logits.detach().square().mean())
        return measured


def labelled_step(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The step of docs/steps.md for a model whose loss is a mean over the labels that count."""
    outputs = model(batch[0])
    count = (batch[1] != IGNORED).sum()
    loss = functional.cross_entropy(outputs, batch[1], ignore_index=IGNORED)
    return {"loss": (loss * count, count), "outputs": outputs, "target": batch[1]}


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01}),
}


def keys_of(case: dict[str, Any]) -> dict[str, Any]:
    """The keys of a job; those of a run on some workers are left."""
    has, (cls, args) = case["has"], OPTIMIZERS[case["optimizer"]]
    data = {"target": f"{HERE}:Data", "args": {"length": case["rows"], "has": has}}
    what: dict[str, Any] = {"loss": "torch.nn:CrossEntropyLoss"}
    if "over" in has:
        what = {"loss": {"target": f"{HERE}:Contrast", "args": {"moves": "moves" in has}, "over": "batch"}}
    elif "ignored" in has:
        what = {"step": f"{HERE}:labelled_step"}
    elif "moves" in has:
        what = {"loss": f"{HERE}:Centred"}
    if "metric" in has:
        what["metrics"] = {"weighed": f"{HERE}:Weighing"}
    if case["eval_rows"]:
        args_of = {"length": case["eval_rows"], "has": [one for one in has if one != "epochs"]}
        evaluated = {"dataset": {"target": f"{HERE}:Data", "args": args_of}, "batch_size": 5, "every_steps": 3}
        what["eval"] = evaluated
    return {
        **what,
        "task": "train",
        "model": {"target": f"{HERE}:Model", "args": {"has": has}},
        "dataset": data,
        "optimizer": {"target": f"{cls.__module__}:{cls.__qualname__}", "args": args},
        "epochs": EPOCHS,
        "shuffle": True,
        "checkpoint": {"every_steps": case["kept"]},
        "loader": {"processes": case["processes"]},
        **{name: case[name] for name in ("batch_size", "shards", "grad_clip", "bitwise")},
    }


def batches_of(case: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """The epoch and the samples of each batch."""
    found = []
    for epoch in range(EPOCHS):
        order = Order(case["rows"], 0, epoch, shuffle=True)
        for start in range(0, case["rows"], case["batch_size"]):
            found.append((epoch, [order[at] for at in range(start, min(start + case["batch_size"], case["rows"]))]))
    return found


class Around:
    """A loss and a metric, as plain torch computes them of a batch in chunks."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.has, self.shards = set(case["has"]), case["shards"]
        self.loss = Contrast("moves" in self.has) if "over" in self.has else Centred()
        self.metric = Weighing()

    def measured(self, model: nn.Module, inputs: Any, targets: Any, keeps: bool) -> tuple[torch.Tensor, float, float]:
        """The sum of the losses, their weight, and the mean of the metric; each chunk starts from the same state."""
        chunks = list(zip(inputs.chunk(self.shards), targets.chunk(self.shards), strict=True))
        centre, seen = self.loss.centre.clone(), self.metric.seen.clone()
        kept = None
        total, weight, weighed = torch.zeros((), dtype=torch.float64), 0.0, 0.0
        for x, y in chunks:
            self.metric.seen.copy_(seen)
            if "over" not in self.has:
                self.loss.centre.copy_(centre)
            outputs = model(x)
            weighed += self.metric(outputs, y).sum().item()
            if "ignored" in self.has:
                total = total + functional.cross_entropy(outputs, y, ignore_index=IGNORED, reduction="sum")
                weight += (y != IGNORED).sum().item()
            elif "over" not in self.has:
                moves = "moves" in self.has
                total = (
                    total
                    + (
                        self.loss(outputs, y) if moves else functional.cross_entropy(outputs, y, reduction="none")
                    ).sum()
                )
                weight += len(y)
            kept = kept or (self.loss.centre.clone(), self.metric.seen.clone())
        if "over" in self.has:
            total, weight = self.loss(model(inputs), targets) * len(targets), len(targets)
        assert kept is not None
        self.metric.seen.copy_(kept[1] if keeps else seen)
        if not keeps:
            self.loss.centre.copy_(centre)
        elif "over" not in self.has:
            self.loss.centre.copy_(kept[0])
        return total, weight, weighed / len(targets)


def plainly(case: dict[str, Any]) -> tuple[nn.Module, list[dict[str, float]], float | None]:
    """What one process of plain torch comes to: the model, a row for each step, and the last evaluation's loss."""
    has = set(case["has"])
    model, data, around = (
        initial(Model, [one for one in case["has"] if one not in ("clamp", "after")]),
        None,
        Around(case),
    )
    cls, args = OPTIMIZERS[case["optimizer"]]
    optimizer = cls(model.parameters(), **args)
    data, rows = Data(case["rows"], case["has"]), []
    for epoch, picked in batches_of(case):
        data.epoch = epoch if "epochs" in has else None
        inputs, targets = (torch.stack(list(column)) for column in zip(*(data[at] for at in picked), strict=True))
        total, weight, weighed = around.measured(model, inputs, targets, keeps=True)
        (total / weight).backward()  # type: ignore[no-untyped-call]
        if "clamp" in has:
            model.body.weight.grad = clamped(model.body.weight.grad)  # type: ignore[union-attr, arg-type]
        if "after" in has:
            halve(model.head.bias)  # type: ignore[union-attr, arg-type]
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        ).item()
        if case["grad_clip"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["grad_clip"])
        rows.append({"loss": total.item() / weight, "gradient_norm": norm, "weighed": weighed})
        optimizer.step()
        optimizer.zero_grad()
    if not case["eval_rows"]:
        return model, rows, None
    held, totals, weights = Data(case["eval_rows"], [one for one in case["has"] if one != "epochs"]), 0.0, 0.0
    with torch.no_grad():
        for at in range(0, len(held), 5):
            total, weight, _ = around.measured(
                model, held.inputs[at : at + 5], held.targets[at : at + 5], keeps=False
            )
            totals, weights = totals + total.item(), weights + weight
    return model, rows, totals / weights if weights else None

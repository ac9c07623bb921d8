"""What stands around a model in a training: losses, steps and metrics with a state, hooks, targets to ignore, epochs.

Each is named, or an object of the script's; datasets also hold generators. `plainly` is the oracle: one process of
plain torch, on the rows that a single process reads.
"""

import functools
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset, Subset

from dp_ray.job.job import Job
from dp_ray.plan.order import Order
from dp_ray.plan.split import Split, Work
from tests.support.builders import loader_of
from tests.support.group import history_of, weights_of
from tests.support.own_modes import Adapted
from tests.support.trainings import initial
from tests.support.writing import set_state, state_of

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


class Jitter:
    """A transform that draws from a generator of its own."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.rng: Any = GENERATORS[kind](seed)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if isinstance(self.rng, torch.Generator):
            return inputs + torch.randn(6, generator=self.rng, dtype=torch.float64)
        return inputs + (self.rng.rand() if isinstance(self.rng, np.random.RandomState) else self.rng.random())


class Compose:
    """Transforms one after another, as torchvision has them."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs


class Around(Dataset[Any]):
    """Transforms the rows of another dataset, which it holds by a name of its own."""

    def __init__(self, rows: Any, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.rows, self.held = rows, {"of": (transform, 1)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.rows[index]
        return self.held["of"][0](inputs), target


class AroundMany(Around):
    """The same, which reads many rows at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


GENERATORS: dict[str, Callable[[int], Any]] = {
    "numpy": np.random.default_rng,
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "state": lambda seed: np.random.RandomState(seed),
    "random": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}
NESTS = ["compose", "partial", "method", "closure", "list"]


def nested(nest: str, kind: str, seed: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """A transform with a generator somewhere in it."""
    jitter = Jitter(kind, seed)
    if nest == "partial":
        return functools.partial(applied, jitter)
    if nest == "method":
        return Compose([jitter]).__call__
    if nest == "closure":
        return lambda inputs: jitter(inputs)
    return Compose([jitter, Compose([Jitter(kind, seed + 1)])] if nest == "list" else [jitter])


def applied(transform: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return transform(inputs)


def drawing(
    length: int, has: list[str], nest: str, kind: str, parts: str, loader_context: str | None = None
) -> Dataset[Any]:
    """`Data` whose transforms draw; of several parts, each with a generator of its own."""
    dataset: Any = _drawing(Data(length, has), nest, kind, parts)
    dataset.loader_context = loader_context
    return dataset  # type: ignore[no-any-return]


def _drawing(data: "Data", nest: str, kind: str, parts: str) -> Dataset[Any]:
    if parts == "wrapped":
        return AroundMany(Around(data, nested(nest, kind)), nested(nest, kind, 5))
    if parts == "whole":
        return Around(data, nested(nest, kind))
    cut = len(data) // 2
    halves = [Subset(data, range(cut)), Subset(data, range(cut, len(data)))]
    return ConcatDataset([Around(half, nested(nest, kind, at)) for at, half in enumerate(halves)])


class Model(nn.Module):
    """6 numbers a row to 3, in float64; with `over` prototypes and a scale beside them; hooks on gradients.

    adapter: one that `eval()` merges. experts: each row has its own. early: the first forward writes a buffer that no
    state_dict has, and fills another one.
    """

    seen: torch.Tensor
    scale_of: torch.Tensor
    shift: torch.Tensor

    def __init__(self, has: list[str]) -> None:
        super().__init__()
        self.has = set(has)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        if "over" in has:
            self.prototypes, self.scale = nn.Parameter(torch.randn(PROTOTYPES, 3)), nn.Parameter(torch.tensor(1.5))
        if "adapter" in has:
            self.adapter = Adapted(8, 8)
        if "experts" in has:
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        if "early" in has:
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("scale_of", torch.ones(()), persistent=False)
            self.register_buffer("shift", None, persistent=False)
        self.double()
        if "clamp" in has:
            self.body.weight.register_hook(clamped)  # type: ignore[no-untyped-call]
        if "after" in has:
            self.head.bias.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = torch.tanh(self.body(inputs))
        if "adapter" in self.has:
            hidden = hidden + self.adapter(hidden).tanh()
        if "experts" in self.has:
            routes, added = (inputs[:, 2] + 1.5).long().clamp(0, 3), torch.zeros_like(hidden)
            for number in routes.unique().tolist():  # type: ignore[no-untyped-call]
                added[routes == number] = self.experts[number](hidden[routes == number])
            hidden = hidden + added
        if "early" in self.has:
            if not self.seen:
                self.seen.fill_(1)
                self.scale_of.fill_(0.5)
                self.shift = torch.full((8,), 0.3, dtype=torch.float64)
            hidden = hidden * self.scale_of + self.shift
        logits = self.head(hidden)
        if "over" not in self.has:
            return logits
        return {"logits": logits, "prototypes": self.prototypes * 1.0, "scale": self.scale.exp()}


def clamped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.02, 0.02)


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Centred(nn.Module):
    """Cross entropy of the outputs without their running mean, which is the loss's own.

    It has a frozen teacher, which follows too, counts its calls, and makes a buffer that is in no state_dict.
    """

    centre: torch.Tensor
    calls: torch.Tensor
    hidden: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", None, persistent=False)
        self.teacher = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
        with torch.no_grad():
            self.teacher.weight.copy_(torch.eye(3))
            self.teacher.bias.zero_()

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
            self.hidden = outputs.mean(0) if self.hidden is None else self.hidden * 0.5 + outputs.mean(0)
            self.teacher.weight.mul_(0.95).add_(0.02 * outputs.mean())
            taught = self.teacher(outputs).tanh() / self.calls
        losses = functional.cross_entropy(
            outputs - self.centre + 0.1 * self.hidden + taught, target, reduction="none"
        )
        with torch.no_grad():
            self.centre.mul_(0.8).add_(outputs.mean(0), alpha=0.2)
        return losses


class Stepping(nn.Module):
    """A step with a loss that has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = Centred()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return with_loss(model, batch, self.loss)


class Holding:
    """An object, no module, that holds a step."""

    def __init__(self) -> None:
        self.step = Stepping()

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.step(model, batch)


def with_loss(model: nn.Module, batch: Any, loss: nn.Module) -> dict[str, Any]:
    outputs = model(batch[0])
    return {"loss": (loss(outputs, batch[1]).sum(), len(outputs)), "outputs": outputs, "target": batch[1]}


STEPS: dict[str, Callable[[], Any]] = {
    "module": Stepping,
    "object": Holding,
    "method": lambda: Stepping().forward,
    "partial": lambda: functools.partial(with_loss, loss=Centred()),
}


class Looping:
    """A loop that wraps parts of a model, and weighs the loss by the number of its steps."""

    def __init__(self, model: Any = None, optimizer: str = "SGD", clip: float | None = None) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip

    def loss(self, batch: Any) -> torch.Tensor:
        losses = functional.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        weighed: torch.Tensor = losses * self.factor
        return weighed

    def __call__(self, run: Any) -> None:
        self.model = self.model or run.model
        cls, args = OPTIMIZERS[self.optimizer]
        update = run.optimizer(cls([each for each in run.model.parameters() if each.requires_grad], **args))
        counts = run.state("counts", {"steps": 0})
        for step in run.steps():
            counts["steps"] += 1
            self.factor = 1 + counts["steps"] / 10
            step.log(told=step.backward(self.loss, of=run.model))
            update.step(clip=self.clip)


def looping(run: Any, optimizer: str, clip: float | None) -> None:
    Looping(None, optimizer, clip)(run)


def stepping(kind: str, is_object: bool) -> Any:
    """A step of that kind that the script has made; or the name of a class of steps."""
    made = STEPS[kind]
    return named_or_made(is_object, made if is_object or made in (Stepping, Holding) else Stepping)


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
    named = functools.partial(named_or_made, case["objects"])
    what: dict[str, Any] = {"loss": "torch.nn:CrossEntropyLoss"}
    if "over" in has:
        what = {"loss": {"target": f"{HERE}:Contrast", "args": {"moves": "moves" in has}, "over": "batch"}}
    elif "ignored" in has:
        what = {"step": f"{HERE}:labelled_step"}
    elif "moves" in has:
        what = {"step": stepping(case["step"], case["objects"])} if case["step"] else {"loss": named(Centred)}
    if "metric" in has:
        what["metrics"] = {"weighed": named(Weighing)}
    if case["eval_rows"]:
        held = [one for one in has if one != "epochs"]
        what["eval"] = {"dataset": named(Data, case["eval_rows"], held), "batch_size": 5, "every_steps": 3}
    if case.get("loops"):
        what.pop("loss")
        what["metrics"] = {"nll": f"{HERE}:nll"} if case["eval_rows"] else {}
    is_hooked = bool({"clamp", "after"} & set(has))  # which nothing pickles, and closures neither
    fork = ["fork"] if case["draws"] and case["draws"][0] == "closure" else []
    data = named(drawing if case["draws"] else Data, case["rows"], has, *(case["draws"] or ()), *fork)
    model = named_or_made(case["objects"] and not is_hooked, Model, has)
    if case.get("loops"):
        given = case["optimizer"], case["grad_clip"]
        of_names = {"target": f"{HERE}:looping", "args": {"optimizer": given[0], "clip": given[1]}}
        what["loop"] = Looping(model, *given) if case["objects"] else of_names
    else:
        what["optimizer"] = {"target": f"{cls.__module__}:{cls.__qualname__}", "args": args}
        what["grad_clip"] = case["grad_clip"]
    return {
        **what,
        "task": "train",
        "model": model,
        "dataset": data,
        "epochs": EPOCHS,
        "shuffle": True,
        "checkpoint": {"every_steps": case["kept"]},
        "loader": {"processes": case["processes"]},
        **{name: case[name] for name in ("batch_size", "shards", "bitwise")},
    }


def nll(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, target, reduction="none")


def named_or_made(is_object: bool, made: Callable[..., Any], *args: Any) -> Any:
    """What the script has made, with the seed of the job; or its name and its arguments.

    A pipe between processes takes no closures.
    """
    if is_object and "closure" not in args:
        return initial(made, *args)
    names = list(inspect.signature(made).parameters)[: len(args)]
    return {"target": f"{HERE}:{made.__name__}", "args": dict(zip(names, args, strict=True))}


def read_alone(case: dict[str, Any]) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """The rows of each epoch as one process reads them, all at once: what they draw is theirs alone."""
    dataset = drawing(case["rows"], case["has"], *case["draws"])
    keys = keys_of({**case, "processes": 0})
    job = Job.make({**keys, "dataset": dataset, "shards": 1, "batch_size": case["rows"]}, "job")
    split = Split(case["rows"], case["rows"], 1, epochs=EPOCHS)
    return [
        {int(index): (x, y) for index, x, y in zip(indices, inputs, targets, strict=True)}
        for indices, (inputs, targets) in loader_of(job, dataset, Work(split))
    ]


def assert_each_draws_its_own(case: dict[str, Any], epochs: list[dict[int, Any]]) -> None:
    """No two rows have the same noise, in no epoch."""
    inputs = Data(case["rows"], case["has"]).inputs
    noise = [round((rows[at][0] - inputs[at])[0].item(), 9) for rows in epochs for at in rows]
    assert len(set(noise)) == case["rows"] * EPOCHS


def batches_of(case: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """The epoch and the samples of each batch."""
    found = []
    for epoch in range(EPOCHS):
        order = Order(case["rows"], 0, epoch, shuffle=True)
        for start in range(0, case["rows"], case["batch_size"]):
            found.append((epoch, [order[at] for at in range(start, min(start + case["batch_size"], case["rows"]))]))
    return found


class Beside:
    """A loss and a metric, as plain torch computes them of a batch in chunks."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.has, self.shards = set(case["has"]), case["shards"]
        self.loss = Contrast("moves" in self.has) if "over" in self.has else Centred()
        self.metric = Weighing()

    def of_chunk(self, outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The sum of the losses, and their weight."""
        if "ignored" in self.has:
            total = functional.cross_entropy(outputs, target, ignore_index=IGNORED, reduction="sum")
            return total, (target != IGNORED).sum().item()
        if "moves" in self.has:
            return self.loss(outputs, target).sum(), len(target)
        return functional.cross_entropy(outputs, target, reduction="sum"), len(target)

    def measured(self, model: nn.Module, inputs: Any, targets: Any, keeps: bool) -> tuple[torch.Tensor, float, float]:
        """The sum of the losses, their weight, and the mean of the metric; each chunk starts from the same state."""
        beside = self.loss, self.metric
        before, kept = [state_of(one) for one in beside], None
        total, weight, weighed = torch.zeros((), dtype=torch.float64), 0.0, 0.0
        for x, y in zip(inputs.chunk(self.shards), targets.chunk(self.shards), strict=True):
            for one, state in zip(beside, before, strict=True):
                set_state(one, state)
            outputs = model(x)
            weighed += self.metric(outputs, y).sum().item()
            if "over" not in self.has:
                of_chunk, count = self.of_chunk(outputs, y)
                total, weight = total + of_chunk, weight + count
            kept = kept or [state_of(one) for one in beside]
        assert kept is not None
        for one, state in zip(beside, kept, strict=True):
            set_state(one, state)
        if "over" in self.has:
            total, weight = self.loss(model(inputs), targets) * len(targets), len(targets)
        for one, state in zip(beside, before, strict=True) if not keeps else ():
            set_state(one, state)
        return total, weight, weighed / len(targets)


def plainly(case: dict[str, Any]) -> tuple[nn.Module, list[dict[str, float]], list[float]]:
    """What one process of plain torch comes to: the model, a row for each step, and the evaluations' losses."""
    has = set(case["has"])
    model, around = initial(Model, [one for one in case["has"] if one not in ("clamp", "after")]), Beside(case)
    epochs = read_alone(case) if case["draws"] else []
    if epochs:
        assert_each_draws_its_own(case, epochs)
    cls, args = OPTIMIZERS[case["optimizer"]]
    optimizer = cls([each for each in model.parameters() if each.requires_grad], **args)
    data, rows, evaluations = Data(case["rows"], case["has"]), list[dict[str, float]](), list[float]()
    batches = batches_of(case)
    for epoch, picked in batches:
        data.epoch = epoch if "epochs" in has else None
        given = map((epochs[epoch] if epochs else data).__getitem__, picked)
        inputs, targets = (torch.stack(list(column)) for column in zip(*given, strict=True))
        total, weight, weighed = around.measured(model, inputs, targets, keeps=True)
        if case.get("loops"):
            total = total * (1 + (len(rows) + 1) / 10)
        (total / (weight or 1)).backward()  # type: ignore[no-untyped-call]  # of no labels: a gradient of 0
        if "clamp" in has:
            model.body.weight.grad = clamped(model.body.weight.grad)  # type: ignore[union-attr, arg-type]
        if "after" in has:
            halve(model.head.bias)  # type: ignore[union-attr, arg-type]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if case["grad_clip"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["grad_clip"])
        loss = total.item() / weight if weight else float("nan")
        rows.append({"loss": loss, "gradient_norm": norm, "weighed": weighed})
        optimizer.step()
        optimizer.zero_grad()
        if case["eval_rows"] and (len(rows) % 3 == 0 or len(rows) == len(batches)):
            evaluations.append(evaluated(case, model, around))
    return model, rows, evaluations


@torch.no_grad()
def evaluated(case: dict[str, Any], model: nn.Module, around: Beside) -> float:
    model.eval()
    held, totals, weights = Data(case["eval_rows"], [one for one in case["has"] if one != "epochs"]), 0.0, 0.0
    for at in range(0, len(held), 5):
        total, weight, _ = around.measured(model, held.inputs[at : at + 5], held.targets[at : at + 5], keeps=False)
        totals, weights = totals + total.item(), weights + weight
    model.train()
    return totals / weights if weights else float("nan")


def compare(case: dict[str, Any], folder: Path) -> None:
    """Compare a run with one plain process."""
    model, rows, evaluations = plainly(case)
    history, weights = history_of(folder), weights_of(folder)
    loops = bool(case.get("loops"))
    names = {"loss": "told"} if loops else {"loss": "loss", "gradient_norm": "gradient_norm"}
    names |= {"weighed": "weighed"} if "metric" in case["has"] and not loops else {}
    for name, column in names.items():
        found, expected = [row[column] for row in history], [row[name] for row in rows]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True), name
    for name, tensor in model.state_dict().items():
        assert (weights[name] - tensor).abs().max().item() <= 1e-8, name
    column = "eval_nll" if loops else "eval_loss"
    told = [row[column] for row in history if row.get(column) is not None]
    assert told == pytest.approx([one for one in evaluations if one == one], rel=1e-6, abs=1e-9)

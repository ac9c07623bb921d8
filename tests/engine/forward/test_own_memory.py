"""Outputs in memory that the model itself keeps, and writes again in its next forward: each shard's are its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dp_ray

ROWS, BATCH = 23, 6
INPUTS = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(ROWS) % 3


class OneMemory(nn.Module):
    """Writes its outputs into one tensor, a buffer or not, as a model captured in a CUDA graph does."""

    out: torch.Tensor

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        if is_buffer:
            self.register_buffer("out", torch.zeros(BATCH, 3), persistent=False)
        else:
            self.out = torch.zeros(BATCH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out[: len(inputs)].copy_(self.linear(inputs))


class Tempered(nn.Module):
    """Returns a temperature of its own, a buffer or a frozen parameter, which each forward of a training moves."""

    tau: torch.Tensor

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        if is_buffer:
            self.register_buffer("tau", torch.ones(()))
        else:
            self.tau = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            with torch.no_grad():
                self.tau.mul_(1.5)
        return {"logits": self.linear(inputs), "tau": self.tau}


class Right:
    """A metric with a state: the share of rows whose largest output is that of their class."""

    def __init__(self) -> None:
        self.reset()

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        self.right += int((outputs.argmax(1) == target).sum())
        self.rows += len(target)

    def reset(self) -> None:
        self.right, self.rows = 0, 0

    def merge_state(self, other: "Right") -> None:
        self.right, self.rows = self.right + other.right, self.rows + other.rows

    def compute(self) -> float:
        return self.right / self.rows


class Copied(Right):
    """One that counts its copies."""

    count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Copied":
        Copied.count += 1
        return Copied()


def tempered(outputs: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs["logits"] / outputs["tau"], target)


def made(kind: Any, is_buffer: bool) -> Any:
    torch.manual_seed(0)
    return kind(is_buffer)


def run(tmp_path: Path, **keys: Any) -> Any:
    return dp_ray.run(**keys, batch_size=BATCH, shards=2, workers=0, storage=str(tmp_path), name="run", quiet=True)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_prediction_has_the_outputs_of_each_row(tmp_path: Path, is_buffer: bool) -> None:
    model = made(OneMemory, is_buffer)
    outputs = torch.as_tensor(run(tmp_path, task="predict", model=model, dataset=Rows()).outputs)
    assert torch.allclose(outputs, model.linear(INPUTS), atol=1e-6)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_an_evaluation_measures_the_outputs_of_each_row(tmp_path: Path, is_buffer: bool) -> None:
    model = made(OneMemory, is_buffer)
    metrics: Any = {"right": Right, "over": {"target": functional.cross_entropy, "over": "batch"}}
    dataset = TensorDataset(INPUTS, TARGETS)
    found = run(tmp_path, task="evaluate", model=model, dataset=dataset, metrics=metrics).metrics
    logits = model.linear(INPUTS)
    assert found["right"] == pytest.approx((logits.argmax(1) == TARGETS).double().mean().item())
    assert found["over"] == pytest.approx(functional.cross_entropy(logits, TARGETS).item(), rel=1e-5)


def test_a_metric_with_a_state_is_copied_once_for_each_of_the_shards_of_a_batch(tmp_path: Path) -> None:
    """Not in each of the four steps: a copy of one on a GPU takes its time."""
    Copied.count = 0
    keys: dict[str, Any] = {"model": nn.Linear(6, 3), "dataset": TensorDataset(INPUTS, TARGETS)}
    found = run(tmp_path, task="evaluate", metrics={"right": Copied}, loss=functional.cross_entropy, **keys).metrics
    assert found["right"] == pytest.approx((keys["model"](INPUTS).argmax(1) == TARGETS).double().mean().item())
    assert Copied.count == 2


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_loss_over_the_batch_sees_what_the_forwards_left(tmp_path: Path, is_buffer: bool) -> None:
    keys: dict[str, Any] = {"loss": {"target": tempered, "over": "batch"}, "shuffle": False}
    keys["optimizer"] = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    dataset = TensorDataset(INPUTS, TARGETS)
    history = run(tmp_path, task="train", model=made(Tempered, is_buffer), dataset=dataset, **keys).history
    model = made(Tempered, is_buffer)
    losses = []
    for start in range(0, ROWS, BATCH):
        rows = slice(start, start + BATCH)
        loss = tempered(model(INPUTS[rows]), TARGETS[rows])
        gradients = torch.autograd.grad(loss, list(model.linear.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.linear.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        losses.append(loss.item())
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=1e-5)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """The inputs alone."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return INPUTS[index]

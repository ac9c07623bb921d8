"""The recipes of docs/training.md for dict items, Hugging Face models and losses that are one number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dp_ray.job.job import Job
from tests.support import training
from tests.support.group import ProcessExit, history_of, run_group


class Items(training.Pairs):
    """Dicts, as a Hugging Face tokenizer gives them; some labels do not count."""

    def __getitem__(self, index: int) -> Any:
        return {"inputs": self.inputs[index], "labels": self.targets[index] if index % 4 else torch.tensor(-100)}


class Outputs(dict[str, torch.Tensor]):
    __getattr__ = dict.__getitem__


class WithLoss(nn.Module):
    """A model that computes its own loss, the mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Outputs:
        logits = self.layer(inputs)
        return Outputs(loss=F.cross_entropy(logits, labels), logits=logits)


def step(model: nn.Module, batch: Any) -> dict[str, Any]:
    outputs = model(**batch)
    n = (batch["labels"] != -100).sum()
    return {"loss": (outputs.loss * n, n), "outputs": outputs.logits, "target": batch["labels"]}


def step_of_one_number(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def entropy_of_one_number(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, target)


def entropy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, target, reduction="none")


def distance_of_one_number(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target[:, None]).abs().mean()


def distance(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target[:, None]).abs()


HERE = "tests.test_recipes"


def job_of(**keys: Any) -> Job:
    """101 rows in one batch, in shards of 34, 34 and 33 rows."""
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": "tests.support.training:Pairs",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "batch_size": 101,
        "shards": 3,
        "workers": 2,
        **keys,
    }
    return Job.make(given, "job")


@pytest.mark.parametrize("task", ["train", "evaluate"])
@pytest.mark.parametrize("inputs", ["auto", "all", "first"])
def test_dict_items_are_answered_with_one_recipe(tmp_path: Path, task: str, inputs: str) -> None:
    given = job_of(task=task, dataset=f"{HERE}:Items", loss="torch.nn:CrossEntropyLoss", inputs=inputs)
    with pytest.raises(ProcessExit) as raised:
        run_group(given, tmp_path)
    says = str(raised.value)
    assert f"task {task} needs items that are (inputs, target), got a batch of a dict; name keys of its items" in says
    assert "inputs: [x] and target: y (it has " in says
    assert "{'loss': (outputs.loss * n, n), 'outputs': outputs.logits, 'target': batch['labels']}" in says
    assert "set inputs: all" not in says


BEFORE_AND_AFTER = [
    ({"loss": f"{HERE}:entropy_of_one_number"}, {"loss": f"{HERE}:entropy"}),
    (
        {"step": f"{HERE}:step_of_one_number", "model": f"{HERE}:WithLoss", "dataset": f"{HERE}:Items"},
        {"step": f"{HERE}:step", "model": f"{HERE}:WithLoss", "dataset": f"{HERE}:Items"},
    ),
    ({"loss": f"{HERE}:distance_of_one_number"}, {"loss": f"{HERE}:distance"}),
]


@pytest.mark.parametrize(("before", "after"), BEFORE_AND_AFTER)
def test_the_three_losses_of_one_number(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Written as for one GPU they are an error; written as docs/training.md says, they are what they were there."""
    with pytest.raises(ProcessExit, match="returned one number for a shard") as raised:
        run_group(job_of(**before), tmp_path / "before")
    assert "(loss * n, n)" in str(raised.value)
    run_group(job_of(**after), tmp_path / "after")
    assert history_of(tmp_path / "after")[0]["loss"] == pytest.approx(on_one_gpu(before), rel=1e-6)


def on_one_gpu(before: dict[str, Any]) -> float:
    """The loss over the whole batch, in one process."""
    torch.manual_seed(0)
    if "step" in before:
        model, items = WithLoss(), Items()
        batch = torch.utils.data.default_collate([items[index] for index in range(101)])
        return float(model(**batch).loss.detach())
    data = training.Pairs()
    name = str(before["loss"]).partition(":")[2]
    return float(globals()[name](training.mlp()(data.inputs), data.targets).detach())


def test_the_recipe_stands_in_the_docs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    assert '{"loss": (outputs.loss * n, n), "outputs": outputs.logits, "target": batch["labels"]}' in page

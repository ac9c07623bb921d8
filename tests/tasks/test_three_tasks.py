"""One job file for three tasks: what evaluate and predict take of a training's file."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dp_ray
from dp_ray.job.job import Job
from dp_ray.messages import Note
from dp_ray.rundir.ledger import PARTS
from tests.support import models, training
from tests.support.group import run_group
from tests.support.three_tasks import FILE, UNTRAINED

pytestmark = pytest.mark.usefixtures("in_project")


def keys(folder: Path, **others: Any) -> dict[str, Any]:
    return {**FILE, "workers": 0, "storage": str(folder), "name": "run", **others}


def notes(messages: list[Any]) -> list[str]:
    return [message.text for message in messages if isinstance(message, Note)]


def test_evaluate_measures_the_dataset_of_eval(tmp_path: Path) -> None:
    """All 20 rows, in batches of 6, whatever the training shuffles and drops."""
    result = dp_ray.run(**keys(tmp_path, task="evaluate"))
    data, model = training.Pairs(20), mlp()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(data.inputs), data.targets).item()
    assert (result.rows, result.batch_size, result.steps) == (20, 6, 4)
    assert result.metrics["loss"] == pytest.approx(expected, rel=1e-6)


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return training.mlp().eval()


def test_evaluate_measures_what_the_training_did_at_its_end(tmp_path: Path) -> None:
    trained = dp_ray.run(**keys(tmp_path, name="trained", quiet=True))
    found = dp_ray.run(**keys(tmp_path, task="evaluate", init_from=trained.run_dir, quiet=True))
    assert {f"eval_{name}": value for name, value in found.metrics.items()} == {
        name: value for name, value in trained.metrics.items() if name.startswith("eval_")
    }


def test_random_data_of_an_evaluation_is_that_of_the_training(tmp_path: Path) -> None:
    """What a dataset draws while it is built is keyed by the key that it stands under."""
    data = {"dataset": "tests.tasks.test_three_tasks:Drawn", "batch_size": 6}
    trained = dp_ray.run(**keys(tmp_path, name="trained", quiet=True, eval=data))
    found = dp_ray.run(**keys(tmp_path, task="evaluate", init_from=trained.run_dir, quiet=True, eval=data))
    assert found.metrics["loss"] == trained.metrics["eval_loss"]


class Drawn(training.Pairs):
    """20 pairs drawn from torch's global generator."""

    def __init__(self) -> None:
        super().__init__(20)
        self.inputs = torch.randn(20, 6)


def test_the_plan_is_that_of_the_evaluation(tmp_path: Path) -> None:
    job = Job.make(keys(tmp_path, task="evaluate"), "job")
    assert job.for_task().batch_size == 6
    assert job.for_task().for_task() == job.for_task()
    assert Job.make(keys(tmp_path), "job").for_task().batch_size == 22


@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_weights_that_nobody_trained_are_said(tmp_path: Path, task: str) -> None:
    job = Job.make(keys(tmp_path, task=task, workers=2, inputs="first"), "job")
    told = notes(run_group(job, tmp_path))
    assert [one for one in told if UNTRAINED in one] == [one for one in told if "untrained" in one]
    assert sum(UNTRAINED in one for one in told) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"model": models.Linear()},  # an object has the weights that it came with
        {"model": "tests.support.models:Doubler"},  # has no weights
        {"model": "tests.support.models:Linear", "init_from": "linear.pt"},
    ],
)
def test_other_weights_are_not(tmp_path: Path, given: dict[str, Any]) -> None:
    torch.save(models.Linear().state_dict(), tmp_path / "linear.pt")
    if "init_from" in given:
        given = {**given, "init_from": str(tmp_path / "linear.pt")}
    job = Job.make({"dataset": models.Rows(20), "batch_size": 7, **given}, "job")
    assert not any("untrained" in note for note in notes(run_group(job, tmp_path)))
    assert (tmp_path / PARTS).exists()

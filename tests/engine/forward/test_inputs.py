"""What of an item the model gets: `inputs: auto` asks the model's signature, and says what it leaves out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import Note
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support import models, training
from tests.support.merging import merged

FIRST, SECOND = models.Rows(20).data, models.Rows(20).data.flip(0)
PAIRS = TensorDataset(FIRST, SECOND)
LEFT_OUT = "inputs: auto gives the model the first of each pair (inputs, target), and leaves the target out"


class One(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


class Keyword(nn.Module):
    def forward(self, rows: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return rows * scale


class Two(nn.Module):
    def forward(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return rows - other


class Maybe(nn.Module):
    def forward(self, rows: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return rows * 2 if other is None else rows - other


class Named(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


class WithTarget:
    """Items (dict of inputs, target)."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"rows": FIRST[index]}, index


class Nested(WithTarget):
    """Items ((input, other input), target)."""

    def __getitem__(self, index: int) -> Any:
        return (FIRST[index], SECOND[index]), index


def predicted(folder: Path, model: Any, dataset: Any, **keys: Any) -> tuple[Merged, list[str]]:
    """The merged outputs of two workers, one after another, and what they told."""
    job = Job.make({"model": model, "dataset": dataset, "batch_size": 7, "workers": 2, **keys}, "job")
    run, told = Storage(str(folder)), list[Any]()
    run.child(PARTS).create()
    for rank in range(2):
        run_task(job, World(rank, 2), run, told.append)
    return merged(job, run, len(dataset)), [message.text for message in told if isinstance(message, Note)]


LOSS = {"loss": "torch.nn:MSELoss"}
DOUBLE, DIFFERENCE = FIRST * 2, FIRST - SECOND


@pytest.mark.parametrize(
    ("model", "dataset", "keys", "expected", "left_out"),
    [
        (One(), PAIRS, {}, DOUBLE, True),
        (Keyword(), PAIRS, {}, DOUBLE, True),
        (One(), models.Rows(20), {}, DOUBLE, False),
        (Two(), PAIRS, {}, DIFFERENCE, False),
        (Two(), PAIRS, LOSS, DIFFERENCE, False),  # what it must have is no target
        (Maybe(), PAIRS, {}, DIFFERENCE, False),
        (Maybe(), PAIRS, LOSS, DOUBLE, True),  # of a job with a loss, items are (inputs, target)
        (Maybe(), PAIRS, {"inputs": "first"}, DOUBLE, False),
        (Named(), WithTarget(), {"call": "kwargs"}, DOUBLE, True),
        (Two(), Nested(), LOSS, DIFFERENCE, True),
    ],
)
def test_the_model_gets_what_its_signature_takes(
    tmp_path: Path, model: Any, dataset: Any, keys: dict[str, Any], expected: torch.Tensor, left_out: bool
) -> None:
    merged, told = predicted(tmp_path, model, dataset, **keys)
    assert torch.equal(merged.read(), expected)
    assert [one for one in told if "leaves the target out" in one] == [LEFT_OUT] * left_out


def test_what_may_be_a_target_and_is_given_to_the_model_is_told(tmp_path: Path) -> None:
    _, told = predicted(tmp_path, Maybe(), PAIRS)
    assert told == [
        "inputs: auto gives the model both of each pair, as its forward may take two; if the second is a target, "
        "set inputs: first"
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_module_is_asked_too(tmp_path: Path) -> None:
    data = training.Images()
    merged, told = predicted(tmp_path, training.scripted(), data)
    assert len(merged.read()) == len(data)
    assert told == [LEFT_OUT]


@pytest.mark.parametrize(
    ("order", "expected"), [("dataset", range(20)), ("shuffled", Order(20, 0, 0).indices(0, 20))]
)
def test_outputs_come_in_the_order_of_the_dataset_unless_it_is_asked_for(
    tmp_path: Path, order: str, expected: Any
) -> None:
    merged, _ = predicted(tmp_path, One(), models.Rows(20), shuffle=True, order=order)
    assert merged.sample_index().tolist() == list(expected)
    assert torch.equal(merged.read(), DOUBLE[list(expected)])


def test_a_prediction_does_not_depend_on_how_a_training_shuffles() -> None:
    keys: dict[str, Any] = {"model": "a:b", "dataset": "a:c", "batch_size": 3}
    prints = {Job.make({**keys, "shuffle": shuffle}, "job").fingerprint() for shuffle in (True, False)}
    assert len(prints) == 1
    assert Job.make({**keys, "order": "shuffled"}, "job").fingerprint() not in prints

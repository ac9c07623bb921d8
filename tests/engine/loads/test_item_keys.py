"""`inputs: [keys]` and `target: key`: a table trains and predicts with a model and a job file alone."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import dp_ray
from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from tests.support.models import Rows

ROWS = 30
KEYS: dict[str, Any] = {
    "model": {"target": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 2}},
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
    "batch_size": 7,
    "workers": 0,
    "shards": 3,
    "quiet": True,
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 3, generator=generator), torch.arange(ROWS) % 2


@pytest.fixture
def table(tmp_path: Path) -> str:
    inputs, labels = data()
    columns = {"x": inputs.tolist(), "label": labels.tolist(), "note": [f"row {n}" for n in range(ROWS)]}
    schema = pa.schema([("x", pa.list_(pa.float32())), ("label", pa.int64()), ("note", pa.string())])
    pq.write_table(pa.table(columns, schema=schema), tmp_path / "rows.parquet", row_group_size=4)
    return str(tmp_path / "rows.parquet")


@pytest.mark.full
@pytest.mark.slow
def test_a_table_trains_as_pairs_do(table: str, tmp_path: Path) -> None:
    keys = {**KEYS, "task": "train", "shuffle": True, "epochs": 2, "storage": str(tmp_path)}
    pairs = torch.utils.data.TensorDataset(*data())
    source = {"target": "dp_ray.data:Parquet", "args": {"paths": table}}
    by_keys = dp_ray.run(**keys, name="keys", dataset=source, inputs=["x"], target="label")
    assert by_keys.weights_sha256 == dp_ray.run(**keys, name="pairs", dataset=pairs).weights_sha256
    with_processes = {"processes": 2}
    loaded = dp_ray.run(**keys, name="l", dataset=source, inputs=["x"], target="label", loader=with_processes)
    assert loaded.weights_sha256 == by_keys.weights_sha256


def test_a_table_is_evaluated_and_predicted_as_pairs_are(table: str, tmp_path: Path) -> None:
    keys = {**KEYS, "storage": str(tmp_path)}
    pairs = torch.utils.data.TensorDataset(*data())
    source = {"target": "dp_ray.data:Parquet", "args": {"paths": table}}
    picks: dict[str, Any] = {"dataset": source, "inputs": ["x"], "target": "label"}
    measured = dp_ray.run(**keys, task="evaluate", name="keys", **picks).metrics
    assert measured == dp_ray.run(**keys, task="evaluate", name="pairs", dataset=pairs).metrics
    outputs = dp_ray.run(**keys, task="predict", name="predict", **picks).outputs
    assert torch.equal(outputs, dp_ray.run(**keys, task="predict", name="x", dataset=Inputs(), inputs="all").outputs)


class Inputs(Rows):
    """The inputs alone."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.data = data()[0]


class TakesNames(torch.nn.Linear):
    """A model with arguments by name."""

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + label[:, None]


def test_several_keys_give_a_dict_which_kwargs_spreads(table: str, tmp_path: Path) -> None:
    source = {"target": "dp_ray.data:Parquet", "args": {"paths": table}}
    model = TakesNames(3, 2)
    keys: dict[str, Any] = {**KEYS, "model": model, "dataset": source, "storage": str(tmp_path), "name": "run"}
    result = dp_ray.run(**keys, task="predict", inputs=["x", "label"], call="kwargs")
    with torch.inference_mode():
        assert torch.allclose(result.outputs, model(*data()), atol=1e-6)


def test_a_key_that_is_not_there_is_named_with_the_sample(table: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**KEYS, "storage": str(tmp_path), "name": "run"}
    source = {"target": "dp_ray.data:Parquet", "args": {"paths": table}}
    with pytest.raises(
        DataError, match=r"sample 0 of the dataset: there is no 'xx'; .*; the item has x, label, note"
    ):
        dp_ray.run(**keys, task="predict", dataset=source, inputs=["xx"])
    pairs = torch.utils.data.TensorDataset(*data())
    with pytest.raises(DataError, match=r"sample 0 of the dataset: .* must be a dict; got a tuple of 2"):
        dp_ray.run(**keys, task="predict", dataset=pairs, inputs=["x"], overwrite=True)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"target": "label"}, "target: needs inputs to be a list of keys, like [image]; got inputs: auto"),
        (
            {"inputs": ["x"], "task": "train"},
            "target: is missing; task train with inputs: ['x'] needs the key of its target",
        ),
        ({"inputs": []}, "inputs: "),
    ],
)
def test_keys_that_do_not_belong_together_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError) as caught:
        Job.make({**{k: v for k, v in KEYS.items() if k != "quiet"}, "dataset": "a:b", **keys}, "job")
    assert says in str(caught.value)


def test_the_keys_are_part_of_a_jobs_identity_and_their_absence_changes_none() -> None:
    def job(**keys: Any) -> Job:
        return Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 3, "workers": 1, **keys}, "job")

    assert job(inputs=["x"]).fingerprint() != job(inputs=["y"]).fingerprint()
    assert job(inputs=["x"], target="y").fingerprint() != job(inputs=["x"], target="z").fingerprint()
    assert job().fingerprint() == "a60a221bfa4f4f3873ab73b80564526af48dc7418ce5ea20d254e0ea7adbad61"

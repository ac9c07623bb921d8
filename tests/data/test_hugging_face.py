"""A Hugging Face dataset on disk: a job file alone trains and predicts with what `datasets` has saved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import dp_ray
from dp_ray.engine.loads.items import ItemKeys
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from tests.support.group import run_group, weights_of

datasets = pytest.importorskip("datasets", reason="needs the package datasets: pip install datasets")

ROWS = 22
JOB = """\
model: {{target: "torch.nn:Linear", args: {{in_features: 3, out_features: 1}}}}
dataset: {{target: "datasets:load_from_disk", args: {{dataset_path: "{folder}"}}}}
inputs: [x]
target: y
loss: "tests.data.test_hugging_face:squares"
optimizer: {{target: "torch.optim:SGD", args: {{lr: 0.1}}}}
batch_size: 7
shards: 3
workers: 0
epochs: 2
shuffle: true
bitwise: true
"""


def squares(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - target) ** 2


def columns() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(5))
    return numbers, numbers.sum(1)


class InMemory(torch.utils.data.Dataset[Any]):
    """The same rows in memory, in pairs."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in columns())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    x, y = columns()
    given = {"x": x.tolist(), "y": y.tolist(), "text": [f"row {n}" for n in range(ROWS)]}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(given).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.full
@pytest.mark.slow
def test_a_job_file_alone_trains_and_predicts(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.format(folder=saved))
    keys: dict[str, Any] = {"storage": str(tmp_path), "quiet": True}
    memory = {"dataset": InMemory, "inputs": "auto", "target": None}
    job = str(tmp_path / "job.yaml")
    wanted = dp_ray.run(job, task="train", name="memory", **keys, **memory)
    for processes in (0, 2):
        trained = dp_ray.run(job, task="train", name=f"l-{processes}", loader={"processes": processes}, **keys)
        assert trained.weights_sha256 == wanted.weights_sha256
    outputs = dp_ray.run(job, task="predict", name="outputs", **keys).outputs
    memory["inputs"] = "first"
    assert torch.equal(outputs, dp_ray.run(job, task="predict", name="wanted", **keys, **memory).outputs)


@pytest.mark.slow
def test_workers_train_the_same_weights(saved: Path, tmp_path: Path) -> None:
    keys = yaml.safe_load(JOB.format(folder=saved)) | {"task": "train"}
    memory = {"dataset": "tests.data.test_hugging_face:InMemory", "inputs": "auto", "target": None}
    run_group(Job.make({**keys, **memory, "workers": 1}, "job"), tmp_path / "one")
    run_group(Job.make({**keys, "workers": 2}, "job"), tmp_path / "two")
    first, second = (weights_of(tmp_path / name) for name in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_default_collate_gets_tensors_of_lists_and_images() -> None:
    item = {"x": [1.5, 2], "n": 3, "f": 0.1, "m": [[1, 2], [3, 4]], "t": ["a"], "u": [[1], []]}
    item["image"] = Image.fromarray(np.full((2, 5), 7, np.uint8))
    picked = ItemKeys([*item], None, as_tensors=True).pick(item)
    assert {key: (value.dtype, value.tolist()) for key, value in picked.items() if hasattr(value, "dtype")} == {
        "x": (torch.float32, [1.5, 2]),
        "f": (np.dtype(np.float32), np.float32(0.1).item()),
        "m": (torch.int64, [[1, 2], [3, 4]]),
        "image": (torch.uint8, [[[7] * 5] * 2] * 3),
    }
    assert (picked["n"], picked["t"], picked["u"]) == (3, ["a"], [[1], []])
    assert (
        ItemKeys([*item], None, as_tensors=False).pick(item) == item
    )  # a collate of the user's gets them as they are


def test_a_folder_of_several_splits_is_refused_with_their_names(saved: Path, tmp_path: Path) -> None:
    table = datasets.load_from_disk(saved)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "splits")
    (tmp_path / "job.yaml").write_text(JOB.format(folder=tmp_path / "splits"))
    says = r"dataset: must be indexed by numbers; DatasetDict has train, test; give one of them: .*FOLDER/train"
    with pytest.raises(JobError, match=says):
        dp_ray.run(str(tmp_path / "job.yaml"), storage=str(tmp_path), quiet=True)

"""What cannot work is said before workers start, and what will surprise is told in a line."""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import PIL.Image
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import dp_ray
from dp_ray.data import Csv
from dp_ray.driver.planning import plan_job
from dp_ray.engine.forward.step import build_loss
from dp_ray.errors import Error, JobError, StorageError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target
from dp_ray.monitor.in_process import InProcess
from dp_ray.plan.costs import remarks
from dp_ray.plan.split import Split
from dp_ray.system import imports
from tests.support import training
from tests.support.cli import status_of
from tests.support.trainings import keys_of

HERE = "tests.driver.test_checks"


class NoModule:
    """Called as one, but none."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


class Metaclassed(type):
    def __call__(cls) -> nn.Module:
        return training.mlp()


class Factory(metaclass=Metaclassed):
    """A class that gives a module when it is called."""


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return training.Pairs()[index]


class Stream(IterableDataset[Any]):
    """Has a length, and yet no item has a number."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def loader() -> Any:
    return DataLoader(training.Pairs())


def top(outputs: Any, target: Any) -> Any:
    return outputs


class Top:
    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, outputs: Any, target: Any) -> Any:
        return outputs


made = training.mlp()
PAIRS, LOSS = "tests.support.training:Pairs", "torch.nn:CrossEntropyLoss"
ADVICE = "use fewer workers or a larger batch_size"


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test in which a run comes as far as its task fails."""

    def run(*_: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(InProcess, "run", run)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        (
            {"model": f"{HERE}:NoModule"},
            JobError,
            "model: must give a torch.nn.Module, and NoModule is no subclass of it",
        ),
        ({"model": NoModule()}, JobError, "model: must be a torch.nn.Module, got a NoModule"),
        (
            {"model": f"{HERE}:made"},
            JobError,
            f"model: {HERE}:made is a Sequential that is made already; name its class",
        ),
        ({"dataset": f"{HERE}:NoLength"}, JobError, "dataset: must be map-style, .*; NoLength lacks __len__"),
        ({"dataset": f"{HERE}:Stream"}, JobError, "dataset: must be map-style, .*; Stream lacks __getitem__"),
        ({"dataset": f"{HERE}:loader"}, JobError, "DataLoader lacks __getitem__; give the dataset that it loads"),
        ({"eval": {"dataset": f"{HERE}:Stream"}}, JobError, "eval.dataset: must be map-style, .*; Stream lacks"),
        (
            {"optimizer": f"{HERE}:NoModule"},
            JobError,
            "optimizer: must give a torch.optim.Optimizer, and NoModule is no",
        ),
        ({"model": {"target": "torch.nn:Linear", "args": {"sizes": 2}}}, JobError, "model.args: .* takes no 'sizes'"),
        ({"dataset": {"target": PAIRS, "args": {"rows": 2}}}, JobError, "dataset.args: .* takes no 'rows'"),
        ({"loss": "torch.nn:CrossEntropyLos"}, JobError, "loss: .* did you mean 'CrossEntropyLoss'"),
        ({"loss": {"target": LOSS, "args": {"smooth": 2}}}, JobError, "loss.args: .* takes no 'smooth'"),
        ({"metrics": {"other": f"{HERE}:Top"}}, JobError, "metrics.other.args: .*missing a required argument: 'n'"),
        ({"metrics": {"top": {"target": f"{HERE}:top", "args": {"n": 3}}}}, JobError, "metrics.top.args: .* no 'n'"),
        ({"optimizer": {"target": "torch.optim:SGD", "args": {"r": 1}}}, JobError, "optimizer.args: .* takes no 'r'"),
        ({"collate": {"target": f"{HERE}:top", "args": {"n": 3}}}, JobError, "collate.args: .* takes no 'n'"),
        ({"loss": None, "step": {"target": f"{HERE}:top", "args": {"n": 3}}}, JobError, "step.args: .* takes no 'n'"),
    ],
)
def test_what_cannot_work_is_said_before_a_worker_starts(
    tmp_path: Path, keys: dict[str, Any], error: type[Error], says: str
) -> None:
    with pytest.raises(error, match=says):
        dp_ray.run(**keys_of(storage=str(tmp_path), name="run", **keys))
    job = {key: one for key, one in keys_of(storage=str(tmp_path), **keys).items() if key != "quiet"}
    with pytest.raises(error, match=says):
        plan_job(Job.make(job, "run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("in_project")
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
def test_the_plan_of_a_job_that_no_run_would_take_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    args = ["plan", "jobs/tutorial.yaml", "--set", "model.args.sizes=1", "--storage", str(tmp_path), *more]
    assert status_of(monkeypatch, *args) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == ("error: model.args: jobs.tutorial:Model takes no 'sizes', but input_size, output_size\n")


def test_the_plan_says_what_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run says the same as an error. The plan may be of another machine, so there it is a remark."""
    keys = keys_of(storage=str(tmp_path), name="run", init_from=str(tmp_path / "no.pt"), trackers=["wandb"])
    monkeypatch.setattr(imports, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    plan = plan_job(Job.make({key: one for key, one in keys.items() if key != "quiet"}, "run"))
    missing, lacking = plan.remarks
    assert missing == f"a run would not start: init_from: there is no file {tmp_path}/no.pt"
    assert lacking == "a run would not start: trackers: wandb is not installed; pip install 'dp-ray[wandb]'"
    with pytest.raises(JobError, match=r"^trackers: wandb is not installed"):
        dp_ray.run(**keys)
    with pytest.raises(JobError, match=r"^init_from: there is no file"):
        dp_ray.run(**{**keys, "trackers": []})
    assert not list(tmp_path.iterdir())


def test_a_class_that_gives_a_module_is_one(tmp_path: Path) -> None:
    done = dp_ray.run(**keys_of(storage=str(tmp_path), model=f"{HERE}:Factory"))
    assert done.status == "done"


def test_a_folder_without_write_permission_says_what_to_set() -> None:
    says = r"cannot be made: .*Permission denied; set storage to a folder that you may read and write$"
    is_root = os.geteuid() == 0
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        try:
            if is_root:
                os.seteuid(65534)  # nobody
            with pytest.raises(StorageError, match=says):
                dp_ray.run(**keys_of(storage=folder))
        finally:
            if is_root:
                os.seteuid(0)


@pytest.mark.parametrize(
    ("split", "workers", "says"),
    [
        (Split(100, 30, 4), 4, []),
        (Split(30, 30, 4), 4, []),
        (Split(20, 30, 4), 4, ["batch_size 30 is larger than the dataset: its 20 rows are one batch"]),
        (
            Split(100, 3, 8),
            8,
            ["5 of 8 workers never have a row: the largest batch is 3 rows in 3 shards; " + ADVICE],
        ),
        # 10 rows in 8 shards are 2, 2, 2, 2, 2 and three empty ones, as torch.chunk cuts them.
        (
            Split(100, 10, 8),
            8,
            ["3 of 8 workers never have a row: the largest batch is 10 rows in 5 shards; " + ADVICE],
        ),
        (
            Split(100, 10, 8),
            4,
            ["1 of 4 workers never has a row: the largest batch is 10 rows in 5 shards; " + ADVICE],
        ),
        (Split(100, 10, 8), 0, []),
    ],
)
def test_batches_that_leave_workers_idle_are_told(split: Split, workers: int, says: list[str]) -> None:
    assert remarks(split, workers) == says


@pytest.mark.usefixtures("in_project")
def test_the_plan_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", "jobs/tutorial.yaml", "--workers", "3", "--set", "batch_size=300", "--set", f"storage={tmp_path}"]
    assert status_of(monkeypatch, *args) == 0
    line = "batch_size 300 is larger than the dataset: its 100 rows are one batch"
    assert line in capsys.readouterr().out.splitlines()
    assert status_of(monkeypatch, *args, "--json") == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == [line]


def test_a_run_tells_them_at_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    f1 = {"target": "torchmetrics.classification:MulticlassF1Score", "args": {"num_classes": 3}}
    keys = keys_of(storage=str(tmp_path), name="run", quiet=False, batch_size=512, metrics={"f1": f1})
    dp_ray.run(**keys)
    told = capsys.readouterr().err
    assert "run: batch_size 512 is larger than the dataset: its 101 rows are one batch\n" in told
    assert (
        "run: metrics.f1: is measured over a whole dataset, so by evaluations only, and there are none: set eval\n"
        in told
    )
    dp_ray.run(**{**keys, "name": "other", "eval": {"dataset": "tests.support.training:Pairs"}})
    assert "metrics.f1: is" not in capsys.readouterr().err


LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 2, 1, 0])


@pytest.mark.parametrize(
    "given",
    [
        {"target": "torch.nn:CrossEntropyLoss", "args": {"weight": [1, 2, 3]}},
        {"target": "torch.nn.functional:cross_entropy", "args": {"weight": [1, 2, 3]}},
    ],
)
def test_integer_class_weights_are_cast(given: Any) -> None:
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 3, "loss": given}, "job")
    total, weight = build_loss(job.loss, torch.device("cpu"))(LOGITS, CLASSES)
    expected = nn.functional.cross_entropy(LOGITS, CLASSES, weight=torch.tensor([1.0, 2.0, 3.0]))
    assert (total / weight).item() == pytest.approx(expected.item(), rel=1e-6)


def test_integer_weights_of_positives_are_cast() -> None:
    loss = build_loss(
        Target(target="torch.nn:BCEWithLogitsLoss", args={"pos_weight": [2, 3, 4]}), torch.device("cpu")
    )
    target = (LOGITS > 0).float()
    expected = nn.functional.binary_cross_entropy_with_logits(
        LOGITS, target, pos_weight=torch.tensor([2.0, 3.0, 4.0]), reduction="none"
    )
    assert torch.equal(loss(LOGITS, target), expected)


class Wrapped(Dataset[Any]):
    """A dataset of a user's own, around another one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset: Any = torch.utils.data.ConcatDataset([dataset])

    @property
    def classes(self) -> Any:
        raise RuntimeError("nobody is to ask")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def test_what_is_read_otherwise_is_told_by_the_plan_and_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids are the same in a batch, in what is carried and in the outputs, whichever file has the one that tells."""
    (tmp_path / "a.csv").write_text("id,zip,x\n1,01234,0.5\n")
    (tmp_path / "b.csv").write_text("id,zip,x\n16777217.0,90210,1.5\n16777219.0,10001,2.5\n")
    ids, keys = [1, 16777217, 16777219], {"inputs": ["x"], "outputs": {"carry": ["id", "zip"]}, "batch_size": 2}
    data = Wrapped(Csv([tmp_path / "a.csv", tmp_path / "b.csv"]))
    lines = [
        f"{tmp_path}/a.csv: column 'id' is read as int64, since float32 would change its numbers; "
        "types: {id: float32} reads it so",
        f"{tmp_path}/a.csv: column 'zip' is read as text, since numbers would lose its leading zeros; "
        "types: {zip: int64} reads numbers",
    ]
    result = dp_ray.run(model=nn.Identity(), dataset=data, **keys, workers=0, storage=str(tmp_path / "runs"))
    table = pd.read_parquet(Path(result.run_dir) / "outputs")
    assert table["id"].tolist() == ids
    assert table["id"].dtype == "int64"
    assert table["zip"].tolist() == ["01234", "90210", "10001"]
    assert [value for batch in result.batches() for value in batch.tolist()] == [0.5, 1.5, 2.5]
    told = capsys.readouterr().err
    assert all(told.count(line) == 1 for line in lines)


def write_images(folder: Path) -> None:
    """Write images of three classes to train on, and of two of them to test."""
    for name in ("train/ant/1.png", "train/bee/2.png", "train/cat/3.png", "test/ant/4.png", "test/cat/5.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("RGB", (2, 2)).save(folder / name)


def test_classes_that_differ_between_training_and_evaluation_are_told(tmp_path: Path) -> None:
    write_images(tmp_path)

    def plan(**more: Any) -> tuple[str, ...]:
        test, train = (
            {"target": "dp_ray.data:Images", "args": {"paths": str(tmp_path / name), **more}}
            for name in ("test", "train")
        )
        keys = keys_of(storage=str(tmp_path), name="run", dataset=train, eval={"dataset": test}, batch_size=2)
        return plan_job(Job.make({key: value for key, value in keys.items() if key != "quiet"}, "run")).remarks

    assert plan(classes=True) == (
        "eval.dataset and dataset: the classes bee are in one alone, so their labels differ; give both the same "
        "class_names",
    )
    assert plan(class_names=["ant", "bee", "cat"]) == ()


class Flat(nn.Linear):
    """A model of images of 2 by 2."""

    def __init__(self) -> None:
        super().__init__(12, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image.flatten(1).float())


@pytest.mark.parametrize("shards", [1, "auto"])
def test_an_evaluation_of_a_run_is_told_which_classes_differ(
    tmp_path: Path, shards: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path)

    def run(task: str, folder: str, **images: Any) -> tuple[dp_ray.Result, str]:
        keys = {"name": f"{task}-{len(images['class_names'] or ())}", "model": f"{HERE}:Flat", "batch_size": 3}
        keys |= {"dataset": {"target": "dp_ray.data:Images", "args": {"paths": str(tmp_path / folder), **images}}}
        keys |= {"inputs": ["image"], "target": "label", "loss": "torch.nn:CrossEntropyLoss", "shards": shards}
        if task == "train":
            keys |= {"epochs": 1, "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}}
        else:
            keys["init_from"] = str(tmp_path / "runs" / "train-0")
        result = dp_ray.run(task=task, workers=0, storage=str(tmp_path / "runs"), **keys)
        return result, capsys.readouterr().err

    run("train", "train", classes=True, class_names=None)
    says = (
        f"dataset and the training of {tmp_path}/runs/train-0: the classes bee are in one alone, so their labels "
        "differ; give both the same class_names"
    )
    assert says in run("evaluate", "test", classes=True, class_names=None)[1]
    assert "so their labels differ" not in run("evaluate", "test", class_names=["ant", "bee", "cat"])[1]

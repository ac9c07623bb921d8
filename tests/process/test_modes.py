"""What a script has set in torch holds on workers too, and is kept with the run."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.job.job import Job
from dp_ray.process.modes import as_in_script, script_modes
from dp_ray.process.settings import restoring
from dp_ray.rundir.files import RUN_JSON
from dp_ray.storage import Storage
from dp_ray.system.imports import import_from, own_folders
from tests.support.cluster import Run
from tests.support.group import run_group, weights_of

KEYS: dict[str, Any] = {
    "task": "train",
    "loss": nn.MSELoss,
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with restoring([]):
        yield


def as_the_script_sets_it() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    torch.use_deterministic_algorithms(True, warn_only=True)


def settings() -> dict[str, Any]:
    return {
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    }


EXPECTED = {
    "dtype": torch.float64,
    "precision": "medium",
    "anomaly": (True, False),
    "deterministic": (True, True),
}


class Checking(nn.Linear):
    """A model that is built under the script's settings alone."""

    def __init__(self, is_bitwise: bool) -> None:
        assert settings() == {**EXPECTED, "deterministic": (True, not is_bitwise)}, settings()
        super().__init__(2, 1)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index / 8, 1.0]), torch.tensor([1.0])


@pytest.mark.parametrize("is_bitwise", [False, True])
def test_workers_have_what_the_script_has_set_and_bitwise_goes_before_it(tmp_path: Path, is_bitwise: bool) -> None:
    as_the_script_sets_it()
    RUN_JSON.write(Storage(str(tmp_path)), {"modes": script_modes()})
    model = {"target": Checking, "args": {"is_bitwise": is_bitwise}}
    given = {**KEYS, "model": model, "dataset": Rows, "batch_size": 4, "workers": 2, "bitwise": is_bitwise}
    run_group(Job.make(given, "job"), tmp_path)
    assert weights_of(tmp_path)["weight"].dtype == torch.float64


@pytest.mark.full
@pytest.mark.ray
def test_workers_on_ray_train_the_weights_of_the_script(run_in_session: Run, tmp_path: Path) -> None:
    as_the_script_sets_it()
    model = {"target": f"{__name__}:Checking", "args": {"is_bitwise": True}}
    keys: dict[str, Any] = {**KEYS, "model": model, "dataset": f"{__name__}:Rows", "batch_size": 4, "shards": 2}
    here = dp_ray.run(**keys, workers=0, bitwise=True, storage=str(tmp_path), name="here", quiet=True)
    there = run_in_session(**keys, workers=2, bitwise=True)
    assert there.weights["weight"].dtype == torch.float64
    assert there.weights_sha256 == here.weights_sha256


def test_a_run_goes_on_under_the_settings_with_which_it_began(tmp_path: Path) -> None:
    before = settings()
    given = {**KEYS, "model": nn.Linear, "model_args": {"in_features": 2, "out_features": 1}, "dataset": Rows}
    given |= {"batch_size": 4, "workers": 0, "storage": str(tmp_path), "name": "run", "quiet": True}
    as_the_script_sets_it()
    assert dp_ray.run(**given).weights["weight"].dtype == torch.float64
    with as_in_script({"default_dtype": "float32", "anomaly": [False, True]}):
        assert torch.get_default_dtype() == torch.float32
        kept = settings()
        longer = dp_ray.run(**given, epochs=2)
        assert settings() == kept, "the script's own settings stay"
    assert longer.weights["weight"].dtype == torch.float64
    assert longer.total_steps == 4
    assert settings() == EXPECTED != before


def test_modules_are_found_in_the_scripts_folders_where_these_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    folders = own_folders()
    assert str(tmp_path) in folders
    assert not any("site-packages" in folder for folder in folders)
    monkeypatch.setattr("sys.path", ["/first"])
    import_from([str(tmp_path), str(tmp_path / "nowhere"), "/first"])
    assert sys.path == ["/first", str(tmp_path)]

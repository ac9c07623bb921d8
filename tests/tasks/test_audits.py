"""Audits below Ray, in processes with gloo: who computes wrong is found, and nobody else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dp_ray.job.job import Job
from tests.support.group import ProcessExit, history_of, run_group, weights_of
from tests.support.trainings import job_of

KEYS: dict[str, Any] = {
    "batch_size": 24,
    "shards": 6,
    "bitwise": True,
    "epochs": 4,
    "audit": 1,
    "optimizer": {"target": "tests.support.faulty:Sgd", "args": {"lr": 0.1}},
    "checkpoint": {"every_steps": 1, "every_seconds": None, "keep": 1},
}


def made(fault: list[Any] | None = None, data: Any = "Pairs", **keys: Any) -> Job:
    model = {"target": "tests.support.faulty:Kernels", "args": {"fault": fault}}
    return job_of(model, data, **{**KEYS, **keys})


def noted(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "audits.json").read_text()))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "run"
    run_group(made(workers=1, audit=None), folder)
    return folder


def assert_same(folder: Path, expected: Path) -> None:
    there, here = weights_of(expected), weights_of(folder)
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert history_of(folder) == history_of(expected)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_right_training_is_as_without_audits(tmp_path: Path, clean: Path, workers: int) -> None:
    told = run_group(made(workers=workers), tmp_path / "run")
    assert not [one for one in told if "audit" in str(one)]
    assert_same(tmp_path / "run", clean)


def test_a_steady_fault_convicts_its_worker(tmp_path: Path, clean: Path) -> None:
    with pytest.raises(ProcessExit, match="computes wrong"):
        run_group(made([2, "sizes", 60], workers=3), tmp_path / "run")
    assert [*noted(tmp_path / "run")["convicted"]] == ["localhost, cpu 2"]
    run_group(made(workers=2), tmp_path / "run")
    assert_same(tmp_path / "run", clean)

"""Runs that go on: on other workers, for longer, as Python objects; and what is told of them meanwhile."""

from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.job import Job
from dp_ray.rundir.claim import claim
from dp_ray.storage import Storage
from tests.group import StopsBefore, run_group, weights_of
from tests.test_trainer import job_of

pytestmark = pytest.mark.usefixtures("in_project")


def job(folder: Path, **keys: Any) -> Job:
    """A training of 45 steps of 7 rows."""
    given = {"name": "run", "storage": str(folder), "epochs": 3, "bitwise": True, "workers": 0}
    return job_of("mlp", **{**given, **keys})


def killed(folder: Path, before: int, **keys: Any) -> None:
    """A run of the job, killed before a step."""
    made = job(folder, **keys)
    claim(made, Storage(str(folder)), rows={"dataset": 101})
    run_group(made, folder / "run", StopsBefore(before))


def test_a_job_that_sets_no_shards_goes_on_on_other_numbers_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(tmp_path, 20, workers=2, checkpoint={"every_steps": 5})
    result = dp_ray.run(job(tmp_path, workers=0))
    told = [line for line in capsys.readouterr().err.splitlines() if "shards: " in line]
    assert told == ["run: shards: 2, with which this run began"]
    assert result.shards == 2
    run_group(job(tmp_path, workers=2), tmp_path / "undisturbed")
    undisturbed = weights_of(tmp_path / "undisturbed")
    assert all(result.weights[name].equal(undisturbed[name]) for name in undisturbed)

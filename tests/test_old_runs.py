"""Runs that an earlier version began and did not end: this one reports, loads and resumes them to the same bits."""

import json
import re
import shutil
from pathlib import Path

import pytest

import dp_ray
from tests.support import forked
from tests.support.cluster import ROOT
from tests.support.old_runs import AXIS, JOBS

VERSIONS = sorted(path.name for path in (ROOT / "tests" / "data").iterdir() if path.is_dir())


def program(*arguments: str) -> str:
    done = forked.ended(forked.dp_ray_program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "predict"])
@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_run_is_reported_resumed_and_loaded(version: str, name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "data" / version / name, tmp_path / name)
    program("report", str(tmp_path / name))
    job = tmp_path / "job.json"
    job.write_text(json.dumps(JOBS[name]))
    says = program("run", str(job), "--name", name, "--storage", str(tmp_path))
    assert re.search(rf"^{name}: resumed from step {3 if name == 'predict' else 4}(, 1 step again)?$", says, re.M)
    whole = dp_ray.run(**{**JOBS[name], "name": "whole", "storage": str(tmp_path), "quiet": True})
    result = dp_ray.load(tmp_path / name)
    assert (result.weights_sha256, result.outputs_sha256) == (whole.weights_sha256, whole.outputs_sha256)
    assert result.weights_sha256 or result.outputs_sha256


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_sweep_goes_on(version: str, tmp_path: Path) -> None:
    for one in ("sweep", "sweep-1", "sweep-2"):
        shutil.copytree(ROOT / "tests" / "data" / version / one, tmp_path / one)
    job = tmp_path / "job.json"
    job.write_text(json.dumps(JOBS["sweep"]))
    says = program("sweep", str(job), "--over", AXIS, "--name", "sweep", "--storage", str(tmp_path))
    assert "sweep-2: resumed from step 4\n" in says
    for number, lr in enumerate((0.01, 0.02), 1):
        optimizer = {"target": "torch.optim:AdamW", "args": {"lr": lr}}
        keys = {**JOBS["sweep"], "optimizer": optimizer, "name": f"whole-{number}", "storage": str(tmp_path)}
        whole = dp_ray.run(**{**keys, "quiet": True})
        assert dp_ray.load(tmp_path / f"sweep-{number}").weights_sha256 == whole.weights_sha256


def test_each_release_that_is_out_has_runs_that_this_version_is_tested_with() -> None:
    released = re.findall(r"^## (\d+\.\d+\.\d+) - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released
    there = {path.name for path in (ROOT / "tests" / "data").iterdir() if path.is_dir()}
    assert {"90f781f", *released} <= there
    assert all((ROOT / "tests" / "data" / one / "jobs.json").exists() for one in there), "of tests/test_old_jobs.py"

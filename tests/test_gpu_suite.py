"""The suite for a GPU runs on the CPU as far as that can show it, so that it fits the code when a GPU is at hand."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.cluster import ROOT

# Of one test, not of all: on a busy machine the suite takes as long as it needs. One that hangs says where.
EACH = ["-o", "faulthandler_timeout=900", "-o", "faulthandler_exit_on_timeout=true"]


@pytest.mark.full
@pytest.mark.slow
def test_the_suite_for_a_gpu_passes_on_the_cpu(tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    line = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *EACH, "tests/gpu"]
    environment = {**kept, "DP_RAY_GPU_SUITE_ON": "cpu"}
    # Into a file: the processes of a test that hangs would hold a pipe open.
    with (tmp_path / "said").open("w+") as said:
        done = subprocess.run(line, cwd=ROOT, env=environment, stdout=said, stderr=said)
        said.seek(0)
        told = said.read()
    assert done.returncode == 0, told[-6000:]
    found = re.search(r"(\d+) passed, (\d+) skipped", told)
    assert found is not None, told[-6000:]
    assert int(found[1]) > 40, "most of it needs no CUDA"


@pytest.mark.full
@pytest.mark.slow
def test_the_suite_for_a_gpu_starts_without_ray(tmp_path: Path) -> None:
    """All its files are imported, and what needs Ray is skipped: a GPU's machine may have torch alone."""
    without_ray = tmp_path / "site"
    without_ray.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name != "ray" and not path.name.startswith("ray-"):
            (without_ray / path.name).symlink_to(path)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = {**kept, "PYTHONPATH": str(without_ray), "DP_RAY_GPU_SUITE_ON": "cpu"}
    # `-S` leaves out this environment's own packages.
    line = [sys.executable, "-S", "-m", "pytest", "-m", "ray", "-rs", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^(\d+) skipped, (\d+) deselected", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert int(found[1]) >= 8 and int(found[2]) > 40
    assert "it needs Ray" in done.stdout

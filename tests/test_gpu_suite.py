"""The suite for a GPU runs on the CPU as far as that can show it, so that it fits the code when a GPU is at hand."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.cluster import ROOT


@pytest.mark.slow
def test_the_suite_for_a_gpu_passes_on_the_cpu() -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    line = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/gpu"]
    environment = {**kept, "DP_RAY_GPU_SUITE_ON": "cpu"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:]
    found = re.search(r"(\d+) passed, (\d+) skipped", done.stdout)
    assert found is not None, done.stdout[-6000:]
    assert int(found[1]) > 40, "most of it needs no CUDA"

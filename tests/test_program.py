"""How the program's process ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT

LEAVES = """
import atexit, sys, threading, time
from torch.utils.data import TensorDataset
import torch

atexit.register(print, "an exit handler")

def late():
    time.sleep(0.5)
    print("a thread", "x" * 100_000, flush=False)

def data():
    threading.Thread(target=late).start()
    return TensorDataset(torch.zeros(10, 1))
"""


def dp_ray(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "dp_ray", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("arguments", "status"), [(["-h"], 0), (["run", "no.yaml"], 2), (["plan"], 2)])
def test_its_status_is_what_the_command_line_says(arguments: list[str], status: int) -> None:
    assert dp_ray(*arguments).returncode == status


@pytest.mark.slow
def test_what_is_to_happen_at_the_end_happens(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    (tmp_path / "job.yaml").write_text("{model: 'torch.nn:Identity', dataset: 'leaves:data', batch_size: 5}")
    done = dp_ray("plan", "job.yaml", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    written = done.stdout + done.stderr  # a plan keeps stdout free of what user code prints
    assert "an exit handler" in written
    assert f"a thread {'x' * 100_000}\n" in written

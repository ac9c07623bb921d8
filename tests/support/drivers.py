"""Drivers as processes of their own, of a training that is slow enough to be disturbed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dp_ray
from dp_ray.cluster.internals.variables import VARIABLES
from dp_ray.plan.history import CLOCKED
from tests.support.cluster import ROOT, Cluster

SLOW: dict[str, Any] = {
    "task": "train",
    "model": {"target": "tests.support.training:conv"},
    "dataset": {"target": "tests.support.models:SlowPairs"},
    "collate": {"target": "tests.support.training:as_images"},
    "batch_size": 10,
    "shards": 8,
    "bitwise": True,
    "epochs": 2,
    "shuffle": True,
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.01}},
    "checkpoint": {"every_steps": 3},
}


def driver(cluster: Cluster, *args: str) -> subprocess.Popen[str]:
    """The program in a process of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    line = [sys.executable, "-m", "dp_ray", *args, "--address", cluster.address]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=ROOT, env=kept, stdout=pipe, stderr=pipe, text=True)


def job_file(folder: Path, **keys: Any) -> str:
    path = folder / "job.yaml"
    path.write_text(json.dumps({**SLOW, **keys}))  # JSON is YAML
    return str(path)


def told(result: dp_ray.Result) -> str:
    """The history without what the clock says; as text, in which NaN equals itself."""
    return repr([{key: value for key, value in row.items() if key not in CLOCKED} for row in result.history])


def wait_for_checkpoint(run_dir: Path, process: subprocess.Popen[str], after: int = 0) -> None:
    until = time.monotonic() + 90
    while not any(int(path.stem[5:]) > after for path in run_dir.glob("checkpoints/step-*")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < until, "no checkpoint came"
        time.sleep(0.02)

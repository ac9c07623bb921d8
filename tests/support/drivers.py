"""Drivers as processes of their own, of a training that is slow enough to be disturbed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dp_ray.cluster.ray_internals.variables import VARIABLES
from tests.support.cluster import ROOT, Cluster

SLOW: dict[str, Any] = {
    "task": "train",
    "model": {"target": "tests.support.training:conv"},
    "dataset": {"target": "tests.support.models:SlowPairs"},
    "collate": {"target": "tests.test_training_runs:as_images"},
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

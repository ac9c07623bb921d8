"""Trainings and predictions over some rows, in memory or from anywhere, by workers without Ray."""

from pathlib import Path
from typing import Any

import torch

from dp_ray.job.job import Job
from dp_ray.outputs.files import outputs_sha256
from dp_ray.storage import Storage
from tests.support.group import run_group, weights_of
from tests.support.merging import merged

ROWS = 46
KEYS: dict[str, Any] = {
    "model": {"target": "torch.nn:Linear", "args": {"in_features": 3, "out_features": 2}},
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.1}},
    "batch_size": 9,
    "shards": 3,
    "bitwise": True,
    "epochs": 2,
    "shuffle": True,
}
PREDICT = {"task": "predict", "order": "shuffled"}
MEMORY: dict[str, Any] = {"dataset": "tests.support.feeds:InMemory"}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(8))
    return numbers, numbers.argmax(1) % 2


class InMemory(torch.utils.data.TensorDataset):
    """The rows in memory, in pairs."""

    def __init__(self) -> None:
        super().__init__(*rows())


def job_of(given: dict[str, Any], **keys: Any) -> Job:
    return Job.make({**KEYS, **given, **keys}, "job").for_task()


def trained(folder: Path, given: dict[str, Any], **keys: Any) -> dict[str, Any]:
    run_group(job_of(given, task="train", **keys), folder)
    return {name: tensor.tolist() for name, tensor in weights_of(folder).items()}


def predicted(folder: Path, given: dict[str, Any], **keys: Any) -> str:
    """The hash of the outputs."""
    job, run = job_of({**PREDICT, **given}, **keys), Storage(str(folder))
    run_group(job, folder)
    merged(job, run, ROWS)
    return outputs_sha256(run)

"""The jobs of this folder on its device, and what plain torch makes of the same."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import StepControl
from dp_ray.plan.order import Order
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support.group import history_of, weights_of
from tests.support.trainings import ADAMW, job_of

RESNET: dict[str, Any] = {
    "model": {"target": "benchmarks.nets:resnet", "args": {"width": 4, "blocks": [1, 1], "classes": 5}},
    "dataset": {"target": "benchmarks.nets:Images", "args": {"length": 48, "size": 32, "classes": 5}},
}
GPT: dict[str, Any] = {
    "model": {
        "target": "benchmarks.nets:Gpt",
        "args": {"vocabulary": 17, "context": 12, "layers": 2, "heads": 2, "width": 16, "dropout": 0.1},
    },
    "dataset": {"target": "benchmarks.nets:Texts", "args": {"length": 48, "context": 12, "vocabulary": 17}},
    "optimizer": ADAMW,
    "grad_clip": 0.5,
}
MLP: dict[str, Any] = {"model": {"target": "tests.support.training:mlp", "args": {"dropout": 0.5}}}


def job_on(device: torch.device, model: Any = "mlp", **keys: Any) -> Job:
    """The job of a small training whose workers all use `device`."""
    return job_of(keys.pop("model", model), keys.pop("dataset", "Pairs"), **{"devices": [str(device)], **keys})


def run_here(job: Job, folder: Path, control: StepControl | None = None) -> list[Any]:
    """Run a job in this process, as one worker; what it sends."""
    devices = tuple(torch.device(name) for name in job.devices or ["cpu"])
    run = Storage(str(folder))
    run.child(PARTS).create()
    sent: list[Any] = []
    run_task(job, World(device=devices[0], all_devices=devices), run, sent.append, control)
    return sent


def bits(folder: Path) -> tuple[dict[str, bytes], str]:
    """The bits at which a training ended, and its history."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in weights_of(folder).items()}
    return weights, repr(history_of(folder))


def plain_training(
    model: nn.Module,
    dataset: Any,
    device: torch.device,
    optimizer: torch.optim.Optimizer,
    batch_size: int = 7,
    epochs: int = 2,
    dtype: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    shuffle: bool = True,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The oracle: plain torch on one device, whole batches in the same order; the losses of its steps."""
    losses: list[float] = []
    model.train()
    for epoch in range(epochs):
        order = Order(len(dataset), 0, epoch, shuffle)
        for start in range(0, len(dataset), batch_size):
            picked = [dataset[order[at]] for at in range(start, min(start + batch_size, len(dataset)))]
            inputs, targets = (torch.stack(list(column)).to(device) for column in zip(*picked, strict=True))
            context = torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()
            with context:
                loss = nn.functional.cross_entropy(model(inputs), targets)
            _step(loss, optimizer, scaler)
            losses.append(loss.item())
            after_step(len(losses))
    return losses


def _step(loss: torch.Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()

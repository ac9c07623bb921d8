"""The jobs that run on simulated GPUs, and on the CPU beside them."""

import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import nn

from dp_ray.job.job import Job
from tests.support.trainings import ADAMW, SGD, job_of

SHARDS = 6
FACTOR = 5e5  # of outputs of which some are too large for fp16 then
STEPS = 6  # after the early ones, in which the host reads the parameters' digests, three more


class Wide(nn.Sequential):
    """A model of 2.7 MB: DDP reduces its gradients in several buckets. Dropout draws on the GPU.

    With half of the numbers dropped, the CPU's kernel and the one that a GPU takes give the same bits.
    """

    def __init__(self, norm: bool = False, pauses: bool = False) -> None:
        layers: list[nn.Module] = [nn.Linear(6, 580)]
        for _ in range(2):
            layers += [Pause()] if pauses else []
            layers += [nn.Linear(580, 580), *([nn.BatchNorm1d(580)] if norm else []), nn.ReLU(), nn.Dropout(0.5)]
        super().__init__(*layers, nn.Linear(580, 3))


class Pause(nn.Module):
    """What it is given; its backward goes on when the exchange of the gradients so far has ended."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs * 1.0
        if outputs.requires_grad:
            outputs.register_hook(lambda _: wait_for_exchange())  # type: ignore[no-untyped-call]
        return outputs


def wait_for_exchange() -> None:
    """Wait while a thread of a reducer is at work."""
    time.sleep(0.05)
    end = time.monotonic() + 60
    while any(map(exchanges, sys._current_frames().values())) and time.monotonic() < end:
        time.sleep(0.01)


def exchanges(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "_complete":
        frame = frame.f_back
    return frame is not None


class TooLarge(Wide):
    """A model of which some outputs are too large for fp16, none of the first shards among them."""

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = super().forward(inputs)  # type: ignore[no-untyped-call]
        return {"small": outputs, "large": outputs * FACTOR}


class Tight(Wide):
    """A model that asks for more memory than there is, and goes on without, as cuDNN does for its algorithms."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.is_cuda:
            with suppress(torch.OutOfMemoryError):
                torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device=inputs.device)
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


class OverTwo(nn.Module):
    """A model that is cut over its devices, which it is given."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 64).to(devices[0])
        self.second = nn.Linear(64, 3).to(devices[-1])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        outputs: torch.Tensor = self.second(hidden.to(self.second.weight.device))
        return outputs


def wide(**args: Any) -> dict[str, Any]:
    return {"target": "tests.sim.jobs:Wide", "args": args}


PARTLY = {"target": "tests.support.training:partly_used"}
PAIRS = "tests.support.training:Pairs"
EVAL = {"dataset": {"target": PAIRS, "args": {"length": 17}}, "every_steps": 2, "batch_size": 8}
RIGHT = {"right": {"target": "tests.support.training:right"}}
PARTLY_LABELLED: dict[str, Any] = {
    "dataset": {"target": "tests.support.training:PartlyLabelled", "args": {"length": 74}},
    "loss": "tests.support.training:mean_of_labels",
}
MISALIGNED = "tests.support.misaligned"
ODD: dict[str, Any] = {
    "model": {"target": f"{MISALIGNED}:Net"},
    "dataset": {"target": f"{MISALIGNED}:Odd"},
    "bitwise": True,
    "batch_size": 22,
    "shards": 5,
    "grad_clip": 0.1,
    "epochs": 3,
    "max_steps": 10,
}
JOINED = {"model": {"target": f"{MISALIGNED}:Joined"}, "shards": 3}
QUEUE = {"model": {"target": f"{MISALIGNED}:Queue"}, "shards": 3, "checkpoint": {"every_steps": 3}}
OVER_BATCH = {"target": "torch.nn:CrossEntropyLoss", "over": "batch"}
JOBS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "bitwise": {"bitwise": True, "shards": 8},
    "fsdp": {"strategy": "fsdp"},
    "fsdp bitwise": {"strategy": "fsdp", "bitwise": True},
    "fp16": {"precision": "fp16", "bitwise": True, "optimizer": SGD},
    "bf16": {"precision": "bf16", "bitwise": True, "optimizer": SGD},
    "fsdp fp16": {"strategy": "fsdp", "precision": "fp16", "optimizer": SGD},
    "fsdp bf16": {"strategy": "fsdp", "precision": "bf16", "optimizer": SGD},
    "BatchNorm": {"model": wide(norm=True), "bitwise": True, "batch_size": 12, "shards": 3},
    "everything": {
        "ema": {"decay": 0.9, "evaluate": True},
        "grad_clip": 0.5,
        "metrics": RIGHT,
        "eval": EVAL,
        "bitwise": True,
        "stop_on_nan": True,
        "checkpoint": {"every_steps": 2},
    },
    "unused": {"model": PARTLY, "find_unused_parameters": "auto"},
    "unused bitwise": {"model": PARTLY, "bitwise": True},
    "evaluate": {"task": "evaluate", "metrics": RIGHT, "eval": EVAL},
    "predict": {"task": "predict"},
    "narrow": {"task": "predict", "model": {"target": "tests.sim.jobs:TooLarge"}, "outputs": {"dtype": "float16"}},
    "fsdp predict": {"task": "predict", "strategy": "fsdp"},
    "over batch": {"loss": OVER_BATCH, "bitwise": True},
    "fsdp over batch": {"loss": OVER_BATCH, "bitwise": True, "strategy": "fsdp"},
    "no labels": {**PARTLY_LABELLED, "bitwise": True},
    "fsdp no labels": {**PARTLY_LABELLED, "bitwise": True, "strategy": "fsdp"},
    "odd": ODD,
    "fsdp odd": {**ODD, "strategy": "fsdp", "shards": 3},
    "odd views": {**ODD, **JOINED},
    "odd buffer": {**ODD, **QUEUE},
    "odd buffer, resumed": {**ODD, **QUEUE},
    "odd over batch": {**ODD, "loss": OVER_BATCH, "shards": 3},
    "odd rows": {**ODD, "shards": 3, "loader": {"pin_memory": False}},
    "loop": {"loop": "tests.support.loops:halves", "loss": None, "optimizer": None, "bitwise": True},
    "two devices": {"model": {"target": "tests.sim.jobs:OverTwo"}, "bitwise": True},  # last: it opens a second GPU
}
# What only some of the counts, or the mutants, run.
OTHERS: dict[str, dict[str, Any]] = {
    "one shard": {"shards": 1, "grad_clip": 0.5},
    "one predicted shard": {"task": "predict", "shards": 1},
    "one narrowed shard": {"task": "predict", "shards": 1, "outputs": {"dtype": "float16"}},
    "loader": {"model": PARTLY, "loader": {"processes": 1}},
    "long": {"model": PARTLY, "batch_size": 1, "shards": 1, "max_steps": 20, "stop_on_nan": True},
    "tight": {"model": {"target": "tests.sim.jobs:Tight"}, "bitwise": True, "max_steps": 2},
    "kept": {"checkpoint": {"every_steps": 2}},
    "fsdp kept": {"strategy": "fsdp", "checkpoint": {"every_steps": 2}},
    "hung": {"model": {"target": "tests.sim.hanging:Hanging"}, "batch_size": 2, "shards": 2, "max_steps": 30},
    "paused": {"model": wide(pauses=True), "bitwise": True, "shards": 8, "max_steps": 2},
}
# Autocast takes other kernels to half precision on a GPU than on a CPU.
OTHER_KERNELS = {"fp16", "bf16", "fsdp fp16", "fsdp bf16"}
RESUMED = {"odd buffer, resumed": "odd buffer"}  # and the job that runs to its end at once
NOT_BITWISE = {"ddp", "fsdp", "fsdp fp16", "fsdp bf16", "unused"}  # another number of workers may round otherwise


def num_devices(name: str) -> int:
    """On how many devices each worker's model lies."""
    return 2 if name == "two devices" else 1


def job(name: str, size: int, devices: list[str]) -> Job:
    """A job for so many workers."""
    keys = dict({**JOBS, **OTHERS}[name])
    common: dict[str, Any] = {"optimizer": ADAMW, "batch_size": 8, "epochs": 1, "max_steps": STEPS, "shards": SHARDS}
    if keys.get("task") in ("predict", "evaluate"):
        common = {"optimizer": None, "epochs": 1, "batch_size": 9, "shards": SHARDS, "shuffle": False}
    if keys.get("task") == "predict":
        common["loss"] = None
    if name == "odd rows":  # of a shard that is on the GPU already
        keys["collate"] = {"target": f"{MISALIGNED}:OnDevice", "args": {"device": devices[0]}}
    dataset = {"target": PAIRS, "args": {"length": 74}}
    model = keys.pop("model", wide())
    return job_of(model, dataset, **{**common, **keys, "workers": size, "devices": devices})

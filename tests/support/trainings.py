"""Jobs of small trainings, and what tests compare them with."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.job.job import Job
from tests.support import training
from tests.support.bad_data import Broken, good_loop
from tests.support.group import history_of, weights_of
from tests.support.three_tasks import FILE

SGD = {"target": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}}
ADAMW = {"target": "torch.optim:AdamW", "args": {"lr": 0.01}}
STEPS_OF_22: dict[str, Any] = {  # steps that a checkpoint follows every second time; with BatchNorm
    "shards": 8,
    "batch_size": 22,  # no chunk of one row in 70 samples: BatchNorm needs two
    "bitwise": True,
    "epochs": 3,
    "optimizer": ADAMW,
    "scheduler": "tests.support.training:warm_up",
    "checkpoint": {"every_steps": 2, "keep": 2},
}
Chunks = Sequence[Any]


def job_of(model: Any, dataset: Any = "Pairs", /, **keys: Any) -> Job:
    """A shuffled training of 2 epochs in batches of 7, with SGD: its updates do not magnify rounding as Adam's do."""
    data = dataset if isinstance(dataset, dict) else {"target": f"tests.support.training:{dataset}"}
    common = {"task": "train", "shuffle": True, "epochs": 2, "batch_size": 7, "optimizer": SGD}
    made = model if isinstance(model, dict) else {"target": f"tests.support.training:{model}"}
    given = {"model": made, "dataset": data, "loss": "torch.nn:CrossEntropyLoss"}
    return Job.make({**common, **given, **keys}, "job")


def initial(model: Callable[..., nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return model(*args)


def mean_loss(model: nn.Module, chunks: Chunks) -> torch.Tensor:
    inputs, targets = (torch.cat(column) for column in zip(*chunks, strict=True))
    return nn.functional.cross_entropy(model(inputs), targets)


def chunked_statistics(model: nn.Module, chunks: Chunks) -> torch.Tensor:
    """The sum over chunks, each normalised by itself, all from the same buffers; the first one's buffers stay."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kept: dict[str, torch.Tensor] = {}
    total, rows = torch.zeros(()), 0
    for inputs, targets in chunks:
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])
        total = total + nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
        rows += len(targets)
        if not kept:
            kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])
    return total / rows


def assert_close(folder: Path, model: nn.Module, losses: list[float], tolerance: float = 1e-6) -> None:
    """Weights and losses within a relative tolerance, each tensor against its largest number."""
    weights = weights_of(folder)
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        apart = (weights[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-30)
        assert apart <= tolerance, f"{name}: {apart}"
    got = torch.tensor([row["loss"] for row in history_of(folder)], dtype=torch.float64)
    assert torch.allclose(got, torch.tensor(losses, dtype=torch.float64), rtol=tolerance * 3, atol=0)


def trained(folder: Path, name: str = "trained", **others: Any) -> dp_ray.Result:
    # Without decay, and far too fast: the loss of the evaluation is at its least before the end.
    overshoots = {"optimizer": {"target": "torch.optim:SGD", "args": {"lr": 9.0}}}
    return dp_ray.run(**{**FILE, **overshoots, "workers": 0, "storage": str(folder), "name": name, **others})


def eval_loss(weights: dict[str, torch.Tensor]) -> float:
    """The loss over the evaluation's 20 rows, by plain torch; the keys are those of the bare module."""
    model, data = training.mlp().eval(), training.Pairs(20)
    model.load_state_dict(weights)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(data.inputs), data.targets).item()


def keys_of(**keys: Any) -> dict[str, Any]:
    sgd = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": "tests.support.training:Pairs",
        "batch_size": 4,
    }
    return {**given, "loss": "torch.nn:CrossEntropyLoss", "optimizer": sgd, "workers": 0, "quiet": True, **keys}


def short_training(folder: Path, name: str, lr: float = 0.1, **keys: Any) -> dp_ray.Result:
    """Three epochs of eight steps over 32 rows."""
    data = {"target": "tests.support.training:Pairs", "args": {"length": 32}}
    optimizer = {"target": "torch.optim:SGD", "args": {"lr": lr}}
    given = keys_of(storage=str(folder), name=name, dataset=data, optimizer=optimizer, epochs=3)
    return dp_ray.run(**{**given, "metrics": {"right": "tests.support.training:right"}, **keys})


def assert_as_good_loop(folder: Path, bad: Collection[int]) -> None:
    """The mlp's training in a folder, of 2 epochs in 5 shards, is that of one process without the rows `bad`."""
    torch.manual_seed(0)
    model = training.mlp()
    told = good_loop(model, Broken(), bad, torch.optim.SGD(model.parameters(), 0.1, 0.9), 5)
    weights, history = weights_of(folder), history_of(folder)
    for name, expected in model.state_dict().items():
        assert torch.allclose(weights[name], expected, rtol=1e-5, atol=1e-6), name
    assert [row["rows"] for row in history] == [rows for rows, _ in told]
    assert [row["loss"] for row in history if row["rows"]] == pytest.approx([one for _, one in told if one], rel=1e-5)

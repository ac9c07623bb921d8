"""Whole small trainings, drawn at random: a plain process's weights, and the same bits on other workers after a kill.

`make fuzz` draws many more.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dp_ray.job import Job
from tests.support.group import StopsBefore, history_of, run_group, weights_of
from tests.support.patchwork import Noisy, Patchwork, put, train_plainly
from tests.support.training import Pairs, warm_up
from tests.support.trainings import initial

PARTS = ["channels_last", "transposed", "scalar", "double", "unused", "sometimes", "frozen", "still", "statistics"]
PARTS += ["observer", "dropout", "noise", "expanded", "sparse", "complex", "half", "wide"]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5}),
    "SGD with decay": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "weight_decay": 0.1}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "eps": 0.01, "fused": True}),
    "noisy": (Noisy, {"lr": 0.05}),
}


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    """The keys of a job, and what happens to it."""
    has = draw(st.lists(st.sampled_from(PARTS), max_size=5, unique=True).map(sorted))
    is_wide = "wide" in has
    shards = draw(st.integers(1, 6))
    rows = draw(st.integers(1, 12 if is_wide else 24))
    batch_size = draw(st.integers(-(-rows // 8), 12))
    optimizers = [name for name in OPTIMIZERS if ("sparse" not in has and "complex" not in has) or name == "SGD"]
    workers = st.integers(1, min(shards, 5))
    return {
        "has": has,
        "rows": rows,
        "batch_size": batch_size,
        "shards": shards,
        "workers": [draw(workers), draw(workers)],
        "optimizer": draw(st.sampled_from(optimizers)),
        "scheduler": draw(st.sampled_from([None, "tests.support.training:warm_up"])),
        "grad_clip": draw(st.sampled_from([None, 0.3])),
        "bitwise": draw(st.booleans()),
        "precision": draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16"]))
        if not {"complex"} & set(has)
        else "fp32",
        "kept": draw(st.integers(1, 3)),
        "stops": draw(st.integers(1, 8)),
        "eval_rows": draw(st.sampled_from([None, 1, 5, 9])),
        "finds_unused": "sometimes" in has or draw(st.sampled_from(["auto", True])),
    }


def job_for(case: dict[str, Any], workers: int) -> Job:
    cls, args = OPTIMIZERS[case["optimizer"]]
    evaluation = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": case["eval_rows"]}}}
    keys = {
        "task": "train",
        "model": {"target": "tests.support.patchwork:Patchwork", "args": {"has": case["has"]}},
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": case["rows"]}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": f"{cls.__module__}:{cls.__qualname__}", "args": args},
        "workers": workers,
        "epochs": 2,
        "shuffle": True,
        "checkpoint": {"every_steps": case["kept"]},
        "find_unused_parameters": case["finds_unused"],
        "eval": {**evaluation, "batch_size": 4, "every_steps": 3} if case["eval_rows"] else None,
    }
    same = ("batch_size", "shards", "scheduler", "grad_clip", "bitwise", "precision")
    return Job.make({**keys, **{name: case[name] for name in same}}, "job")


def plainly(case: dict[str, Any]) -> tuple[nn.Module, list[float]]:
    """What one process of plain torch comes to."""
    model = initial(Patchwork, case["has"])
    cls, args = OPTIMIZERS[case["optimizer"]]
    optimizer = cls([one for one in model.parameters() if one.requires_grad], **args)
    scheduler = warm_up(optimizer) if case["scheduler"] else None
    sizes = case["batch_size"], case["shards"], 2
    return model, train_plainly(model, Pairs(case["rows"]), optimizer, scheduler, *sizes, case["grad_clip"])


def evaluated(model: nn.Module, rows: int, shards: int) -> float:
    """The mean loss in eval mode, each shard from the same buffers."""
    data = Pairs(rows)
    batches = [(data.inputs[at : at + 4], data.targets[at : at + 4]) for at in range(0, rows, 4)]
    model = copy.deepcopy(model).eval()
    before, total = copy.deepcopy(dict(model.named_buffers())), 0.0
    for batch in batches:
        for x, y in zip(*(column.chunk(shards) for column in batch), strict=True):
            put(model, before)
            total += nn.functional.cross_entropy(model(x), y, reduction="sum").item()
    return total / rows


def ends_of(folder: Path) -> tuple[dict[str, bytes], str]:
    weights = {name: one.contiguous().view(-1).view(torch.uint8) for name, one in weights_of(folder).items()}
    return {name: one.numpy().tobytes() for name, one in weights.items()}, repr(history_of(folder))


def check(case: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        first, second = case["workers"]
        run_group(job_for(case, first), folder / "run", StopsBefore(case["stops"]))
        run_group(job_for(case, second), folder / "run")
        if case["bitwise"]:
            run_group(job_for(case, 1), folder / "one")
            assert ends_of(folder / "run") == ends_of(folder / "one")
        if case["precision"] == "fp32" and "half" not in case["has"]:
            compare(case, weights_of(folder / "run"), history_of(folder / "run"))


def compare(case: dict[str, Any], weights: dict[str, torch.Tensor], history: list[dict[str, Any]]) -> None:
    model, losses = plainly(case)
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=2e-4, abs=1e-5)
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        apart = (weights[name] - tensor).abs().max().item() if tensor.numel() else 0.0
        assert apart <= 1e-4 + 1e-3 * tensor.abs().max().item(), f"{name}: {apart}"
    if case["eval_rows"]:
        assert history[-1]["eval_loss"] == pytest.approx(
            evaluated(model, case["eval_rows"], case["shards"]), rel=2e-4
        )


USUAL: dict[str, Any] = {
    "has": [],
    "rows": 34,
    "batch_size": 10,
    "shards": 8,
    "workers": [2, 3],
    "optimizer": "SGD",
    "scheduler": None,
    "grad_clip": None,
    "bitwise": True,
    "precision": "fp32",
    "kept": 2,
    "stops": 5,
    "eval_rows": None,
    "finds_unused": "auto",
}
FOUND: dict[str, dict[str, Any]] = {
    "layouts on workers with several nodes of the tree": {"has": ["channels_last", "transposed"]},
    "state of a fused optimizer lies as its parameter": {"has": ["channels_last"], "optimizer": "fused AdamW"},
    "workers without rows leave unused parameters alone": {
        "has": ["unused"],
        "optimizer": "SGD with decay",
        "workers": [8, 8],
        "bitwise": False,
    },
    "the same to the bit": {"has": ["unused"], "optimizer": "SGD with decay", "workers": [8, 5]},
    "parts left in eval mode stay so": {"has": ["still"], "eval_rows": 5},
    "an evaluation changes no buffer": {"has": ["observer"], "eval_rows": 9},
    "an optimizer draws the same everywhere": {"optimizer": "noisy"},
    "generators of the model's own": {"has": ["noise"]},
    "parameters that some shards use": {"has": ["sometimes"], "finds_unused": True, "workers": [3, 2]},
    "sparse gradients": {"has": ["sparse"], "bitwise": False, "grad_clip": 0.3},
    "sparse gradients made dense": {"has": ["sparse"]},
    "an expanded buffer": {"has": ["expanded"]},
    "a complex parameter, the first": {"has": ["complex"], "workers": [3, 8]},
    "parameters of two dtypes": {"has": ["double", "scalar"], "workers": [3, 5]},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", list(FOUND))
def test_what_was_wrong_without_a_word(what: str) -> None:
    check({**USUAL, **FOUND[what]})


@pytest.mark.slow
@given(case=trainings())
@settings(max_examples=2 * settings().max_examples, suppress_health_check=list(HealthCheck))
def test_any_training_ends_where_one_plain_process_does(case: dict[str, Any]) -> None:
    check(case)

"""Whole small trainings, drawn at random: a plain process's weights, and the same bits on other workers after a kill.

`make fuzz` draws many more.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cases import OPTIMIZERS, USUAL, compare, job_for
from tests.support.group import StopsBefore, history_of, run_group, weights_of

PARTS = ["channels_last", "transposed", "scalar", "double", "unused", "sometimes", "frozen", "still", "statistics"]
PARTS += ["observer", "dropout", "noise", "expanded", "sparse", "complex", "half", "wide"]


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
    optimizer = draw(st.sampled_from(optimizers))
    strategies = st.sampled_from(["ddp", "fsdp"] if optimizer != "noisy" else ["ddp"])
    return {
        "has": has,
        "rows": rows,
        "batch_size": batch_size,
        "shards": shards,
        "workers": [draw(workers), draw(workers)],
        "strategies": [draw(strategies), draw(strategies)],
        "optimizer": optimizer,
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


def ends_of(folder: Path) -> tuple[dict[str, bytes], str]:
    weights = {name: one.contiguous().view(-1).view(torch.uint8) for name, one in weights_of(folder).items()}
    return {name: one.numpy().tobytes() for name, one in weights.items()}, repr(history_of(folder))


def check(case: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        first, second = zip(case["workers"], case["strategies"], strict=True)
        run_group(job_for(case, *first), folder / "run", StopsBefore(case["stops"]))
        run_group(job_for(case, *second), folder / "run")
        if case["bitwise"]:
            run_group(job_for(case, 1), folder / "one")
            assert ends_of(folder / "run") == ends_of(folder / "one")
        if case["precision"] == "fp32" and "half" not in case["has"]:
            compare(case, weights_of(folder / "run"), history_of(folder / "run"))


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

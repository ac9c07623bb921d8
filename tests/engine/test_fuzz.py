"""Whole small trainings, drawn at random: a plain process's weights, and the same bits on other workers after a kill.

`make fuzz` draws many more.
"""

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dp_ray.job.job import Job
from tests.support.cases import OPTIMIZERS, SCHEDULERS, SOME, USUAL, compare, job_for
from tests.support.chance import handful
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group, weights_of
from tests.support.patchwork import Patchwork

PARTS = ["channels_last", "transposed", "scalar", "double", "unused", "sometimes", "frozen", "still", "statistics"]
PARTS += ["observer", "dropout", "noise", "expanded", "sparse", "complex", "half", "wide"]
MODES = ["adapter", "wide_adapter", "built_in_eval", "own_train", "experts", "dropped", "freezing"]
WHOLE = {"adapter", "wide_adapter", "built_in_eval", "experts", "freezing"}  # what fsdp refuses
WRITES = ["momentum", "momentum_data", "max_norm", "rescaled", "shrinking", "lazy", "hidden", "in_place"]
WRITTEN = {"momentum": "follower.bias", "momentum_data": "follower.bias", "max_norm": "words.weight"}
WRITTEN |= {"shrinking": "head.weight"}


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    """The keys of a job, and what happens to it."""
    parts = st.lists(st.sampled_from(PARTS), max_size=5, unique=True)
    writes = st.lists(st.sampled_from(WRITES), max_size=3, unique=True)
    modes = st.lists(st.sampled_from(MODES), max_size=3, unique=True)
    has = sorted([*draw(parts), *draw(writes), *draw(modes)])
    if "momentum_data" in has:  # in bfloat16 the copy may not differ in the first steps
        has = [one for one in has if one != "half"]
    is_wide = "wide" in has
    shards = draw(st.integers(1, 6))
    rows = draw(st.integers(1, 12 if is_wide else 24))
    batch_size = draw(st.integers(-(-rows // 8), 12))
    optimizers = [name for name in OPTIMIZERS if ("sparse" not in has and "complex" not in has) or name == "SGD"]
    workers = st.integers(1, min(shards, 5))
    optimizer = draw(st.sampled_from(optimizers))
    is_whole = optimizer in ("noisy", "schedule-free") or WHOLE & set(has)
    strategies = st.sampled_from(["ddp"] if is_whole else ["ddp", "fsdp"])
    return {
        "has": has,
        "rows": rows,
        "batch_size": batch_size,
        "shards": shards,
        "workers": [draw(workers), draw(workers)],
        "strategies": [draw(strategies), draw(strategies)],
        "optimizer": optimizer,
        "some": draw(st.sampled_from([None, None, None, *SOME])),
        "scheduler": draw(st.sampled_from([None, *(one for one in SCHEDULERS if is_for(one, optimizer))])),
        "flops": draw(st.sampled_from([False, False, True])),
        "grad_clip": draw(st.sampled_from([None, 0.3])),
        "bitwise": draw(st.booleans()),
        "precision": draw(st.sampled_from(["fp32", "fp32", "fp32", "bf16"]))
        if not {"complex"} & set(has)
        else "fp32",
        "kept": draw(st.integers(1, 3)),
        "stops": draw(st.integers(1, 8)),
        "eval_rows": draw(st.sampled_from([None, 1, 5, 9])),
        "eval_every": draw(st.integers(1, 4)),
        "ema": draw(st.sampled_from([None, None, 0.5])) if optimizer != "schedule-free" else None,
        "finds_unused": draw(st.sampled_from(["auto", True])),
    }


def is_for(scheduler: str, optimizer: str) -> bool:
    """Whether torch has the two together: a OneCycleLR cycles the momentum, if there is one."""
    return scheduler != "one cycle" or optimizer not in ("noisy", "schedule-free")


def ends_of(folder: Path) -> tuple[dict[str, bytes], str]:
    weights = {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in weights_of(folder).items()}
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}, repr(history_of(folder))


def check(case: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        controls: tuple[StopsBefore | None, ...] = (StopsBefore(case["stops"]), None)
        for workers, strategy, control in zip(case["workers"], case["strategies"], controls, strict=True):
            job = job_for(case, workers, strategy)
            if strategy == "fsdp" and workers > 1 and writes_shards(case["has"]) and not has_ended(folder / "run"):
                check_refused(job, folder / "run", set(case["has"]))
                job = job_for(case, workers)
            run_group(job, folder / "run", control)
        if case["bitwise"]:
            run_group(job_for(case, 1), folder / "one")
            assert ends_of(folder / "run") == ends_of(folder / "one")
        if case["precision"] == "fp32" and "half" not in case["has"]:
            compare(case, folder / "run")


def writes_shards(has: list[str]) -> bool:
    """Whether a forward writes a parameter that fsdp shards: one that is not of a second dtype."""
    parameters = dict(Patchwork(has).named_parameters())
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters.values():
        sizes[parameter.dtype] += parameter.nbytes if parameter.requires_grad and not parameter.is_complex() else 0
    main = max(sizes, key=lambda dtype: sizes[dtype])
    written = [parameters[name] for way, name in WRITTEN.items() if way in has]
    return any(not one.requires_grad or one.dtype == main for one in written)


def has_ended(folder: Path) -> bool:
    return (folder / "weights.safetensors").exists()


def check_refused(job: Job, folder: Path, has: set[str]) -> None:
    """What a forward writes of a sharded parameter would be lost: an error says so.

    A copy that follows by `.data` may never differ from what it follows, and then nothing is written.
    """
    error = None
    try:
        run_group(job, folder)
    except ProcessExit as raised:
        error = str(raised)
    if error is None:
        assert has & WRITTEN.keys() == {"momentum_data"}
    else:
        assert re.search(r"step \d+, shard \d+: (model raised ModelError: )?the forward wrote \S+", error)
        assert not has_ended(folder)


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
    "momentum of sparse gradients goes on in a sharded training": {
        "has": ["sparse"],
        "bitwise": False,
        "strategies": ["ddp", "fsdp"],
        "workers": [1, 2],
    },
    "sparse gradients made dense": {"has": ["sparse"]},
    "an expanded buffer": {"has": ["expanded"]},
    "a complex parameter, the first": {"has": ["complex"], "workers": [3, 8]},
    "parameters of two dtypes": {"has": ["double", "scalar"], "workers": [3, 5]},
}


@pytest.mark.full(but=["workers without rows leave unused parameters alone", "parameters that some shards use"])
@pytest.mark.slow
@pytest.mark.parametrize("what", list(FOUND))
def test_what_was_wrong_without_a_word(what: str) -> None:
    check({**USUAL, **FOUND[what]})


@pytest.mark.slow
@given(case=trainings())
@settings(max_examples=handful(40), suppress_health_check=list(HealthCheck))
def test_any_training_ends_where_one_plain_process_does(case: dict[str, Any]) -> None:
    check(case)

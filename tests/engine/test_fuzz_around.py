"""Small trainings with a state outside the model, drawn at random: one plain process's numbers, with a kill."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from dp_ray.job.job import Job
from tests.support.around import GENERATORS, NESTS, PROTOTYPES, STEPS, Data, batches_of, compare, keys_of
from tests.support.chance import handful
from tests.support.group import StopsBefore, history_of, run_group

LOSSES = [[], ["moves"], ["moves"], ["ignored"], ["over"], ["over", "moves"]]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """What a training has around its model, its sizes, and what happens to it."""
    has = list(draw(st.sampled_from(LOSSES)))
    around = ["metric", "clamp", "after", "epochs", "adapter", "experts", "early"]
    has += draw(st.lists(st.sampled_from(around), unique=True, max_size=4))
    shards, rows = draw(st.integers(1, 6)), draw(st.integers(2, 24))
    workers = st.integers(1, min(shards, 4))
    draws = st.tuples(
        st.sampled_from(NESTS), st.sampled_from(sorted(GENERATORS)), st.sampled_from(["whole", "wrapped", "parts"])
    )
    is_whole = bool({"clamp", "after", "adapter", "experts"} & set(has))
    strategies = st.sampled_from(["ddp"] if is_whole else ["ddp", "ddp", "fsdp"])
    return {
        "has": has,
        "rows": rows,
        "batch_size": draw(st.integers(-(-rows // 6), 16)),
        "shards": shards,
        "workers": [draw(workers), draw(workers)],
        "strategies": [draw(strategies), draw(strategies)],
        "optimizer": draw(st.sampled_from(["SGD", "AdamW"])),
        "grad_clip": draw(st.sampled_from([None, 0.05])),
        "bitwise": draw(st.booleans()),
        "kept": draw(st.integers(1, 3)),
        "stops": draw(st.integers(1, 8)),
        "eval_rows": draw(st.sampled_from([None, 7, 12])),
        "processes": draw(st.sampled_from([0, 0, 0, 1, 2])),
        "objects": draw(st.booleans()),
        "step": draw(st.sampled_from([None, *STEPS])),
        "draws": draw(st.one_of(st.none(), draws)) if "epochs" not in has else None,
    }


def check(case: dict[str, Any]) -> None:
    targets = Data(case["rows"], case["has"]).targets
    assume(
        all(bool((targets[picked] >= 0).any()) for _, picked in batches_of(case))
    )  # else plain torch's loss is NaN
    if "over" in case["has"] and "fsdp" in case["strategies"]:
        # There only sizes tell which outputs have rows, and a line says so.
        batches = [torch.ones(len(picked)).chunk(case["shards"]) for _, picked in batches_of(case)]
        assume(not any(len(piece) == PROTOTYPES for batch in batches for piece in batch))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for workers, strategy, control in zip(
            case["workers"], case["strategies"], (StopsBefore(case["stops"]), None), strict=True
        ):
            job = Job.make({**keys_of(case), "workers": workers, "strategy": strategy}, "job")
            run_group(job, folder / "run", control)
        if case["bitwise"]:
            run_group(Job.make({**keys_of(case), "workers": 1}, "job"), folder / "one")
            # As texts: a loss of no labels is NaN, which equals nothing.
            assert repr(history_of(folder / "run")) == repr(history_of(folder / "one"))
        compare(case, folder / "run")


FITS: dict[str, Any] = {  # each shard has as many rows as there are prototypes
    "has": ["over", "moves"],
    "rows": 16,
    "batch_size": 8,
    "shards": 2,
    "workers": [2, 1],
    "strategies": ["ddp", "ddp"],
    "optimizer": "SGD",
    "grad_clip": None,
    "bitwise": True,
    "kept": 1,
    "stops": 2,
    "eval_rows": None,
    "processes": 0,
    "objects": False,
    "step": None,
    "draws": None,
}


# What goes on with other workers begins with a batch of one row.
SINGLE = {**FITS, "has": ["over"], "rows": 17, "batch_size": 16, "shards": 4, "workers": [1, 2], "stops": 1}

# A generator of torch, which torch by itself sends to no process that is not forked.
SENT: dict[str, Any] = {**FITS, "has": [], "processes": 2, "draws": ("compose", "torch", "whole")}


@pytest.mark.slow
@given(case=cases())
@example(case=FITS)
@example(case=SINGLE)
@example(case=SENT)
@settings(max_examples=handful(40), suppress_health_check=list(HealthCheck))
def test_what_is_around_a_model_is_that_of_one_plain_process(case: dict[str, Any]) -> None:
    check(case)

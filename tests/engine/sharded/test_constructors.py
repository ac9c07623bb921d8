"""With `strategy: fsdp`, the initial weights are those of a plain constructor, whatever that does, or none."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dp_ray.engine.random import seed_all
from dp_ray.engine.sharded.build import build_on_meta, build_sharded
from dp_ray.engine.world import World, alone
from dp_ray.errors import JobError, ModelError
from dp_ray.messages import StepControl
from dp_ray.tensors.files import local
from tests.support.chance import handful
from tests.support.constructors import REFUSED, WHOLE, WITHOUT_MEMORY, Constructed
from tests.support.group import run_group, weights_of
from tests.support.trainings import job_of

Steps = Sequence[tuple[str, int]]


def job_that_takes(steps: Steps, **keys: Any) -> Any:
    model = {"target": "tests.support.constructors:Constructed", "args": {"steps": [list(step) for step in steps]}}
    return job_of(model, workers=2, strategy="fsdp", **keys)


def tensors_of(model: nn.Module) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class BuildsAlike(StepControl):
    """Builds a model sharded, and plainly, on each worker; rank 0 tells what was said."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def task(self, context: Any) -> None:
        told: list[str] = []
        sharded = build_sharded(context.job, context.world, told.append).model
        got, state = tensors_of(sharded), torch.get_rng_state()
        seed_all(0)
        plain = Constructed(self.steps)
        expected = tensors_of(plain)
        assert got.keys() == expected.keys()
        size, rank = context.world.world_size, context.world.rank
        for name, value in expected.items():
            is_sharded = hasattr(got[name], "to_local")
            mine = [*value.chunk(size), *[value[:0]] * size][rank] if is_sharded else value
            assert local(got[name]).dtype == mine.dtype and torch.equal(local(got[name]), mine), name
        assert torch.equal(torch.get_rng_state(), state), "as many numbers are drawn"
        weight = "body.0.weight"
        has_attribute = hasattr(plain.get_parameter(weight), "no_decay")
        assert hasattr(sharded.get_parameter(weight), "no_decay") == has_attribute
        for line in told:
            context.send(line)


def built_alike(steps: Steps, folder: Path) -> str:
    """Build a model sharded over two workers, and plainly; why it was built whole, or empty."""
    told = run_group(job_that_takes(steps), folder, BuildsAlike(steps))
    return next((line for line in told if "shard by shard" in line), "")


@pytest.mark.parametrize("step", list(WITHOUT_MEMORY))
def test_one_worker_alone_builds_the_values(tmp_path: Path, step: str) -> None:
    assert built_alike([(step, 0), ("triu", 1), (step, 1)], tmp_path) == ""


@pytest.mark.parametrize("step", list(WHOLE))
def test_what_needs_values_is_built_whole_and_told(tmp_path: Path, step: str) -> None:
    said = built_alike([(step, 0), ("triu", 1), (step, 1)], tmp_path)
    assert "cannot be built shard by shard, so each worker builds it whole" in said


def test_without_memory_nothing_has_values() -> None:
    """A model of 4 TB, of which no other worker than rank 0 makes a tensor."""
    job = job_of({"target": "torch.nn:Linear", "args": {"in_features": 10**6, "out_features": 10**6}})
    model = build_on_meta(job)
    assert all(parameter.is_meta for parameter in model.parameters())
    del model
    gc.collect()


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("step", list(REFUSED))
def test_a_model_that_shards_would_change_is_refused_by_name(step: str, is_whole: bool) -> None:
    job = job_that_takes([("item", 0)] * is_whole + [(step, 0)])
    with alone(needs_group=True), pytest.raises((JobError, ModelError), match=REFUSED[step][1]):
        build_sharded(job, World(), list[str]().append)


def steps_of(names: Sequence[str], most: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(list(names)), st.integers(0, 9)), max_size=most)


@given(lean=steps_of(list(WITHOUT_MEMORY), 8), whole=steps_of(list(WHOLE), 1), more=steps_of(list(WITHOUT_MEMORY), 3))
@settings(max_examples=handful(50), suppress_health_check=list(HealthCheck))
def test_any_constructor_gives_the_same_weights_or_is_built_whole(
    tmp_path: Path, lean: Steps, whole: Steps, more: Steps
) -> None:
    steps = [*lean, *whole, *more]
    seed_all(0)
    try:
        Constructed(steps)
    except Exception:
        return  # it is no constructor
    built_alike(steps, tmp_path)


@pytest.mark.slow
def test_two_workers_begin_with_the_weights_of_a_plain_constructor(tmp_path: Path) -> None:
    still = {"target": "torch.optim:SGD", "args": {"lr": 0.0}}
    steps = [(name, at) for at, name in enumerate(WITHOUT_MEMORY)]
    run_group(job_that_takes(steps, optimizer=still, max_steps=1), tmp_path)
    seed_all(0)
    expected, weights = Constructed(steps).state_dict(), weights_of(tmp_path)
    assert weights.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []

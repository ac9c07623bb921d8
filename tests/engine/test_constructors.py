"""With `strategy: fsdp`, the initial weights are those of a plain constructor, whatever that does, or none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dp_ray.engine.random import seed_all
from dp_ray.engine.sharded.build import build_sharded
from dp_ray.engine.world import World, alone
from dp_ray.errors import JobError, ModelError
from dp_ray.tensors.files import local
from tests.support.chance import handful
from tests.support.constructors import RECORDED, REFUSED, WHOLE, Constructed
from tests.support.group import run_group, weights_of
from tests.support.trainings import job_of

Steps = Sequence[tuple[str, int]]


def job_that_takes(steps: Steps, **keys: Any) -> Any:
    model = {"target": "tests.support.constructors:Constructed", "args": {"steps": [list(step) for step in steps]}}
    return job_of(model, workers=2, strategy="fsdp", **keys)


def sharded_alone(steps: Steps) -> tuple[nn.Module, list[str]]:
    """The model of a worker that is alone, and what is told."""
    told: list[str] = []
    with alone(needs_group=True):
        return build_sharded(job_that_takes(steps), World(), told.append).model, told


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers; of shards, those of this worker, which has all."""
    found: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: local(value).detach() for name, value in found.items()}


def built_alike(steps: Steps) -> str:
    """Build a model sharded, and plainly; why it was built whole, or empty."""
    sharded, told = sharded_alone(steps)
    got, state = tensors_of(sharded), torch.get_rng_state()
    seed_all(0)
    plain = Constructed(steps)
    expected = tensors_of(plain)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name
    assert torch.equal(torch.get_rng_state(), state), "as many numbers are drawn"
    weight = "body.0.weight"
    assert hasattr(sharded.get_parameter(weight), "no_decay") == hasattr(plain.get_parameter(weight), "no_decay")
    return next((one for one in told if "shard by shard" in one), "")


@pytest.mark.parametrize("step", list(RECORDED))
def test_what_a_constructor_does_is_recorded(step: str) -> None:
    assert built_alike([(step, 0), ("triu", 1), (step, 1)]) == ""


@pytest.mark.parametrize("step", list(WHOLE))
def test_what_cannot_be_recorded_is_built_whole_and_told(step: str) -> None:
    assert "cannot be built shard by shard, so each worker builds it whole" in built_alike([(step, 0)])


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("step", list(REFUSED))
def test_a_model_that_shards_would_change_is_refused_by_name(step: str, is_whole: bool) -> None:
    with pytest.raises((JobError, ModelError), match=REFUSED[step][1]):
        sharded_alone([("item", 0)] * is_whole + [(step, 0)])


def steps_of(names: Sequence[str], most: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(list(names)), st.integers(0, 9)), max_size=most)


@given(recorded=steps_of(list(RECORDED), 8), whole=steps_of(list(WHOLE), 1), more=steps_of(list(RECORDED), 3))
@settings(max_examples=handful(50), suppress_health_check=list(HealthCheck))
def test_any_constructor_gives_the_same_weights_or_is_built_whole(recorded: Steps, whole: Steps, more: Steps) -> None:
    steps = [*recorded, *whole, *more]
    seed_all(0)
    try:
        Constructed(steps)
    except Exception:
        return  # it is no constructor
    built_alike(steps)


@pytest.mark.slow
def test_two_workers_begin_with_the_weights_of_a_plain_constructor(tmp_path: Path) -> None:
    still = {"target": "torch.optim:SGD", "args": {"lr": 0.0}}
    steps = [(name, at) for at, name in enumerate(RECORDED)]
    run_group(job_that_takes(steps, optimizer=still, max_steps=1), tmp_path)
    seed_all(0)
    expected, weights = Constructed(steps).state_dict(), weights_of(tmp_path)
    assert weights.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []

"""Workers that go on where others are killed, in real processes: the bits of one undisturbed process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dp_ray.job.job import Job
from tests.support.group import history_of, run_group, weights_of
from tests.support.survivors import Fault, run_surviving
from tests.support.trainings import job_of

KEYS: dict[str, Any] = {
    "batch_size": 22,
    "shards": 6,
    "bitwise": True,
    "epochs": 3,
    "eval": {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4},
    "ema": {"decay": 0.8},
    "checkpoint": {"every_steps": 5, "best": "eval_loss"},
}


def images(length: int | None = None) -> dict[str, Any]:
    args = {} if length is None else {"length": length}
    return {"target": "tests.support.training:Images", "args": args}


OF_IMAGES = {"dataset": images(), "eval": {"dataset": images(20), "every_steps": 4}}


def made(model: str = "mlp", **keys: Any) -> Job:
    return job_of(model, **{**KEYS, **(OF_IMAGES if model == "conv" else {}), **keys})


def undisturbed(tmp_path: Path, model: str = "mlp", **keys: Any) -> Path:
    folder = tmp_path / "undisturbed"
    run_group(made(model, workers=1, **keys), folder)
    return folder


def assert_same(folder: Path, expected: Path) -> None:
    there, here = weights_of(expected), weights_of(folder)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert history_of(folder) == history_of(expected)


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_one_of_three_is_killed(tmp_path: Path, slot: int) -> None:
    expected = undisturbed(tmp_path)
    told = run_surviving(made(workers=3), tmp_path / "run", [Fault(slot, 7)])
    assert told.views == [[0, 1, 2], [one for one in (0, 1, 2) if one != slot]]
    assert_same(tmp_path / "run", expected)


@pytest.mark.parametrize("part", ["backward", "exchange", "update", "after", "evaluation", "checkpoint", "weights"])
@pytest.mark.parametrize("slot", [0, 1])
def test_a_worker_is_killed_in_a_part_of_a_step(tmp_path: Path, part: str, slot: int) -> None:
    expected = undisturbed(tmp_path, "conv")
    job = made("conv", workers=3)
    step = {"weights": 14, "evaluation": 7}.get(part, 9)
    told = run_surviving(job, tmp_path / "run", [Fault(slot, step, part)])
    assert len(told.views) == (1 if part == "checkpoint" and slot == 1 else 2)
    assert_same(tmp_path / "run", expected)


@pytest.mark.parametrize("bitwise", [True, False])
@pytest.mark.parametrize("faults", [[Fault(0, 6, "update"), Fault(2, 6, "exchange")], [Fault(2, 6, "exchange")]])
def test_of_four_those_hear_of_a_death_that_are_no_neighbours(
    tmp_path: Path, faults: list[Fault], bitwise: bool
) -> None:
    expected = undisturbed(tmp_path, "conv", shards=4, bitwise=bitwise)
    told = run_surviving(made("conv", workers=4, shards=4, bitwise=bitwise), tmp_path / "run", faults)
    assert told.views[-1] == [slot for slot in range(4) if slot not in {fault.slot for fault in faults}]
    if bitwise:
        assert_same(tmp_path / "run", expected)
    there, here = weights_of(expected), weights_of(tmp_path / "run")
    assert all(torch.allclose(there[name], here[name], rtol=1e-4, atol=1e-5) for name in there)


@pytest.mark.parametrize("slot", [0, 2])
def test_another_worker_comes_in_the_place_of_a_dead_one(tmp_path: Path, slot: int) -> None:
    slow: dict[str, Any] = {"epochs": 60, "checkpoint": {"every_steps": 50, "best": "eval_loss"}}
    expected = undisturbed(tmp_path, **slow)
    job = made(workers=3, **slow)
    told = run_surviving(job, tmp_path / "run", [Fault(slot, 7, "exchange")], replaces=True)
    assert sorted(told.views[-1]) == [0, 1, 2] and len(told.views) >= 2
    if slot:
        assert all(view[0] == 0 for view in told.views)
    assert_same(tmp_path / "run", expected)


def test_the_last_of_three_goes_on_alone(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    faults = [Fault(0, 3, "exchange"), Fault(1, 8, "exchange")]
    told = run_surviving(made(workers=3), tmp_path / "run", faults)
    assert told.views == [[0, 1, 2], [1, 2], [2]]
    assert_same(tmp_path / "run", expected)

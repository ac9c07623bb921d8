"""Workers that go on where others are killed, in real processes: the bits of one undisturbed process."""

from pathlib import Path
from typing import Any

import pytest
import torch

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


def undisturbed(tmp_path: Path, model: str = "mlp", **keys: Any) -> Path:
    folder = tmp_path / "undisturbed"
    run_group(job_of(model, workers=1, **{**KEYS, **keys}), folder)
    return folder


def assert_same(folder: Path, expected: Path) -> None:
    there, here = weights_of(expected), weights_of(folder)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert history_of(folder) == history_of(expected)


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_one_of_three_is_killed(tmp_path: Path, slot: int) -> None:
    expected = undisturbed(tmp_path)
    told = run_surviving(job_of("mlp", workers=3, **KEYS), tmp_path / "run", [Fault(slot, 7)])
    assert told.views == [[0, 1, 2], [one for one in (0, 1, 2) if one != slot]]
    assert_same(tmp_path / "run", expected)

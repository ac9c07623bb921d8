"""A training whose loop is the user's, against the same loop in plain torch on whole batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dp_ray.job.job import Job
from tests.support import loops
from tests.support.group import history_of, run_group, weights_of

LOOPS = "tests.support.loops"


def loop_job(loop: str, workers: int, **keys: Any) -> Job:
    given = {
        "task": "train",
        "model": f"{LOOPS}:Gan",
        "dataset": f"{LOOPS}:Points",
        "loop": loop if ":" in loop else f"{LOOPS}:{loop}",
        "workers": workers,
        "batch_size": loops.BATCH,
        "epochs": loops.EPOCHS,
        "shuffle": False,
        "shards": 3,
    }
    return Job.make({**given, **keys}, "job")


def trained(folder: Path, loop: str, workers: int, **keys: Any) -> dict[str, torch.Tensor]:
    run_group(loop_job(loop, workers, **keys), folder)
    return weights_of(folder)


@pytest.mark.parametrize("keys", [{}, {"bitwise": True}], ids=["sums", "bitwise"])
def test_a_gan_trains_as_in_plain_torch_on_any_number_of_workers(tmp_path: Path, keys: dict[str, Any]) -> None:
    expected, logged = loops.by_hand(loops.gan_by_hand)
    found = [trained(tmp_path / str(workers), "gan", workers, **keys) for workers in (1, 2, 3)]
    for workers, weights in enumerate(found, 1):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=2e-5, atol=1e-6)
            if keys:
                assert torch.equal(tensor, found[0][name]), name
        rows = history_of(tmp_path / str(workers))
        for name in ("critic", "generator"):
            assert [row[name] for row in rows] == pytest.approx([row[name] for row in logged], rel=1e-4)


def test_a_gradient_penalty_and_a_generator_of_each_second_step(tmp_path: Path) -> None:
    expected, _ = loops.by_hand(loops.wgan_by_hand)
    for workers in (1, 2, 3):
        for name, tensor in trained(tmp_path / str(workers), "wgan", workers).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)

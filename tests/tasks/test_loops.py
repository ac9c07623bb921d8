"""A training whose loop is the user's, against the same loop in plain torch on whole batches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dp_ray.job.job import Job
from tests.support import loops
from tests.support.group import StopsBefore, history_of, run_group, weights_of

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


def lbfgs_by_hand(steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = loops.Gan()
    optimizer = torch.optim.LBFGS(model.generator.parameters(), lr=0.5, max_iter=4)
    for real, noise in list(loops.batches(loops.Points()))[:steps]:

        def closure(real: torch.Tensor = real, noise: torch.Tensor = noise) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model.generator(noise) - real).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return dict(model.state_dict())


def test_lbfgs_is_torchs_on_the_whole_batch(tmp_path: Path) -> None:
    """To the bit with one shard; later steps magnify what the order of a sum rounds."""
    for name, tensor in trained(tmp_path / "one", "lbfgs", 1, shards=1).items():
        torch.testing.assert_close(tensor, lbfgs_by_hand(9)[name], rtol=1e-5, atol=1e-7)
    for workers in (1, 2):
        for name, tensor in trained(tmp_path / str(workers), "lbfgs", workers, max_steps=2).items():
            torch.testing.assert_close(tensor, lbfgs_by_hand(2)[name], rtol=1e-4, atol=1e-5)
    found = [trained(tmp_path / f"bits-{workers}", "lbfgs", workers, bitwise=True) for workers in (1, 2, 3)]
    assert all(torch.equal(found[0][name], weights[name]) for weights in found for name in weights)


def test_a_loss_over_the_batch_adds_to_one_of_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = loops.Gan()
    optimizer = loops.sgd(model)
    for real, noise in loops.batches(loops.Points()):
        optimizer.zero_grad()
        made = model(noise)
        ((made - real).square().mean() + loops.spread(made, real)).backward()
        optimizer.step()
    for workers in (1, 2, 3):
        for name, tensor in trained(tmp_path / str(workers), "contrastive", workers).items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-5)


PPO = {"model": f"{LOOPS}:Policy", "dataset": f"{LOOPS}:Rows", "bitwise": True}


def test_rollouts_are_gathered_and_cut_into_the_same_shards_on_any_workers(tmp_path: Path) -> None:
    found = [trained(tmp_path / str(workers), "ppo", workers, **PPO) for workers in (1, 2, 3)]
    for weights in found[1:]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in found[0].items())
    rows = [history_of(tmp_path / str(workers)) for workers in (1, 2, 3)]
    assert [row["won"] for row in rows[0]] == [row["won"] for row in rows[1]] == [row["won"] for row in rows[2]]
    assert [row["played"] for row in rows[0]] == [10, 20, 23, 33, 43, 46, 56, 66, 69]


def test_a_batch_of_the_loops_own_has_the_gradient_of_its_mean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = loops.Gan()
    table = torch.linspace(0, 1, 11)[:, None].expand(11, 3)
    for _ in range(9):
        model.zero_grad()
        model(table).square().sum(1).mean().backward()
        with torch.no_grad():
            for parameter in model.generator.parameters():
                parameter -= loops.LR * parameter.grad
    for workers in (1, 3):
        for name, tensor in trained(tmp_path / str(workers), "ppo_of_one_pass", workers).items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loop", ["gan", "ppo", "wgan"])
def test_a_loop_that_is_killed_before_any_step_goes_on_to_the_same_bits(tmp_path: Path, loop: str) -> None:
    """On other workers each time; its optimizers, states and random numbers with it."""
    keys: dict[str, Any] = {"bitwise": True, "checkpoint": {"every_steps": 1, "keep": 9}}
    keys |= PPO if loop == "ppo" else {}
    expected = trained(tmp_path / "whole", loop, 2, **keys)
    for at in (1, 4, 8):
        folder = tmp_path / str(at)
        run_group(loop_job(loop, 3, **keys), folder, StopsBefore(at))
        for name, tensor in trained(folder, loop, 2 if at == 1 else 1, **keys).items():
            assert torch.equal(tensor, expected[name]), (at, name)
    plain = history_of(tmp_path / "whole")
    for at in (1, 4, 8):
        again = history_of(tmp_path / str(at))
        assert [row["loss"] for row in again] == [row["loss"] for row in plain]

"""Loops as users write them: plain torch's numbers, and the same bits on any workers and after a kill."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dp_ray.driver.replay import replay
from dp_ray.job.job import Job
from dp_ray.replay.replay import StepChoice
from dp_ray.results.replayed import ReplayedLoop
from jobs.loops import actor_critic
from tests.support import loops_of_users as users
from tests.support.builders import run_dir_of
from tests.support.group import StopsBefore, history_of, run_group, weights_of

pytestmark = pytest.mark.usefixtures("in_project")

EPOCHS = 3
KEYS: dict[str, dict[str, Any]] = {
    "diffusion": {"model": "Denoiser", "dataset": "Spiral", "ema": {"decay": 0.5}},
    "dqn": {"model": "Agent", "dataset": "rounds"},
    "maml": {"model": "Wave", "dataset": "Waves"},
    "words": {
        "loop": "jobs.loops.words:train",
        "model": {"target": "jobs.loops.words:Reader", "args": {"width": 8}},
        "dataset": {"target": "jobs.loops.words:Pieces", "args": {"length": 5, "pieces": 3}},
        "eval": {
            "dataset": {"target": "jobs.loops.words:Pieces", "args": {"split": "test", "length": 5, "pieces": 2}}
        },
        "metrics": {"loss_of_words": "jobs.loops.words:loss_of"},
        "batch_size": 20,
    },
    "actor_critic": {
        "loop": "jobs.loops.actor_critic:train",
        "model": "jobs.loops.actor_critic:Balance",
        "dataset": {"target": "jobs.loops.actor_critic:carts", "args": {"number": 192}},
        "batch_size": 64,
    },
}
NUM_ROWS = {"words": 60, "actor_critic": 192}


def job_of(loop: str, **keys: Any) -> Job:
    given: dict[str, Any] = {
        "task": "train",
        "loop": loop,
        "batch_size": users.BATCH,
        "epochs": EPOCHS,
        "shards": users.SHARDS,
    }
    given |= {"shuffle": False, "bitwise": True, **KEYS[loop], **keys}
    for key in ("loop", "model", "dataset"):
        if isinstance(given[key], str) and ":" not in str(given[key]):
            given[key] = f"tests.support.loops_of_users:{given[key]}"
    return Job.make(given, "job")


def trained(folder: Path, loop: str, *lives: tuple[int, int | None], **keys: Any) -> Path:
    """A run in several lives: each on so many workers, and to the step before which all die."""
    job = job_of(loop, **keys)
    run = run_dir_of(folder, job, rows={"dataset": NUM_ROWS.get(loop, users.ROWS)}).storage
    for workers, dies in lives:
        run_group(
            job.model_copy(update={"workers": workers}), run.location, None if dies is None else StopsBefore(dies)
        )
    return Path(run.location)


def check(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_diffusion_trains_as_in_plain_torch(tmp_path: Path) -> None:
    """And the average of its weights is that of torch's own, once a step."""
    averages: list[Any] = []

    def averaged(run: Any) -> None:
        """The loop, with the average at the end of each step."""
        average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
        averages.append(average)
        steps = run.steps

        def counted() -> Any:
            for step in steps():
                yield step
                average.update_parameters(run.model)

        run.steps = counted
        users.diffusion(run)

    model, logged = users.plainly(averaged, users.Denoiser, users.Spiral().points, EPOCHS)
    run = trained(tmp_path, "diffusion", (2, None))
    check(weights_of(run), model.state_dict())
    check(dict(load_file(run / "ema.safetensors")), averages[0].module.state_dict())
    for name in ("error", "rate"):
        assert [row[name] for row in history_of(run)] == pytest.approx([row[name] for row in logged], rel=1e-4)


def test_dqn_with_a_replay_buffer_trains_as_in_plain_torch(tmp_path: Path) -> None:
    """It plays 69 rounds, so that the buffer of 64 is written over."""
    model, logged = users.plainly(users.dqn, users.Agent, torch.arange(users.ROWS), EPOCHS)
    run = trained(tmp_path, "dqn", (2, None))
    check(weights_of(run), model.state_dict())
    assert [row["played"] for row in history_of(run)] == [10, 20, 23, 33, 43, 46, 56, 66, 69]
    assert [row["won"] for row in history_of(run)] == pytest.approx([row["won"] for row in logged])


@pytest.mark.full
def test_dqn_learns_to_walk_to_the_end(tmp_path: Path) -> None:
    run = trained(tmp_path, "dqn", (1, None), epochs=60)
    agent = users.Agent()
    agent.load_state_dict(weights_of(run))
    with torch.no_grad():
        values = agent.online(torch.eye(users.PLACES))
    assert values[:-1].argmax(1).tolist() == [1] * (users.PLACES - 1)
    assert values[4, 1].item() == pytest.approx(1.0, abs=0.15) and values[3, 1].item() == pytest.approx(0.9, abs=0.2)


def test_maml_is_that_of_torch_func(tmp_path: Path) -> None:
    weights, errors = users.maml_by_hand(EPOCHS)
    run = trained(tmp_path, "maml", (2, None))
    check(weights_of(run), weights)
    assert [row["error"] for row in history_of(run)] == pytest.approx(errors, rel=1e-4)


def test_an_actor_and_its_critic_train_as_in_plain_torch(tmp_path: Path) -> None:
    """By the errors that the critic's pass keeps; the carts play on from step to step."""
    model, logged = users.plainly(actor_critic.train, actor_critic.Balance, torch.arange(192), EPOCHS, 64)
    run = trained(tmp_path, "actor_critic", (2, None))
    check(weights_of(run), model.state_dict())
    assert [row["fell"] for row in history_of(run)] == pytest.approx([row["fell"] for row in logged])


@pytest.mark.full(but=["maml", "words"])
@pytest.mark.parametrize("loop", KEYS)
def test_it_has_the_same_bits_on_any_workers_through_kills_and_in_a_replay(tmp_path: Path, loop: str) -> None:
    keys: dict[str, Any] = {"checkpoint": {"every_steps": 2, "keep": 9}}
    whole = trained(tmp_path / "whole", loop, (1, None))
    expected, history = weights_of(whole), history_of(whole)
    for name, lives in (("two", [(2, None)]), ("killed", [(3, 3), (1, 6), (2, None)])):
        run = trained(tmp_path / name, loop, *lives, **keys)
        found = weights_of(run)
        assert all(torch.equal(found[one], tensor) for one, tensor in expected.items())
        assert history_of(run) == history
    (again,) = replay(str(run), StepChoice(5), lambda line: None)
    assert isinstance(again, ReplayedLoop) and (again.start, again.compared) == (4, "bitwise equal")
    assert all(number.here == number.history for number in again.logged.values())

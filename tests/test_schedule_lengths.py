"""A scheduler that ends before its training is refused before anything runs, not in its last step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import dp_ray
from dp_ray.errors import JobError
from dp_ray.job import Job
from dp_ray.job_plan import plan_of
from tests.support.group import ProcessExit, history_of, run_group

ONE_CYCLE = "torch.optim.lr_scheduler:OneCycleLR"
ROWS, STEPS = 60, 12  # of the training, in two epochs


def one_cycle(optimizer: torch.optim.Optimizer, **args: Any) -> OneCycleLR:
    """A scheduler whose class the job does not say."""
    return OneCycleLR(optimizer, max_lr=0.1, **args)


def keys(target: str, per: str, **args: Any) -> dict[str, Any]:
    given = {"max_lr": 0.1, **args} if target == ONE_CYCLE else args
    return {
        "task": "train",
        "name": "run",
        "model": {"target": "tests.support.training:mlp"},
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": ROWS}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "scheduler": {"target": target, "args": given, "per": per},
        "batch_size": 10,
        "epochs": 2,
        "workers": 1,
    }


@pytest.mark.parametrize(
    ("per", "args", "lasts"),
    [
        ("step", {"total_steps": STEPS}, None),
        ("step", {"total_steps": STEPS - 1}, STEPS - 1),
        ("step", {"epochs": 2, "steps_per_epoch": 6}, None),
        ("step", {"epochs": 1, "steps_per_epoch": 6}, 6),
        ("epoch", {"total_steps": 2}, None),
        ("epoch", {"total_steps": 1}, 1),
    ],
)
def test_the_plan_refuses_a_one_cycle_that_is_too_short(per: str, args: dict[str, Any], lasts: int | None) -> None:
    job = Job.make(keys(ONE_CYCLE, per, **args), "run")
    if lasts is None:
        plan_of(job, {"dataset": ROWS})
        return
    with pytest.raises(JobError, match=rf"lasts for {lasts} steps? from here, and the training steps it \d+ times"):
        plan_of(job, {"dataset": ROWS})


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_one_that_lasts_goes_to_the_end_and_one_of_the_users_own_is_refused_before_its_first_step(
    tmp_path: Path, per: str
) -> None:
    """The oracle is torch: it takes a scheduler of n steps n times, and no further."""
    target, enough = "tests.test_schedule_lengths:one_cycle", STEPS if per == "step" else 2
    run_group(Job.make(keys(target, per, total_steps=enough), "run"), tmp_path / "enough")
    assert len(history_of(tmp_path / "enough")) == STEPS
    with pytest.raises(ProcessExit, match=f"lasts for {enough - 1} steps? from here"):
        run_group(Job.make(keys(target, per, total_steps=enough - 1), "run"), tmp_path / "short")
    assert not list((tmp_path / "short" / "history").glob("*"))


def test_a_finished_run_that_is_to_train_past_its_one_cycle_stays_finished(tmp_path: Path) -> None:
    given = {**keys(ONE_CYCLE, "step", total_steps=STEPS), "workers": 0, "storage": str(tmp_path), "quiet": True}
    whole = dp_ray.run(**given)
    with pytest.raises(JobError, match="lasts for 12 steps from here, and the training steps it 18 times"):
        dp_ray.run(**{**given, "epochs": 3})
    assert dp_ray.load(whole.run_dir).weights_sha256 == whole.weights_sha256

"""A scheduler that ends before its training is refused before anything runs; one that ends elsewhere is told.

`auto` and the short form are made for the length of the training.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import dp_ray
from dp_ray.engine.optimizer import Schedule
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.plan import plan_of, split_of, with_schedule
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
    target, enough = "tests.engine.test_schedule_lengths:one_cycle", STEPS if per == "step" else 2
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


LR = "torch.optim.lr_scheduler"


def trains(scheduler: Any, **more: Any) -> Job:
    return Job.make({**keys(ONE_CYCLE, "step", total_steps=STEPS), "scheduler": scheduler, **more}, "run")


def remarks(scheduler: Any, **more: Any) -> list[str]:
    return [line for line in plan_of(trains(scheduler, **more), {"dataset": ROWS}).remarks if "scheduler" in line]


def rates(folder: Path) -> list[float]:
    return [row["learning_rate"] for row in history_of(folder)]


def of_plain_loop(make: Callable[[torch.optim.Optimizer], Any], updates: int) -> list[float]:
    """The rate of each update of a plain loop of torch."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler, found = make(optimizer), []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("target", "args", "per", "says"),
    [
        ("CosineAnnealingLR", {"T_max": 6}, "step", "T_max 6, and the training steps it 12 times.* goes up again"),
        (
            "CosineAnnealingLR",
            {"T_max": 2},
            "step",
            "T_max: auto is the whole training, and per: epoch counts epochs",
        ),
        ("CosineAnnealingLR", {"T_max": 24}, "step", "the training ends before that; T_max: auto is the whole"),
        ("CosineAnnealingLR", {"T_max": 12}, "epoch", "T_max 12, and the training steps it 2 times, once each epoch"),
        ("PolynomialLR", {"total_iters": 5}, "step", "the learning rate is 0 after that"),
        ("LinearLR", {"total_iters": 13}, "step", "the training ends before that"),
        ("MultiStepLR", {"milestones": [6, 30]}, "step", r"milestones \[6, 30\], and .* ends before that$"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 40}, "step", "the training ends before that"),
        ("CosineAnnealingLR", {"T_max": 12}, "step", None),
        ("CosineAnnealingLR", {"T_max": 11}, "step", None),
        ("CosineAnnealingLR", {"T_max": "auto"}, "step", None),
        ("LinearLR", {"total_iters": 3}, "step", None),
        ("MultiStepLR", {"milestones": [6, 9]}, "step", None),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 12}, "step", None),
        ("CosineAnnealingWarmRestarts", {"T_0": 5}, "step", None),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.2}, "step", None),
        ("StepLR", {"step_size": 50}, "step", None),
    ],
)
def test_the_plan_tells_a_schedule_that_ends_elsewhere(
    target: str, args: dict[str, Any], per: str, says: str | None
) -> None:
    told = remarks({"target": f"{LR}:{target}", "args": args, "per": per})
    assert (told == []) if says is None else re.search(says, "".join(told))


def test_num_training_steps_states_a_length_in_any_scheduler() -> None:
    said = "scheduler: its num_training_steps is 24, and the training steps it 12 times, once each step"
    assert remarks({"target": "a:b", "args": {"num_training_steps": 24}})[0].startswith(said)
    assert remarks({"target": "a:b", "args": {"num_training_steps": 12, "T_max": 5}}) == []


@pytest.mark.parametrize(("per", "length"), [("step", STEPS), ("epoch", 2)])
def test_auto_is_how_often_the_training_steps_it(tmp_path: Path, per: str, length: int) -> None:
    run_group(trains({"target": f"{LR}:CosineAnnealingLR", "args": {"T_max": "auto"}, "per": per}), tmp_path / "auto")
    stepped = of_plain_loop(lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, length), length)
    assert rates(tmp_path / "auto") == [rate for rate in stepped for _ in range(STEPS // length)]


def test_auto_follows_the_batch_size() -> None:
    job = trains({"target": ONE_CYCLE, "args": {"max_lr": 1.0, "total_steps": "auto"}}, batch_size=7)
    split = split_of(job, ROWS)
    assert split.total_steps == 18
    planned = with_schedule(job, split).scheduler
    assert planned is not None and planned.args == {"max_lr": 1.0, "total_steps": 18}
    longer = trains(job.scheduler, batch_size=7, epochs=5)
    assert longer.fingerprint() == job.fingerprint(), "a longer training is the same one"


def expected(shape: str, warmup: int) -> list[float]:
    """By the formulas, without torch's classes."""
    rises = [0.1 * (k + 1) / (warmup + 1) for k in range(warmup)]
    shares = [k / (STEPS - warmup) for k in range(STEPS - warmup)]
    falls = {
        "cosine": [0.1 * (1 + math.cos(math.pi * share)) / 2 for share in shares],
        "linear": [0.1 * (1 - share) for share in shares],
        "constant": [0.1 for _ in shares],
    }
    return [*rises, *falls[shape]]


@pytest.mark.parametrize(("warmup", "updates"), [(0.25, 3), (4, 4), (0, 0), (0.01, 0)])
@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_the_short_form_is_torchs_own_classes(shape: str, warmup: float, updates: int) -> None:
    given = trains({"shape": shape, "warmup": warmup})
    job = with_schedule(given, split_of(given, ROWS))

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return Schedule(job.schedulers, [optimizer]).schedulers[0]

    def plain(optimizer: torch.optim.Optimizer) -> Any:
        lr, left = torch.optim.lr_scheduler, STEPS - updates
        if shape == "cosine":
            rest: Any = lr.CosineAnnealingLR(optimizer, T_max=left)
        elif shape == "linear":
            rest = lr.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=left)
        else:
            rest = lr.ConstantLR(optimizer, factor=1.0)
        if not updates:
            return rest
        warm = lr.LinearLR(optimizer, start_factor=1 / (updates + 1), total_iters=updates)
        return lr.SequentialLR(optimizer, [warm, rest], milestones=[updates])

    found = of_plain_loop(make, STEPS)
    assert found == of_plain_loop(plain, STEPS)
    assert found == pytest.approx(expected(shape, updates), abs=1e-12)


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        ({"warmup": 1.5}, r"scheduler\.warmup: must be a share of all updates .*got 1\.5"),
        ({"warmup": True}, r"scheduler\.warmup: must be a share"),
        ({"warmup": -1, "shape": "cosine"}, r"scheduler\.warmup: must be a share"),
        (
            {"shape": "cosin"},
            r"scheduler\.shape: must be 'cosine', 'linear' or 'constant', got 'cosin'; did you mean",
        ),
        ({"shape": "cosine", "warmup_steps": 5}, r"scheduler: .* keys shape and warmup alone; got warmup_steps too"),
        ({"shape": "cosine", "per": "epoch"}, r"scheduler: .* got per too"),
        (
            {"target": f"{LR}:StepLR", "args": {"step_size": "auto"}},
            r"scheduler: args\.step_size: auto, the length of the training, is for T_max, total_steps",
        ),
    ],
)
def test_a_wrong_schedule_is_named(scheduler: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        trains(scheduler)


def test_a_warm_up_that_is_longer_than_the_training_is_refused() -> None:
    with pytest.raises(
        JobError, match=r"scheduler\.warmup: 12 updates, and the training has 12; set fewer, or a sha"
    ):
        remarks({"warmup": 12})


@pytest.mark.parametrize(
    "scheduler",
    [
        {"warmup": 0.25, "shape": "cosine"},
        {"target": f"{LR}:CosineAnnealingLR", "args": {"T_max": "auto"}},
        {"target": ONE_CYCLE, "args": {"max_lr": 0.3, "total_steps": "auto"}},
    ],
)
def test_a_longer_training_plans_anew_and_says_so(tmp_path: Path, scheduler: dict[str, Any]) -> None:
    """From where it goes on, its rates are those of a training that had this length from the start."""
    run_group(trains(scheduler), tmp_path / "run")
    told = run_group(trains(scheduler, epochs=3), tmp_path / "run")
    run_group(trains(scheduler, epochs=3), tmp_path / "whole")
    shorter, longer, whole = (
        rates(tmp_path / "run")[:STEPS],
        rates(tmp_path / "run")[STEPS:],
        rates(tmp_path / "whole"),
    )
    assert shorter != whole[:STEPS]
    assert longer == whole[STEPS:]
    (said,) = (one.text for one in told if "steps now" in getattr(one, "text", ""))
    assert said.startswith("18 steps now, 12 before: the scheduler is planned anew: the learning rate goes on at ")

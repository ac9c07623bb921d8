"""An optimizer with train() and eval() trains other weights than it evaluates: each is where it belongs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dp_ray
from dp_ray.driver.checks import check_targets
from dp_ray.driver.replay import replay
from dp_ray.engine.optimizer import build_optimizers
from dp_ray.errors import JobError
from dp_ray.plan.order import Order
from dp_ray.replay.replay import StepChoice
from tests.support import training
from tests.support.group import StopsBefore, history_of, measured, run_group, weights_of
from tests.support.schedule_free import plain_schedule_free
from tests.support.trainings import eval_loss, initial, job_of, keys_of

LR = 2.0
EVAL = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4}
KEYS: dict[str, Any] = {
    "optimizer": {"target": "tests.support.schedule_free:ScheduleFree", "args": {"lr": LR}},
    "dataset": {"target": "tests.support.training:Pairs", "args": {"length": 42}},
    "shards": 4,
    "bitwise": True,
    "eval": EVAL,
    "checkpoint": {"every_steps": 4, "keep": 9, "best": "eval_loss"},
}
STEPS = 12


def expected() -> list[dict[str, torch.Tensor]]:
    """What is to be evaluated after each step, by the plain sequences."""
    data = training.Pairs(42)

    def batches() -> Iterator[Any]:
        for epoch in range(2):
            order = Order(42, 0, epoch, shuffle=True)
            for start in range(0, 42, 7):
                yield [torch.tensor([order[at] for at in range(start, start + 7)])]

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        (rows,) = batch
        return nn.functional.cross_entropy(model(data.inputs[rows]), data.targets[rows])

    return list(plain_schedule_free(initial(training.mlp), batches(), loss_of, LR))


def as_floats(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in weights.items()}


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name].double(), value, rtol=1e-5, atol=2e-6), name


def evaluated(folder: Path) -> dict[int, float]:
    return {row["step"]: row["eval_loss"] for row in history_of(folder) if row["eval_loss"] is not None}


def test_evaluations_best_and_the_weights_are_the_means(tmp_path: Path) -> None:
    run_group(job_of("mlp", **KEYS, workers=2), tmp_path)
    means = expected()
    losses = evaluated(tmp_path)
    assert list(losses) == [3, 7, 11]
    for step, loss in losses.items():
        assert loss == pytest.approx(eval_loss(as_floats(means[step])), rel=1e-5)
    assert_near(weights_of(tmp_path), means[-1])
    best = min(losses, key=lambda step: losses[step])
    assert best < STEPS - 1, "else the best are the last"
    assert_near(load_file(tmp_path / "best.safetensors"), means[best])


@pytest.mark.full
@pytest.mark.slow
def test_parts_of_a_model_are_switched_too(tmp_path: Path) -> None:
    """With strategy: fsdp, on two workers and, after a kill, on three."""
    job = job_of("mlp", **{**KEYS, "bitwise": False, "strategy": "fsdp"}, workers=2)
    run_group(job, tmp_path, StopsBefore(6))
    run_group(job.model_copy(update={"workers": 3}), tmp_path)
    means, losses = expected(), evaluated(tmp_path)
    assert_near(weights_of(tmp_path), means[-1])
    best = min(losses, key=lambda step: losses[step])
    assert_near(load_file(tmp_path / "best.safetensors"), means[best])


def test_the_bits_depend_neither_on_workers_nor_on_evaluations_nor_on_a_kill(tmp_path: Path) -> None:
    """To switch the weights there and back rounds: a training with evaluations would end elsewhere."""
    unevaluated: dict[str, Any] = {"workers": 1, "eval": None, "checkpoint": {}}
    for name, keys in {"one": {"workers": 1}, "two": {"workers": 2}, "none": unevaluated}.items():
        run_group(job_of("mlp", **{**KEYS, **keys}), tmp_path / name)
    run_group(job_of("mlp", **KEYS, workers=2), tmp_path / "killed", StopsBefore(6))
    run_group(job_of("mlp", **KEYS, workers=1), tmp_path / "killed")
    whole = {name: tensor.tolist() for name, tensor in weights_of(tmp_path / "one").items()}
    for name in ("two", "none", "killed"):
        assert {key: tensor.tolist() for key, tensor in weights_of(tmp_path / name).items()} == whole, name
    assert history_of(tmp_path / "killed") == history_of(tmp_path / "two") == history_of(tmp_path / "one")


def test_a_run_goes_on_from_its_checkpoint_and_others_begin_with_what_it_evaluated(tmp_path: Path) -> None:
    run_group(job_of("mlp", **KEYS, workers=1), tmp_path / "whole")
    checkpoint = str(tmp_path / "whole/checkpoints/step-8.safetensors")
    run_group(job_of("mlp", **KEYS, workers=1, init_from=checkpoint), tmp_path / "on")
    assert weights_of(tmp_path / "on").keys() == weights_of(tmp_path / "whole").keys()
    for name, tensor in weights_of(tmp_path / "whole").items():
        assert torch.equal(weights_of(tmp_path / "on")[name], tensor), name
    keys: dict[str, Any] = {
        "task": "evaluate",
        "optimizer": None,
        "checkpoint": {},
        "bitwise": False,
        "init_from": checkpoint,
    }
    found = measured(
        run_group(job_of("mlp", **{**KEYS, **keys, "shuffle": False}, workers=1), tmp_path / "evaluated")
    )
    assert found["loss"] == pytest.approx(evaluated(tmp_path / "whole")[7], rel=1e-6)


def keep_weights(view: Any) -> None:
    torch.save(view.weights, f"{view.run_dir}/seen-{view.step}.pt")


def test_a_replay_has_the_bits_and_hooks_see_the_means(tmp_path: Path) -> None:
    data = KEYS["dataset"]
    keys = {**KEYS, "dataset": data, "batch_size": 7, "epochs": 2, "shuffle": True, "checkpoint": {"every_steps": 20}}
    dp_ray.run(
        **keys_of(
            **keys, storage=str(tmp_path), name="r", hooks={"on_step": "tests.engine.test_schedule_free:keep_weights"}
        )
    )
    for found in replay(str(tmp_path / "r"), StepChoice(9), lambda line: None):
        assert found.compared == "bitwise equal"
    assert_near(torch.load(tmp_path / "r/seen-8.pt"), expected()[8])


class Sam(torch.optim.SGD):
    """As SAM is written by most: step() has a closure, which it needs."""

    def first_step(self) -> None:
        raise NotImplementedError

    def second_step(self) -> None:
        raise NotImplementedError


class Again(torch.optim.SGD):
    """One whose closure has another name."""

    def step(self, evaluate: Any) -> Any:  # type: ignore[override]
        return super().step(evaluate)


@pytest.mark.parametrize(("name", "says"), [("Sam", "in its first_step and second_step"), ("Again", "by a closure")])
def test_an_optimizer_that_wants_the_loss_again_is_refused(name: str, says: str) -> None:
    match = f"optimizer: {name} computes the loss several times in a step, {says}"
    with pytest.raises(JobError, match=match):
        check_targets(
            job_of("mlp", optimizer={"target": f"tests.engine.test_schedule_free:{name}", "args": {"lr": 0.1}})
        )
    made = {"Sam": Sam, "Again": Again}[name]
    with pytest.raises(JobError, match=match):
        build_optimizers([("optimizer", lambda parameters: made(parameters, lr=0.1))], training.mlp())

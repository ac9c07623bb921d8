"""A shard whose labels are all ignored: its weight is 0, so it counts as nothing, though its mean is NaN."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dp_ray
from dp_ray.engine.forward.step import weighted_sum
from tests.support import training
from tests.support.group import ProcessExit, history_of, run_group, weights_of
from tests.support.replays import replayed
from tests.support.training import IGNORED, PartlyLabelled, mean_of_labels, plain_loop
from tests.support.trainings import assert_close, initial, job_of, keys_of, mean_loss


def as_taught(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the docs teach it: a mean over the labels, and how many they are; of no labels it is NaN."""
    labels = (target != IGNORED).sum()
    return functional.cross_entropy(outputs, target) * labels, labels


def right_of_labels(outputs: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    """A metric, which is NaN where there is no label."""
    mask = target != IGNORED
    labels = int(mask.sum())
    return ((outputs.argmax(1) == target)[mask].float().mean() * labels).item(), labels


def step_of_pairs(model: nn.Module, batch: Any) -> Any:
    inputs, target = batch
    outputs = model(inputs)
    return {"loss": mean_of_labels(outputs, target), "outputs": outputs, "target": target}


HERE = "tests.engine.forward.test_without_labels"
DATA = {"target": "tests.support.training:PartlyLabelled"}
EVAL = {"dataset": {"target": "tests.support.training:PartlyLabelled", "args": {"length": 25}}}
KEYS: dict[str, Any] = {
    "loss": "tests.support.training:mean_of_labels",
    "shards": 7,
    "epochs": 2,
    "stop_on_nan": True,
}


def trained_by_torch(data: Any = None, order_of: Any = None) -> tuple[nn.Module, list[float]]:
    model = initial(training.mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    return model, plain_loop(model, data or PartlyLabelled(), 7, 2, mean_loss, optimizer, order_of=order_of)


CASES: dict[str, dict[str, Any]] = {
    "one worker": {"workers": 1},
    "as the docs teach it": {"workers": 1, "loss": f"{HERE}:as_taught"},
    "one worker, bitwise": {"workers": 1, "bitwise": True},
    "a step": {"workers": 1, "loss": None, "step": f"{HERE}:step_of_pairs"},
    "two workers": {"workers": 2},
    "three workers, bitwise": {"workers": 3, "bitwise": True},
    "two workers, clipped": {"workers": 2, "grad_clip": 1e9},
}


@pytest.mark.full(but=["three workers, bitwise", "two workers, clipped"])
@pytest.mark.parametrize("case", CASES)
def test_a_training_is_that_of_plain_torch(tmp_path: Path, case: str) -> None:
    run_group(job_of("mlp", DATA, **{**KEYS, **CASES[case]}), tmp_path)
    assert_close(tmp_path, *trained_by_torch(), 3e-6)


@pytest.mark.full(but=["False"])
@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
def test_a_sharded_training_is_that_of_plain_torch(tmp_path: Path, bitwise: bool) -> None:
    """Rank 0 has three shards and rank 1 four: its dummy batch, the first one, has no label either."""
    data = {"target": "tests.support.training:PartlyLabelled", "args": {"first": 1}}
    run_group(job_of("mlp", data, **KEYS, shuffle=False, workers=2, bitwise=bitwise, strategy="fsdp"), tmp_path)
    assert_close(tmp_path, *trained_by_torch(PartlyLabelled(first=1), lambda epoch: range(42)), 3e-6)


def test_evaluations_metrics_best_and_early_stopping_see_the_mean_over_the_labels(tmp_path: Path) -> None:
    best = {"metric": "eval_loss", "mode": "min"}
    metrics = {"right": f"{HERE}:right_of_labels"}
    stopping = {"metric": "eval_loss", "patience": 30}
    given = {**KEYS, "metrics": metrics, "eval": EVAL, "checkpoint": {"best": best}, "early_stopping": stopping}
    run_group(job_of("mlp", DATA, **given, workers=2), tmp_path)
    model, _ = trained_by_torch()
    last = history_of(tmp_path)[-1]
    data = PartlyLabelled(25)
    with torch.no_grad():
        outputs = model.eval()(data.inputs)
    labelled = data.targets != IGNORED
    assert last["eval_loss"] == pytest.approx(functional.cross_entropy(outputs, data.targets).item(), rel=1e-5)
    assert last["eval_right"] == pytest.approx(
        (outputs.argmax(1) == data.targets)[labelled].double().mean().item(), rel=1e-6
    )
    assert all(row["right"] == row["right"] for row in history_of(tmp_path))
    assert (tmp_path / "best.safetensors").exists()


def test_a_batch_without_any_label_changes_nothing_and_has_no_loss(tmp_path: Path) -> None:
    """Its gradient is 0, so SGD without momentum leaves the weights; a mean over nothing is NaN."""
    data = {"target": "tests.support.training:PartlyLabelled", "args": {"length": 21, "end": 14}}
    sgd = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    keys = {**KEYS, "shuffle": False, "optimizer": sgd, "epochs": 1, "workers": 2}
    run_group(job_of("mlp", data, **keys), tmp_path / "three")
    run_group(job_of("mlp", data, **keys, max_steps=2), tmp_path / "two")
    (*_, last), before = history_of(tmp_path / "three"), weights_of(tmp_path / "two")
    assert last["loss"] is None or last["loss"] != last["loss"]
    assert last["gradient_norm"] == 0.0
    assert {name: tensor.tolist() for name, tensor in weights_of(tmp_path / "three").items()} == {
        name: value.tolist() for name, value in before.items()
    }


def test_a_loss_that_is_nan_where_it_has_weight_still_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(ProcessExit, match="step 0: the loss is nan, and stop_on_nan is true"):
        run_group(job_of("mlp", DATA, **{**KEYS, "loss": f"{HERE}:nan_with_weight"}, workers=1), tmp_path)


def nan_with_weight(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return outputs.sum() * float("nan"), len(target)


def test_a_sum_of_weight_zero_is_zero() -> None:
    for total in (float("nan"), float("inf"), 5.0):
        for weight in (0, 0.0, torch.tensor(0), torch.tensor([0.0])):
            for given in (total, torch.tensor(total)):
                assert weighted_sum((given, weight), 3, "metrics.m").sum.item() == 0.0


def test_a_replay_finds_nothing_in_a_shard_without_labels(tmp_path: Path) -> None:
    data = {"target": "tests.support.training:PartlyLabelled"}
    given = {**KEYS, "shards": 7, "dataset": data, "batch_size": 7, "stop_on_nan": False}
    dp_ray.run(**keys_of(**given, storage=str(tmp_path), name="r"))
    found = replayed(tmp_path / "r", 3)
    assert found.compared == "bitwise equal"
    assert (found.output, found.gradient) == (None, None)
    assert [row.loss for row in found.rows if row.loss != row.loss] == []

"""The state of losses, steps and metrics: as that of a model's forwards it follows shard 0, and is kept."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.engine.forward.buffers import modules_in
from dp_ray.engine.forward.step import build_loss
from dp_ray.engine.trainer import WRITTEN
from dp_ray.job.job import Job
from dp_ray.rundir.checkpoint import load_checkpoint
from dp_ray.storage import Storage
from tests.support import training
from tests.support.builders import run_dir_of
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group, weights_of
from tests.support.replays import replayed
from tests.support.stateful import STEPS, Centred, CentredStep, Distance, closure, loss_closure, plain_training
from tests.support.trainings import assert_close, initial, job_of

pytestmark = pytest.mark.usefixtures("in_project")

DATA = {"target": "tests.support.training:Pairs", "args": {"length": 30}}


def of(name: str, **args: Any) -> dict[str, Any]:
    return {"target": f"tests.support.stateful:{name}", "args": args}


def job(**keys: Any) -> Job:
    """30 rows in batches of 14, 14 and 2: of four workers two have no rows in the last step."""
    given: dict[str, Any] = {"batch_size": 14, "shards": 4, "epochs": 2, "loss": of("Centred"), **keys}
    return job_of("mlp", DATA, **given)


def state_in(folder: Path) -> dict[str, torch.Tensor]:
    """What the last checkpoint has of the state beside the model."""
    newest = max((folder / "checkpoints").glob("*.safetensors"), key=lambda path: int(path.stem.split("-")[1]))
    found = load_checkpoint(Storage(str(newest.parent)), newest.name).state
    return dict(found.get(WRITTEN, {}).get("buffers", {}))


def ends(made: Job, folder: Path) -> tuple[dict[str, bytes], dict[str, bytes], str]:
    run_group(made, folder)
    weights, state = (
        {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
        for tensors in (weights_of(folder), state_in(folder))
    )
    return weights, state, repr(history_of(folder))


def assert_state(folder: Path, key: str, module: nn.Module) -> None:
    """The last checkpoint has all that the module has and that changes."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = state_in(folder)
    wanted = {f".{key}.{name}": tensor for name, tensor in tensors.items() if "classes" not in name}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=3e-6, atol=1e-6)


@pytest.mark.full(but=["True-8"])
@pytest.mark.parametrize(("over_batch", "width"), [(False, 300), (True, 8), (True, 300)])
def test_a_losss_state_follows_shard_0_or_the_batch(tmp_path: Path, over_batch: bool, width: int) -> None:
    loss = {**of("Centred", over_batch=over_batch, width=width), **({"over": "batch"} if over_batch else {})}
    model, plain = initial(training.mlp), Centred(over_batch, width)
    losses, _ = plain_training(model, plain, training.Pairs(30), 14, 4, 2, over_batch)
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        run_group(job(loss=loss, workers=workers), folder)
        assert_close(folder, model, losses, 5e-6)
        assert_state(folder, "loss", plain)


@pytest.mark.full(but=["True-ddp"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("over_batch", [False, True])
def test_the_bits_are_the_same_on_any_workers_and_after_a_kill(
    tmp_path: Path, over_batch: bool, strategy: str
) -> None:
    """With evaluations in between, which leave no change, and use the state of the training."""
    loss = {**of("Centred", over_batch=over_batch), **({"over": "batch"} if over_batch else {})}
    keys: dict[str, Any] = {
        "loss": loss,
        "bitwise": True,
        "strategy": strategy,
        "metrics": {"distance": of("Distance")},
        "checkpoint": {"every_steps": 2},
    }
    keys["eval"] = {"dataset": DATA, "every_steps": 2, "batch_size": 14}
    first = ends(job(workers=1, **keys), tmp_path / "1")
    assert {".loss.centre", ".loss.hidden", ".metrics.distance.mean"} <= first[1].keys()
    if strategy == "ddp":
        assert ends(job(workers=2, **keys), tmp_path / "2") == first
    assert ends(job(workers=3, **keys), tmp_path / "3") == first
    run_group(job(workers=2, **keys), tmp_path / "killed", StopsBefore(3))
    assert ends(job(workers=3 if strategy == "fsdp" else 1, **keys), tmp_path / "killed") == first


@pytest.mark.parametrize("kind", list(STEPS))
def test_the_state_that_a_step_reaches_is_followed(tmp_path: Path, kind: str) -> None:
    model, plain = initial(training.mlp), Centred()
    losses, _ = plain_training(model, plain, training.Pairs(30), 14, 4, 2)
    keys: dict[str, Any] = {"loss": None, "workers": 0, "storage": str(tmp_path)}
    step = STEPS[kind]()
    for name in ("first", "again"):  # the caller's object stays as it was, but for what a closure holds
        result = dp_ray.run(job(step=step, **keys), name=name, quiet=True)
        if kind != "closure" or name == "first":
            got = torch.tensor([row["loss"] for row in result.history])
            assert torch.allclose(got, torch.tensor(losses), rtol=1e-5)
            assert len(state_in(tmp_path / name)) == 12
            assert_weights(result.weights, model)


def assert_weights(weights: Any, model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_trials_leave_the_state_as_it_was(tmp_path: Path) -> None:
    """Those of `shards: auto`, and of a loss: with other rows, and where its size may not be that of rows."""
    keys: dict[str, Any] = {"workers": 0, "storage": str(tmp_path), "batch_size": 12}
    ways: dict[str, Any] = {
        "auto": {"loss": None, "step": closure(), "shards": "auto"},
        "loss": {"loss": loss_closure()},
    }
    for name, given in ways.items():
        model = initial(training.mlp)
        plain_training(model, Centred(), training.Pairs(30), 12, 1 if name == "auto" else 4, 2)
        assert_weights(dp_ray.run(job(**{**keys, **given}), name=name, quiet=True).weights, model)


def test_a_step_that_is_a_module_has_one_state_on_any_workers(tmp_path: Path) -> None:
    """Also where the first shards of a trial run before the steps."""
    keys: dict[str, Any] = {"loss": None, "step": of("CentredStep"), "bitwise": True, "flops": True}
    first = ends(job(workers=1, **keys), tmp_path / "1")
    assert ends(job(workers=2, **keys, find_unused_parameters="auto"), tmp_path / "2") == first
    model, plain = initial(training.mlp), CentredStep()
    losses, _ = plain_training(model, plain.loss, training.Pairs(30), 14, 4, 2)
    assert_close(tmp_path / "1", model, losses, 5e-6)
    assert_state(tmp_path / "1", "step", plain)


def test_a_metrics_state_follows_shard_0(tmp_path: Path) -> None:
    model, plain, metric = initial(training.mlp), Centred(), Distance()
    _, means = plain_training(model, plain, training.Pairs(30), 14, 4, 2, metric=metric)
    run_group(job(workers=2, metrics={"distance": of("Distance")}), tmp_path)
    assert [row["distance"] for row in history_of(tmp_path)] == pytest.approx(means, rel=1e-5)
    torch.testing.assert_close(state_in(tmp_path)[".metrics.distance.mean"], metric.mean)


@pytest.mark.parametrize("over_batch", [False, True])
def test_an_evaluation_measures_with_the_trained_state_and_leaves_it(tmp_path: Path, over_batch: bool) -> None:
    """Each shard of it, or each batch, from the same values."""
    loss = {**of("Centred", over_batch=over_batch), **({"over": "batch"} if over_batch else {})}
    keys = {"dataset": DATA, "batch_size": 14, "every_steps": 6}
    run_group(job(loss=loss, workers=1, shards=2, eval=keys), tmp_path)
    model, plain, data = initial(training.mlp), Centred(over_batch), training.Pairs(30)
    plain_training(model, plain, data, 14, 2, 2, over_batch)
    model.eval()
    total = 0.0
    for start in range(0, 30, 14):
        rows, targets = data.inputs[start : start + 14], data.targets[start : start + 14]
        parts = 1 if over_batch else 2
        for chunk, target in zip(rows.chunk(parts), targets.chunk(parts), strict=True):
            with torch.no_grad():
                value = copy.deepcopy(plain)(model(chunk), target)
            total += float(value * len(target) if over_batch else value.sum())
    (found,) = [row["eval_loss"] for row in history_of(tmp_path) if row["eval_loss"] is not None]
    assert found == pytest.approx(total / 30, rel=1e-5)
    assert_state(tmp_path, "loss", plain)


@pytest.mark.full(but=["True"])
@pytest.mark.parametrize("over_batch", [False, True])
def test_a_replayed_step_has_the_historys_loss(tmp_path: Path, over_batch: bool) -> None:
    loss = {**of("Centred", over_batch=over_batch), **({"over": "batch"} if over_batch else {})}
    keys: dict[str, Any] = {"bitwise": True, "checkpoint": {"every_steps": 2}, "loss": loss}
    made = job(workers=2, **keys)
    run = run_dir_of(tmp_path, made, rows={"dataset": 30}).storage
    run_group(made, run.location)
    for step, row in enumerate(history_of(Path(run.location))):
        found = replayed(run.location, step)
        assert found.loss == row["loss"]
        values = [row.gradient if over_batch else row.loss for row in found.rows]
        assert len(values) == (2 if step % 3 == 2 else 14) and None not in values
        if not over_batch:
            assert sum(value for value in values if value is not None) / len(values) == pytest.approx(row["loss"])


def test_weights_that_a_step_has_of_its_own_are_told(tmp_path: Path) -> None:
    says = r"step.head.weight got a gradient, and no optimizer trains it: make it a part of the model, or freeze it"
    for workers in (1, 2):
        with pytest.raises(ProcessExit, match=says):
            run_group(job(loss=None, step=of("Arc"), workers=workers), tmp_path / str(workers))


def test_a_checkpoint_without_the_state_begins_it_anew_and_one_of_another_loss_is_told(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"workers": 1, "checkpoint": {"every_steps": 3}}
    run_group(job(loss="torch.nn:CrossEntropyLoss", **keys), tmp_path / "old", StopsBefore(3))
    assert not state_in(tmp_path / "old")
    start = str(tmp_path / "old" / "checkpoints" / "step-3.safetensors")
    run_group(job(init_from=start, **keys), tmp_path / "new")
    assert int(state_in(tmp_path / "new")[".loss.seen"]) == 4 + 4 + 1
    start = str(tmp_path / "new" / "checkpoints" / "step-6.safetensors")
    with pytest.raises(ProcessExit, match=r"the checkpoint has the buffer loss.centre, unlike this job"):
        run_group(job(loss="torch.nn:CrossEntropyLoss", init_from=start, epochs=3, **keys), tmp_path / "other")
    run_group(job(init_from=str(tmp_path / "new" / "weights.safetensors"), **keys), tmp_path / "weights")
    assert int(state_in(tmp_path / "weights")[".loss.seen"]) == 2 * (4 + 4 + 1)


def test_class_weights_are_no_state() -> None:
    """So nothing is copied or sent in a step."""
    made = {"target": "torch.nn:CrossEntropyLoss", "args": {"weight": [1.0, 2.0, 3.0]}}
    assert modules_in("loss", build_loss(job(loss=made).loss, torch.device("cpu"))) == {}

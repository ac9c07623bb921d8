"""A model's own `train()` and `eval()` are called as in plain torch, and what they change counts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dp_ray.driver.planning import plan_memory_of
from dp_ray.engine.forward.model import evaluating, returning
from dp_ray.engine.loads.loading import Source, seeded_dataset
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.job.plan import split_of
from dp_ray.storage import Storage
from dp_ray.tasks import setup
from dp_ray.tasks.held import Held
from dp_ray.tasks.setup import Context, model_to_run
from dp_ray.trials.memory import Data, why_not
from tests.support import own_modes, training
from tests.support.group import ProcessExit, history_of, measured, run_group, weights_of
from tests.support.merging import merged
from tests.support.own_modes import LR, Noted, adapted, plain_training
from tests.support.schedule_free import ScheduleFree
from tests.support.trainings import initial, job_of

DATA = {"target": "tests.support.training:Pairs", "args": {"length": 42}}
EVAL = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 2}
SGD = {"target": "torch.optim:SGD", "args": {"lr": LR}}
KEYS: dict[str, Any] = {
    "dataset": DATA,
    "bitwise": True,
    "shards": 2,
    "eval": EVAL,
    "optimizer": SGD,
    "checkpoint": {"every_steps": 3},
}


def model_of(name: str, in_eval: str = "") -> dict[str, Any]:
    return {"target": f"tests.support.own_modes:{name}", "args": {"in_eval": in_eval} if in_eval else {}}


def assert_same(folder: Path, other: Path) -> None:
    mine, theirs = weights_of(folder), weights_of(other)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine), "bit for bit"
    assert history_of(folder) == history_of(other)


def assert_as(
    folder: Path, model: nn.Module, losses: list[float], evaluations: list[float], column: str = "eval_loss"
) -> None:
    found = weights_of(folder)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=2e-5, atol=2e-6), name
    history = history_of(folder)
    assert [row["loss"] for row in history] == pytest.approx(losses, rel=2e-5)
    assert [row[column] for row in history if row[column]] == pytest.approx(evaluations, rel=2e-5)


@pytest.mark.parametrize(
    ("name", "in_eval", "back"),
    [
        ("adapted", "", lambda model: model.train()),
        ("adapted", "all", lambda model: model.train()),  # as one of from_pretrained
        ("adapted", "part", lambda model: (model.train(), model[1].eval())),  # its weights stay merged
        ("still", "", lambda model: model.train()),
        ("still", "part", lambda model: (model.train(), model[1].eval())),
    ],
)
def test_a_training_with_evaluations_is_that_of_plain_torch(
    tmp_path: Path, name: str, in_eval: str, back: Callable[[nn.Module], Any]
) -> None:
    for workers in (1, 2):
        run_group(job_of(model_of(name, in_eval), **KEYS, workers=workers), tmp_path / str(workers))
    model = initial(getattr(own_modes, name), in_eval)
    assert_as(tmp_path / "1", model, *plain_training(model, 2, lambda: back(model)))
    assert_same(tmp_path / "1", tmp_path / "2")


def test_a_loop_of_the_users_does_the_same(tmp_path: Path) -> None:
    keys = {**KEYS, "optimizer": None, "loss": None, "loop": "tests.support.own_modes:loop"}
    keys["metrics"] = {"nll": "tests.support.own_modes:by_row"}
    run_group(job_of(model_of("adapted"), **keys, workers=2), tmp_path)
    model = initial(adapted)
    assert_as(tmp_path, model, *plain_training(model, 2, model.train), "eval_nll")


@pytest.mark.parametrize("in_eval", ["", "all"])
def test_an_averaged_copy_has_modes_of_its_own(tmp_path: Path, in_eval: str) -> None:
    run_group(job_of(model_of("adapted", in_eval), **KEYS, ema={"decay": 0.5}, workers=2), tmp_path)
    model = initial(adapted, in_eval).train()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    found = plain_training(
        model,
        2,
        lambda: average.train(),
        evaluated=average.module,
        after_step=lambda: average.update_parameters(model),
    )
    assert_as(tmp_path, model, *found)
    averaged = load_file(tmp_path / "ema.safetensors")
    for name, tensor in average.module.state_dict().items():
        torch.testing.assert_close(averaged[name], tensor, rtol=2e-5, atol=2e-6)


def test_eval_comes_after_the_weights_to_evaluate_and_train_before_those_to_train(tmp_path: Path) -> None:
    optimizer = {"target": "tests.support.schedule_free:ScheduleFree", "args": {"lr": LR}}
    run_group(job_of(model_of("adapted"), **{**KEYS, "optimizer": optimizer}, workers=2), tmp_path)
    model = initial(adapted)
    plain = ScheduleFree([each for each in model.parameters() if each.requires_grad], LR)
    plain.train()

    @contextmanager
    def in_place() -> Iterator[None]:
        plain.eval()
        yield
        plain.train()

    losses, evaluations = plain_training(model, 2, model.train, in_place=in_place, optimizer=plain)
    plain.eval()  # whose weights are kept
    assert_as(tmp_path, model, losses, evaluations)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_prediction_and_an_evaluation_run_what_stands_after_eval(tmp_path: Path, workers: int) -> None:
    """Its weights are so small that they are put back before each shard."""
    narrow = {"target": "tests.support.own_modes:adapted", "args": {"wide": 8}}
    keys = {"dataset": DATA, "batch_size": 7, "shards": 2, "workers": workers, "model": narrow}
    model, data = initial(adapted, "", None, 8).eval(), training.Pairs(42)
    job = Job.make({**keys, "inputs": "first"}, "job")
    run_group(job, tmp_path / "outputs")
    expected = model(data.inputs).detach()
    torch.testing.assert_close(merged(job, tmp_path / "outputs", 42).read(), expected, rtol=1e-5, atol=1e-6)
    told = run_group(Job.make({**keys, "task": "evaluate", "loss": "torch.nn:CrossEntropyLoss"}, "job"), tmp_path)
    assert measured(told)["loss"] == pytest.approx(nn.functional.cross_entropy(expected, data.targets).item(), 1e-5)


def test_weights_come_into_a_model_that_was_built_in_eval(tmp_path: Path) -> None:
    """They are those of train mode, as a training keeps them, and it had merged others."""
    model = initial(adapted)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    given = {**model_of("adapted", "all"), "args": {"in_eval": "all", "seed": 1}}
    keys = {"model": given, "init_from": str(tmp_path / "weights.safetensors"), "dataset": DATA, "inputs": "first"}
    job = Job.make({**keys, "batch_size": 21, "workers": 1}, "job")
    run_group(job, tmp_path / "outputs")
    expected = model.eval()(training.Pairs(42).inputs).detach()
    torch.testing.assert_close(merged(job, tmp_path / "outputs", 42).read(), expected, rtol=1e-5, atol=1e-6)


def test_a_newcomer_gets_no_weights_that_others_have_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have merged weights go on with them; with a newcomer all build the model anew."""
    job = Job.make({"model": model_of("adapted"), "dataset": DATA, "inputs": "first", "batch_size": 21}, "job")
    context = Context(job, World(), Storage(str(tmp_path)), lambda message: None, held=Held())
    for has_newcomer, is_merged in ((True, False), (False, True), (True, False)):
        monkeypatch.setattr(setup, "gathered", lambda value, new=has_newcomer: [value and not new, value])
        model: Any = model_to_run(context).model
        expected: Any = initial(adapted).eval() if is_merged else initial(adapted)
        assert torch.equal(model[1].weight, expected[1].weight), "bit for bit"
        with evaluating(model):
            assert model[1].merged


@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_with_fsdp_an_eval_that_writes_a_parameter_is_told(tmp_path: Path, task: str) -> None:
    keys: dict[str, Any] = {**KEYS, "bitwise": False, "strategy": "fsdp", "task": task}
    if task == "evaluate":
        keys |= {"eval": None, "optimizer": None, "checkpoint": {}}
    with pytest.raises(
        ProcessExit, match=r"\.ModelError: the model's own eval\(\) wrote 1\.weight, .*strategy: ddp\n$"
    ):
        run_group(job_of(model_of("adapted"), **keys, workers=2), tmp_path)


def test_the_trial_of_shards_and_the_plan_of_memory_train_in_the_models_own_mode() -> None:
    """They raise what the model raises once its statistics are trained."""
    for strategy in ("ddp", "fsdp"):
        job = job_of(model_of("checked"), **KEYS, workers=2, strategy=strategy)
        plan_memory_of(job, None)
    dataset = seeded_dataset(job, "dataset")
    data = Data(Source(job, dataset), split_of(job, len(dataset)))
    assert why_not(job_of(model_of("checked"), **KEYS, workers=1), World(), data, [data]) == ""


def test_calls_alone_set_modes() -> None:
    """Of a compiled model those of the model itself."""
    outer, inner, other = Noted(nn.Dropout()), Noted(nn.Dropout()), Noted(nn.Dropout())
    outer.append(inner)
    model = Noted(outer, other)
    outer.eval()
    inner.train()
    modes = [module.training for module in model.modules()]
    for module in (model, outer, inner, other):
        module.calls.clear()
    called: Any = torch.compile(model, backend="eager")
    with returning(called), evaluating(called):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    assert model.calls == ["eval", "train(False)", "train(True)"]
    assert outer.calls == ["train(False)", "train(True)", "eval", "train(False)"]
    assert inner.calls == ["train(False)", "train(True)", "train(False)", "train(True)"]
    assert other.calls == ["train(False)", "train(True)"]

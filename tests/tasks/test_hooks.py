"""Hooks: called on rank 0 with what the history says, unable to change the training, and named when they fail."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dp_ray
from dp_ray.driver.checks import check_targets
from dp_ray.driver.from_run import follow_up
from dp_ray.engine.trainer import Update
from dp_ray.engine.world import own_rank
from dp_ray.errors import JobError, ModelError
from dp_ray.tasks.hooks import TrainingView
from tests.support.group import ProcessExit, StopsBeforeItsWeights, history_of, run_group, weights_of
from tests.support.trainings import job_of, keys_of

PAIRS = "tests.support.training:Pairs"
EVAL = {"dataset": {"target": PAIRS, "args": {"length": 20}}, "every_steps": 4}
DROPOUT = {"target": "tests.support.training:mlp", "args": {"dropout": 0.3}}


def note(view: TrainingView, hook: str) -> None:
    """Append what a hook sees to a file of the run."""
    values = {"hook": hook, "rank": own_rank(), "step": view.step, "epoch": view.epoch, "samples": view.samples}
    values |= {"loss": view.loss, "gradient_norm": view.gradient_norm, "learning_rate": view.learning_rate}
    has_weights = (Path(view.run_dir) / "weights.safetensors").exists()
    values |= {"metrics": dict(view.metrics), "has_weights": has_weights}
    with (Path(view.run_dir) / "seen.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def noting(*names: str) -> dict[str, Any]:
    return {name: {"target": "tests.tasks.test_hooks:note", "args": {"hook": name}} for name in names}


METRICS = {"right": "tests.support.training:right"}


@pytest.mark.parametrize("workers", [1, 2])
def test_each_hook_sees_what_the_history_says(tmp_path: Path, workers: int) -> None:
    keys = {"metrics": METRICS, "eval": EVAL, "scheduler": "tests.support.training:warm_up", "batch_size": 22}
    hooks = noting("on_step", "on_evaluate", "on_end")
    run_group(job_of("mlp", workers=workers, shards=3, hooks=hooks, **keys), tmp_path)
    lines, history = seen(tmp_path), history_of(tmp_path)
    assert {line["rank"] for line in lines} == {0}
    by_hook = {name: [line for line in lines if line["hook"] == name] for name in hooks}
    assert [line["step"] for line in by_hook["on_step"]] == [row["step"] for row in history] == list(range(10))
    for line, row in zip(by_hook["on_step"], history, strict=True):
        assert {name: line[name] for name in ("epoch", "loss", "gradient_norm", "learning_rate")} == {
            name: row[name] for name in ("epoch", "loss", "gradient_norm", "learning_rate")
        }
        measured = {name: row[name] for name in ("right", "epoch_loss", "eval_loss", "eval_right")}
        assert line["metrics"] == {name: value for name, value in measured.items() if value is not None}
    assert [line["samples"] for line in by_hook["on_step"]] == [22, 44, 66, 88, 101, 123, 145, 167, 189, 202]
    assert [line["step"] for line in by_hook["on_evaluate"]] == [3, 7, 9]
    (end,) = by_hook["on_end"]
    assert lines[-1] == end and end["has_weights"] and not any(line["has_weights"] for line in lines[:-1])
    assert (end["step"], end["loss"], end["metrics"]["eval_loss"]) == (
        9,
        history[-1]["loss"],
        history[-1]["eval_loss"],
    )


def meddle(view: TrainingView) -> None:
    """Try all that a hook could do to the training."""
    for weight in (*view.weights.values(), *(view.ema_weights or {}).values()):
        weight.zero_()
    with pytest.raises(TypeError):
        view.metrics["loss"] = 3.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.step = 3  # type: ignore[misc]
    torch.manual_seed(7)
    torch.rand(3)


def test_a_hook_cannot_change_the_training(tmp_path: Path) -> None:
    keys = {"workers": 2, "epochs": 1, "ema": {"decay": 0.5}, "eval": EVAL, "bitwise": True}
    run_group(job_of(DROPOUT, **keys), tmp_path / "alone")
    meddling = dict.fromkeys(("on_step", "on_evaluate", "on_end"), "tests.tasks.test_hooks:meddle")
    run_group(job_of(DROPOUT, hooks=meddling, **keys), tmp_path / "meddled")
    for name in ("weights.safetensors", "ema.safetensors"):
        alone, meddled = load_file(tmp_path / "alone" / name), load_file(tmp_path / "meddled" / name)
        assert all(torch.equal(alone[key], value) for key, value in meddled.items())
    assert repr(history_of(tmp_path / "alone")) == repr(history_of(tmp_path / "meddled"))


class Keeps:
    """A hook with a state of its own: it writes the weights of a step, and how often it was called."""

    def __init__(self, step: int) -> None:
        self.step, self.calls = step, 0

    def __call__(self, view: TrainingView) -> None:
        self.calls += 1
        if view.step == self.step:
            both = {"weights": view.weights, "ema": view.ema_weights, "calls": self.calls}
            torch.save(both, Path(view.run_dir) / "kept.pt")


def test_a_class_keeps_a_state_and_the_weights_are_those_of_the_step(tmp_path: Path) -> None:
    hooks = {"on_step": {"target": "tests.tasks.test_hooks:Keeps", "args": {"step": 5}}}
    run_group(job_of("conv", "Images", workers=2, batch_size=14, ema={"decay": 0.5}, hooks=hooks), tmp_path / "whole")
    run_group(job_of("conv", "Images", workers=2, batch_size=14, ema={"decay": 0.5}, max_steps=6), tmp_path / "six")
    kept = torch.load(tmp_path / "whole" / "kept.pt")
    assert kept["calls"] == 6
    for name, expected in (
        ("weights", weights_of(tmp_path / "six")),
        ("ema", load_file(tmp_path / "six" / "ema.safetensors")),
    ):
        assert kept[name].keys() == expected.keys()
        assert all(torch.equal(kept[name][key], value) for key, value in expected.items())


def fails(view: TrainingView, step: int) -> None:
    if view.step == step:
        raise KeyError("no such column")


@pytest.mark.parametrize(("hook", "step"), [("on_step", 2), ("on_evaluate", 3), ("on_end", 14)])
def test_an_error_names_the_hook_and_the_step(tmp_path: Path, hook: str, step: int) -> None:
    hooks = {hook: {"target": "tests.tasks.test_hooks:fails", "args": {"step": step}}}
    says = f"ModelError: step {step}: hooks.{hook} raised KeyError: 'no such column'"
    with pytest.raises(ProcessExit, match=says):
        run_group(job_of("mlp", workers=2, epochs=1, eval=EVAL, hooks=hooks), tmp_path)


def test_a_run_that_died_after_its_last_step_still_has_its_end(tmp_path: Path) -> None:
    job = job_of("mlp", workers=2, epochs=1, eval=EVAL, hooks=noting("on_step", "on_end"))
    run_group(job, tmp_path, StopsBeforeItsWeights())
    assert len(seen(tmp_path)) == 15
    run_group(job, tmp_path)
    *steps, end = seen(tmp_path)
    assert len(steps) == 15 and end["hook"] == "on_end" and end["step"] == 14 and end["has_weights"]
    assert end["loss"] != end["loss"], "no step has run in these processes"
    assert end["metrics"] == {"eval_loss": history_of(tmp_path)[-1]["eval_loss"]}


class Unread:
    """A number on a device that must not be waited for."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("the device was asked")

    def __getitem__(self, at: object) -> Any:
        raise AssertionError("the device was asked")


def test_numbers_are_read_only_when_they_are_asked_for() -> None:
    unread: Any = Unread()
    update = Update(unread, 0.1, unread, False)
    view = TrainingView(3, 0, 12, 0.1, "runs/a", update, {"eval_loss": 1.0}, unread)
    assert "step=3" in repr(view) and (view.step, view.samples, view.learning_rate) == (3, 12, 0.1)
    with pytest.raises(AssertionError, match="the device was asked"):
        _ = view.loss


def test_fsdp_has_no_whole_weights_for_a_hook(tmp_path: Path) -> None:
    hooks = {"on_step": {"target": "tests.tasks.test_hooks:Keeps", "args": {"step": 1}}}
    with pytest.raises(ProcessExit, match="hooks: with strategy: fsdp rank 0 has only a part of the weights"):
        run_group(job_of("mlp", workers=2, strategy="fsdp", hooks=hooks), tmp_path)


@pytest.fixture
def calls() -> Iterator[list[TrainingView]]:
    found: list[TrainingView] = []
    yield found
    found.clear()


@pytest.mark.usefixtures("in_project")
def test_functions_of_python_are_hooks_and_do_not_keep_a_run_from_going_on(
    tmp_path: Path, calls: list[TrainingView]
) -> None:
    keys = keys_of(storage=str(tmp_path), name="run", eval=EVAL, epochs=1, optimizer={"target": "torch.optim:SGD"})
    first = dp_ray.run(**keys, max_steps=3, hooks={"on_step": calls.append})
    assert [view.step for view in calls] == [0, 1, 2]
    dp_ray.run(**keys, max_steps=5, hooks={"on_step": calls.append, "on_end": lambda view: calls.append(view)})
    assert [view.step for view in calls] == [0, 1, 2, 3, 4, 4]
    assert follow_up("evaluate", first.run_dir, None, {}).job.hooks.given == {}
    with pytest.raises(ModelError, match=r"step 5: hooks.on_step raised ZeroDivisionError"):
        dp_ray.run(**keys, max_steps=6, hooks={"on_step": lambda view: view.step // 0})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("tests.tasks.test_hooks:nothing", "hooks.on_step: tests.tasks.test_hooks has no attribute 'nothing'; did"),
        (f"{__name__}:METRICS", "hooks.on_step: tests.tasks.test_hooks:METRICS is .*, not a class or function"),
        ({"target": "tests.tasks.test_hooks:note", "args": {"name": 1}}, "hooks.on_step.args: .* takes no 'name'"),
        ({"target": "tests.tasks.test_hooks:Keeps", "args": {}}, "hooks.on_step.args: .* rejects {}"),
        (METRICS.items(), "hooks.on_step: must be called with a view of the training, and a dict_items cannot be"),
    ],
)  # fmt: skip
def test_a_hook_that_cannot_be_called_is_told_before_anything_starts(given: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        check_targets(job_of("mlp", hooks={"on_step": given}))

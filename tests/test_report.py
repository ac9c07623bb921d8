"""`dp-ray report`: one run for reading, several side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.results.report import compared, lines
from dp_ray.results.shown import relative
from tests.support.cli import status_of
from tests.support.trainings import keys_of


def train(folder: Path, name: str, lr: float = 0.1, **keys: Any) -> dp_ray.Result:
    """Three epochs of eight steps over 32 rows."""
    data = {"target": "tests.support.training:Pairs", "args": {"length": 32}}
    optimizer = {"target": "torch.optim:SGD", "args": {"lr": lr}}
    given = keys_of(storage=str(folder), name=name, dataset=data, optimizer=optimizer, epochs=3)
    return dp_ray.run(**{**given, "metrics": {"right": "tests.support.training:right"}, **keys})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_told_for_reading(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(here / "runs", "one")
    assert status_of(monkeypatch, "report", "runs/one") == 0
    told = capsys.readouterr().out.splitlines()
    assert "steps           24 (3 epochs of 8)" in told
    assert "run_dir         runs/one" in told
    assert "weights         runs/one/weights.safetensors" in told
    assert ["metrics", "loss", f"{result.metrics['loss']:.6g}"] in [line.split() for line in told]
    assert f"                right      {result.metrics['right']:.6g}" in told
    assert not any(str(here) in line for line in told)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"epochs": 1}, "steps           8"),
        ({"epochs": 3, "max_steps": 20}, "steps           20 (8 in an epoch)"),
        ({"epochs": 3, "max_steps": 5}, "steps           5 (8 in an epoch)"),
    ],
)
def test_the_steps_of_a_run_are_those_that_it_has(here: Path, keys: dict[str, Any], says: str) -> None:
    assert says in lines(train(here, "one", **keys))


def test_a_path_is_relative_where_it_can_be(here: Path) -> None:
    assert relative(str(here / "runs" / "a")) == "runs/a"
    assert relative("/elsewhere/a") == "/elsewhere/a"
    assert relative("s3://bucket/a") == "s3://bucket/a"
    assert relative(str(here)) == "."


def test_two_runs_are_compared_side_by_side(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = train(here, "one"), train(here, "two", lr=0.3, epochs=2, checkpoint={"keep": 1})
    assert status_of(monkeypatch, "report", "one", "two") == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert told[0] == ["one", "two"]
    rows = {row[0]: row[1:] for row in told[1:]}
    assert rows["optimizer.args.lr"] == ["0.1", "0.3"]
    assert rows["checkpoint.keep"] == ["2", "1"]
    assert rows["metrics.loss"] == [f"{one.metrics['loss']:.6g}" for one in (first, second)]
    assert rows["seconds"] == [f"{one.seconds:.1f}" for one in (first, second)]
    assert rows["epochs"] == ["3", "2"]
    assert rows["steps"] == ["24", "16"]
    assert not {"name", "batch_size", "optimizer.target", "model.target"} & rows.keys(), "those that differ alone"
    assert status_of(monkeypatch, "report", "one", "two", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["job"]["optimizer.args.lr"] == [0.1, 0.3]
    assert values["metrics"]["loss"] == [first.metrics["loss"], second.metrics["loss"]]
    assert [one["name"] for one in values["runs"]] == ["one", "two"]


def test_runs_of_one_job_differ_in_nothing(here: Path) -> None:
    first, second = train(here, "one"), train(here, "two")
    told = compared([first, second]).splitlines()
    assert told[-1] == "the same job, the same weights"
    assert compared([first, train(here, "three", seed=1)]).splitlines()[-1] != told[-1]


def test_several_runs_have_no_shapes_to_print(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    train(here, "one")
    assert status_of(monkeypatch, "report", "one", "one", "--shapes") == 2
    assert status_of(monkeypatch, "report") == 2


def test_what_verify_measures_for_itself_is_not_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"right": "tests.support.training:right", "outputs_digest": "dp_ray.tensors.digest:outputs_digest"}
    result = train(here, "one", metrics=metrics, eval={"dataset": "tests.support.training:Pairs"}, quiet=False)
    told = capsys.readouterr()
    assert "eval_right" in told.err and "digest" not in told.err + told.out
    assert "digest" not in "\n".join(lines(result)) + compared([result, result])
    assert "eval_outputs_digest" in result.metrics

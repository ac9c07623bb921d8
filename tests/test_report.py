"""`dp-ray report`: one run for reading, several side by side."""

from pathlib import Path
from typing import Any

import pytest

from dp_ray.results.compare import comparison_text, read_compared_run
from dp_ray.results.result import lines
from dp_ray.results.text import relative
from tests.support.cli import status_of
from tests.support.trainings import short_training as train


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
    assert "steps                24 (3 epochs of 8)" in told
    assert "run_dir              runs/one" in told
    assert "weights              runs/one/weights.safetensors" in told
    assert ["metrics", "loss", f"{result.metrics['loss']:.6g}"] in [line.split() for line in told]
    assert f"{21 * ' '}right      {result.metrics['right']:.6g}" in told
    assert not any(str(here) in line for line in told)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"epochs": 1}, "steps                8"),
        ({"epochs": 3, "max_steps": 20}, "steps                20 (8 in an epoch)"),
        ({"epochs": 3, "max_steps": 5}, "steps                5 (8 in an epoch)"),
    ],
)
def test_the_steps_of_a_run_are_those_that_it_has(here: Path, keys: dict[str, Any], says: str) -> None:
    assert says in lines(train(here, "one", **keys))


def test_a_path_is_relative_where_it_can_be(here: Path) -> None:
    assert relative(str(here / "runs" / "a")) == "runs/a"
    assert relative("/elsewhere/a") == "/elsewhere/a"
    assert relative("s3://bucket/a") == "s3://bucket/a"
    assert relative(str(here)) == "."


def test_several_runs_have_no_shapes_to_print(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    train(here, "one")
    assert status_of(monkeypatch, "report", "one", "one", "--shapes") == 2
    assert status_of(monkeypatch, "report") == 2


def test_what_verify_measures_for_itself_is_not_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"right": "tests.support.training:right", "outputs_digest": "dp_ray.tensors.files:outputs_digest"}
    result = train(here, "one", metrics=metrics, eval={"dataset": "tests.support.training:Pairs"}, quiet=False)
    told = capsys.readouterr()
    assert "eval_right" in told.err and "digest" not in told.err + told.out
    assert "digest" not in "\n".join(lines(result)) + comparison_text([read_compared_run(result.storage())] * 2)
    assert "eval_outputs_digest" in result.metrics

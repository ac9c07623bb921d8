"""`dp-ray report`: one run for reading, several side by side."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dp_ray.report.page import metrics_of, page_facts, time_shares
from dp_ray.report.run_data import read_run
from dp_ray.results.compare import comparison_text, read_compared_run
from dp_ray.results.result import lines
from dp_ray.rundir.listing import listed_runs
from dp_ray.storage import Storage
from dp_ray.text import relative
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
    assert ["steps", "8", "in", "an", "epoch"] in [line.split() for line in told]
    assert ["total_steps", "24"] in [line.split() for line in told]
    assert "run_dir              runs/one" in told
    assert "weights              runs/one/weights.safetensors" in told
    assert ["metrics", "loss", f"{result.metrics['loss']:.6g}"] in [line.split() for line in told]
    assert f"{21 * ' '}right      {result.metrics['right']:.6g}" in told
    assert not any(str(here) in line for line in told)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"epochs": 1}, {"steps": "8", "epochs": "1"}),
        ({"epochs": 3, "max_steps": 20}, {"steps": "8 in an epoch", "epochs": "3", "total_steps": "20"}),
        ({"epochs": 3, "max_steps": 12}, {"steps": "8 in an epoch", "epochs": "2", "total_steps": "12"}),
        ({"epochs": 3, "max_steps": 5}, {"steps": "5", "epochs": "1"}),
    ],
)
def test_the_steps_of_a_run_are_those_that_its_files_plan_and_page_have(
    here: Path, keys: dict[str, Any], says: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(here, "one", **keys)
    told = dict(line.split(maxsplit=1) for line in lines(result))
    assert {key: told[key] for key in ("steps", "epochs", "total_steps") if key in told} == says
    kept = json.loads((here / "one" / "result.json").read_text())
    plan = json.loads((here / "one" / "about.json").read_text())["drivers"][0]["plan"]
    assert (str(kept["steps"]), str(kept["epochs"])) == (says["steps"].split()[0], says["epochs"])
    whole = kept["total_steps"]
    assert f"{kept['epochs']} epochs, {whole} steps in all" in plan or f": {whole} step" in plan
    (steps, *_) = page_facts(read_run(Storage(str(here / "one"))))
    assert steps.value == str(whole)
    (row,) = listed_runs(Storage(str(here)))
    assert (row.step, row.steps) == (whole, whole)


def test_the_bar_of_a_page_has_the_numbers_of_its_verdict(here: Path) -> None:
    train(here, "one", epochs=3)
    data = read_run(Storage(str(here / "one")))
    shares = {part.name: 100 * part.share for part in time_shares(data)}
    shown = {f"{share:.0f}" for share in [*shares.values(), shares["forward"] + shares["backward"]]}
    assert data.verdict is not None
    assert set(re.findall(r"(\d+) %", data.verdict)) <= shown, data.verdict


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


def test_a_step_has_one_number_on_the_console_in_the_history_and_on_the_page(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of its row, from 0: where the best value was measured."""
    keys: dict[str, Any] = {"eval": {"dataset": "tests.support.training:Pairs"}, "quiet": False}
    result = train(here, "one", epochs=3, checkpoint={"best": "eval_loss"}, **keys)
    assert result.best is not None
    best = result.best["value"]
    (step,) = [row["step"] for row in result.history if row["eval_loss"] == best]
    assert f"step {step}: eval_loss {best:.6g}" in capsys.readouterr().err
    assert f"eval_loss {best:.6g} after step {step}" in "\n".join(lines(result))
    (told,) = [
        metric.detail for metric in metrics_of(read_run(Storage(str(here / "one")))) if metric.label == "eval_loss"
    ]
    assert told == f"best {best:.6g} after step {step}"
    page = (here / "one" / "report.html").read_text().partition('id="evaluations"')[2]
    assert re.findall(r"<tr><td>(\d+)</td>", page.partition("</section>")[0]) == [
        str(row["step"]) for row in reversed(result.history) if row["eval_loss"] is not None
    ]

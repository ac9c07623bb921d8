"""`dp-ray compare`: what differs between runs, their figures and curves; and the sparklines that it draws."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dp_ray
from dp_ray.errors import Error, StorageError
from dp_ray.report.page import page_facts
from dp_ray.report.run_data import read_run
from dp_ray.results.compare import comparison_text, comparison_values, read_compared_run
from dp_ray.results.text import BLOCKS, sparkline
from dp_ray.rundir.history import HISTORY, METRICS, SEGMENT
from dp_ray.storage import Storage
from dp_ray.tables import read_table, write_table
from tests.support import training
from tests.support.builders import held_by, run_dir_of
from tests.support.cli import status_of
from tests.support.fresh import loaded_by
from tests.support.reported import write_run
from tests.support.trainings import short_training as train


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told_of(*results: dp_ray.Result) -> str:
    return comparison_text([read_compared_run(result.storage()) for result in results])


def rate_of(result: dp_ray.Result) -> float:
    """The rows of a training, divided by the seconds of its steps."""
    timed: list[dict[str, Any]] = [row for row in result.history if row["rows_per_second"]]
    return float(sum(row["rows"] for row in timed) / sum(row["rows"] / row["rows_per_second"] for row in timed))


@pytest.mark.parametrize("command", ["compare", "report"])
def test_two_runs_are_compared_side_by_side(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    first, second = train(here, "one"), train(here, "two", lr=0.3, epochs=2, checkpoint={"keep": 1})
    assert status_of(monkeypatch, command, "one", "two") == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert told[1] == ["one", "two"]
    rows = {row[0]: row[1:] for row in told[2:]}
    assert rows["optimizer.args.lr"] == ["0.1", "0.3"]
    assert rows["checkpoint.keep"] == ["2", "1"]
    assert rows["metrics.loss"] == [f"{result.metrics['loss']:.6g}" for result in (first, second)]
    assert rows["seconds"] == [f"{result.seconds:.1f}" for result in (first, second)]
    assert rows["epochs"] == ["3", "2"]
    assert rows["steps"] == ["24", "16"]
    assert not {"name", "batch_size", "optimizer.target", "model.target"} & rows.keys(), "those that differ alone"
    assert status_of(monkeypatch, command, "one", "two", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["rows_per_second"][0] == pytest.approx(rate_of(first))
    assert values["job"]["optimizer.args.lr"] == [0.1, 0.3]
    assert values["metrics"]["loss"] == [first.metrics["loss"], second.metrics["loss"]]
    assert [value["name"] for value in values["runs"]] == ["one", "two"]


@pytest.mark.full
def test_runs_of_one_job_differ_in_nothing(here: Path) -> None:
    first, second = train(here, "one"), train(here, "two")
    told = told_of(first, second).splitlines()
    assert told[0] == "the same job, the same weights"
    assert told_of(first, train(here, "three", seed=1)).splitlines()[0] == "different jobs, different weights"
    kept = train(here, "four", checkpoint={"keep": 7})
    assert told_of(first, kept).splitlines()[0] == "the same job (but for checkpoint.keep), the same weights"


def test_a_run_of_0_2_with_keys_that_went_is_the_same_job(here: Path) -> None:
    on_error = {"quarantine": 5, "finite": False}
    now, then = train(here, "now", on_error=on_error), train(here, "then", on_error=on_error)
    claim = Path(then.run_dir, "run.json")
    claimed = json.loads(claim.read_text())
    claimed["job"] |= {"blocks": None, "on_error": {**on_error, "timeout": 3}}
    claim.write_text(json.dumps(claimed))
    assert told_of(now, then).splitlines()[0] == "the same job, the same weights"


def test_a_run_whose_driver_was_killed_as_it_removed_the_pieces_of_its_history_has_all_steps(here: Path) -> None:
    result = train(here, "one", epochs=1)
    folder = result.storage().child(HISTORY)
    folder.create()
    write_table(folder, SEGMENT.format(0, 2), read_table(result.storage(), METRICS).slice(0, 2))
    losses = read_compared_run(result.storage()).curve("loss")
    assert losses == [row["loss"] for row in result.history] and len(losses) > 2


@pytest.mark.full
def test_what_came_from_python_is_not_called_the_same(here: Path) -> None:
    first, second = (train(here, name, dataset=training.Pairs(101)) for name in ("one", "two"))
    told = "the same job as far as can be told: dataset from Python cannot be compared, the same weights"
    assert told_of(first, second).splitlines()[0] == told
    other = train(here, "three", dataset=training.Pairs(101), seed=1)
    assert told_of(first, other).splitlines()[0] == "different jobs, different weights"


def test_curves_lie_side_by_side_on_one_scale(here: Path) -> None:
    first, second = train(here, "one"), train(here, "two", epochs=1)
    lines = told_of(first, second).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("loss, "))
    losses = [[row["loss"] for row in result.history] for result in (first, second)]
    low, high = min(map(min, losses)), max(map(max, losses))
    assert lines[at] == f"loss, {low:.4g} to {high:.4g}"
    drawn = [line.split() for line in lines[at + 1 : at + 3]]
    assert [name for name, _ in drawn] == ["one", "two"]
    assert drawn[0][1] == sparkline(losses[0], 60, low, high) and len(drawn[0][1]) == 24
    assert drawn[1][1] == sparkline(losses[1], 20, low, high) and len(drawn[1][1]) == 8


def test_environments_are_compared_as_far_as_both_runs_tell(here: Path) -> None:
    results = [train(here, name, epochs=1) for name in ("one", "two", "three")]
    drivers = [{"started": "1", "git": {"commit": "aa"}, "packages": {"torch": "2.13", "ray": "2.60"}}]
    for name, torch in (("one", "2.12"), ("two", "2.13")):
        packages = {**drivers[0]["packages"], "torch": torch}  # type: ignore[dict-item]
        about = {"drivers": [{}, {**drivers[0], "started": name, "packages": packages}]}
        Path(name, "about.json").write_text(json.dumps(about))
    Path("three", "about.json").unlink(missing_ok=True)
    first, second, third = (read_compared_run(result.storage()) for result in results)
    assert comparison_values([first, second])["environment"] == {"packages.torch": ["2.12", "2.13"]}
    assert ["packages.torch", "2.12", "2.13"] in [
        line.split() for line in comparison_text([first, second]).splitlines()
    ]
    assert comparison_values([first, third])["environment"] == {}


def test_a_page_that_compares_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lr in (("one", 0.1), ("two", 0.3)):
        train(here, name, lr=lr, epochs=1)
    assert status_of(monkeypatch, "compare", "one", "two", "--html", "both.html") == 0
    said, *_ = capsys.readouterr().out.splitlines()
    page = (here / "both.html").read_text()
    assert "optimizer.args.lr" in page and "one" in page and "two" in page
    train(here, "again", lr=0.1, epochs=1)
    assert status_of(monkeypatch, "compare", "one", "again", "--html", "same.html") == 0
    same, *_ = capsys.readouterr().out.splitlines()
    assert (said, same) == ("different jobs, different weights", "the same job, the same weights")
    for text, name in ((said, "both.html"), (same, "same.html")):
        first = (here / name).read_text().partition("</h1>")[2]
        assert first.partition("<h2>")[0].strip() == f'<p class="verdict">{text}</p>', "as in the terminal"


def test_the_time_split_of_the_results_is_compared(here: Path) -> None:
    results = [train(here, name, epochs=1) for name in ("one", "two")]
    path = here / "one" / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "time_split": {"all": {"forward": 0.25}}}))
    values = comparison_values([read_compared_run(result.storage()) for result in results])
    assert values["time_split"]["time_split.forward"][0] == 0.25
    assert values["time_split"]["data_wait_share"] == [result.data_wait_share for result in results]
    assert ["time_split.forward", "0.25"] in [line.split()[:2] for line in told_of(*results).splitlines()]


def test_runs_that_did_not_end_are_compared(here: Path) -> None:
    result = train(here, "one", epochs=1)
    with pytest.raises(Error):
        train(here, "two", collate="tests.support.odd:fails")
    with held_by(run_dir_of(here)):
        runs = [read_compared_run(Storage(str(here / name))) for name in ("one", "two", "run")]
    table = {row[0]: row[1:] for row in (line.split("  ") for line in comparison_text(runs).splitlines())}
    assert [cell.strip() for cell in table["status"] if cell] == ["done", "failed", "running"]
    assert comparison_values(runs)["metrics"]["loss"] == [result.metrics["loss"], None, None]


def test_what_is_no_run_is_an_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(here, "one", epochs=1)
    with pytest.raises(StorageError, match=r"none: holds no run.json"):
        read_compared_run(Storage(str(here / "none")))
    (here / "one" / "result.json").write_text("[")
    with pytest.raises(StorageError, match="one: is damaged"):
        read_compared_run(Storage(str(here / "one")))
    assert status_of(monkeypatch, "compare", "one") == 2


def test_names_cannot_act_on_a_terminal(here: Path) -> None:
    results = [train(here, name, epochs=1) for name in ("one", "two")]
    path = here / "one" / "run.json"
    values: dict[str, Any] = json.loads(path.read_text())
    values["job"]["model"]["target"] = "a:b\x1b[2J"
    path.write_text(json.dumps(values))
    assert "\x1b" not in told_of(*results) and r"a:b\x1b[2J" in told_of(*results)


@pytest.mark.slow
def test_comparing_waits_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & loaded_by("import dp_ray.results.compare")


def test_a_sparkline_shows_numbers_that_are_none() -> None:
    assert sparkline([0.0, math.nan, 7.0, math.inf, None], 5) == "▁!█!"
    assert (sparkline([], 5), sparkline([2.0, 2.0], 5)) == ("", "▁▁")
    assert sparkline([0, 7], 8, low=0, high=14) == "▁▅"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 80))
def test_a_sparkline_is_as_wide_as_it_may_and_rises_with_its_values(values: list[float], width: int) -> None:
    line = sparkline(sorted(values), width)
    assert len(line) == min(width, len(values))
    levels = [BLOCKS.index(block) for block in line]
    assert levels == sorted(levels)


@pytest.mark.parametrize(
    ("result", "speed"),
    [
        ({"world_sizes": [2]}, 20.0),
        ({"world_sizes": [2, 1]}, None),  # the loop is that of the last attempt, which ran a part of the rows
        ({"world_sizes": [2], "status": "failed"}, None),  # nobody knows how many rows the loop ran
    ],
)
def test_the_page_and_the_comparison_tell_one_speed_of_a_run_without_a_history(
    here: Path, result: dict[str, Any], speed: float | None
) -> None:
    run = Storage(str(here / "run"))
    write_run(run, 10, task="predict", workers=[{"loop_seconds": 1.0}, {"loop_seconds": 2.0}], **result)
    assert read_compared_run(run).rows_per_second == speed
    told = {fact.label: fact.value for fact in page_facts(read_run(run))}
    assert told.get("rows per second") == (None if speed is None else f"{speed:.0f}")

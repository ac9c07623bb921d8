"""`dp-ray list`: all runs of a storage, whatever state they are in."""

import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.errors import Error, JobError
from dp_ray.job.keys import JobKeys
from dp_ray.results.text import list_text, time_span
from dp_ray.rundir.listing import ListedRun, listed_runs, sorted_by
from dp_ray.storage import Storage
from dp_ray.text import printable
from tests.support.builders import held_by, run_dir_of
from tests.support.cli import status_of
from tests.support.fresh import loaded_by
from tests.support.trainings import keys_of

LENGTHS = {"epochs": 3, "max_steps": None}
JOB = {"task": "train", "batch_size": 4, "shards": 1, "drop_last": False, **LENGTHS}


def written(folder: Path, name: str, result: dict[str, Any] | None = None, **job: Any) -> Path:
    """A run directory with the files that the list reads."""
    run = folder / name
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"rows": {"dataset": 32}, "job": {**JOB, **job}}))
    if result is not None:
        (run / "result.json").write_text(json.dumps(result))
    return run


def done(loss: float, steps: int = 24) -> dict[str, Any]:
    return {"status": "done", "total_steps": steps, "metrics": {"loss": loss}, "seconds": 1.5}


def by_name(folder: Path) -> dict[str, ListedRun]:
    return {row.name: row for row in listed_runs(Storage(str(folder)))}


def test_each_state_of_a_run_is_told(tmp_path: Path) -> None:
    written(tmp_path, "done", done(0.5))
    written(tmp_path, "failed", {"status": "failed", "error": "ModelError: no\nmore", "total_steps": 24})
    killed = written(tmp_path, "killed")
    (killed / "progress.json").write_text(json.dumps({"step": 7, "metrics": {"loss": 2}}))
    with held_by(run_dir_of(tmp_path)):
        rows = by_name(tmp_path)
    assert {name: row.status for name, row in rows.items()} == {
        "done": "done",
        "failed": "failed",
        "killed": "unfinished",
        "run": "running",
    }
    assert (rows["done"].step, rows["done"].steps, rows["done"].metrics) == (24, 24, {"loss": 0.5})
    assert (rows["failed"].note, rows["failed"].steps) == ("ModelError: no", 24)
    assert (rows["killed"].step, rows["killed"].steps, rows["killed"].metrics) == (7, 24, {"loss": 2.0})
    (killed / "checkpoints").mkdir()
    for step in (8, 16):
        (killed / "checkpoints" / f"step-{step}.safetensors").touch()
    assert by_name(tmp_path)["killed"].step == 16, "as report and plan say, from which step it is resumed"


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path) -> None:
    """In JSON it is null."""
    written(tmp_path, "run", {**done(0.5), "metrics": {"loss": None, "right": 0.25}})
    (row,) = listed_runs(Storage(str(tmp_path)))
    assert "loss nan, right 0.25" in list_text([row])
    assert json.loads(json.dumps(row.to_json(), allow_nan=False))["metrics"] == {"loss": None, "right": 0.25}


LONG = "a-name-that-is-longer-than-any-terminal-is-wide"


@pytest.mark.parametrize("width", [48, 60, 80])
def test_a_list_fits_the_terminal(width: int) -> None:
    """Nothing is lost, no line is wider, and a row begins with its name."""
    metrics = {"loss": 0.0644132, "accuracy": 1.0, "epoch_loss": 0.162359, "eval_accuracy": 0.963889}
    told = [ListedRun(name, "done", "train", 900.0, 135, 135, 10.9, metrics) for name in ("d0", LONG[: width - 5])]
    told.append(ListedRun("m0", "failed", "predict", note="ModelError: " + "no " * 20 + "more"))
    text = list_text(told, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for row in told:
        (at,) = (number for number, line in enumerate(lines) if line.split()[0] == row.name)
        assert all(line.startswith("  ") for line in lines[at + 1 : at + 3])
    words = " ".join(text.split())
    assert words.count("epoch_loss 0.162359, eval_accuracy 0.963889") == 2 and words.endswith("no more")
    assert list_text(told) == list_text(told, 1000), "wide enough, or no terminal: one line for each run"
    assert len(list_text(told).splitlines()) == 4


def test_a_real_run_and_a_failed_one_are_listed(tmp_path: Path) -> None:
    result = dp_ray.run(**keys_of(storage=str(tmp_path), name="one", epochs=2))
    with pytest.raises(Error):
        dp_ray.run(**keys_of(storage=str(tmp_path), name="two", collate="tests.support.odd:fails"))
    rows = by_name(tmp_path)
    assert (rows["one"].status, rows["one"].task, rows["one"].metrics) == ("done", "train", result.metrics)
    assert rows["one"].step == rows["one"].steps == result.steps * 2
    assert rows["one"].age is not None and rows["one"].age < 60
    assert (rows["two"].status, rows["two"].step, rows["two"].steps) == ("failed", 0, result.steps)
    assert "LookupError: nothing there" in rows["two"].note


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nope", "nope: there is no such folder"),
        ("file", "file is a file, not a folder of runs"),
        ("run", "is a run"),
    ],
)
def test_what_holds_no_runs_is_named(tmp_path: Path, given: str, says: str) -> None:
    (tmp_path / "file").touch()
    written(tmp_path, "run")
    with pytest.raises(JobError, match=says) as raised:
        listed_runs(Storage(str(tmp_path / given)))
    assert "Errno" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", "{", "run.json: is damaged"),
        ("run.json", "[]", "run.json: is damaged"),
        ("run.json", '{"rows": {"dataset": "many"}, "job": {"task": "train"}}', "KeyError"),
        ("run.json", '{"rows": {"dataset": 3}, "job": 5}', "TypeError"),
        ("run.json", "\udcff", "run.json"),
        ("result.json", "no", "result.json: is damaged"),
        ("result.json", '{"status": "done"}', "total_steps"),
    ],
)
def test_a_damaged_run_is_a_row(tmp_path: Path, name: str, text: str, says: str) -> None:
    written(tmp_path, "good", done(1.0))
    run = written(tmp_path, "bad", {"status": "failed"})
    (run / name).write_bytes(text.encode(errors="surrogateescape"))
    rows = by_name(tmp_path)
    assert rows["bad"].status == "damaged"
    assert says in rows["bad"].note
    assert rows["good"].status == "done"


def test_foreign_files_and_folders_stop_nothing(tmp_path: Path) -> None:
    written(tmp_path, "good", done(1.0))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"\xff")
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").mkdir()
    rows = by_name(tmp_path)
    assert {name: row.status for name, row in rows.items()} == {"good": "done", "odd": "no run", "photos": "no run"}


def test_rows_are_sorted_by_any_column_or_metric(tmp_path: Path) -> None:
    for number, loss in enumerate([0.5, float("nan"), 0.1]):
        run = written(tmp_path, f"run{number}", done(loss, steps=10 - number))
        os.utime(run / "result.json", (time.time(), time.time() - 100 * (3 - number)))
    (tmp_path / "photos").mkdir()
    rows = listed_runs(Storage(str(tmp_path)))

    def names(key: str, is_reversed: bool = False) -> list[str]:
        return [row.name for row in sorted_by(rows, key, is_reversed)]

    assert [row.name for row in rows] == ["run2", "run1", "run0", "photos"], "the newest first"
    assert names("loss") == ["run2", "run0", "run1", "photos"]
    assert names("loss", True) == ["run0", "run2", "run1", "photos"]
    assert names("steps") == ["run2", "run1", "run0", "photos"]
    assert names("name", True)[0] == "run2"
    with pytest.raises(JobError, match=r"no run has 'los'.*did you mean 'loss'"):
        sorted_by(rows, "los")


def test_the_command_lists_for_people_and_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "one", done(0.5))
    written(tmp_path, "two", {"status": "failed", "error": "bad \x1b[2J thing", "metrics": {"loss": 0.25}})
    assert status_of(monkeypatch, "list", str(tmp_path), "--sort", "loss") == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()] == ["name", "two", "one"]
    assert "\x1b" not in told and r"bad \x1b[2J thing" in told
    assert status_of(monkeypatch, "list", str(tmp_path), "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["metrics"] for row in rows} == {"one": {"loss": 0.5}, "two": {"loss": 0.25}}
    assert status_of(monkeypatch, "list", str(tmp_path / "none")) == 2
    assert status_of(monkeypatch, "list", str(tmp_path / "one")) == 2
    assert "is a run, not a folder of runs" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert status_of(monkeypatch, "list", str(tmp_path / "empty")) == 0
    assert capsys.readouterr().out == "no runs\n"
    written(tmp_path / JobKeys.model_fields["storage"].default, "three")
    monkeypatch.chdir(tmp_path)
    assert status_of(monkeypatch, "list") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("three ")


@pytest.mark.slow
def test_a_thousand_runs_are_listed_within_two_seconds(tmp_path: Path) -> None:
    written(tmp_path, "run0", done(0.5))
    for number in range(1, 1000):
        shutil.copytree(tmp_path / "run0", tmp_path / f"run{number}")
    began = time.process_time()
    assert "run999" in list_text(listed_runs(Storage(str(tmp_path))))
    assert time.process_time() - began < 2.0


def test_a_list_waits_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & loaded_by("import dp_ray.rundir.listing, dp_ray.results.text")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (59, "59 s"), (90, "2 min"), (7200, "2 h"), (2e6, "23 d")])
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert time_span(seconds) == text


def test_ages_are_counted_from_the_last_sign_of_life(tmp_path: Path) -> None:
    run = written(tmp_path, "killed")
    (run / "progress.json").write_text("{}")
    now = datetime.now(UTC) + timedelta(hours=1)
    (row,) = listed_runs(Storage(str(tmp_path)), now)
    assert row.age == pytest.approx(3600, abs=30)


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("a\x1b[2J\n\u202eb é") == r"a\x1b[2J\n\u202eb é"


@pytest.mark.slow
def test_runs_in_an_object_store_are_listed(server: Any) -> None:
    base = Storage(server.url("list"))
    dp_ray.run(**keys_of(storage=base.location, name="one"))
    (row,) = listed_runs(base)
    assert (row.name, row.status) == ("one", "done")

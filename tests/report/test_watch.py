"""`dp-ray watch`: a run in lines, whatever state the run is in."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import dp_ray
from dp_ray.cli.main import cli
from dp_ray.cli.runs import watched_lines
from dp_ray.monitor import console
from dp_ray.report.page import page_of
from dp_ray.rundir import listing
from dp_ray.rundir.claim import RunDir
from dp_ray.rundir.history import HISTORY
from dp_ray.rundir.incidents import INCIDENTS_JSON, IncidentKind, IncidentLog, Interruption
from dp_ray.rundir.listing import watched
from dp_ray.storage import Storage
from dp_ray.tables import write_table
from tests.support.builders import held_by, run_dir_of
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.fresh import loaded_by
from tests.support.trackers import wait_until
from tests.support.trainings import short_training

WORKER = {"rank": 0, "node": "10.0.0.7", "device": "cuda:0", "rows": 12345, "ms": 12.34}


NOTED = {"step": 7, "steps": 10, "rows": 1500, "rows_in_all": 3000, "rows_per_second": 1230.0, "phase": ""}
NOTED |= {"metrics": {"loss": 0.394217, "eval_accuracy": 0.97}, "workers": [WORKER]}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a run at once, and print a line whenever there is another one."""
    monkeypatch.setattr(listing, "WATCH_SECONDS", {False: 0.01, True: 0.01})
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)


@contextlib.contextmanager
def watching(run: Storage) -> Iterator[list[str]]:
    """The lines so far of a run that is watched in a thread; all of them once the block has ended."""
    lines: list[str] = []

    def watch() -> None:
        for line in watched_lines(run):
            lines.append(line)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        thread.join(60)
        assert not thread.is_alive()


def in_files(run: Storage, first: int, end: int) -> None:
    clocks = {"rows": 1, "rows_per_second": 5.0, "data_wait_seconds": 0.01}
    both = {"epoch": 0, "learning_rate": 0.1, "gradient_norm": 1.0, **clocks}
    rows = [{"step": step, "loss": 6.0 - step, **both} for step in range(first, end)]
    write_table(run.child(HISTORY), f"steps-{first}-{end}.parquet", pa.Table.from_pylist(rows))


def claimed(folder: Path) -> RunDir:
    """A run that its driver has claimed, with ten steps, of which six are in files."""
    made = run_dir_of(folder)
    run = made.storage
    values = json.loads(run.read_text("run.json"))
    job = {**values["job"], "task": "train", "epochs": 1, "max_steps": None}
    run.write_text("run.json", json.dumps({**values, "rows": {"dataset": 10}, "job": job}))
    run.child(HISTORY).create()
    in_files(run, 0, 6)
    note(run)
    return made


def note(run: Storage, **changed: Any) -> None:
    run.write_text("progress.json", json.dumps({**NOTED, "at": time.time(), **changed}))


@pytest.mark.usefixtures("soon")
def test_a_run_is_waited_for_and_watched_to_its_end(tmp_path: Path) -> None:
    """It is told in lines: that there is no run, what its console says, and how it ended."""
    with watching(Storage(str(tmp_path / "run"))) as lines:
        wait_until(lambda: lines == ["run: waiting, there is no run yet"])
        made = claimed(tmp_path / "other")
        with held_by(made):
            (tmp_path / "other" / "run").rename(tmp_path / "run")
            wait_until(lambda: "run: 7/10 steps, 1500 rows, 1,230 rows/s, loss 0.3942, 0:01 left" in lines)
            (tmp_path / "run").rename(tmp_path / "other" / "run")
        (tmp_path / "other" / "run" / "result.json").write_text(
            '{"status": "failed", "error": "DataError: no\\nmore"}'
        )
        (tmp_path / "other" / "run").rename(tmp_path / "run")
    assert re.fullmatch(r"run: failed, 7/10 steps, \d+ s ago, loss 0.394217, eval_accuracy 0.97", lines[-3])
    assert lines[-2:] == ["DataError: no", "more"]


@pytest.mark.usefixtures("soon")
def test_the_lines_are_those_of_the_runs_console(tmp_path: Path) -> None:
    """Of a phase, a loss that is not finite, an interruption, the end of the steps, a driver that is killed."""
    run = Storage(str(tmp_path / "run"))
    lost = Interruption(IncidentKind.WORKER, "SIGKILL", 7, (1,), ("10.0.0.8",))
    log = IncidentLog((2, 2)).interrupted(lost)
    driver = contextlib.ExitStack()
    driver.enter_context(held_by(claimed(tmp_path)))
    with watching(run) as lines, driver:
        wait_until(lambda: bool(lines))
        note(run, phase="building the dataset and the model", at=time.time() - 100)
        wait_until(lambda: lines[-1].startswith("run: building the dataset and the model, 10"))
        note(run, metrics={"loss": None}, rows_per_second=2.5)
        wait_until(lambda: lines[-1] == "run: 7/10 steps, 1500 rows, 2.5 rows/s, loss nan, 10:00 left")
        INCIDENTS_JSON.write(run, log)
        wait_until(lambda: lines[-1] == "run: interrupted, worker: SIGKILL (rank 1 on 10.0.0.8), in step 7")
        INCIDENTS_JSON.write(run, log.resumed(4, 4.5))
        wait_until(lambda: lines[-1] == "run: resumed from step 4 after 4.5 s, 3 steps again")
        note(run, step=10, rows=3000)
        wait_until(lambda: lines[-1] == "run: 10/10 steps, 3000 rows, finishing")
    assert lines[-2].startswith("run: unfinished, 10/10 steps, ")
    assert lines[-1] == "its driver was killed; run the same command to resume"
    assert len([line for line in lines if "interrupted" in line or "resumed" in line]) == 2, "each once"


def test_a_name_or_an_error_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    run = claimed(tmp_path).storage
    run.write_text("result.json", json.dumps({"status": "failed", "error": "bad\x1b]0;title\x07\rthing"}))
    (tmp_path / "run").rename(tmp_path / "a\x1b[2Jb")
    done = CliRunner().invoke(cli, ["watch", str(tmp_path / "a\x1b[2Jb")], color=True)
    assert all(line.isprintable() for line in done.stdout.splitlines())
    assert r"a\x1b[2Jb: failed" in done.stdout and done.exit_code == 0


def test_what_a_directory_says_at_a_moment(tmp_path: Path) -> None:
    run = Storage(str(tmp_path / "run"))
    assert not watched(run).has_ended
    with held_by(claimed(tmp_path)):
        seen = watched(run)
        assert (seen.status, seen.step, seen.steps, seen.has_ended) == ("running", 7, 10, False)
    killed = watched(run)
    assert (killed.status, killed.has_ended) == ("unfinished", True)
    (tmp_path / "run" / "run.json").write_text("{")
    damaged = watched(run)
    assert (damaged.status, damaged.has_ended) == ("damaged", True)


def test_a_finished_run_is_told_once(tmp_path: Path) -> None:
    result = short_training(tmp_path, "one")
    (line,) = watched_lines(Storage(result.run_dir))
    assert line.startswith("one: done, 24/24 steps, ") and f"loss {result.metrics['loss']:.6g}" in line


def test_a_mistyped_name_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed(tmp_path)
    assert status_of(monkeypatch, "watch", str(tmp_path / "rum"), "--wait", "0.1") == 2
    err = capsys.readouterr().err
    assert f"rum: no run has begun there within 0.1 s; --wait sets how long; the runs there: {tmp_path}/run\n" in err


@pytest.mark.full
@pytest.mark.slow
def test_the_command_prints_lines_until_ctrl_c(tmp_path: Path) -> None:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["env"] = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    (tmp_path / "elsewhere").mkdir()
    pipes["cwd"] = tmp_path / "elsewhere"  # a checkout may have runs, which the line would name
    command = [sys.executable, "-m", "dp_ray", "watch", str(tmp_path / "run")]
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "run: waiting, there is no run yet\n"
        finally:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    waited = f"{tmp_path / 'run'}: there is no run yet, and it is waited for, 60 s\n"
    assert (process.returncode, err) == (130, f"{waited}\ninterrupted\n")


def test_the_lines_wait_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & loaded_by("import dp_ray.cli.runs, dp_ray.monitor.console, dp_ray.rundir.listing")


def test_a_run_notes_its_progress(tmp_path: Path) -> None:
    with pytest.raises(dp_ray.Error):
        short_training(tmp_path, "one", metrics={"right": "tests.support.odd:fails"})
    noted = json.loads((tmp_path / "one" / "progress.json").read_text())
    assert (noted["step"], noted["steps"], noted["workers"][0]["rank"]) == (0, 24, 0)
    short_training(tmp_path, "two")
    assert not (tmp_path / "two" / "progress.json").exists(), "only an unfinished run needs it"


@pytest.mark.full
@pytest.mark.slow
def test_a_run_in_an_object_store_is_watched(server: Any) -> None:
    run = Storage(server.url("watch/one"))
    dp_ray.run(**{**_keys(server.url("watch")), "name": "one"})
    (line,) = watched_lines(run)
    assert line.startswith("one: done, ")
    page = page_of(run)
    assert "one" in page and "hush" not in page


def _keys(storage: str) -> dict[str, Any]:
    from tests.support.trainings import keys_of

    return keys_of(storage=storage)

"""The command line: what goes to stdout, and the exit status of every way to end."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.cli import status_of
from tests.support.cluster import ROOT


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(
        "{model: 'tests.support.models:Linear', dataset: {target: 'tests.support.models:Rows', args: {length: 101}}, "
        f"batch_size: 7, shards: 5, workers: 0, storage: '{tmp_path}'}}"
    )
    return path


def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert status_of(monkeypatch, "plan", *args, "--json") == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


@pytest.mark.usefixtures("in_project")
def test_the_plan_of_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(monkeypatch, capsys, "jobs/tutorial.yaml", "--workers", "8", "--set", f"storage={tmp_path}") == {
        "rows": 100,
        "batch_size": 30,
        "shards": 8,
        "workers": 8,
        "epochs": 1,
        "steps": 4,
        "batches": [
            {
                "steps": 3,
                "rows": 30,
                "shard_rows": [4, 4, 4, 4, 4, 4, 4, 2],
                "worker_shards": [[0], [1], [2], [3], [4], [5], [6], [7]],
            },
            {
                "steps": 1,
                "rows": 10,
                "shard_rows": [2, 2, 2, 2, 2, 0, 0, 0],
                "worker_shards": [[0], [1], [2], [3], [4], [5], [6], [7]],
            },
        ],
        "padded": 0,
        "dropped": 0,
    }


@pytest.mark.usefixtures("in_project")
def test_the_plan_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "shards=8", "--set", f"storage={tmp_path}"]
    assert status_of(monkeypatch, "plan", "jobs/tutorial.yaml", "--workers", "3", *settings) == 0
    assert capsys.readouterr().out.splitlines() == [
        "100 rows in global batches of 30: 4 steps, 8 shards on 3 workers; padded 0, dropped 0",
        "3 x 30 rows",
        "  rank 0        4 + 4 = 8 rows",
        "  rank 1        4 + 4 + 4 = 12 rows",
        "  rank 2        4 + 4 + 2 = 10 rows",
        "1 x 10 rows",
        "  rank 0        2 + 2 = 4 rows",
        "  rank 1        2 + 2 + 2 = 6 rows",
        "  rank 2        0 + 0 + 0 = 0 rows",
    ]


def test_what_is_dropped_is_told(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(monkeypatch, capsys, str(job), "--set", "drop_last=true")
    assert (plan["steps"], plan["dropped"], plan["padded"]) == (14, 3, 0)


def test_a_run_in_this_process_and_its_report(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "run", str(job), "--shapes", "--json") == 0
    printed = capsys.readouterr()
    *lines, last = printed.out.splitlines()
    result = json.loads(last)
    assert (result["status"], result["rows"], result["steps"], result["world_sizes"]) == ("done", 101, 15, [1])
    assert lines[:2] == ["\tIn Model: input size torch.Size([2, 5]) output size torch.Size([2, 2])"] * 2
    assert len(lines) == 14 * (4 + 1) + 3 + 1
    assert "run directory" in printed.err
    assert status_of(monkeypatch, "report", str(tmp_path / "job"), "--shapes", "--json") == 0
    assert capsys.readouterr().out.splitlines() == [*lines, last]
    assert status_of(monkeypatch, "report", str(tmp_path / "job")) == 0
    assert f"outputs_sha256       {result['outputs_sha256']}" in capsys.readouterr().out


def test_a_finished_run_is_not_run_again_unless_it_is_to_be_replaced(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "run", str(job), "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert status_of(monkeypatch, "run", str(job)) == 2
    assert "give it another name (--name, name=), or replace it (--overwrite" in capsys.readouterr().err
    assert status_of(monkeypatch, "run", str(job), "--overwrite") == 0
    assert status_of(monkeypatch, "run", str(job), "--name", "other") == 0


def test_overwrite_never_removes_what_is_no_run(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    assert status_of(monkeypatch, "run", str(job), "--name", "precious", "--overwrite") == 2
    assert "holds files that are no run" in capsys.readouterr().err
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["run", "none.yaml"], 2, "none.yaml: cannot be read"),
        (["run"], 2, "Missing argument 'JOB.yaml'"),
        (["rnu"], 2, "No such command 'rnu'"),
        (["run", "jobs/tutorial.yaml", "--workers", "many"], 2, "--workers 'many': must be N"),
        (["run", "jobs/tutorial.yaml", "--set", "batch_size=0"], 2, "batch_size: must be greater than 0, got 0"),
        (
            ["run", "jobs/tutorial.yaml", "--set", "model.args.input=5"],
            2,
            "takes no 'input', but input_size, output_size",
        ),
        (["plan", "jobs/tutorial.yaml", "--set", "dataset.args.length=0"], 1, "RandomDataset is empty"),
        (["status"], 2, "Missing option '--address', like http://HEAD:8265: status shows what was submitted"),
        (["status", "digits"], 2, "dp-ray list shows the runs in a storage, dp-ray report RUN_DIR one of them"),
        (["report", "nowhere"], 1, "nowhere: holds no result.json"),
        (["--help"], 0, ""),
    ],
)
@pytest.mark.usefixtures("in_project")
def test_the_exit_status_of_each_way_to_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], status: int, says: str
) -> None:
    assert status_of(monkeypatch, *args) == status
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.slow
def test_a_job_that_fails_tells_the_users_traceback_and_keeps_the_failure(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "{model: 'tests.support.models:Linear', dataset: 'tests.support.models:Breaks', batch_size: 7, workers: 0, "
        f"storage: '{tmp_path}'}}"
    )
    done = forked.ended(forked.dp_ray_program, "run", str(job), "--json")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: step 1, shard 0: sample 7 of the dataset raised OSError: the disk has a hole"
    )
    assert 'raise OSError("the disk has a hole")' in done.stderr
    assert json.loads((tmp_path / "job" / "result.json").read_text())["status"] == "failed"


@pytest.mark.full
@pytest.mark.slow
def test_an_installed_script_runs_from_anywhere(job: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from tests.support.models import Rows\n")
    script = Path(sys.executable).parent / "dp-ray"
    done = subprocess.run([script, "plan", str(job)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

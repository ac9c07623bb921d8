"""How each attempt ended is told as it was, and a run that has not finished says what is there."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import dp_ray
from dp_ray.cli.runs import report
from dp_ray.errors import DataError, RunInterrupted, StorageError
from dp_ray.job.job import Job
from dp_ray.monitor.attempts import interruption_of
from dp_ray.monitor.messages import Interrupted
from dp_ray.rundir.incidents import IncidentKind, Interruption
from dp_ray.rundir.lease import LEASE
from tests.support import forked, models
from tests.support.builders import run_dir_of
from tests.support.trainings import keys_of

pytestmark = pytest.mark.usefixtures("in_project", "foreground")
NEVER = {"every_steps": None, "every_seconds": None}


class Ends(models.SlowPairs):
    """96 pairs; the file `ends` says at which read of this process it ends, and by what.

    Before a SIGKILL there is time for the driver to hear of the steps that are done.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(0.0)
        self.ends, self.reads = Path(folder) / "ends", 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        if self.ends.exists():
            at, by = self.ends.read_text().split()
            if self.reads == int(at):
                self.ends.unlink()
                if by == "OSError":
                    raise OSError("sector 7")
                time.sleep(2.5 if by == "SIGKILL" else 0)
                os.kill(os.getpid(), signal.Signals[by])
        return super().__getitem__(index)


def keys(folder: Path, **others: Any) -> dict[str, Any]:
    """A training of 48 steps of 6 rows."""
    target = {"target": "tests.test_incidents:Ends", "args": {"folder": str(folder)}}
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": target,
        "loss": "torch.nn:CrossEntropyLoss",
    }
    optimizer = {"target": "torch.optim:AdamW", "args": {"lr": 0.01}}
    how = {"optimizer": optimizer, "batch_size": 6, "epochs": 3, "workers": 0, "checkpoint": NEVER}
    return {**given, **how, "name": "run", "storage": str(folder), "quiet": True, **others}


def ended(folder: Path, step: int, first: int, by: str, **others: Any) -> None:
    """Run, in a process of its own where that is killed, until it is ended in a step; it begins with step `first`."""
    (folder / "ends").write_text(f"{(step - first) * 6 + 2} {by}")
    if by != "SIGKILL":
        with contextlib.suppress(RunInterrupted, dp_ray.Error):
            dp_ray.run(**keys(folder, **others))
        return
    assert forked.ended(forked.run_job, keys(folder, **others)).returncode == -signal.SIGKILL


def told(result: dp_ray.Result) -> list[tuple[str, str, int, int]]:
    return [(one["kind"], one["what"], one["step"], one["resumed_step"]) for one in result.interruptions]


def reported(run_dir: Path, capsys: pytest.CaptureFixture[str], as_json: bool = False) -> str:
    capsys.readouterr()
    assert report.callback
    report.callback(run_dirs=(str(run_dir),), shapes=False, as_json=as_json)
    return capsys.readouterr().out


@pytest.mark.slow
def test_each_attempts_end_is_told_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, 15, 0, "SIGINT")
    ended(tmp_path, 31, 16, "SIGKILL")
    ended(tmp_path, 20, 16, "OSError")
    ended(tmp_path, 18, 16, "SIGTERM")
    result = dp_ray.run(**keys(tmp_path, quiet=False))
    first, second, third, fourth = told(result)
    assert first == ("driver", "stopped by SIGINT after step 16", 16, 16)
    assert second == ("driver", "killed, or its machine lost, after step 31 (the last it reported)", 31, 16)
    assert re.match("ended after step 20 by DataError: .*sector 7", third[1]) and third[2:] == (20, 16)
    assert fourth == ("driver", "stopped by SIGTERM after step 19", 19, 19)
    assert result.world_sizes == [1] * 5
    assert "run: the last driver was stopped by SIGTERM after step 19\n" in capsys.readouterr().err
    assert (
        "driver: killed, or its machine lost, after step 31 (the last it reported); driver: ended after step 20 by"
        in reported(tmp_path / "run", capsys)
    )


def test_the_result_of_one_driver_is_never_taken_for_that_of_the_next(tmp_path: Path) -> None:
    job = Job.make({name: value for name, value in keys(tmp_path).items() if name != "quiet"}, "run")
    run_dir_of(tmp_path, job)
    (tmp_path / "run" / "result.json").write_text(json.dumps({"status": "interrupted", "error": "KeyboardInterrupt"}))
    run_dir_of(tmp_path, job)
    assert not (tmp_path / "run" / "result.json").exists()


CLOCK = r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d"


@pytest.mark.slow
def test_a_run_that_was_killed_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, 31, 0, "SIGKILL", checkpoint={"every_steps": 10, "every_seconds": None})
    assert json.loads((tmp_path / "run" / LEASE).read_text())["step"] == 31
    shown = reported(tmp_path / "run", capsys)
    says = rf"unfinished: newest checkpoint step 30 of 48, last alive {CLOCK}\nrun the same command to resume\n"
    assert re.fullmatch(says, shown), shown
    values = json.loads(reported(tmp_path / "run", capsys, as_json=True))
    assert (values["status"], values["step"], values["steps"]) == ("unfinished", 30, 48)
    with pytest.raises(StorageError, match=r"holds no result\.json: the run has not finished \(dp-ray report "):
        dp_ray.load(tmp_path / "run")


def test_a_run_that_was_stopped_says_so_above_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, 15, 0, "SIGINT")
    first, *_ = reported(tmp_path / "run", capsys).splitlines()
    assert re.fullmatch(rf"unfinished: newest checkpoint step 16 of 48, last alive {CLOCK}", first)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("train", "no checkpoint yet of 48 steps"),
        ("predict", "outputs of 0 of 16 steps"),
        ("evaluate", "an evaluation keeps nothing"),
    ],
)
def test_so_does_one_that_has_kept_nothing(
    tmp_path: Path, task: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {name: value for name, value in keys(tmp_path, task=task).items() if name != "quiet"}
    run_dir_of(tmp_path, Job.make(given, "run"), rows={"dataset": 96})
    assert reported(tmp_path / "run", capsys).startswith(f"unfinished: {says}, last alive ")


def test_what_is_no_run_is_an_error_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StorageError, match=r"holds no result\.json: not a run directory"):
        reported(tmp_path, capsys)


@pytest.mark.parametrize(
    ("kind", "what", "told"),
    [
        (IncidentKind.WORKER, "SIGKILL", "worker: SIGKILL, in step 4"),
        (
            IncidentKind.ERROR,
            "step 4, shard 0: model raised",
            "error: step 4, shard 0: model raised",
        ),
        (IncidentKind.ERROR, "sample 7 is in no step 42", "error: sample 7 is in no step 42, in step 4"),
        (IncidentKind.DRIVER, "the driver ended after step 3", "driver: the driver ended after step 3"),
    ],
)
def test_an_interruption_names_its_step_once(kind: IncidentKind, what: str, told: str) -> None:
    assert str(Interruption(kind, what, 4)) == told


def test_an_error_that_comes_before_the_last_reports_tells_the_step() -> None:
    error = Interrupted(IncidentKind.ERROR, "step 7, shard 1: sample 50 of the dataset raised", (0,))
    died = Interrupted(IncidentKind.WORKER, "SIGKILL", (0,))
    assert interruption_of(error, [], "", 5, Mock()).step == 7
    assert interruption_of(died, [], "", 5, Mock()).step == 5


class Holed(models.SlowPairs):
    """96 pairs, of which one cannot be read."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 17:
            raise OSError("a hole")
        return super().__getitem__(index)


def test_a_failed_step_is_named_and_not_counted_as_done(tmp_path: Path) -> None:
    """Of step 4 its first shard has run, and told of its shapes."""
    keys = keys_of(dataset="tests.test_incidents:Holed", storage=str(tmp_path), name="run", shards=4)
    with pytest.raises(DataError, match=r"^step 4, shard 1: sample 17 of the dataset raised OSError: a hole$"):
        dp_ray.run(**keys)
    (end,) = json.loads((tmp_path / "run" / "story.json").read_text())["interruptions"]
    assert (end["step"], end["what"].partition(" by ")[0]) == (4, "ended after step 4")
    failure = json.loads((tmp_path / "run" / "result.json").read_text())["failure"]
    assert (failure["step"], failure["sample"]) == (4, 17)

"""What launchers are told: each exit status is that of a command, and 75 is one that the same command mends."""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import dp_ray
from dp_ray import __main__
from dp_ray.cluster.internals.controller import CONTROLLER_PROCESS
from dp_ray.driver.run import Execution
from dp_ray.errors import EXIT_STATUSES, exit_status_of, status_of_several, stop_status
from dp_ray.system.threads import planned_stops
from tests.support import forked
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.commands import started
from tests.support.signalled import predicting, training
from tests.support.within import within

pytestmark = pytest.mark.usefixtures("in_project", "foreground")
AGAIN = "dp-ray stop --run-again"
SECONDS = 300.0  # the machine may be busy
# The program, for which a cluster is lost 4 s after its head has gone.
SOONER = """
from dp_ray.cluster import workers
from dp_ray.__main__ import program
workers.AWAY_SECONDS = 4.0
program()
"""


def job_file(keys: dict[str, Any], folder: Path, name: str = "run") -> str:
    """A job file of these keys, whose run is called `name`."""
    path = folder / f"{name}.yaml"
    own = {key: value for key, value in keys.items() if key != "quiet"} | {"name": name}
    path.write_text(json.dumps(own))  # JSON is YAML
    return str(path)


def as_undisturbed(keys: dict[str, Any], folder: Path) -> bool:
    """Whether the run in `folder` has the bits of one that nothing disturbs."""
    whole = dp_ray.run(**{**keys, "name": "undisturbed"})
    run = dp_ray.load(folder / "run")
    return (run.weights_sha256, run.outputs_sha256) == (whole.weights_sha256, whole.outputs_sha256)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (["SIGTERM"], 75),
        (["SIGUSR2"], 75),
        ([AGAIN], 75),
        ([AGAIN, AGAIN, "SIGTERM"], 75),
        (["SIGINT"], 130),
        (["dp-ray stop"], 130),
        (["dp-ray stop", AGAIN], 130),
        (["SIGTERM", "SIGTERM"], 130),
        (["SIGUSR2", "SIGTERM"], 130),
        (["SIGTERM", "SIGINT"], 130),
        ([], 130),
    ],
    ids=lambda one: "-".join(one).replace(" ", "_") if isinstance(one, list) else None,
)
def test_the_status_of_a_stop(asked: Sequence[str], status: int) -> None:
    assert stop_status(asked) == status
    assert exit_status_of(dp_ray.errors.RunInterrupted("", asked)) == status


def test_the_status_of_several_jobs() -> None:
    assert [status_of_several(one) for one in ([], [0, 75], [75, 1, 0], [1, 2, 75], [2, 130, 75])] == [
        0,
        75,
        1,
        2,
        130,
    ]


def test_the_page_of_commands_has_the_table() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {int(status): text for status, text in rows} == EXIT_STATUSES


@pytest.mark.full(but=["SIGTERM-train", "SIGUSR2-predict"])
@pytest.mark.parametrize("task", ["train", "predict", "evaluate"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR2"])
def test_what_a_launcher_stops_ends_with_75_and_the_same_command_finishes(
    task: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = predicting(tmp_path, 32, number) if task == "predict" else training(tmp_path, 32, number, task=task)
    line = ("run", job_file(keys, tmp_path), "--quiet")
    assert status_of(monkeypatch, *line) == 75
    assert dp_ray.load(tmp_path / "run").status == "interrupted"
    assert task == "evaluate" or any((tmp_path / "run").glob("*/step*")), "the step is kept"
    assert status_of(monkeypatch, *line) == 0
    assert dp_ray.load(tmp_path / "run").status == "done"
    assert as_undisturbed(keys, tmp_path)


@pytest.mark.parametrize(
    ("signals", "status", "kept"),
    [("SIGINT", 130, 16), ("SIGTERM SIGTERM", 130, 12), ("SIGUSR2 SIGINT", 130, 12)],
    ids=["ctrl_c", "twice", "launcher_and_ctrl_c"],
)
def test_what_a_person_stops_ends_with_130_and_is_kept(
    signals: str, status: int, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = training(tmp_path, 15 * 6 + 2, *signals.split(), checkpoint={"every_steps": 4, "every_seconds": None})
    assert status_of(monkeypatch, "run", job_file(keys, tmp_path), "--quiet") == status
    assert (tmp_path / "run" / "checkpoints" / f"step-{kept}.safetensors").exists()


def test_a_job_that_fails_ends_with_1_and_a_bad_one_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = training(tmp_path, loss="tests.cli.test_exit_statuses:no_loss")
    assert status_of(monkeypatch, "run", job_file(keys, tmp_path), "--quiet") == 1
    assert status_of(monkeypatch, "run", job_file({**keys, "batch_size": 0}, tmp_path), "--quiet") == 2


def no_loss(*_: Any) -> Any:
    raise ValueError("no loss today")


@pytest.mark.full
def test_of_several_jobs_one_that_is_done_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """So that the command that ended with 75 ends with 0 when it is run again."""
    keys = training(tmp_path)
    first = job_file({**keys, "dataset": "tests.support.models:SlowPairs", "epochs": 1}, tmp_path, "first")
    line = ("run", first, job_file(training(tmp_path, 32, "SIGTERM"), tmp_path), "--json")
    assert status_of(monkeypatch, *line) == 75
    done = (tmp_path / "first" / "result.json").read_bytes()
    capfd.readouterr()
    assert status_of(monkeypatch, *line) == 0
    printed, said = capfd.readouterr()
    assert [json.loads(line)["name"] for line in printed.splitlines()] == ["first", "run"]
    assert f"first: is done: {tmp_path / 'first'}\n" in said
    assert (tmp_path / "first" / "result.json").read_bytes() == done
    assert as_undisturbed(keys, tmp_path)


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 1), ("SIGINT", 130)])
def test_of_several_jobs_a_failure_wins_over_75_and_130_over_all(
    number: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: dict[str, Any] = {
        "dataset": "tests.support.models:SlowPairs",
        "loss": "tests.cli.test_exit_statuses:no_loss",
    }
    fails = job_file(training(tmp_path, **broken), tmp_path, "fails")
    stopped = job_file(training(tmp_path, 32, number), tmp_path)
    assert status_of(monkeypatch, "run", fails, stopped, "--keep-going", "--quiet") == status
    assert dp_ray.load(tmp_path / "run").status == "interrupted"


def program(number: int, *args: str) -> None:
    """Be the program `dp-ray`, to which a signal comes when its run is done, before the page is written."""
    write_page = Execution.write_page

    def signalled(execution: Execution) -> None:
        os.kill(os.getpid(), number)
        write_page(execution)

    if number:
        Execution.write_page = signalled  # type: ignore[method-assign, assignment]  # this process ends with it
    sys.argv = ["dp-ray", *args]
    __main__.program()


@pytest.mark.full(but=["15-0"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_run_that_is_done_is_not_to_be_run_again(number: int, status: int, tmp_path: Path) -> None:
    job = job_file(training(tmp_path, epochs=1), tmp_path)
    assert forked.ended(program, int(number), "run", job).returncode == status
    assert dp_ray.load(tmp_path / "run").status == "done"


@pytest.mark.full(but=["once"])
@pytest.mark.parametrize(("signals", "status"), [("SIGTERM", 75), ("SIGTERM SIGTERM", 130)], ids=["once", "twice"])
def test_a_launchers_second_signal_while_the_program_ends_is_a_second_one(
    signals: str, status: int, tmp_path: Path
) -> None:
    """The first comes in a step, the second when the run has been kept."""
    first, *second = signals.split()
    job = job_file(training(tmp_path, 32, first), tmp_path)
    number = int(signal.Signals[second[0]]) if second else 0
    assert forked.ended(program, number, "run", job).returncode == status
    assert (tmp_path / "run" / "checkpoints" / "step-6.safetensors").exists()


def test_a_block_that_begins_where_a_stop_was_accepted_is_asked_too() -> None:
    """As that of a trial that was still starting when the sweep was asked."""
    asked: list[str] = []

    def refuse(by: str) -> bool:
        asked.append(by)
        return False

    with planned_stops(lambda _: True):
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(KeyboardInterrupt), planned_stops(refuse):
            pass
    assert asked == ["SIGUSR2"]
    with planned_stops(refuse):
        pass
    assert asked == ["SIGUSR2"], "with the block, what it has accepted is over"


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_that_is_lost_ends_the_run_with_75_and_it_goes_on_elsewhere(tmp_path: Path) -> None:
    keys = training(tmp_path, workers=1, epochs=3, checkpoint={"every_steps": 2, "every_seconds": None})
    keys["dataset"] = {
        "target": "tests.rundir.test_stopping:HeldInTheMiddle",
        "args": {"file": str(tmp_path / "held")},
    }
    job, run = job_file(keys, tmp_path), tmp_path / "run"
    (tmp_path / "held").touch()
    with started("--workers", "1", job=job, program=("-c", SOONER)) as command:
        assert within(SECONDS, lambda: any(run.glob("checkpoints/step-*")))
        for pid, line in command.processes().items():
            if "gcs_server" in line or "raylet/raylet" in line:
                psutil.Process(pid).kill()
        status, errors = command.ends()
    assert status == 75, errors
    assert re.fullmatch(
        r"error: the Ray at \S+ was lost: it no longer answers \([\w ]+\); run the job again once there is a Ray: it "
        "resumes",
        errors.splitlines()[-1],
    )
    assert (unfinished := dp_ray.load(run)).status == "failed"
    assert unfinished.error and unfinished.error.startswith("ClusterLost: ")
    (tmp_path / "held").unlink()
    assert dp_ray.run(job, workers=0, quiet=True).status == "done"
    assert as_undisturbed({**keys, "workers": 0}, tmp_path)


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_controller_ends_a_run_that_says_how_it_goes_on(tmp_path: Path) -> None:
    keys = training(tmp_path, workers=1, epochs=3, checkpoint={"every_steps": 2, "every_seconds": None})
    held = {"file": str(tmp_path / "held")}
    keys["dataset"] = {"target": "tests.rundir.test_stopping:HeldInTheMiddle", "args": held}
    job, run = job_file(keys, tmp_path), tmp_path / "run"
    (tmp_path / "held").touch()
    with started(job=job) as command:
        assert within(SECONDS, lambda: any(run.glob("checkpoints/step-*")))
        (controller,) = [pid for pid, line in command.processes().items() if CONTROLLER_PROCESS in line]
        psutil.Process(controller).kill()
        _, errors = command.ends()
    assert errors.splitlines()[-1].endswith("; run the same command again: it resumes"), errors
    (tmp_path / "held").unlink()
    assert dp_ray.run(job, workers=0, quiet=True).status == "done"

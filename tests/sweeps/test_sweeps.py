"""Sweeps: each trial an ordinary run, carried on after a kill, a Ctrl-C or a failure; searched by optuna; shown."""

import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import optuna
import pytest
import torch

import dp_ray
from dp_ray.errors import RunInterrupted
from dp_ray.job.files import job_maker
from dp_ray.rundir.files import SweepTrial
from dp_ray.rundir.lease import LEASE
from dp_ray.rundir.lease import held as lease_held
from dp_ray.rundir.listing import listed_runs
from dp_ray.storage import Storage
from dp_ray.sweeps.define import Definition, parse_axis
from dp_ray.sweeps.record import SweepRecord, open_record
from dp_ray.sweeps.run import Lane, Stop, run_side_by_side
from dp_ray.sweeps.search import suggested
from dp_ray.system.threads import planned_stops
from tests.support import sweeps
from tests.support.cli import status_of
from tests.support.cluster import Cluster
from tests.support.fresh import loaded_by
from tests.support.s3 import SECRET, Server
from tests.support.sweeps import GRID, NUMBERS, VALUES, drivers, evaluation_job, kept, states, swept, training_job

pytestmark = pytest.mark.usefixtures("in_project", "foreground")

READS = 2 * 101  # of a trial
IN_THIRD = 2 * READS + 150  # a read in the second epoch of the third trial

Lines = pytest.CaptureFixture[str]


def undisturbed(job: str, number: int, storage: str) -> dp_ray.Result:
    """The run of one trial by itself, in a place of its own."""
    lr, size = VALUES[number - 1]
    args = {"target": "torch.optim:SGD", "args": {"lr": lr}}
    return dp_ray.run(job, optimizer=args, batch_size=size, storage=storage, name=f"alone-{number}", quiet=True)


def check_carried_on(job: str, base: Storage, alone: str) -> None:
    """Four runs, none run twice; the third was resumed; each ends as it would by itself."""
    assert states(base) == ["done"] * 4
    assert drivers(base) == [1, 1, 2, 1]
    for number, trial in zip(NUMBERS, kept(base), strict=True):
        result = dp_ray.load(base.child(f"job-sweep-{number}").location)
        by_itself = undisturbed(job, number, alone)
        assert result.weights_sha256 == by_itself.weights_sha256
        assert len(result.interruptions) == (number == 3)
        assert trial["metric"] == trial["metrics"]["loss"] == by_itself.metrics["loss"]
        assert tuple(trial["values"].values()) == VALUES[number - 1]


@pytest.mark.slow
def test_a_sweep_killed_in_the_third_trial_ends_with_four_runs_and_none_run_twice(tmp_path: Path) -> None:
    job, base = training_job(tmp_path, IN_THIRD), Storage(str(tmp_path / "runs"))
    (tmp_path / "trap").write_text("SIGKILL")
    assert swept(job, *GRID).returncode == -signal.SIGKILL
    assert states(base) == ["done", "done", "running", "waiting"]
    assert drivers(base) == [1, 1, 1, 0]
    goes_on = swept(job, *GRID)
    assert goes_on.returncode == 0, goes_on.stderr
    assert "job-sweep-3: the last driver was killed, or its machine lost, after" in goes_on.stderr
    assert "trial 1 of 4" not in goes_on.stderr and "trial 2 of 4" not in goes_on.stderr
    check_carried_on(job, base, str(tmp_path / "alone"))
    again = swept(job, *GRID)
    assert (again.returncode, again.stdout, again.stderr) == (0, goes_on.stdout, "")
    assert drivers(base) == [1, 1, 2, 1]


@pytest.mark.full
@pytest.mark.slow
def test_the_same_on_an_object_store(server: Server, tmp_path: Path) -> None:
    url = server.url("sweeps")
    job, base = training_job(tmp_path, IN_THIRD, storage=url), Storage(url)
    (tmp_path / "trap").write_text("SIGKILL")
    assert swept(job, *GRID).returncode == -signal.SIGKILL
    assert states(base) == ["done", "done", "running", "waiting"]
    goes_on = swept(job, *GRID, "--json")
    assert goes_on.returncode == 0, goes_on.stderr
    check_carried_on(job, base, str(tmp_path / "alone"))
    told = json.loads(goes_on.stdout)
    assert told["sweep_dir"].startswith("s3://") and told["trials"][0]["run"].endswith(f"job-sweep-{told['best']}")
    assert "report.html" in server.objects("sweeps/job-sweep")
    everything = goes_on.stdout + goes_on.stderr + base.child("job-sweep").read_text("sweep.json")
    assert SECRET not in everything and server.uploads("sweeps") == []


@pytest.mark.full
def test_a_run_that_finished_before_its_driver_was_killed_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    line = ["sweep", job, "--over", "model.args.x=1,2,4,6"]
    assert status_of(monkeypatch, *line) == 0
    file = tmp_path / "runs" / "job-sweep" / "sweep.json"
    told = json.loads(file.read_text())
    told["trials"][1] |= {"state": "running", "metric": None, "metrics": {}}
    file.write_text(json.dumps(told))
    before = capsys.readouterr().out
    assert status_of(monkeypatch, *line) == 0
    assert capsys.readouterr().out == before
    assert (states(base), drivers(base)) == (["done"] * 4, [1] * 4)


def test_the_table_and_the_json_have_the_best_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    line = ["sweep", evaluation_job(tmp_path), "--quiet", "--over", "model.args.x=0,4,3.5"]
    assert status_of(monkeypatch, *line) == 0
    printed = capsys.readouterr()
    runs = tmp_path / "runs"
    assert printed.out.splitlines() == [
        line.format(runs)
        for line in (
            "trial  model.args.x  loss  state  run",
            "3      3.5           0.25  done   {}/job-sweep-3",
            "2      4             1     done   {}/job-sweep-2",
            "1      0             9     done   {}/job-sweep-1",
        )
    ]
    assert printed.err == ""
    assert status_of(monkeypatch, *line, "--maximize", "--json") == 0  # what counts may change: nothing runs again
    told = json.loads(capsys.readouterr().out)
    assert (told["best"], told["metric"], told["mode"], told["count"]) == (1, "loss", "max", 3)
    assert [(trial["number"], trial["metric"], trial["state"]) for trial in told["trials"]] == [
        *[(1, 9.0, "done"), (2, 1.0, "done"), (3, 0.25, "done")]
    ]
    page = (runs / "job-sweep" / "report.html").read_text()
    rows = re.findall(r"<tr( class=.best.)?><th scope=.row.>(\d)( <span[^>]*>best</span>)?</th>(.*?)</tr>", page)
    assert [(bool(best), number, bool(mark)) for best, number, mark, _ in rows] == [
        *[(True, "3", True), (False, "2", False), (False, "1", False)]
    ]
    cells = [re.findall(r"<td>(.*?)</td>", row[-1])[:3] for row in rows]
    assert cells == [["3.5", "0.25", "done"], ["4", "1", "done"], ["0", "9", "done"]]
    assert all(name in page for name in ("1: x 0<", "2: x 4<", "3: x 3.5<", "<h1>job-sweep</h1>", "model.args.x"))


def test_json_has_no_number_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    line = ["sweep", evaluation_job(tmp_path), "--quiet", "--json", "--over", "model.args.x=-1.0e+30,4"]
    for _ in range(2):  # the second one reads the file
        assert status_of(monkeypatch, *line) == 0
        for text in (capsys.readouterr().out, (tmp_path / "runs" / "job-sweep" / "sweep.json").read_text()):
            told = json.loads(text, parse_constant=pytest.fail)
            losses = {trial["number"]: trial["metrics"]["loss"] for trial in told["trials"]}
            assert losses == {1: None, 2: 1.0}


def test_a_dry_run_checks_and_shows_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job = evaluation_job(tmp_path)
    assert status_of(monkeypatch, "sweep", job, "--dry-run", "--over", "model.args.x=1,2") == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()] == [
        ["trial", "model.args.x", "loss", "state"],
        ["1", "1", "-", "waiting"],
        ["2", "2", "-", "waiting"],
    ]
    assert status_of(monkeypatch, "sweep", job, "--dry-run", "--over", "model.args.z=1,2") == 2
    assert "takes no 'z', but x, y" in capsys.readouterr().err
    taken = tmp_path / "runs" / "job-sweep-2" / "mine.txt"
    taken.parent.mkdir(parents=True)
    taken.touch()
    assert status_of(monkeypatch, "sweep", job, "--dry-run", "--over", "model.args.x=1,2") == 2
    assert "job-sweep-2: trial 2 would run there, and it is not empty" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "runs")
    search = [
        "--search",
        "optuna",
        "--trials",
        "7",
        "--over",
        "model.args.x=log(1e-2..8)",
        "--over",
        "batch_size=2,4",
    ]
    assert status_of(monkeypatch, "sweep", job, "--dry-run", *search) == 0
    assert capsys.readouterr().out.splitlines() == [
        "7 trials, whose values optuna draws from",
        "  model.args.x: log(0.01..8.0)",
        "  batch_size: 2, 4",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_checks_a_mixture_without_building_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    sources = {
        "a": {"target": "torch.utils.data:TensorDataset"},
        "b": {"target": "dp_ray.data:Csv", "args": {"paths": "none"}},
    }
    mix = {"target": "dp_ray.data:Mix", "args": {"sources": sources, "weights": {"a": 0.5, "b": 0.5}}}
    job = tmp_path / "job.json"
    keys = {"task": "predict", "model": "torch.nn:Identity", "batch_size": 2, "storage": str(tmp_path / "runs")}
    job.write_text(json.dumps({**keys, "dataset": mix}))
    line = ["sweep", str(job), "--dry-run", "--over"]
    assert status_of(monkeypatch, *line, "batch_size=1,2") == 0
    for over, says in {
        "dataset.args.weights.a=0.5,0.7": "Mix: weights: must add up to 1, and add up to 1.2",
        "dataset.args.stop=first,last": "Mix: stop: must be first, all",
        "dataset.args.sources.b.args.path=a,b": "sources.b.args: dp_ray.data:Csv takes no 'path', but paths",
    }.items():
        capsys.readouterr()
        assert status_of(monkeypatch, *line, over) == 2
        assert says in capsys.readouterr().err


def test_a_trial_that_fails_fails_the_sweep_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    line = ["sweep", job, "--quiet", "--over", "model.args.x=1,9,2,4"]
    assert status_of(monkeypatch, *line, "--fail-fast") == 1
    assert states(base) == ["done", "failed", "waiting", "waiting"]
    assert status_of(monkeypatch, *line) == 1
    assert states(base) == ["done", "failed", "done", "done"]
    assert drivers(base) == [1, 2, 1, 1]
    printed = capsys.readouterr()
    assert "job-sweep: trial 2 failed:" in printed.err and "ValueError: 9.0 is above 8" in printed.err
    assert [row.split()[:4] for row in printed.out.splitlines()[-4:]] == [
        *[["3", "2", "1", "done"], ["4", "4", "1", "done"], ["1", "1", "4", "done"], ["2", "9", "-", "failed"]]
    ]
    assert "9.0 is above 8" in kept(base)[1]["error"]


@pytest.mark.full(but=["SIGTERM-75"])
@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_a_stop_keeps_the_step_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines, name: str, status: int
) -> None:
    job, base = training_job(tmp_path, IN_THIRD), Storage(str(tmp_path / "runs"))
    (tmp_path / "trap").write_text(name)
    monkeypatch.setattr(sweeps.Trapped, "reads", 0)
    assert status_of(monkeypatch, "sweep", job, *GRID) == status
    told = capsys.readouterr().err
    assert "interrupted: 2 of 4 trials are done; run the same command to go on" in told.splitlines()
    assert states(base) == ["done", "done", "interrupted", "waiting"]
    assert status_of(monkeypatch, "sweep", job, *GRID) == 0
    assert "job-sweep-3: resumed from step" in capsys.readouterr().err
    check_carried_on(job, base, str(tmp_path / "alone"))


def test_a_sweep_that_another_driver_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    assert status_of(monkeypatch, "sweep", job, "--quiet", "--over", "model.args.x=9,1") == 1
    with lease_held(base.child("job-sweep"), "token", lambda: True):
        assert status_of(monkeypatch, "sweep", job, "--quiet", "--over", "model.args.x=9,1") == 2
    assert "job-sweep is being run by process" in capsys.readouterr().err
    assert states(base) == ["failed", "done"]


@pytest.mark.full
def test_overwrite_deletes_the_sweep_and_its_runs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    assert status_of(monkeypatch, "run", job, "--quiet", "--name", "job-sweep-9") == 0
    assert status_of(monkeypatch, "sweep", job, "--quiet", "--over", "model.args.x=1,2,4") == 0
    other = ["sweep", job, "--quiet", "--over", "model.args.x=5,6", "--overwrite"]
    assert status_of(monkeypatch, *other, "--dry-run") == 0
    assert len(kept(base)) == 3
    assert status_of(monkeypatch, *other) == 0
    assert [trial["values"] for trial in kept(base)] == [{"model.args.x": 5}, {"model.args.x": 6}]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        *["job-sweep", "job-sweep-1", "job-sweep-2", "job-sweep-9"]
    ]


def test_overwrite_deletes_no_run_from_which_a_trial_would_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, runs = training_job(tmp_path), tmp_path / "runs"
    sweep = ["sweep", job, "--quiet", "--set", "max_steps=1", "--over", "batch_size=16,32"]
    assert status_of(monkeypatch, *sweep) == 0
    begins = f"init_from={tmp_path}/elsewhere.pt,{runs}/job-sweep-2/weights.safetensors"
    torch.save({}, tmp_path / "elsewhere.pt")
    assert status_of(monkeypatch, *sweep[:-2], "--over", begins, "--overwrite") == 2
    says = r"init_from: \S+job-sweep-2/weights.safetensors lies in \S+/job-sweep-2, which --overwrite"
    assert re.search(says, capsys.readouterr().err)
    left = ["job-sweep", "job-sweep-1", "job-sweep-2"]
    assert sorted(path.name for path in runs.iterdir()) == left and states(Storage(str(runs))) == ["done"] * 2
    assert (runs / left[2] / "weights.safetensors").exists()


def test_overwrite_leaves_a_run_where_no_trial_had_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    sweep = ["sweep", job, "--quiet", "--over", "model.args.x=9,1,2"]
    assert status_of(monkeypatch, *sweep, "--fail-fast") == 1
    assert states(base) == ["failed", "waiting", "waiting"]
    assert status_of(monkeypatch, "run", job, "--quiet", "--name", "job-sweep-3") == 0
    before = base.child("job-sweep-3").read_text("run.json")
    assert status_of(monkeypatch, *sweep, "--overwrite") == 2
    assert "job-sweep-3: trial 3 would run there, and it is not empty" in capsys.readouterr().err
    assert base.child("job-sweep-3").read_text("run.json") == before


def test_a_sweep_that_was_given_another_name_takes_no_other_runs_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, runs = evaluation_job(tmp_path), tmp_path / "runs"
    sweep = ["sweep", job, "--quiet", "--over", "model.args.x=1,2", "--name", "moved"]
    assert status_of(monkeypatch, *sweep[:-1], "first") == 0
    (runs / "first").rename(runs / "moved")
    assert status_of(monkeypatch, "run", job, "--quiet", "--name", "moved-1") == 0
    before = (runs / "moved-1" / "run.json").read_text()
    assert status_of(monkeypatch, *sweep) == 2
    assert "holds a different sweep (given another name: its first run is first-1)" in capsys.readouterr().err
    assert status_of(monkeypatch, *sweep, "--overwrite") == 2
    assert (runs / "moved-1" / "run.json").read_text() == before
    assert (runs / "first-1" / "run.json").exists()


@pytest.mark.full(but=["<lambda>2"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda trials: trials[0].update(metrics={"loss": "x"}),
        lambda trials: trials[0].update(picked={"model.args.x": -1}),
        lambda trials: trials[1].update(number=7),
        lambda trials: trials.pop(),
    ],
)
def test_a_damaged_file_of_a_sweep_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines, damage: Callable[[list[Any]], object]
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    sweep = ["sweep", job, "--quiet", "--over", "model.args.x=1,2"]
    assert status_of(monkeypatch, *sweep) == 0
    told = json.loads(base.child("job-sweep").read_text("sweep.json"))
    damage(told["trials"])
    base.child("job-sweep").write_text("sweep.json", json.dumps(told))
    assert status_of(monkeypatch, *sweep) == 1
    assert "job-sweep/sweep.json: is damaged: " in capsys.readouterr().err


def test_a_result_that_is_damaged_fails_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    sweep = ["sweep", job, "--quiet", "--over", "model.args.x=1,2"]
    assert status_of(monkeypatch, *sweep) == 0
    told = json.loads(base.child("job-sweep").read_text("sweep.json"))
    told["trials"][0]["state"] = "running"
    base.child("job-sweep").write_text("sweep.json", json.dumps(told))
    base.child("job-sweep-1").write_text("result.json", '{"status": "done"}')
    assert status_of(monkeypatch, *sweep) == 1
    assert "job-sweep-1/result.json: is damaged: KeyError: 'metrics'" in capsys.readouterr().err
    assert states(base) == ["failed", "done"]


def test_the_list_of_runs_tells_what_the_folder_of_a_sweep_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    assert status_of(monkeypatch, "sweep", job, "--quiet", "--over", "model.args.x=1,9") == 1
    row = next(row for row in listed_runs(base) if row.name == "job-sweep")
    assert (row.status, row.note) == ("sweep", "1 of 2 trials are done")
    (tmp_path / "runs" / "job-sweep" / "sweep.json").write_text("{")
    row = next(row for row in listed_runs(base) if row.name == "job-sweep")
    assert row.status == "damaged"
    assert status_of(monkeypatch, "sweep", job, "--quiet", "--over", "model.args.x=1,9") == 1
    assert "sweep.json: is damaged" in capsys.readouterr().err


SEARCH = ("--search", "optuna", "--over", "model.args.x=-9.0..8.0", "--over", "model.args.y=0,0.5,-1")


def picked(base: Storage, name: str) -> list[dict[str, Any]]:
    return [trial["values"] for trial in kept(base, name)]


@pytest.mark.full
@pytest.mark.slow
def test_a_search_draws_better_values_and_one_that_was_stopped_draws_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    line = ["sweep", job, "--quiet", *SEARCH]
    assert status_of(monkeypatch, *line, "--trials", "30", "--name", "whole") == 0
    for trials in ("1", "12", "13", "30"):  # each is an end from which the next goes on
        assert status_of(monkeypatch, *line, "--trials", trials, "--name", "parts") == 0
        assert len(kept(base, "parts")) == int(trials)
    assert picked(base, "parts") == picked(base, "whole")
    assert drivers(base, "parts") == [1] * 4
    for trial in kept(base, "whole"):
        x, y = trial["values"]["model.args.x"], trial["values"]["model.args.y"]
        assert -9 <= x <= 8 and y in (0, 0.5, -1)
        assert trial["metric"] == pytest.approx((x + y - 3) ** 2, rel=1e-5)
    losses = [trial["metric"] for trial in kept(base, "whole")]
    assert min(losses[10:]) < min(losses[:10])  # the first ten are drawn at random
    assert len({x["model.args.x"] for x in picked(base, "whole")}) == 30


@pytest.mark.full
def test_a_killed_search_runs_its_half_run_trial_with_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    line = ["sweep", job, "--quiet", "--search", "optuna", "--trials", "4", "--over", "model.args.x=log(1e-3..8.0)"]
    assert status_of(monkeypatch, *line) == 0
    whole = picked(base, "job-sweep")
    file = tmp_path / "runs" / "job-sweep" / "sweep.json"
    told = json.loads(file.read_text())
    told["trials"] = [*told["trials"][:2], {**told["trials"][2], "state": "running", "metrics": {}}]
    file.write_text(json.dumps(told))  # as a driver leaves it that is killed as its third trial begins
    for number in (3, 4):
        Storage(str(tmp_path / "runs" / f"job-sweep-{number}")).remove()
    assert status_of(monkeypatch, *line) == 0
    assert picked(base, "job-sweep") == whole
    assert states(base) == ["done"] * 4


def trial(sweep: Definition, number: int, picked: dict[str, Any], **how: Any) -> SweepTrial:
    """A trial, as a file keeps it."""
    return replace(sweep.trial(number, picked), **how)


def measured(loss: float | None) -> dict[str, Any]:
    """What is kept of a trial that is done: no file keeps a loss that is not finite."""
    return {"state": "done", "metrics": {"loss": loss}, "metric": loss}


def test_a_search_takes_what_is_no_result_for_none(tmp_path: Path) -> None:
    """Trials that run, that failed, and whose loss is no number or is infinite."""
    axes = (parse_axis("model.args.x=0.0..8.0"), parse_axis("model.args.y=0,1"))
    sweep = Definition("s", job_maker(evaluation_job(tmp_path)), axes, 99, "optuna", "loss")
    good = [
        trial(sweep, number, {"model.args.x": number / 2, "model.args.y": 0}, **measured(1.0))
        for number in range(1, 13)
    ]
    ends: list[dict[str, Any]] = [{"state": "running"}, {"state": "failed"}, measured(None)]
    others = [
        trial(sweep, at, {"model.args.x": 2.0, "model.args.y": 1}, **how) for at, how in enumerate(ends, start=13)
    ]
    infinite = trial(sweep, 16, {"model.args.x": 2.0, "model.args.y": 1}, **measured(None))
    found = suggested(sweep, 0, 17, [*good, *others, infinite])
    assert 0 <= found["model.args.x"] <= 8 and found["model.args.y"] in (0, 1)
    assert found == suggested(sweep, 0, 17, [*good, *others, infinite])
    assert found != suggested(sweep, 1, 17, [*good, *others, infinite])
    assert found != suggested(sweep, 0, 18, [*good, *others, infinite])


def test_a_search_draws_the_same_from_infinite_losses_after_it_was_stopped(tmp_path: Path) -> None:
    axes = (parse_axis("model.args.x=0.0..8.0"),)
    sweep = Definition("s", job_maker(evaluation_job(tmp_path)), axes, 99, "optuna", "loss")
    losses = [None if number > 8 else number / 4 for number in range(16)]
    trials = [
        trial(sweep, at, {"model.args.x": (at * 5 % 16) / 2}, **measured(losses[at * 5 % 16])) for at in range(1, 16)
    ]
    record = SweepRecord(Storage(str(tmp_path / "s")), sweep, trials)
    with record.held(print):
        pass
    again = open_record(sweep, Storage(str(tmp_path))).trials
    assert suggested(sweep, 0, 16, again) == suggested(sweep, 0, 16, trials)


def test_a_run_that_measured_infinity_before_its_driver_was_killed_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = evaluation_job(tmp_path), Storage(str(tmp_path / "runs"))
    sweep = ["sweep", job, "--quiet", "--over", "model.args.x=-1e30,1"]
    assert status_of(monkeypatch, *sweep) == 0
    assert json.loads((tmp_path / "runs" / "job-sweep-1" / "result.json").read_text())["metrics"] == {"loss": None}
    file = tmp_path / "runs" / "job-sweep" / "sweep.json"
    told = json.loads(file.read_text())
    told["trials"][0] |= {"state": "running", "metrics": {}}
    file.write_text(json.dumps(told))
    assert status_of(monkeypatch, *sweep) == 0
    assert states(base) == ["done"] * 2
    assert drivers(base)[:2] == [1, 1]


@pytest.mark.full
def test_a_sweep_without_a_search_needs_no_optuna() -> None:
    assert "optuna" not in loaded_by("import dp_ray.sweeps.run")


def test_a_search_leaves_optunas_own_settings_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = optuna.logging.get_verbosity()
    line = ["sweep", evaluation_job(tmp_path), "--quiet", "--search", "optuna", "--trials", "2"]
    assert status_of(monkeypatch, *line, "--over", "model.args.x=1..8") == 0
    assert optuna.logging.get_verbosity() == before
    values = picked(Storage(str(tmp_path / "runs")), "job-sweep")
    assert all(type(value["model.args.x"]) is int for value in values)


def lane(begun: threading.Barrier, ends: list[str], is_stubborn: bool) -> Lane:
    """A lane whose job goes on until it is asked to stop, the stubborn one until its workers are ended."""
    over = threading.Event()

    def execute(_: Any) -> Any:
        def ask(signal_name: str) -> bool:
            if not is_stubborn:
                over.set()
            return not is_stubborn

        with planned_stops(ask):
            begun.wait()
            assert over.wait(60)
        ends.append("stopped")
        raise RunInterrupted("stopped")

    return Lane(execute, over.set)


def runs_one(on: Lane) -> None:
    on.execute(Mock())


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_ctrl_c_stops_the_trials_of_all_lanes_and_a_second_one_ends_them(is_stubborn: bool) -> None:
    begun, ends = threading.Barrier(3), list[str]()
    lanes = [lane(begun, ends, False), lane(begun, ends, is_stubborn)]
    stop = Stop()

    def interrupts() -> None:
        begun.wait()
        signal.raise_signal(signal.SIGINT)
        while is_stubborn and not stop.is_asked:
            time.sleep(0.01)
        if is_stubborn:
            signal.raise_signal(signal.SIGINT)

    sender = threading.Thread(target=interrupts)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side(lanes, runs_one, stop)
    sender.join()
    assert ends == ["stopped"] * 2
    assert stop.is_asked and stop.is_at_once == is_stubborn


@pytest.mark.full(but=["2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_trials_ends_the_sweep_and_loses_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    job, base, put = evaluation_job(tmp_path), Storage(str(tmp_path / "runs")), SweepRecord.put

    def signalled(record: SweepRecord, trial: SweepTrial) -> None:
        if trial.state == "done" and trial.number == 2:
            signal.raise_signal(number)
        put(record, trial)

    monkeypatch.setattr(SweepRecord, "put", signalled)
    status = 130 if number == signal.SIGINT else 75
    assert status_of(monkeypatch, "sweep", job, "--over", "model.args.x=1.0,2.0,3.0,4.0") == status
    assert states(base) == ["done", "done", "waiting", "waiting"]
    assert not base.child("job-sweep").exists(LEASE)
    monkeypatch.setattr(SweepRecord, "put", put)
    assert status_of(monkeypatch, "sweep", job, "--over", "model.args.x=1.0,2.0,3.0,4.0") == 0
    assert drivers(base) == [1] * 4


def test_a_stop_without_a_signal_ends_the_lanes_without_an_interrupt() -> None:
    """As after the first failure with --fail-fast."""
    begun, ends, stop = threading.Barrier(2), list[str](), Stop()

    def fails(_: Any) -> Any:
        begun.wait()
        stop.is_asked = True

    run_side_by_side([lane(begun, ends, False), Lane(fails, lambda: None)], runs_one, stop)
    assert ends == ["stopped"]


def test_the_first_error_of_a_lane_stops_the_others() -> None:
    begun, ends = threading.Barrier(2), list[str]()

    def fails(_: Any) -> Any:
        begun.wait()
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        run_side_by_side([lane(begun, ends, False), Lane(fails, lambda: None)], runs_one, Stop())
    assert ends == ["stopped"]


@pytest.mark.full
@pytest.mark.ray
def test_trials_run_side_by_side_in_sessions_and_give_what_one_process_gives(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Lines
) -> None:
    job, base = training_job(tmp_path), Storage(str(tmp_path / "runs"))
    line = ["sweep", job, *GRID, "--workers", "2", "--parallel", "2", "--address", cluster.address]
    assert status_of(monkeypatch, *line) == 0
    assert states(base) == ["done"] * 4
    assert drivers(base) == [1] * 4
    results = [dp_ray.load(base.child(f"job-sweep-{number}").location) for number in NUMBERS]
    for number, result in zip(NUMBERS, results, strict=True):
        assert result.world_sizes == [2]
        assert result.weights_sha256 == undisturbed(job, number, str(tmp_path / "alone")).weights_sha256
    of_workers = [frozenset(worker["pid"] for worker in result.workers) for result in results]
    assert len(set(of_workers)) == 2  # two sessions, whose workers stayed for the next trial
    assert of_workers[0] != of_workers[1]
    said = capsys.readouterr().err
    assert said.index("trial 2 of 4") < said.index("job-sweep-1: done")

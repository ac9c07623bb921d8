"""Runs that are resumed: on other workers, for longer, as Python objects; and what the console says of them."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.plan.history import CLOCKED
from dp_ray.rundir.checkpoint import load_checkpoint
from dp_ray.storage import Storage
from dp_ray.tasks.hooks import TrainingView
from tests.support import training
from tests.support.builders import run_dir_of
from tests.support.cli import status_of
from tests.support.group import StopsBefore, run_group, weights_of
from tests.support.trainings import eval_loss, job_of

pytestmark = pytest.mark.usefixtures("in_project")


def job(folder: Path, **keys: Any) -> Job:
    """A training of 45 steps of 7 rows."""
    given = {"name": "run", "storage": str(folder), "epochs": 3, "bitwise": True, "workers": 0}
    return job_of("mlp", **{**given, **keys})


def killed(folder: Path, before: int, **keys: Any) -> None:
    """A run of the job, killed before a step."""
    made = job(folder, **{"workers": 1, **keys})
    run_dir_of(folder, made, rows={"dataset": 101})
    run_group(made, folder / made.run_name, StopsBefore(before))
    assert list((folder / made.run_name / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_job_that_sets_no_shards_resumes_on_other_numbers_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(tmp_path, 20, workers=2, checkpoint={"every_steps": 5})
    result = dp_ray.run(job(tmp_path, workers=0))
    told = [line for line in capsys.readouterr().err.splitlines() if "shards: " in line]
    assert told == ["run: shards: 2, as when this run began"]
    assert result.shards == 2
    run_group(job(tmp_path, workers=2), tmp_path / "undisturbed")
    undisturbed = weights_of(tmp_path / "undisturbed")
    assert all(result.weights[name].equal(undisturbed[name]) for name in undisturbed)


def same(result: dp_ray.Result, other: dp_ray.Result) -> bool:
    """Whether two trainings ended at the same bits, by the same way."""
    ways = [
        [{name: value for name, value in row.items() if name not in CLOCKED} for row in each.history]
        for each in (result, other)
    ]
    return repr(ways[0]) == repr(ways[1]) and result.weights_sha256 == other.weights_sha256


def run(folder: Path, **keys: Any) -> dp_ray.Result:
    return dp_ray.run(job(folder, **keys), quiet=True)


SCHEDULERS = "torch.optim.lr_scheduler"
EVAL = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [({"epochs": 2}, {"epochs": 4}), ({"max_steps": 20}, {"max_steps": 33}), ({"max_steps": 12}, {})],
    ids=["epochs", "max_steps", "no max_steps"],
)
def test_a_finished_training_resumes_for_longer(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    keys: dict[str, Any] = {"eval": EVAL, "scheduler": "tests.support.training:warm_up"}
    ends = len(run(tmp_path, **keys, **first).history) - 1
    result = dp_ray.run(job(tmp_path, **keys, **then))
    assert f"run: continues to step {len(result.history)} (" in capsys.readouterr().err
    undisturbed = run(tmp_path, name="undisturbed", **keys, **then)
    assert ends + 1 < len(result.history) == len(undisturbed.history)
    ours, theirs = result.history, undisturbed.history
    for row in (ours[ends], theirs[ends]):  # the end was evaluated, which is no end any more
        row.pop("eval_loss")
    assert [row["loss"] for row in ours] == [row["loss"] for row in theirs]
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert [shape.step for shape in result.shapes] == list(range(len(ours)))
    assert (result.status, result.world_sizes, result.restarts) == ("done", [1, 1], 0)
    assert not (tmp_path / "run" / "history").exists()


def test_an_unfinished_training_resumes_for_longer(tmp_path: Path) -> None:
    killed(tmp_path, 20, checkpoint={"every_steps": 5}, epochs=2)
    assert same(run(tmp_path, epochs=4), run(tmp_path, epochs=4, name="undisturbed"))


@pytest.mark.slow
def test_a_longer_run_that_is_killed_resumes_too(tmp_path: Path) -> None:
    """The result of the shorter one is gone by then, its history is not."""
    run(tmp_path, epochs=2)
    longer = job(tmp_path, epochs=4, checkpoint={"every_steps": 5}, workers=1)
    run_dir_of(tmp_path, longer, rows={"dataset": 101}, steps=60)
    assert not (tmp_path / "run" / "result.json").exists()
    run_group(longer, tmp_path / "run", StopsBefore(43))
    result = run(tmp_path, epochs=4)
    assert same(result, run(tmp_path, epochs=4, name="undisturbed"))


def ends_in_step_33(view: TrainingView) -> None:
    if view.step == 33:
        raise RuntimeError("the machine is needed elsewhere")


def test_what_is_asked_of_a_longer_run_that_stopped_is_of_it_and_not_of_the_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"eval": EVAL, "checkpoint": {"every_steps": 2, "best": "eval_loss"}, "ema": {"decay": 0.5}}
    place, shorter = str(tmp_path / "run"), run(tmp_path, epochs=2, **keys)
    assert shorter.best and len(shorter.history) == 30
    with pytest.raises(Exception, match="needed elsewhere"):
        run(tmp_path, epochs=4, hooks={"on_step": ends_in_step_33}, **keys)
    stopped = dp_ray.load(place)
    assert (stopped.status, stopped.best, stopped.ema, stopped.weights_path) == ("failed", None, None, None)
    assert [row["step"] for row in stopped.history] == list(range(33))
    asked = ("evaluate", place, "--quiet", "--name")
    assert status_of(monkeypatch, *asked, "last", "--weights", "last") == 0
    newest = load_checkpoint(Storage(f"{place}/checkpoints"), "step-32.safetensors").state["model"]
    expected = eval_loss(newest)
    assert expected != pytest.approx(eval_loss(shorter.weights), rel=1e-3)
    assert dp_ray.load(tmp_path / "last").metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert status_of(monkeypatch, *asked, "default") == 0
    assert dp_ray.load(tmp_path / "default").metrics["loss"] == dp_ray.load(tmp_path / "last").metrics["loss"]
    for which in ("best", "ema"):
        assert status_of(monkeypatch, *asked, which, "--weights", which) == 2
        said = f"--weights {which}: {place} is unfinished, and its {which}.safetensors is that of an earlier, shorter"
        assert said in capsys.readouterr().err
    asks = {"task": "evaluate", "init_from": place, "optimizer": None, "ema": None, "name": "named", "eval": None}
    dp_ray.run(job(tmp_path, **asks, checkpoint={}))
    assert "the run's newest checkpoint\n" in capsys.readouterr().err  # and not: its best weights are ...
    assert (
        run(tmp_path, epochs=4, **keys).weights_sha256 == run(tmp_path, epochs=4, name="alone", **keys).weights_sha256
    )


@pytest.mark.slow
def test_a_damaged_last_checkpoint_costs_no_history(tmp_path: Path) -> None:
    run(tmp_path, epochs=2)
    newest = tmp_path / "run" / "checkpoints" / "step-30.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert same(run(tmp_path, epochs=4), run(tmp_path, epochs=4, name="undisturbed"))


@pytest.mark.slow
def test_a_training_is_never_cut_below_what_is_done(tmp_path: Path) -> None:
    run(tmp_path, epochs=2)
    with pytest.raises(
        JobError, match=r"which has done 30 steps, and this job has 15 \(epochs: 2 before, 1 now\); give it another"
    ):
        run(tmp_path, epochs=1)
    with pytest.raises(JobError, match=r"holds this run, finished; load its result .* use it .*give it another name"):
        run(tmp_path, epochs=2, max_steps=1000)
    killed(tmp_path, 20, name="killed", checkpoint={"every_steps": 5})
    assert same(run(tmp_path, name="killed", epochs=2), run(tmp_path, name="other", epochs=2))


def test_a_finished_training_without_its_checkpoints_does_not_begin_anew(tmp_path: Path) -> None:
    run(tmp_path, epochs=2)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(
        JobError, match="finished, without the checkpoints and the history from which it could resume"
    ):
        run(tmp_path, epochs=3)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"target": f"{SCHEDULERS}:CosineAnnealingLR", "args": {"T_max": 30}},
        "tests.support.training:warm_up",
    ],
)
def test_a_scheduler_whose_length_may_depend_on_the_runs_is_told(
    tmp_path: Path, scheduler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, epochs=2, scheduler=scheduler)
    dp_ray.run(job(tmp_path, epochs=3, scheduler=scheduler))
    told = [line for line in capsys.readouterr().err.splitlines() if "the scheduler" in line]
    assert told == ["run: 45 steps now, 30 before: the scheduler stays as it was built"]


class Breaks(training.Pairs):
    """The pairs, of which row 50 cannot be read while `broken` is true."""

    broken = False

    def __getitem__(self, index: int) -> Any:
        if self.broken and index == 50:
            raise OSError("sector 50")
        return super().__getitem__(index)


def of_objects(folder: Path, dataset: Breaks, **keys: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    given = {"model": training.mlp(), "dataset": dataset, "loss": nn.CrossEntropyLoss(reduction="none")}
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    made = {"task": "train", "optimizer": optimizer, "batch_size": 7, "epochs": 2, "workers": 0, "quiet": True}
    return {**given, **made, "checkpoint": {"every_steps": 2}, "name": "run", "storage": str(folder), **keys}


@pytest.mark.slow
def test_python_objects_resume_if_the_caller_says_so(tmp_path: Path) -> None:
    dataset = Breaks()
    dataset.broken = True
    with pytest.raises(DataError, match="sector 50"):
        dp_ray.run(**of_objects(tmp_path, dataset), resume=True)
    dataset.broken = False
    says = (
        r"a run of Python objects \(model, .*\); whether these are the same is unknown: if they are, resume=True resu"
    )
    with pytest.raises(JobError, match=says):
        dp_ray.run(**of_objects(tmp_path, dataset))
    with pytest.raises(JobError, match=r"a run of a different job \(batch_size: 7 there, 8 here\)"):
        dp_ray.run(**of_objects(tmp_path, dataset, batch_size=8), resume=True)
    result = dp_ray.run(**of_objects(tmp_path, dataset), resume=True)
    assert [interruption["resumed_step"] for interruption in result.interruptions] == [6]
    assert same(result, dp_ray.run(**of_objects(tmp_path, dataset, name="undisturbed")))


def test_a_checkpoint_as_resume_is_answered_as_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="resume: is no key of a job; here it is init_from"):
        dp_ray.run(**of_objects(tmp_path, Breaks()), resume="checkpoint.pt")


class First(nn.Module):
    """A column, [rows], times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, column: torch.Tensor) -> torch.Tensor:
        return self.weight * column


def table(path: Path, *bad: int) -> None:
    """A table of the numbers 0 to 39, of which some are no numbers."""
    path.write_text("x,y\n" + "".join(f"{'none' if row in bad else f'{row}.0'},{row}.0\n" for row in range(40)))


def of_a_table(folder: Path, **keys: Any) -> dict[str, Any]:
    csv = {"target": "dp_ray.data:Csv", "args": {"paths": str(folder / "table.csv"), "decode": {"x": float}}}
    given = {"model": First, "dataset": csv, "inputs": ["x"], "batch_size": 10, "workers": 0, "quiet": True}
    return {**given, "storage": str(folder), "name": "run", **keys}


SQUARES = {"task": "train", "loss": nn.MSELoss, "target": "y", "optimizer": torch.optim.SGD}


@pytest.mark.parametrize("keys", [{}, {"on_error": {"quarantine": 1}}, SQUARES], ids=["", "set aside", "a training"])
def test_a_run_that_kept_no_step_begins_anew_with_mended_files(tmp_path: Path, keys: dict[str, Any]) -> None:
    table(tmp_path / "table.csv", 3, 4)
    with pytest.raises(DataError, match="'x' cannot be decoded"):
        dp_ray.run(**of_a_table(tmp_path, **keys))
    table(tmp_path / "table.csv")
    result = dp_ray.run(**of_a_table(tmp_path, **keys))
    assert (result.rows, result.quarantined, result.total_steps) == (40, 0, 4)
    assert result.interruptions[0]["resumed_step"] == 0
    if result.task == "predict":
        assert result.outputs.tolist() == list(range(40))


def test_another_job_takes_the_place_of_one_over_files_that_kept_no_step(tmp_path: Path) -> None:
    table(tmp_path / "table.csv", 3)
    with pytest.raises(DataError, match="'x' cannot be decoded"):
        dp_ray.run(**of_a_table(tmp_path))
    table(tmp_path / "table.csv")
    assert dp_ray.run(**of_a_table(tmp_path, batch_size=20)).total_steps == 2


def test_a_run_that_kept_a_step_says_how_to_start_anew_with_mended_files(tmp_path: Path) -> None:
    keys = of_a_table(tmp_path, **SQUARES, checkpoint={"every_steps": 1, "keep": 1})
    table(tmp_path / "table.csv", 35)
    with pytest.raises(DataError, match="'x' cannot be decoded"):
        dp_ray.run(**keys)
    table(tmp_path / "table.csv")
    says = r"put them back, or start anew \(--overwrite, overwrite=True\), which deletes its 1 checkpoint and history"
    with pytest.raises(DataError, match=rf"table\.csv was written again \(.*; {says}"):
        dp_ray.run(**keys)
    assert dp_ray.run(**keys, overwrite=True).total_steps == 4

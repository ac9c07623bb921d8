"""A loss that is NaN or infinite is told with the command that shows its rows; `stop_on_nan` ends the run there."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import dp_ray
from dp_ray.cluster.worker import _ending_of
from dp_ray.engine.sums.votes import LossWatch, NotFinite
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.messages import Ending
from dp_ray.monitor.console import Console, Losses
from dp_ray.plan.order import Order
from dp_ray.storage import Storage
from tests.support.cli import status_of
from tests.support.group import ProcessExit, history_of, run_group
from tests.support.slowness import Begun
from tests.support.training import Scores
from tests.support.trainings import job_of, keys_of

pytestmark = pytest.mark.usefixtures("in_project")

CPU = torch.device("cpu")
STEP = 5
POISONED = Order(101, 0, 0, shuffle=True)[STEP * 7 + 6]  # in the last shard of step 5
DATA = {"target": "tests.support.bad_data:Broken", "args": {"nan": [POISONED]}}


def job(workers: int, **keys: Any) -> Job:
    given = {"shards": 3, "stop_on_nan": True, "checkpoint": {"every_steps": 1, "keep": 2}}
    return job_of("mlp", DATA, workers=workers, **{**given, **keys})


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_workers_stop_at_the_step_and_keep_the_state_before_it(tmp_path: Path, strategy: str) -> None:
    run = tmp_path / "run"
    says = (
        rf"NotFinite: step {STEP}: the loss is nan, and stop_on_nan is true; look at its rows: dp-ray replay {run} "
    )
    for _ in range(2):  # it is resumed, and ends at the same step
        with pytest.raises(ProcessExit, match=says + f"--step {STEP}"):
            run_group(job(3, strategy=strategy), run, Begun(tmp_path))
        kept = sorted(path.name for path in (run / "checkpoints").glob("*.safetensors"))
        assert kept == ["step-4.safetensors", "step-5.safetensors"], "the states before steps 4 and 5"
    begun = [file.read_text().split() for file in tmp_path.glob("begun-*")]
    assert len(begun) == 6 and {steps[-1] for steps in begun} == {str(STEP)}, "no worker has begun another one"
    # Without it, the run goes on: the key is none that makes it another run.
    run_group(job(3, strategy=strategy, stop_on_nan=False), run)
    assert next(row["step"] for row in history_of(run) if row["loss"] != row["loss"]) == STEP


def test_the_run_fails_with_the_command_that_shows_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = keys_of(storage=str(tmp_path), name="run", dataset=DATA, batch_size=7, shuffle=True, stop_on_nan=True)
    with pytest.raises(ModelError, match=f"step {STEP}: the loss is nan"):
        dp_ray.run(**{**values, "quiet": False})
    command = f"dp-ray replay {tmp_path}/run --step {STEP}"
    lines = [line for line in capsys.readouterr().err.splitlines() if command in line]
    assert lines == [f"run: warning: the loss of step {STEP} is nan: {command}"], "once: nothing came after it"
    (recent,) = [row for row in pq.read_table(tmp_path / "run" / "recent.parquet").to_pylist() if row["step"] == STEP]
    assert recent["loss"] != recent["loss"], "the history has the step"
    assert [row["step"] for row in dp_ray.load(str(tmp_path / "run")).history] == [*range(STEP + 1)]
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert status_of(monkeypatch, *command.split()[1:]) == 0
    first = capsys.readouterr().out.partition("position\n")[2].split()
    assert first[:2] == ["nan", str(POISONED)]


class Strict(Scores):
    """A metric of evaluations that raises for what is not finite."""

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        if outputs.isnan().any():
            raise ValueError("the outputs are not finite")
        super().update(outputs, target)


def test_what_an_evaluation_makes_of_it_hides_nothing(tmp_path: Path) -> None:
    evaluates = {"dataset": "tests.support.training:Pairs", "every_steps": 1}
    values = keys_of(storage=str(tmp_path), name="run", dataset=DATA, batch_size=7, shuffle=True, stop_on_nan=True)
    with pytest.raises(ModelError, match=f"step {STEP}: the loss is nan"):
        dp_ray.run(**values, eval=evaluates, metrics={"strict": Strict})


def test_a_run_that_goes_on_says_so_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = keys_of(storage=str(tmp_path), name="run", dataset=DATA, batch_size=7, shuffle=True)
    dp_ray.run(**{**values, "quiet": False})
    said = [line for line in capsys.readouterr().err.splitlines() if "dp-ray replay" in line]
    assert said == [f"run: warning: the loss of step {STEP} is nan: dp-ray replay {tmp_path}/run --step {STEP}"] * 2


def test_a_step_without_rows_has_no_loss_to_warn_of(capsys: pytest.CaptureFixture[str]) -> None:
    losses = Losses(Console("run", quiet=False), "a folder/run")
    losses.say([{"step": 3, "epoch": 0, "loss": float("nan"), "rows": 0}])
    losses.say([{"step": 4, "epoch": 0, "loss": float("-inf"), "rows": 1}])
    losses.end()
    assert capsys.readouterr().err == (
        "run: warning: the loss of step 4 is -inf: dp-ray replay 'a folder/run' --step 4\n"
    )


def test_what_no_attempt_would_mend_is_not_tried_again() -> None:
    assert _ending_of(NotFinite("step 5")) is Ending.MISTAKEN
    assert _ending_of(ModelError("step 5")) is Ending.RAISED


def test_the_watch_names_the_first_step_that_is_not_finite() -> None:
    watch = LossWatch("run")
    for step in (7, 8):
        watch.take(step, 1.0)
        watch.check()
    assert watch.is_finite()
    for step, total in ((9, float("inf")), (10, float("nan"))):
        watch.take(step, total)
        assert not watch.is_finite()
        with pytest.raises(NotFinite, match="step 9: the loss is inf"):
            watch.check()


def test_nothing_is_kept_of_a_run_whose_epochs_end_at_the_step(tmp_path: Path) -> None:
    """The last step, after which a run without the key would keep its state."""
    values = keys_of(storage=str(tmp_path), name="run", dataset=DATA, batch_size=7, shuffle=True, stop_on_nan=True)
    with pytest.raises(ModelError, match=f"step {STEP}: the loss is nan"):
        dp_ray.run(**values, max_steps=STEP + 1)
    assert not Storage(str(tmp_path / "run" / "checkpoints")).names()
    assert not (tmp_path / "run" / "weights.safetensors").exists()

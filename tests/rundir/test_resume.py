"""Trainings that are killed and resumed, anywhere, end at the bits of those that were not."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.engine.trainer import Update
from dp_ray.errors import StorageError
from dp_ray.messages import Note
from dp_ray.plan.split import Split
from dp_ray.rundir.history import (
    FinishedStep,
    History,
    best_of,
    merge_history,
    read_history,
    summary,
    write_piece,
)
from dp_ray.storage import Storage
from tests.support import training
from tests.support.group import ProcessExit, history_of, measured, run_group, weights_of
from tests.support.trainings import STEPS_OF_22, job_of

KEYS: dict[str, Any] = {
    **STEPS_OF_22,
    "eval": {"dataset": {"target": "tests.support.training:Images", "args": {"length": 20}}, "every_steps": 4},
}
DATA = {"target": "tests.support.training:Images", "args": {"length": 70, "augment": True}}


class Mortal(nn.Sequential):
    """The conv net with dropout, which kills its process in its n-th forward, where a file says n."""

    def __init__(self, folder: str) -> None:
        super().__init__(training.conv(), nn.Dropout(0.1))
        self.file = Path(folder) / "dies"
        self.forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        time.sleep(0.02)  # so that a checkpoint is written in the background before the next is due
        if self.training and self.file.exists() and self.forwards == int(self.file.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


def mortal(folder: Path, workers: int, **keys: Any) -> Any:
    model = {"target": "tests.rundir.test_resume:Mortal", "args": {"folder": str(folder)}}
    return job_of(model, DATA, workers=workers, **{**KEYS, **keys})


def ended_by(job: Any, folder: Path) -> str:
    """What a worker raised; nothing where all died, or ran to the end."""
    try:
        run_group(job, folder)
    except ProcessExit as ended:
        return str(ended)
    return ""


@pytest.mark.slow
def test_killed_at_any_step_and_run_on_other_numbers_of_workers(tmp_path: Path) -> None:
    draw = random.Random(7)
    run_group(mortal(tmp_path, 2), tmp_path / "whole")
    run = tmp_path / "killed"
    deaths = 0
    for workers in (3, 1, 5, 2):
        # A worker of W runs about 8 / W forwards in a step: it dies in the first few steps of each life.
        (tmp_path / "dies").write_text(str(draw.randint(28 // workers, 44 // workers)))
        said = ended_by(mortal(tmp_path, workers), run)
        assert not said or "WorkerError: another worker was lost: " in said, "a peer died, and was not told"
        deaths += not (run / "weights.safetensors").exists()
    (tmp_path / "dies").unlink()
    assert deaths == 4
    before = {int(path.stem[5:]) for path in (run / "checkpoints").iterdir() if path.stem.startswith("step")}
    assert before and 0 < max(before) < 12, "it was killed before the end, and after a checkpoint"
    run_group(mortal(tmp_path, 8), run)
    first, second = weights_of(tmp_path / "whole"), weights_of(run)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert repr(history_of(run)) == repr(history_of(tmp_path / "whole"))
    assert [row["step"] for row in history_of(run)] == list(range(12))


@pytest.mark.full
@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_it_used(tmp_path: Path) -> None:
    run_group(mortal(tmp_path, 2), tmp_path / "whole")
    run = tmp_path / "cut"
    (tmp_path / "dies").write_text("38")  # of 8 forwards a step: in the fifth
    run_group(mortal(tmp_path, 1), run)
    (tmp_path / "dies").unlink()
    newest = run / "checkpoints" / "step-4.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    told = [message.text for message in run_group(mortal(tmp_path, 2), run) if isinstance(message, Note)]
    assert "step-4.safetensors is ignored" in told[0] and "is damaged" in told[0]
    first, second = weights_of(tmp_path / "whole"), weights_of(run)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert repr(history_of(run)) == repr(history_of(tmp_path / "whole"))


@pytest.mark.slow
def test_another_runs_checkpoint_goes_on_to_the_bits_of_one_long_run(tmp_path: Path) -> None:
    keys = {**KEYS, "scheduler": None}
    run_group(job_of("conv", DATA, workers=1, **keys), tmp_path / "long")
    run_group(job_of("conv", DATA, workers=2, **{**keys, "max_steps": 6}), tmp_path / "short")
    goes_on = job_of("conv", DATA, workers=3, **keys, init_from=str(tmp_path / "short"))
    run_group(goes_on, tmp_path / "on")
    first, second = weights_of(tmp_path / "long"), weights_of(tmp_path / "on")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert repr(history_of(tmp_path / "on")) == repr(history_of(tmp_path / "long")[6:])

    fresh = job_of("conv", DATA, workers=1, **keys, init_from=f"{tmp_path}/short/weights.safetensors")
    run_group(fresh, tmp_path / "fresh")
    assert len(history_of(tmp_path / "fresh")) == 12

    with pytest.raises(ProcessExit, match=r"has done 12 steps, and this job has 12: set epochs above 3"):
        run_group(job_of("conv", DATA, workers=1, **keys, init_from=str(tmp_path / "long")), tmp_path / "x")
    changed = job_of("conv", DATA, workers=1, **{**keys, "batch_size": 14}, init_from=str(tmp_path / "short"))
    with pytest.raises(
        ProcessExit, match=r"the steps of .* differ from this job's: .*'batch_size': 22.* there, .*'batch_size': 14"
    ):
        run_group(changed, tmp_path / "y")

    for other, says in (
        (
            {"optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.5}}},
            "optimizer.args.lr: 0.01 there, 0.5 here",
        ),
        ({"scheduler": "tests.support.training:warm_up"}, "scheduler: "),
    ):
        changed = job_of("conv", DATA, workers=1, **{**keys, **other}, init_from=str(tmp_path / "short"))
        advice = "set them as they were, or to start anew from weights alone, name a weights file"
        with pytest.raises(ProcessExit, match=rf"init_from: .*short goes on with the optimizer .*{says}.*{advice}"):
            run_group(changed, tmp_path / "z")

    evaluated = run_group(
        job_of("conv", "Images", task="evaluate", workers=2, batch_size=7, init_from=str(tmp_path / "short")),
        tmp_path / "evaluated",
    )
    model = training.conv()
    model.load_state_dict(weights_of(tmp_path / "short"))
    model.eval()
    data = training.Images()
    expected = nn.functional.cross_entropy(model(data.inputs.reshape(-1, 1, 2, 3)), data.targets).item()
    assert measured(evaluated)["loss"] == pytest.approx(expected, rel=1e-6)


def test_another_scheduler_goes_on_with_the_checkpoints_state_and_is_told(tmp_path: Path) -> None:
    rates = {"target": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 2, "gamma": 0.5}}
    run_group(job_of("mlp", workers=1, max_steps=5, scheduler=rates), tmp_path / "first")
    other = {**rates, "args": {"step_size": 2, "gamma": 0.1}}
    goes_on = job_of("mlp", workers=1, max_steps=9, scheduler=other, init_from=str(tmp_path / "first"))
    told = [message.text for message in run_group(goes_on, tmp_path / "second") if isinstance(message, Note)]
    says = "scheduler.args.gamma: 0.5 there, 0.1 here; what the scheduler's state holds goes on as it was"
    assert f"init_from: {tmp_path}/first: {says}" in told
    assert [row["learning_rate"] for row in history_of(tmp_path / "second")] == [0.025, 0.0125, 0.0125, 0.00625]


@pytest.mark.full
@pytest.mark.slow
def test_compiled_modules_keep_their_names_and_their_results(tmp_path: Path) -> None:
    keys = {"workers": 1, "epochs": 1, "batch_size": 101}
    run_group(job_of("mlp", compile=True, **keys), tmp_path / "compiled")
    run_group(job_of("mlp", **keys), tmp_path / "eager")
    compiled, eager = weights_of(tmp_path / "compiled"), weights_of(tmp_path / "eager")
    assert compiled.keys() == eager.keys()
    assert all(torch.allclose(compiled[name], eager[name], atol=1e-6) for name in eager)


def add_steps(history: History, split: Split, first: int, end: int) -> None:
    for step in range(first, end):
        loss = float("nan") if step == 3 else float(step)
        measured = {"eval_loss": 10.0 - step} if step % 2 else {}
        sums = torch.tensor([loss, 1.0, 0.0, 0.0], dtype=torch.float64)
        history.add(FinishedStep(step, Update(sums, 0.1, torch.tensor(2.0), False), measured, 0.0, 0.0))


def test_pieces_of_the_history_become_one_and_holes_are_refused(tmp_path: Path) -> None:
    run, split = Storage(str(tmp_path)), Split(20, 2, 2)
    folder = run.child("history")
    folder.create()
    sent: list[Any] = []
    history = History(folder, split, ["loss"], ["eval_loss"], 0, sent.append)
    add_steps(history, split, 0, 4)
    write_piece(folder, history.take())
    add_steps(history, split, 4, 7)
    write_piece(folder, history.take())
    with pytest.raises(StorageError, match="has 7 of 10 steps"):
        merge_history(folder, run, 10)
    again = History(folder, split, ["loss"], ["eval_loss"], 4, sent.append)  # steps 4 to 6 are run again
    assert folder.names() == ["steps-0-4.parquet"]
    add_steps(again, split, 4, 10)
    write_piece(folder, again.take())
    merge_history(folder, run, 10)
    rows = list(read_history(run))
    assert [row["step"] for row in rows] == list(range(10))
    assert rows[3]["loss"] != rows[3]["loss"]
    assert [row["eval_loss"] for row in rows[:3]] == [None, 9.0, None]
    assert summary(run) == {"loss": 9.0, "eval_loss": 1.0}
    assert best_of(run, "eval_loss", "min", range(11)) == {"metric": "eval_loss", "value": 1.0, "step": 10}
    assert best_of(run, "eval_loss", "max", range(11)) == {"metric": "eval_loss", "value": 9.0, "step": 2}
    assert best_of(run, "eval_loss", "max", [6, 8]) == {"metric": "eval_loss", "value": 5.0, "step": 6}
    assert best_of(run, "eval_loss", "max", [7]) is None
    assert sum(len(message) for message in sent) == 13
    (tmp_path / "history" / "steps-0-4.parquet").unlink()
    with pytest.raises(StorageError, match="has 0 of 10 steps"):
        merge_history(folder, run, 10)

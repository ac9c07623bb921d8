"""The best weights of a training are a file of their own; one line says which weights `init_from` used."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import dp_ray
from dp_ray.errors import DataError
from dp_ray.rundir.checkpoint import CheckpointWriter
from dp_ray.rundir.weights import write_best
from dp_ray.storage import Storage
from tests.support.cluster import ROOT
from tests.support.three_tasks import FILE
from tests.support.trainings import eval_loss, trained

pytestmark = pytest.mark.usefixtures("in_project")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dp_ray.Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return trained(tmp_path_factory.mktemp("runs"), quiet=True)


def test_the_best_weights_are_a_file_that_the_result_names(result: dp_ray.Result) -> None:
    losses = {row["step"] + 1: row["eval_loss"] for row in result.history if row["eval_loss"] is not None}
    step = min(losses, key=lambda step: losses[step])
    assert step < max(losses), "else the best are the last"
    file = Path(result.run_dir) / "best.safetensors"
    assert result.best == {"metric": "eval_loss", "value": losses[step], "step": step, "weights": str(file)}
    assert eval_loss(load_file(file)) == pytest.approx(losses[step], rel=1e-6)
    assert eval_loss(load_file(file.with_name("weights.safetensors"))) == pytest.approx(losses[max(losses)], rel=1e-6)
    with safe_open(file, "pt") as opened:
        assert f'"step": {step}' in str(opened.metadata())


def test_a_run_that_was_moved_knows_its_best(result: dp_ray.Result, tmp_path: Path) -> None:
    moved = Path(result.run_dir).rename(tmp_path / "moved")
    try:
        best = dp_ray.load(moved).best
    finally:
        moved.rename(result.run_dir)
    assert best is not None and best["weights"] == str(moved / "best.safetensors")


def test_without_best_there_is_no_such_file(tmp_path: Path) -> None:
    plain = trained(tmp_path, checkpoint={}, quiet=True)
    assert plain.best is None
    assert not (tmp_path / "trained" / "best.safetensors").exists()


def test_a_training_that_broke_off_at_its_end_has_the_best_too(tmp_path: Path, result: dp_ray.Result) -> None:
    data = {"target": "tests.engine.forward.test_init_from:FragilePairs", "args": {"folder": str(tmp_path)}}
    (tmp_path / "broken").touch()
    with pytest.raises(DataError, match="sector 50"):
        trained(tmp_path, dataset=data, quiet=True, drop_last=False)
    (tmp_path / "broken").unlink()
    again = trained(tmp_path, dataset=data, quiet=True, drop_last=False)
    assert again.best is not None
    assert eval_loss(load_file(again.best["weights"])) == pytest.approx(again.best["value"], rel=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "takes RUN/checkpoints/step-12.safetensors, the run's newest checkpoint; its best weights are "
             "RUN/best.safetensors (eval_loss 0.XX after step 8)"),
        ("/best.safetensors", "takes RUN/best.safetensors (eval_loss 0.XX after step 8)"),
        ("/weights.safetensors", "takes RUN/weights.safetensors"),
    ],
)  # fmt: skip
def test_what_init_from_took_is_said_in_one_line(
    result: dp_ray.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, says: str
) -> None:
    assert result.best is not None
    says = (
        says.replace("RUN", result.run_dir)
        .replace("0.XX", f"{result.best['value']:.6g}")
        .replace("step 8", f"step {result.best['step'] - 1}")
    )
    start = f"{result.run_dir}{given}"
    dp_ray.run(
        **{**FILE, "task": "evaluate", "workers": 0, "storage": str(tmp_path), "name": "e", "init_from": start}
    )
    said = " ".join(capsys.readouterr().err.split())  # the console breaks long lines
    assert said.count("init_from: ") == 1
    assert f"e: init_from: {says} e: done" in said


def test_the_best_weights_are_copied_tensor_by_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {
        "whole": torch.randn(5, 3),
        "half": torch.randn(4).bfloat16(),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(2, 7).t(),
        "empty": torch.zeros(0, 3),
        "counts": torch.arange(4),
    }
    run = Storage(str(tmp_path))
    run.child("checkpoints").create()
    writer = CheckpointWriter(run.child("checkpoints"), keep=1)
    writer.save(3, {}, {"model": {**model, "version": 1}, "optimizer": {"state": torch.randn(100)}})
    writer.wait()
    writer.close()
    monkeypatch.setattr(Storage, "read_bytes", None)
    write_best(run, "loss", 0.5, 3)
    got = load_file(tmp_path / "best.safetensors")
    assert got.keys() == model.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in model.items())

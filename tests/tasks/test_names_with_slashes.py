"""Metrics whose names have a slash, from the job to all that shows them."""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event
from torch import nn

import dp_ray
from dp_ray.report.page import page_of
from dp_ray.storage import Storage
from dp_ray.trackers.clients import mlflow_name
from tests.support.cli import status_of
from tests.trackers.test_tensorboard import events, told

HERE = "tests.tasks.test_names_with_slashes"


def data() -> Any:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 4, generator=draw)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1).gt(0).long())


def right(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == target).float()


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)


def job_of(storage: Path, **keys: Any) -> dict[str, Any]:
    return {
        "task": "train",
        "model": f"{HERE}:Net",
        "dataset": f"{HERE}:data",
        "loss": "torch.nn:CrossEntropyLoss",
        "batch_size": 20,
        "shards": 2,
        "workers": 0,
        "epochs": 6,
        "storage": str(storage),
        "name": "run",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.5}},
        "metrics": {"val/right": f"{HERE}:right"},
        "eval": {"dataset": f"{HERE}:data"},
        "checkpoint": {"best": {"metric": "eval_val/right", "mode": "max"}},
        "early_stopping": {"metric": "eval_val/right", "mode": "max", "patience": 2},
        **keys,
    }


def test_from_the_job_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = dp_ray.run(**job_of(tmp_path), quiet=True)
    table = pandas.read_parquet(Path(result.run_dir) / "metrics.parquet")
    rows = [row for row in result.history if row.get("eval_val/right") is not None]
    assert table["eval_val/right"].dropna().tolist() == [row["eval_val/right"] for row in rows]
    model = Net()
    model.load_state_dict(result.weights)
    inputs, target = data().tensors
    assert result.metrics["eval_val/right"] == pytest.approx(right(model(inputs), target).mean().item())
    best = max(row["eval_val/right"] for row in rows)
    assert result.best is not None
    assert (result.best["metric"], result.best["value"]) == ("eval_val/right", best)
    if result.stopped_early is not None:
        assert result.stopped_early["metric"] == "eval_val/right"
    scalars: dict[str, float] = {}
    for event in (each for file in events(Path(result.run_dir)) for each in file if isinstance(each, Event)):
        scalars |= told(event)[1]
    assert scalars["eval_val/right"] == pytest.approx(result.metrics["eval_val/right"])
    assert "val/right" in scalars
    assert "eval_val/right" in page_of(Storage(result.run_dir))
    assert mlflow_name("eval_val/right") == "eval_val/right"

    dp_ray.run(**job_of(tmp_path, name="other", epochs=2, early_stopping=None), quiet=True)
    assert status_of(monkeypatch, "compare", result.run_dir, str(tmp_path / "other")) == 0
    assert "metrics.eval_val/right" in capsys.readouterr().out
    assert status_of(monkeypatch, "list", str(tmp_path), "--sort", "eval_val/right") == 0
    assert "eval_val/right" in capsys.readouterr().out


def test_a_sweep_takes_the_best_by_such_a_name_and_set_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(
        json.dumps(job_of(tmp_path, epochs=1, metrics={}, checkpoint={}, early_stopping=None))
    )
    named = f"metrics.val/right={HERE}:right"
    over = [
        "--over",
        "optimizer.args.lr=0.0,0.5",
        "--metric",
        "eval_val/right",
        "--maximize",
        "--set",
        named,
        "--json",
    ]
    assert status_of(monkeypatch, "sweep", str(tmp_path / "job.yaml"), *over) == 0
    swept = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert swept["metric"] == "eval_val/right" and swept["best"] == 2
    assert swept["trials"][0]["metric"] == swept["trials"][0]["metrics"]["eval_val/right"]


def test_a_loop_logs_such_a_name(tmp_path: Path) -> None:
    def loop(run: dp_ray.Loop) -> None:
        update = run.optimizer(torch.optim.SGD(run.model.parameters(), 0.1))
        for step in run.steps():
            loss = step.backward(
                lambda batch: nn.functional.cross_entropy(run.model(batch[0]), batch[1], reduction="none"), run.model
            )
            update.step()
            step.log(**{"train/loss": loss})

    keys: dict[str, Any] = {
        "loss": None,
        "optimizer": None,
        "metrics": {},
        "checkpoint": {},
        "early_stopping": None,
        "eval": None,
    }
    result = dp_ray.run(**{**job_of(tmp_path, **keys), "loop": loop}, quiet=True)
    assert [row["train/loss"] for row in result.history] == [row["loss"] for row in result.history]

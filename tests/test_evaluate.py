"""Evaluation: what one process measures over the whole dataset, the same bits on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dp_ray.job import Job
from dp_ray.rundir.history_file import best_of, merge_history, read_history, summary
from dp_ray.storage import Storage
from tests.support import training
from tests.support.group import ProcessExit, history_of, measured, run_group, weights_of

METRICS = {
    "right": "tests.support.training:right",
    "wild": "tests.support.training:wild",  # numbers whose sum depends on the order in which they are added
    "f1": {"target": "torchmetrics.classification:MulticlassF1Score", "args": {"num_classes": 3}},
    "auroc": {"target": "torchmetrics.classification:MulticlassAUROC", "args": {"num_classes": 3}},
    "recall": {
        "target": "torchmetrics.classification:MulticlassRecall",
        "args": {"num_classes": 3, "average": None},
    },
}


def job_of(**keys: Any) -> Job:
    given = {
        "task": "evaluate",
        "model": "tests.support.training:mlp",
        "dataset": "tests.support.training:Pairs",
        "loss": "torch.nn:CrossEntropyLoss",
        "metrics": METRICS,
        "batch_size": 9,
        "shards": 8,
        **keys,
    }
    return Job.make(given, "job")


def expected() -> dict[str, float]:
    """Everything at once, in one process."""
    import torchmetrics

    torch.manual_seed(0)
    model = training.mlp()
    model.eval()
    data = training.Pairs()
    with torch.no_grad():
        outputs = model(data.inputs)
    recall = torchmetrics.classification.MulticlassRecall(num_classes=3, average=None)(outputs, data.targets)
    return {
        "loss": nn.functional.cross_entropy(outputs, data.targets).item(),
        "right": (outputs.argmax(1) == data.targets).double().mean().item(),
        "wild": training.wild(outputs, data.targets).mean().item(),
        "f1": torchmetrics.classification.MulticlassF1Score(num_classes=3)(outputs, data.targets).item(),
        "auroc": torchmetrics.classification.MulticlassAUROC(num_classes=3)(outputs, data.targets).item(),
        **{f"recall_{place}": value for place, value in enumerate(recall.tolist())},
    }


@pytest.mark.slow
def test_each_sample_counts_once_on_any_number_of_workers(tmp_path: Path) -> None:
    """101 samples in batches of 9: the last batch of 2 leaves 6 of 8 workers without rows."""
    found = [measured(run_group(job_of(workers=workers), tmp_path / str(workers))) for workers in (1, 3, 8)]
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx(expected(), rel=1e-6)


@pytest.mark.slow
def test_a_worker_without_any_row_takes_part(tmp_path: Path) -> None:
    data = {"target": "tests.support.training:Pairs", "args": {"length": 2}}
    found = measured(run_group(job_of(workers=4, dataset=data), tmp_path))
    assert 0 <= found["right"] <= 1


def test_metrics_alone_need_no_loss(tmp_path: Path) -> None:
    found = measured(
        run_group(job_of(workers=2, loss=None, metrics={"right": "tests.support.training:right"}), tmp_path)
    )
    assert found == {"right": pytest.approx(expected()["right"])}


def test_a_metric_that_raises_is_named(tmp_path: Path) -> None:
    wrong = {"f1": {"target": "torchmetrics.classification:MulticlassF1Score", "args": {"num_classes": 7}}}
    with pytest.raises(ProcessExit, match=r"evaluation step 0, shard \d: metrics\.f1 raised ValueError: If `preds`"):
        run_group(job_of(workers=2, metrics=wrong), tmp_path)


ELEMENTS = {
    "right": "tests.support.training:right",
    "recall": METRICS["recall"],
    "scores": "tests.support.training:Scores",
}


def training_of(**keys: Any) -> Job:
    """21 steps, evaluated after 10, 20 and 21 of them, kept after each fourth."""
    given = {
        "task": "train",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "metrics": ELEMENTS,
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": 21}},
        "batch_size": 1,
        "shards": 1,
        "eval": {"dataset": "tests.support.training:Pairs", "every_steps": 10, "batch_size": 40},
        "checkpoint": {"every_steps": 4, "keep": 9, "best": {"metric": "eval_recall_1", "mode": "max"}},
        **keys,
    }
    return job_of(**given)


def test_elements_of_metrics_are_columns_of_the_history(tmp_path: Path) -> None:
    """The first pieces of the history were written before anything was evaluated."""
    from torchmetrics.classification import MulticlassRecall

    run = Storage(str(tmp_path))
    run_group(training_of(), tmp_path)
    merge_history(run.child("history"), run, 21)
    rows = list(read_history(run))
    elements = ["eval_recall_0", "eval_recall_1", "eval_recall_2", "eval_scores_right", "eval_scores_rows_1"]
    assert "eval_recall" not in rows[0]
    for name in elements:
        assert [row["step"] for row in rows if row[name] is not None] == [9, 19, 20]
    model, data = training.mlp(), training.Pairs()
    model.load_state_dict(weights_of(tmp_path))
    outputs = model.eval()(data.inputs)
    recall = MulticlassRecall(num_classes=3, average=None)(outputs, data.targets)
    right = (outputs.argmax(1) == data.targets).sum().item()
    assert [rows[-1][name] for name in elements] == [*recall.tolist(), right, 101]
    assert [summary(run)[name] for name in elements] == [*recall.tolist(), right, 101]
    best = best_of(run, "eval_recall_1", "max", range(10**6))
    assert best is not None
    assert best["value"] == max(row["eval_recall_1"] or 0.0 for row in rows)
    assert (tmp_path / "checkpoints" / f"step-{best['step']}.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("eval_recall_7", r"checkpoint\.best\.metric: eval measures eval_loss, .*eval_recall_2.*got 'eval_recall_7'"),
        ("eval_recall", r"checkpoint\.best\.metric: eval measures .*eval_scores_rows_0.*got 'eval_recall'"),
        (
            "eval_right_0",
            r"checkpoint\.best\.metric: .*the elements of a metric that has several.*got 'eval_right_0'",
        ),
    ],
)
def test_a_watched_element_that_is_none_is_told(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ProcessExit, match=says):
        run_group(training_of(checkpoint={"best": name}), tmp_path)
    steps = history_of(tmp_path) if (tmp_path / "history").exists() else []
    assert len(steps) <= 10


def test_two_metrics_of_one_name_are_told(tmp_path: Path) -> None:
    metrics = {"recall_0": "tests.support.training:right", "recall": METRICS["recall"]}
    with pytest.raises(ProcessExit, match="metrics: two give recall_0; rename one"):
        run_group(job_of(metrics=metrics), tmp_path)

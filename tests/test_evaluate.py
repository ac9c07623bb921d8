"""Evaluation: what one process measures over the whole dataset, the same bits on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from dp_ray.job import Job
from tests import training
from tests.group import Ended, measured, run_group

METRICS = {
    "right": "tests.training:right",
    "wild": "tests.training:wild",  # numbers whose sum depends on the order in which they are added
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
        "model": "tests.training:mlp",
        "dataset": "tests.training:Pairs",
        "loss": "torch.nn:CrossEntropyLoss",
        "metrics": METRICS,
        "batch_size": 9,
        "shards": 8,
        **keys,
    }
    return Job.make(given, "job")


def expected() -> dict[str, float]:
    """Everything at once, in one process."""
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


def test_each_sample_counts_once_on_any_number_of_workers(tmp_path: Path) -> None:
    """101 samples in batches of 9: the last batch of 2 leaves 6 of 8 workers without rows."""
    found = [measured(run_group(job_of(workers=workers), tmp_path / str(workers))) for workers in (1, 3, 8)]
    assert found[0] == found[1] == found[2]
    assert found[0] == pytest.approx(expected(), rel=1e-6)


def test_a_worker_without_any_row_takes_part(tmp_path: Path) -> None:
    data = {"target": "tests.training:Pairs", "args": {"length": 2}}
    found = measured(run_group(job_of(workers=4, dataset=data), tmp_path))
    assert 0 <= found["right"] <= 1


def test_metrics_alone_need_no_loss(tmp_path: Path) -> None:
    found = measured(run_group(job_of(workers=2, loss=None, metrics={"right": "tests.training:right"}), tmp_path))
    assert found == {"right": pytest.approx(expected()["right"])}


def test_a_metric_that_raises_is_named(tmp_path: Path) -> None:
    wrong = {"f1": {"target": "torchmetrics.classification:MulticlassF1Score", "args": {"num_classes": 7}}}
    with pytest.raises(Ended, match=r"metrics\.f1: "):
        run_group(job_of(workers=2, metrics=wrong), tmp_path)

"""Evaluation: what one process measures over the whole dataset, the same bits on any number of workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from dp_ray.job.job import Job
from dp_ray.rundir.history import best_of, merge_history, read_history, summary
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


class Regression(training.Pairs):
    """Pairs whose target is a number of the inputs, which correlates with what the model gives."""

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.inputs[index].sum() + 3


class One(nn.Linear):
    """A number for each row."""

    def __init__(self) -> None:
        super().__init__(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)[:, 0]


WHOLE = ("PearsonCorrCoef", "ConcordanceCorrCoef", "KendallRankCorrCoef", "R2Score")


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_metrics_whose_states_are_no_sums_are_those_of_the_whole(tmp_path: Path, shards: int) -> None:
    keys: dict[str, Any] = {
        "model": "tests.tasks.test_evaluate:One",
        "dataset": "tests.tasks.test_evaluate:Regression",
    }
    metrics = {name: f"torchmetrics.regression:{name}" for name in WHOLE}
    job = job_of(**keys, metrics=metrics, loss=None, shards=shards, workers=2)
    found = measured(run_group(job, tmp_path))
    torch.manual_seed(0)
    data, model = Regression(), One()
    inputs, target = (torch.stack(column) for column in zip(*(data[at] for at in range(len(data))), strict=True))
    with torch.no_grad():
        outputs = model(inputs)
    for name in WHOLE:
        assert found[name] == pytest.approx(
            getattr(torchmetrics.regression, name)()(outputs, target).item(), rel=1e-4
        )


class MeanState(torchmetrics.Metric):
    """A metric whose state is a mean."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, outputs: torch.Tensor, _: torch.Tensor) -> None:
        self.mean = outputs.mean()

    def compute(self) -> torch.Tensor:
        return self.mean


WRAPPED = torchmetrics.wrappers.MinMaxMetric(torchmetrics.classification.MulticlassF1Score(num_classes=3))


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (MeanState(), r"metrics.odd: MeanState reduces its state 'mean' by a mean, .* keep a sum and a count"),
        (
            torchmetrics.NormalizedRootMeanSquaredError(),
            r"metrics.odd: Norm\w+Error has a state, 'total', that .* another",
        ),
        (WRAPPED, r"metrics.odd: MinMaxMetric wraps a metric \(MulticlassF1Score\), .* give the MulticlassF1Score"),
    ],
)
def test_metrics_that_shards_do_not_tell_are_refused_by_name(tmp_path: Path, metric: Any, says: str) -> None:
    job = job_of(metrics={"odd": metric}, loss=None, shards=3, workers=1)
    with pytest.raises(ProcessExit, match=says):
        run_group(job, tmp_path)
    if metric is WRAPPED:  # one shard is the whole
        assert measured(run_group(job_of(metrics={"odd": metric}, shards=1, batch_size=101), tmp_path / "one"))


def test_counts_are_those_of_one_worker_on_any_number(tmp_path: Path) -> None:
    """torchmetrics adds up the states of all processes, if it finds any."""
    counts = {"target": "torchmetrics.classification:MulticlassConfusionMatrix", "args": {"num_classes": 3}}
    for workers in (1, 2):
        job = job_of(metrics={"seen": counts}, loss=None, workers=workers)
        assert sum(measured(run_group(job, tmp_path / str(workers))).values()) == 101


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

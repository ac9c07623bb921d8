"""A metric of torchmetrics that takes each update for logits or probabilities is an error in an evaluation."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from ray.cloudpickle import CloudPickler
from torch import nn
from torchmetrics import classification, regression, segmentation, text

from dp_ray.engine import world
from dp_ray.job.job import Job
from dp_ray.trials.measures import of_updates, read_whole
from tests.support import training
from tests.support.group import ProcessExit, history_of, measured, run_group

DRAWS = torch.Generator().manual_seed(1)
ROWS = 12


def logits(*size: int) -> torch.Tensor:
    """Normal numbers; in every other row they lie between 0 and 0.5, and so may be probabilities."""
    outputs = torch.randn(ROWS, *size, generator=DRAWS)
    outputs[::2] = torch.rand(ROWS // 2, *size, generator=DRAWS) / 2
    return outputs


def classes(number: int, *size: int) -> torch.Tensor:
    return torch.randint(number, (ROWS, *size), generator=DRAWS)


SEEN = {
    "Binary": (logits(), classes(2)),
    "Multiclass": (logits(3), classes(3)),
    "Multilabel": (logits(2), classes(2, 2)),
}
pytestmark = pytest.mark.filterwarnings("ignore:Metric `:UserWarning")  # of what a state keeps

ARGS: dict[str, Any] = {
    "num_classes": 3,
    "num_labels": 2,
    "min_recall": 0.5,
    "min_precision": 0.5,
    "min_sensitivity": 0.5,
    "min_specificity": 0.5,
    "beta": 2.0,
}
# They compare with 0.5, or normalise: so a number between 0 and 1 is another one as a logit than as a probability.
GUESS = {
    "Binary": (
        "AUROC Accuracy AveragePrecision CalibrationError CohenKappa ConfusionMatrix EER F1Score FBetaScore "
        "HammingDistance HingeLoss JaccardIndex LogAUC MatthewsCorrCoef NegativePredictiveValue Precision "
        "PrecisionAtFixedRecall PrecisionRecallCurve ROC Recall RecallAtFixedPrecision SensitivityAtSpecificity "
        "Specificity SpecificityAtSensitivity StatScores"
    ),
    "Multiclass": (
        "AUROC AveragePrecision CalibrationError EER HingeLoss LogAUC PrecisionAtFixedRecall PrecisionRecallCurve "
        "ROC RecallAtFixedPrecision SensitivityAtSpecificity SpecificityAtSensitivity"
    ),
    "Multilabel": (
        "AUROC Accuracy AveragePrecision ConfusionMatrix EER ExactMatch F1Score FBetaScore HammingDistance "
        "JaccardIndex LogAUC MatthewsCorrCoef NegativePredictiveValue Precision PrecisionAtFixedRecall "
        "PrecisionRecallCurve ROC Recall RecallAtFixedPrecision SensitivityAtSpecificity Specificity "
        "SpecificityAtSensitivity StatScores"
    ),
}
COUNT = {
    "Multiclass": (
        "Accuracy CohenKappa ConfusionMatrix ExactMatch F1Score FBetaScore HammingDistance JaccardIndex "
        "MatthewsCorrCoef NegativePredictiveValue Precision Recall Specificity StatScores"
    ),
    "Multilabel": "CoverageError RankingAveragePrecision RankingLoss",
}


def of_class(kind: str, name: str) -> Any:
    made = getattr(classification, kind + name)
    wanted = made.__init__.__code__.co_varnames[: made.__init__.__code__.co_argcount]
    wanted += made.__new__.__code__.co_varnames if hasattr(made.__new__, "__code__") else ()
    return made(**{key: ARGS[key] for key in wanted if key in ARGS})


def told(metric: Any, outputs: Any, target: torch.Tensor) -> str:
    """How a metric reads rows together and apart; nothing if that is the same."""
    return next((read_whole(each, (outputs, target), 0) or "" for each in of_updates({"m": metric}).values()), "")


GUESSING = [(kind, name) for kind, names in GUESS.items() for name in names.split()]


@pytest.mark.parametrize(("kind", "name"), GUESSING)
def test_a_metric_that_guesses_is_named_with_logits_and_not_with_probabilities(kind: str, name: str) -> None:
    outputs, target = SEEN[kind]
    says = told(of_class(kind, name), outputs, target)
    assert says.startswith("of 12 rows it gives ") and says.endswith(" one by one")
    assert told(of_class(kind, name), outputs.softmax(1) if kind == "Multiclass" else outputs.sigmoid(), target) == ""


COUNTING = [(kind, name) for kind, names in COUNT.items() for name in names.split()]


@pytest.mark.parametrize(("kind", "name"), COUNTING)
def test_a_metric_that_takes_the_largest_number_or_sorts_them_is_none(kind: str, name: str) -> None:
    assert told(of_class(kind, name), *SEEN[kind]) == ""


def test_each_class_of_torchmetrics_is_in_a_table() -> None:
    known = {kind + name for table in (GUESS, COUNT) for kind, names in table.items() for name in names.split()}
    others = {"BinaryFairness", "BinaryGroupStatRates"}  # of three arguments
    found = {name for name in classification.__all__ if name.startswith(tuple(GUESS))}
    assert found == known | others


def positive(*size: int) -> torch.Tensor:
    return torch.rand(ROWS, *size, generator=DRAWS) + 0.1


NUMBERS = positive(), positive()
FAR = ("ExplainedVariance", "R2Score", "RelativeSquaredError", "MeanSquaredError")
PLAIN = sorted(
    set(regression.__all__)
    - {"CriticalSuccessIndex", "KLDivergence", "JensenShannonDivergence", "CosineSimilarity", "MinkowskiDistance"}
    - {"ContinuousRankedProbabilityScore", "NormalizedRootMeanSquaredError"}  # shards do not tell the last one
)
DISTRIBUTIONS = positive(4).softmax(1), positive(4).softmax(1)
MASKS = classes(3, 4, 4), classes(3, 4, 4)
OTHERS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    **{name: (getattr(regression, name), *NUMBERS) for name in PLAIN},
    **{f"far from 0: {name}": (getattr(regression, name), NUMBERS[0] + 1e4, NUMBERS[1] + 1e4) for name in FAR},
    "CriticalSuccessIndex": (lambda: regression.CriticalSuccessIndex(0.5), *NUMBERS),
    "MinkowskiDistance": (lambda: regression.MinkowskiDistance(3), *NUMBERS),
    "KLDivergence": (regression.KLDivergence, *DISTRIBUTIONS),
    "JensenShannonDivergence": (regression.JensenShannonDivergence, *DISTRIBUTIONS),
    "CosineSimilarity": (regression.CosineSimilarity, positive(4), positive(4)),
    "ContinuousRankedProbabilityScore": (regression.ContinuousRankedProbabilityScore, positive(4), positive()),
    "halves": (regression.MeanSquaredError, NUMBERS[0].bfloat16(), NUMBERS[1].bfloat16()),
    "MeanMetric": (torchmetrics.MeanMetric, *NUMBERS),
    "Perplexity": (text.Perplexity, logits(5, 7), classes(7, 5)),
    "MeanIoU": (lambda: segmentation.MeanIoU(3, input_format="index"), *MASKS),
    "DiceScore": (lambda: segmentation.DiceScore(3, input_format="index"), *MASKS),
    "by sample": (
        lambda: classification.MulticlassStatScores(3, multidim_average="samplewise"),
        logits(3, 5),
        classes(3, 5),
    ),
    "top 2": (lambda: classification.MulticlassStatScores(3, average=None, top_k=2), *SEEN["Multiclass"]),
    "binned": (lambda: classification.BinaryAUROC(thresholds=5), SEEN["Binary"][0].sigmoid(), SEEN["Binary"][1]),
    "a wrapper that draws": (lambda: torchmetrics.wrappers.BootStrapper(regression.MeanSquaredError(), 2), *NUMBERS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_metrics_whose_updates_add_up_are_none(name: str) -> None:
    make, *seen = OTHERS[name]
    assert told(make(), *seen) == ""


class PerUpdate(torchmetrics.Metric):
    """The mean over updates of what a function gives of each."""

    total: torch.Tensor
    updates: torch.Tensor

    def __init__(self, of_update: Any) -> None:
        super().__init__()
        self.of_update = of_update
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("updates", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, target: torch.Tensor) -> None:
        self.total += self.of_update(outputs, target)
        self.updates += 1

    def compute(self) -> torch.Tensor:
        return self.total / self.updates


def draws(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.mean() + torch.rand(())


def of_two(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs[0] - outputs[1]).abs()


def test_what_is_told_of_a_metric_of_ones_own_is_its_value() -> None:
    mean, largest = (
        PerUpdate(lambda outputs, target: outputs.mean()),
        PerUpdate(lambda outputs, target: outputs.max()),
    )
    assert told(mean, *NUMBERS) == ""
    assert told(largest, *NUMBERS).startswith("of 12 rows it gives ")
    assert told(PerUpdate(draws), *NUMBERS) == ""
    assert told(PerUpdate(of_two), *NUMBERS) == ""  # it takes no single row


class Boxes:
    """What no row can be cut from."""


def test_outputs_of_any_form_are_none() -> None:
    for outputs in (Boxes(), [torch.ones(3, 4)] * 4, ["a"] * 4, torch.ones(())):
        assert told(classification.BinaryAccuracy(), outputs, torch.ones(4)) == ""


class Clicks(training.Pairs):
    """Pairs of which the target is 0 or 1."""

    def __init__(self, length: int = 40) -> None:
        super().__init__(length)
        self.targets = (self.targets > 0).long()


class Logit(nn.Linear):
    """A logit for each row, or its probability."""

    def __init__(self, probability: bool = False) -> None:
        super().__init__(6, 1)
        self._probability = probability

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logit = super().forward(inputs)[:, 0]
        return logit.sigmoid() if self._probability else logit


def bce(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, target.float(), reduction="none")


HERE = "tests.engine.forward.test_metric_trial"
ALL = (
    r"metrics\.auroc: BinaryAUROC reads each update as a whole: of 40 rows it gives .* one by one\. So it would "
    r"depend on shards and batch_size; give it probabilities \(a sigmoid or softmax first\), or a metric over the "
    "batch"
)


def job_of(task: str, **keys: Any) -> Job:
    data = {"target": f"{HERE}:Clicks"}
    metrics = {"auroc": {"target": "torchmetrics.classification:BinaryAUROC"}}
    given = {"task": task, "model": f"{HERE}:Logit", "dataset": data, "metrics": metrics, "loss": f"{HERE}:bce"}
    if task == "train":
        sgd = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
        given |= {"optimizer": sgd, "eval": {"dataset": data, "every_steps": 2}}
    return Job.make({**given, "batch_size": 8, "shards": 4, **keys}, "job")


def test_the_first_evaluation_of_a_training_ends_it(tmp_path: Path) -> None:
    with pytest.raises(ProcessExit, match=ALL):
        run_group(job_of("train", workers=2), tmp_path)
    assert len(history_of(tmp_path) if (tmp_path / "history").exists() else []) <= 2


def test_an_evaluation_of_one_update_or_of_probabilities_is_the_whole_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data, model = Clicks(), Logit()
    with torch.no_grad():
        expected = classification.BinaryAUROC()(model(data.inputs), data.targets).item()
    probabilities = {"target": f"{HERE}:Logit", "args": {"probability": True}}
    whole = run_group(job_of("evaluate", batch_size=40, shards=1), tmp_path / "whole")
    shards = run_group(job_of("evaluate", model=probabilities, workers=2), tmp_path / "shards")
    assert measured(whole)["auroc"] == measured(shards)["auroc"] == pytest.approx(expected, rel=1e-6)
    for workers in (1, 2, 3):
        with pytest.raises(ProcessExit, match=ALL):
            run_group(job_of("evaluate", workers=workers), tmp_path / f"logits-{workers}")


def local_metric() -> Any:
    """A metric of a class that no import finds, as one of a script or notebook is for a worker."""

    class Rows:
        def __init__(self) -> None:
            self.rows = 0

        def update(self, outputs: Any, target: Any) -> None:
            self.rows += len(outputs)

        def compute(self) -> float:
            return float(self.rows)

        def merge_state(self, other: Any) -> None:
            self.rows += other.rows

        def reset(self) -> None:
            self.rows = 0

    return Rows()


def test_a_metric_of_a_script_goes_between_workers_by_the_groups_pickler(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = local_metric()
    metric.rows = 3
    with pytest.raises(AttributeError, match="local object"):
        world.message_of(metric)
    monkeypatch.setattr(world, "_pickler", CloudPickler)
    assert pickle.loads(world.message_of({0: metric}))[0].compute() == 3
    assert world.message_of([1, "text"]) == pickle.dumps([1, "text"], 5)


class Unsendable:
    """A metric that no pickler takes."""

    def __init__(self) -> None:
        self.rows = (row for row in range(3))

    def update(self, outputs: Any, target: Any) -> None:
        raise AssertionError("no step has begun")

    def compute(self) -> float:
        return 0.0

    def merge_state(self, others: Any) -> None:
        pass

    def reset(self) -> None:
        pass


def test_a_metric_that_cannot_go_between_workers_is_an_error_with_its_key_before_the_first_step(
    tmp_path: Path,
) -> None:
    given = {
        "task": "evaluate",
        "model": nn.Identity(),
        "dataset": torch.utils.data.TensorDataset(*[torch.ones(4, 1)] * 2),
    }
    job = Job.make({**given, "metrics": {"mine": Unsendable}, "batch_size": 4, "workers": 2}, "job")
    with pytest.raises(ProcessExit, match=r"metrics\.mine: its attribute rows cannot be pickled"):
        run_group(job, tmp_path)

"""Several evaluations of a training, each with a name: what plain torch measures, and who decides by which."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dp_ray
from dp_ray.driver.planning import plan_job
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import measured_by, named_evals
from dp_ray.messages import StepControl
from dp_ray.plan.costs import plan_table
from dp_ray.plan.history import is_inner
from dp_ray.report.charts import charts_of
from dp_ray.rundir.files import has_kept_nothing
from dp_ray.rundir.history import history_so_far, read_history
from dp_ray.rundir.quarantine import merge_quarantine
from dp_ray.storage import Storage
from dp_ray.sweeps.define import chosen_metric
from dp_ray.tasks.evaluate import Evaluator
from tests.support import loops, training
from tests.support.bad_data import Broken, quarantined
from tests.support.builders import run_dir_of
from tests.support.cli import status_of
from tests.support.cluster import Run
from tests.support.group import ProcessExit, history_of, run_group, weights_of
from tests.support.replays import replayed
from tests.support.survivors import Fault, run_surviving
from tests.support.trainings import SGD, job_of, keys_of

HERE = "tests.tasks.test_several_evaluations"
RIGHT = {"right": "tests.support.training:right"}
RECALL = {
    "target": "torchmetrics.classification:MulticlassRecall",
    "args": {"num_classes": 3, "average": None},
}


class Noisy(training.Pairs):
    """The pairs with noise on their inputs, so that the classes are harder to tell."""

    def __init__(self, length: int = 17) -> None:
        super().__init__(length)
        self.inputs = self.inputs + torch.randn(length, 6, generator=torch.Generator().manual_seed(5))


TEST = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4}
HARD = {"dataset": f"{HERE}:Noisy", "every_steps": 3, "batch_size": 5, "metrics": ["recall"]}
METRICS = {**RIGHT, "recall": RECALL}
KEYS: dict[str, Any] = {
    "batch_size": 22,
    "shards": 6,
    "bitwise": True,
    "epochs": 3,  # 15 steps
    "metrics": METRICS,
    "eval": {"test": TEST, "hard": HARD},
    "checkpoint": {
        "every_steps": 5
    },  # by steps alone: the history's pieces have the columns of what was measured by then
}
RECALLS = [f"eval_hard_recall_{at}" for at in range(3)]
OF_TEST = ["eval_test_loss", "eval_test_right", *(f"eval_test_recall_{at}" for at in range(3))]
OF_HARD = ["eval_hard_loss", *RECALLS]


def made(**keys: Any) -> Job:
    return job_of("mlp", **{**KEYS, **keys})


def measured_by_torch(model: nn.Module, data: training.Pairs) -> dict[str, Any]:
    """Everything at once, in one process."""
    model.eval()
    with torch.no_grad():
        outputs = model(data.inputs)
    model.train()
    guessed = outputs.argmax(1)
    return {
        "loss": nn.functional.cross_entropy(outputs, data.targets).item(),
        "right": (guessed == data.targets).double().mean().item(),
        **{
            f"recall_{at}": (guessed[data.targets == at] == at).double().mean().item()
            for at in range(3)
            if (data.targets == at).any()
        },
    }


def by_hand(epochs: int = 3, lr: float = 0.1, momentum: float = 0.9) -> list[dict[str, Any]]:
    """What plain torch measures on both datasets after each step of the same training."""
    torch.manual_seed(0)
    model = training.mlp()
    found: list[dict[str, Any]] = []

    def after() -> None:
        both = {"test": training.Pairs(20), "hard": Noisy()}
        found.append(
            {
                f"eval_{name}_{key}": value
                for name, data in both.items()
                for key, value in measured_by_torch(model, data).items()
            }
        )

    def loss_of(model: nn.Module, chunks: Any) -> torch.Tensor:
        inputs, targets = (torch.cat(column) for column in zip(*chunks, strict=True))
        return nn.functional.cross_entropy(model(inputs), targets)

    optimizer = torch.optim.SGD(model.parameters(), lr, momentum)
    training.plain_loop(model, training.Pairs(), 22, epochs, loss_of, optimizer, after_step=after)
    return found


def evaluated(folder: Path, names: list[str]) -> dict[int, dict[str, float]]:
    """The steps at which something of these names was measured, with what."""
    rows = history_of(folder)
    found = {row["step"]: {name: row[name] for name in names if row.get(name) is not None} for row in rows}
    return {step: values for step, values in found.items() if values}


@pytest.mark.slow
def test_each_measures_what_plain_torch_does_at_its_own_steps_on_any_number_of_workers(tmp_path: Path) -> None:
    histories = []
    for workers in (1, 2, 3):
        run_group(made(workers=workers), tmp_path / str(workers))
        histories.append(history_of(tmp_path / str(workers)))
    assert histories[0] == histories[1] == histories[2]
    expected = by_hand()
    for names, steps in ((OF_TEST, [3, 7, 11, 14]), (OF_HARD, [2, 5, 8, 11, 14])):
        found = evaluated(tmp_path / "2", names)
        assert list(found) == steps
        for step, values in found.items():
            assert list(values) == names
            assert values == pytest.approx({name: expected[step][name] for name in names}, rel=1e-5), step
    columns = {name for row in histories[0] for name, value in row.items() if value is not None and "eval" in name}
    assert columns == {*OF_TEST, *OF_HARD}, "the second has the metrics that it names, and none of the others"


def test_each_has_the_bits_of_the_same_evaluation_by_itself(tmp_path: Path) -> None:
    run_group(made(workers=2), tmp_path / "both")
    for name, keys, names in (("test", TEST, OF_TEST), ("hard", HARD, OF_HARD)):
        run_group(made(workers=1, eval=keys), tmp_path / name)
        alone = evaluated(tmp_path / name, [column.replace(f"_{name}", "", 1) for column in names])
        both = evaluated(tmp_path / "both", names)
        assert [list(values.values()) for values in alone.values()] == [
            list(values.values()) for values in both.values()
        ]
        assert list(alone) == list(both)
    theirs, mine = weights_of(tmp_path / "test"), weights_of(tmp_path / "both")
    assert theirs.keys() == mine.keys() and all(torch.equal(theirs[key], mine[key]) for key in mine)


def spread(outputs: torch.Tensor, target: torch.Tensor) -> float:
    """The standard deviation over the whole batch."""
    return outputs.std().item()


@pytest.mark.full(but=["batch"])
@pytest.mark.parametrize("over", ["shard", "batch"])
def test_what_sees_the_whole_batch_is_measured_where_it_is_named(tmp_path: Path, over: str) -> None:
    """Also beside a loss that does. The hard set is one batch, so the oracle needs no mean of batches."""
    metrics = {**RIGHT, "spread": {"target": f"{HERE}:spread", "over": "batch"}}
    hard = {"dataset": f"{HERE}:Noisy", "batch_size": 17, "metrics": ["spread"]}
    loss = {"target": "torch.nn:CrossEntropyLoss", "over": over}
    evals = {"test": {**TEST, "metrics": ["right"]}, "hard": hard}
    run_group(made(workers=2, metrics=metrics, eval=evals, loss=loss), tmp_path)
    last, model, data = history_of(tmp_path)[-1], training.mlp().eval(), Noisy()
    model.load_state_dict(weights_of(tmp_path))
    with torch.no_grad():
        outputs = model(data.inputs)
    assert last["eval_hard_spread"] == pytest.approx(spread(outputs, data.targets), rel=1e-5)
    assert last["eval_hard_loss"] == pytest.approx(measured_by_torch(model, data)["loss"], rel=1e-5)
    assert {name for name in last if name.startswith("eval_")} == {
        *("eval_test_loss", "eval_test_right", "eval_hard_loss", "eval_hard_spread"),
    }


class KilledAt(StepControl):
    """Kills every worker within an evaluation, after so many of its steps in all."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def touch(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full(but=["eval_hard_loss"])
@pytest.mark.parametrize("best", ["eval_hard_loss", "eval_test_loss"])
def test_a_run_killed_amid_the_second_evaluation_goes_on_to_the_same_end(tmp_path: Path, best: str) -> None:
    """Both are due after step 11: by then `test` ran 2 times a step, and `hard` 3 times four; 1 and 2 are to come."""
    keys: dict[str, Any] = {
        "checkpoint": {"every_steps": 4, "best": best},
        "early_stopping": {"metric": "eval_hard_loss", "patience": 50},
    }
    run_group(made(workers=2, **keys), tmp_path / "whole")
    run = run_dir_of(tmp_path / "killed", made(workers=2, **keys), rows={"dataset": 101}).storage
    folder = Path(run.location)
    run_group(made(workers=2, **keys), folder, KilledAt(2 * 1 + 3 * 4 + 1 + 2))
    ended = [row["step"] for row in history_of(folder)]
    assert ended[-1] == 7, "the checkpoint after step 7 is the last: the worker died within step 11's evaluations"
    assert not (folder / "weights.safetensors").exists()
    run_group(made(workers=3, **keys), folder)
    assert history_of(folder) == history_of(tmp_path / "whole")
    for file in ("weights", "best"):
        mine, theirs = (
            (tmp_path_ / f"{file}.safetensors").read_bytes() for tmp_path_ in (folder, tmp_path / "whole")
        )
        assert mine == theirs


@pytest.mark.full(but=["0"])
@pytest.mark.parametrize("slot", [0, 1])
def test_the_others_go_on_where_a_worker_is_killed_before_the_second_evaluation(tmp_path: Path, slot: int) -> None:
    keys: dict[str, Any] = {"eval": {"test": TEST, "hard": {**HARD, "every_steps": 4}}}
    run_group(made(workers=1, **keys), tmp_path / "undisturbed")
    told = run_surviving(made(workers=3, **keys), tmp_path / "run", [Fault(slot, 7, "second evaluation")])
    assert len(told.views) == 2
    assert history_of(tmp_path / "run") == history_of(tmp_path / "undisturbed")


FAST = {"target": "torch.optim:SGD", "args": {"lr": 3.0}}


@pytest.mark.full(but=["test"])
@pytest.mark.parametrize("name", ["hard", "test"])
def test_the_named_evaluation_ends_the_training_and_both_measure_its_last_step(tmp_path: Path, name: str) -> None:
    """The oracle counts by hand in what plain torch measures."""
    column, every = f"eval_{name}_loss", {"hard": 3, "test": 4}[name]
    keys = {"optimizer": FAST, "epochs": 9, "early_stopping": {"metric": column, "patience": 2}}
    expected = by_hand(epochs=9, lr=3.0, momentum=0.0)
    best, without, stops = float("inf"), 0, None
    for step in range(every - 1, 45, every):
        value = expected[step][column]
        best, without = (value, 0) if value < best else (best, without + 1)
        if without == 2:
            stops = step
            break
    assert stops is not None and stops < 44
    run_group(made(workers=2, **keys), tmp_path)
    assert history_of(tmp_path)[-1]["step"] == stops
    for names in (OF_TEST, OF_HARD):
        assert max(evaluated(tmp_path, names)) == stops
        assert evaluated(tmp_path, names)[stops] == pytest.approx(
            {each: expected[stops][each] for each in names}, rel=1e-3
        )


@pytest.mark.slow
def test_samples_that_are_set_aside_are_told_with_the_evaluation(tmp_path: Path) -> None:
    broken = "tests.support.bad_data:Broken"
    evals = {
        "test": {"dataset": {"target": broken, "args": {"length": 20, "raises": [0, 3]}}},
        "hard": {"dataset": {"target": broken, "args": {"length": 9, "nan": [3, 8]}}, "batch_size": 4},
    }
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        job = made(workers=workers, metrics=RIGHT, eval=evals, on_error={"quarantine": 4, "finite": True})
        run_group(job, folder)
        merge_quarantine(Storage(str(folder)))
        told = [(row["dataset"], row["step"], row["sample_index"]) for row in quarantined(folder)]
        steps = (4, 9, 14)
        expected = [("eval.hard.dataset", step, at) for step in steps for at in (3, 8)]
        expected += [("eval.test.dataset", step, at) for step in steps for at in (0, 3)]
        assert sorted(told) == sorted(expected)
        last = history_of(folder)[-1]
        model = training.mlp()
        model.load_state_dict(weights_of(folder))
        for name, length, bad in (("test", 20, (0, 3)), ("hard", 9, (3, 8))):
            good = [at for at in range(length) if at not in bad]
            data = Broken(length).pairs
            data.inputs, data.targets = data.inputs[good], data.targets[good]
            assert last[f"eval_{name}_rows"] == len(good)
            loss = measured_by_torch(model, data)["loss"]
            assert last[f"eval_{name}_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.full
def test_a_model_in_parts_is_evaluated_on_each(tmp_path: Path) -> None:
    """With FSDP a worker without shards runs dummies beside the others in the second evaluation too."""
    found = {}
    for strategy in ("ddp", "fsdp"):
        run_group(made(workers=3, strategy=strategy), tmp_path / strategy)
        found[strategy] = [evaluated(tmp_path / strategy, names) for names in (OF_TEST, OF_HARD)]
    assert found["ddp"] == found["fsdp"], "it is bitwise"


@pytest.mark.usefixtures("in_project")
def test_the_shards_that_are_found_are_tried_on_each(tmp_path: Path) -> None:
    result = run_here(tmp_path, shards="auto", epochs=1)
    job = json.loads((tmp_path / "run" / "run.json").read_text())["job"]
    assert job["shards"] == 1 and {name for name in result.metrics if name.startswith("eval_")} == {
        *OF_TEST,
        *OF_HARD,
    }


def test_an_error_names_the_evaluation(tmp_path: Path) -> None:
    data = {"target": "tests.support.bad_data:Broken", "args": {"length": 20, "raises": [13]}}
    job = made(workers=1, eval={"test": TEST, "hard": {**HARD, "dataset": data}})
    says = r"evaluation hard, step 2, shard 3: sample 13 of eval\.hard\.dataset raised ValueError"
    with pytest.raises(ProcessExit, match=says):
        run_group(job, tmp_path)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"eval": {"test": TEST, "dataset": TEST}}, "eval: 'dataset' is a key of an evaluation, so none can have"),
        (
            {"eval": {"every_steps": TEST}},
            "eval: 'every_steps' is a key of an evaluation, so none can have this name",
        ),
        (
            {"eval": {"hard": HARD, **TEST}},
            "eval: has 'dataset', a key of a single evaluation, beside the evaluation",
        ),
        ({"eval": {"hard test": HARD}}, "eval: an evaluation's name must be a word of letters, .*, got 'hard test'"),
        ({"eval": {"1": HARD}}, "eval: an evaluation's name must be a word of letters, .*, got '1'"),
        ({"eval": {"test": {"datset": "a:b"}}}, r"eval\.test\.dataset: is missing"),
        (
            {"eval": {"test": {"datset": "a:b"}}},
            r"eval\.test\.datset: is no key of a job; did you mean eval\.test\.da",
        ),
        ({"eval": {"test": {**TEST, "every_steps": 0}}}, r"eval\.test\.every_steps: must be greater than 0, got 0"),
        (
            {"eval": {"test": {**TEST, "metrics": ["wrong"]}}},
            r"eval\.test\.metrics: .* \(right, recall\), got 'wrong'",
        ),
        (
            {"eval": {"test": {**TEST, "metrics": RIGHT}}},
            r"eval\.test\.metrics: must be a list of names of the job's",
        ),
        (
            {"eval": {"test": TEST, "test_hard": TEST}, "metrics": {"hard": RIGHT["right"]}},
            "eval: a column like eval_test_hard may be of 'test' or of 'test_hard'; rename one of them",
        ),
        (
            {"early_stopping": {"metric": "eval_loss", "patience": 2}},
            r"early_stopping\.metric: .* \(eval_test_loss, eval_test_right, .*eval_hard_recall\), got 'eval_loss'",
        ),
        ({"checkpoint": {"best": "eval_hard_right"}}, r"checkpoint\.best\.metric: .*eval_hard_recall\), got"),
        ({"task": "evaluate"}, "evaluation: is missing; task evaluate runs one of those that eval names: test, hard"),
        ({"task": "evaluate", "evaluation": "x"}, r"evaluation: must be one that eval names \(test, hard\), got 'x'"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        made(**keys)


def test_a_name_may_begin_with_another_one() -> None:
    job = made(eval={"test": TEST, "test_hard": HARD}, checkpoint={"best": "eval_test_hard_recall_1"})
    by = {column: measured_by(job.evaluations, column) for column in ("eval_test_loss", "eval_test_hard_recall_1")}
    assert [each and each.name for each in by.values()] == ["test", "test_hard"]


def test_a_column_of_a_metric_that_has_no_such_element_is_told_after_the_first_evaluation(tmp_path: Path) -> None:
    job = made(workers=1, checkpoint={"best": "eval_hard_recall_7"})
    says = r"checkpoint\.best\.metric: eval measures eval_hard_loss, .*eval_hard_recall_2; got 'eval_hard_recall_7'"
    with pytest.raises(ProcessExit, match=says):
        run_group(job, tmp_path)
    run_group(made(workers=1, checkpoint={"best": "eval_hard_recall_1"}), tmp_path / "there")


def test_one_evaluation_is_what_it_was_and_several_are_another_job() -> None:
    single = made(eval=TEST)
    assert "metrics" not in single.describe()["eval"], "earlier versions did not have it"
    assert single.has_fingerprint(made(eval={**TEST, "metrics": None}).fingerprint())
    assert not single.has_fingerprint(made(eval={"test": TEST}).fingerprint())
    assert not single.has_fingerprint(made(eval={**TEST, "metrics": []}).fingerprint())
    several = made()
    again = Job.make(json.loads(json.dumps(several.describe())), "job")
    assert again.has_fingerprint(several.fingerprint()) and again.eval_names == several.eval_names
    assert [each.name for each in named_evals(several.describe()["eval"])] == ["test", "hard"]


@pytest.mark.usefixtures("in_project")
def test_the_plan_has_each_by_name() -> None:
    plan = plan_job(made(workers=0))
    assert plan.rows == {"dataset": 101, "eval.test.dataset": 20, "eval.hard.dataset": 17}
    told = plan.to_json()["evaluate"]
    assert {
        name: (each["rows"], each["batch_size"], each["steps"], each["times"]) for name, each in told.items()
    } == {
        "test": (20, 22, 1, 4),
        "hard": (17, 5, 4, 5),
    }
    text = plan_table(plan)
    assert "evaluations of test every 4 steps and after the last step: 4 times" in text
    assert "evaluations of hard every 3 steps: 5 times\n  17 rows in global batches of 5: 4 steps" in text


def run_here(folder: Path, **keys: Any) -> dp_ray.Result:
    given = {key: value for key, value in KEYS.items() if key != "metrics"}
    return dp_ray.run(
        **keys_of(**{**given, "metrics": METRICS, "optimizer": SGD, "storage": str(folder), "name": "run", **keys})
    )


@pytest.mark.usefixtures("in_project")
def test_the_result_the_console_and_the_charts_name_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_here(tmp_path, checkpoint={"best": {"metric": "eval_hard_loss"}}, quiet=False)
    assert {name for name in result.metrics if name.startswith("eval_")} == {*OF_TEST, *OF_HARD}
    values = [row["eval_hard_loss"] for row in result.history if row["eval_hard_loss"] is not None]
    assert result.best is not None and (result.best["metric"], result.best["value"]) == (
        "eval_hard_loss",
        min(values),
    )
    said = " ".join(capsys.readouterr().err.split())
    assert f"eval_hard_loss {result.metrics['eval_hard_loss']:.6g}" in said
    history, job = history_so_far(result.storage()), json.loads((tmp_path / "run" / "run.json").read_text())["job"]
    charts = {chart.title: [each["name"] for each in chart.series] for chart in charts_of(history, job)}
    assert charts["Loss"] == ["loss", "epoch_loss", "eval_test_loss", "eval_hard_loss"]
    assert charts["right"] == ["right", "eval_test_right"]
    assert charts["recall_1"] == ["eval_test_recall_1", "eval_hard_recall_1"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<th scope="col">eval_hard_recall_2</th>' in page


@pytest.mark.usefixtures("in_project")
def test_evaluate_runs_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = run_here(tmp_path)
    assert status_of(monkeypatch, "evaluate", trained.run_dir) == 2
    assert (
        "evaluation: is missing; task evaluate runs one of those that eval names: test, hard"
        in capsys.readouterr().err
    )
    for name, rows, names in (("test", 20, OF_TEST), ("hard", 17, OF_HARD)):
        assert status_of(monkeypatch, "evaluate", trained.run_dir, "--set", f"evaluation={name}", "--name", name) == 0
        result = dp_ray.load(tmp_path / name)
        assert result.rows == rows
        assert result.metrics == {each.removeprefix(f"eval_{name}_"): trained.metrics[each] for each in names}
        assert f"on its eval.{name}.dataset" in capsys.readouterr().err
    assert status_of(monkeypatch, "predict", trained.run_dir, "--name", "predicted") == 0
    other = json.dumps({"target": "tests.support.training:Pairs", "args": {"length": 9}})
    assert status_of(monkeypatch, "evaluate", trained.run_dir, "--set", f"dataset={other}", "--name", "other") == 0
    assert dp_ray.load(tmp_path / "other").rows == 9


def test_a_run_that_kept_the_references_of_its_evaluations_alone_has_kept_nothing(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.write_text("result.json", json.dumps({"status": "failed"}))
    for name in ("test", "hard"):
        run.write_text(f"reference-of-eval.{name}.dataset.json", "{}")
    assert has_kept_nothing(run)
    run.write_text("reference-of-mine.json", "{}")
    assert not has_kept_nothing(run), "a file of the user's own"


@pytest.mark.full
@pytest.mark.ray
def test_on_ray_the_history_is_that_of_this_process(run_in_session: Run, tmp_path: Path) -> None:
    keys = keys_of(**{**KEYS, "optimizer": SGD, "early_stopping": {"metric": "eval_hard_loss", "patience": 9}})
    here = run_in_session(**keys, name="here")
    there = run_in_session(**{**keys, "workers": 2}, name="there")
    told = [[{name: row[name] for name in (*OF_TEST, *OF_HARD)} for row in run.history] for run in (here, there)]
    assert told[0] == told[1] and here.weights_sha256 == there.weights_sha256
    assert {name for name, value in there.metrics.items() if name.startswith("eval_")} == {*OF_TEST, *OF_HARD}


def test_a_sweep_asks_which_one_it_goes_by() -> None:
    job = made()
    with pytest.raises(
        JobError, match=r"--metric: is missing; the job has several evaluations: name one of loss, .*"
    ):
        chosen_metric(job, None, None)
    assert chosen_metric(job, "eval_hard_loss", None) == ("eval_hard_loss", "min")
    assert chosen_metric(job, "eval_hard_recall_1", "max") == ("eval_hard_recall_1", "max")
    with pytest.raises(JobError, match=r"--metric eval_loss: the job measures loss, .*eval_hard_recall"):
        chosen_metric(job, "eval_loss", None)
    best = made(checkpoint={"best": {"metric": "eval_test_right", "mode": "max"}})
    assert chosen_metric(best, None, None) == ("eval_test_right", "max")


@pytest.mark.usefixtures("in_project")
def test_a_replay_goes_the_way_of_a_scheduler_that_watches_the_second(tmp_path: Path) -> None:
    scheduler = {
        "target": "torch.optim.lr_scheduler:ReduceLROnPlateau",
        "args": {"patience": 0, "factor": 0.1, "threshold": 0.5},
        "per": "epoch",
        "metric": "eval_hard_loss",
    }
    result = run_here(tmp_path, scheduler=scheduler, checkpoint={"every_steps": 100})
    assert len({row["learning_rate"] for row in result.history}) > 1, "the scheduler has lowered the rate"
    assert replayed(result.run_dir, 12).compared == "bitwise equal"


@pytest.mark.usefixtures("in_project")
def test_verify_compares_what_each_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = keys_of(**{**KEYS, "optimizer": SGD, "storage": str(tmp_path), "checkpoint": {"keep": 1}})
    del keys["quiet"]
    (tmp_path / "job.yaml").write_text(json.dumps(keys))
    assert status_of(monkeypatch, "verify", str(tmp_path / "job.yaml"), "--workers", "0", "--resumed", "--quiet") == 0
    assert "the same, bit for bit" in capsys.readouterr().out
    assert is_inner("eval_hard_outputs_digest") and not is_inner("eval_hard_loss")


class Few(loops.Pairs):
    """The first 9 of the pairs."""

    def __len__(self) -> int:
        return 9


def test_a_loop_of_ones_own_is_evaluated_on_each(tmp_path: Path) -> None:
    """The average of the weights is that of torch's own, once a step; of the few the last evaluation is compared."""
    evals = {"all": {"dataset": f"{loops.__name__}:Pairs", "every_steps": 2}, "few": {"dataset": f"{HERE}:Few"}}
    stopping = {"metric": "eval_few_error", "patience": 99}
    keys = {"metrics": {"error": f"{loops.__name__}:error"}, "early_stopping": stopping, "ema": {"decay": 0.5}}
    _, expected = loops.averaged_gan_by_hand()
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        run_group(Job.make(loops.keys_of("gan", workers=workers, eval=evals, **keys), "job"), folder)
        rows = history_of(folder)
        found = [row["eval_all_error"] for row in rows if row["eval_all_error"] is not None]
        assert found == pytest.approx(expected, rel=1e-4)
        model, few = loops.Gan(), Few()
        model.load_state_dict(load_file(folder / "ema.safetensors"))
        with torch.no_grad():
            error = loops.error(model(few.noise[:9]), few.real[:9]).mean().item()
        assert rows[-1]["eval_few_error"] == pytest.approx(error, rel=1e-4)
        assert sum(row["eval_few_error"] is not None for row in rows) == loops.EPOCHS


def test_an_evaluation_is_no_time_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, measure = 0.7, Evaluator.measure

    def slowly(evaluator: Evaluator, step: int) -> dict[str, float]:
        time.sleep(seconds)
        return measure(evaluator, step)

    monkeypatch.setattr(Evaluator, "measure", slowly)
    keys = keys_of(batch_size=20, epochs=2, eval=TEST)
    dp_ray.run(**keys, storage=str(tmp_path), name="run")
    speeds = {row["step"]: row["rows_per_second"] for row in read_history(Storage(str(tmp_path / "run")))}
    assert len(speeds) > 5
    assert min(speed for step, speed in speeds.items() if step) > 20 / seconds

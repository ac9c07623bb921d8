"""A run does what the plan says: counted in what runs read, kept and told, against torch.split and torch.chunk."""

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

import dp_ray
from dp_ray.driver.planning import plan_job, prepare
from dp_ray.errors import DataError, JobError
from dp_ray.job.files import job_from
from dp_ray.job.job import Job
from dp_ray.monitor.console import Console
from dp_ray.plan.costs import plan_table
from tests.support.builders import run_dir_of
from tests.support.chance import examples
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.training import Pairs
from tests.support.trainings import keys_of

HERE = "tests.driver.test_planned_runs"
Plans = dict[str, Any]


class Counted(Pairs):
    """Pairs that note in `reads` which dataset is read."""

    def __init__(self, length: int, name: str, reads: list[str]) -> None:
        super().__init__(length)
        self.name = name
        self.reads = reads

    def __getitem__(self, index: int) -> Any:
        self.reads.append(self.name)
        return super().__getitem__(index)


def of_random_length() -> Dataset[Any]:
    return Pairs(int(torch.randint(10, 1000, ())))


def planned(**keys: Any) -> Plans:
    """The plan's JSON; what a run prepares is the same plan."""
    job = Job.make(keys, "job")
    plan = plan_job(job)
    assert prepare(job, Console("job", quiet=True)).plan == plan
    values: Plans = json.loads(json.dumps(plan.to_json()))
    return values


def epochs_of(plan: Plans) -> list[list[Plans]]:
    """The plan's global batches, unfolded, for each epoch that it begins."""
    epoch = [batch for batch in plan["batches"] for _ in range(batch["steps"])]
    total = plan.get("total_steps", plan["epochs"] * plan["steps"])
    steps = (epoch * plan["epochs"])[:total]
    return [steps[first : first + len(epoch)] for first in range(0, total, len(epoch))]


def due(schedule: Plans, epochs: list[list[Plans]]) -> list[int]:
    """The numbers of steps after which a schedule of the plan is due."""
    ends = [sum(map(len, epochs[: at + 1])) for at in range(len(epochs))]
    per_epoch = len(epochs[0])
    found = {ends[-1]}
    if every := schedule.get("every_steps"):
        found |= set(range(every, ends[-1] + 1, every))
    if every := schedule.get("every_epochs"):
        found |= {end for number, end in enumerate(ends, 1) if number % every == 0 and end == number * per_epoch}
    assert schedule["times"] == len(found)
    return sorted(found)


def chunks(rows: int, shards: int) -> list[int]:
    """The rows of each shard by torch.chunk, 0 for those that it does not give."""
    sizes = [len(chunk) for chunk in torch.arange(rows).chunk(shards)]
    return sizes + [0] * (shards - len(sizes))


def check_batches(plan: Plans, rows: int, drop_last: bool = False) -> None:
    """An epoch's batches are those of torch.split, and their shards those of torch.chunk."""
    sizes = [len(part) for part in torch.split(torch.arange(rows), plan["batch_size"])]
    kept = [size for size in sizes if size == plan["batch_size"] or not drop_last]
    batches = [batch for batch in plan["batches"] for _ in range(batch["steps"])]
    assert [batch["rows"] for batch in batches] == kept[: len(batches)]
    for batch in batches:
        assert batch["shard_rows"] == chunks(batch["rows"], plan["shards"])


def shapes_of(result: dp_ray.Result) -> list[list[int]]:
    """The rows of each shard that the model saw, for each step."""
    steps: dict[int, list[int]] = {}
    for report in sorted(result.shapes, key=lambda one: (one.step, one.shard)):
        steps.setdefault(report.step, []).append(report.rows)
    return list(steps.values())


EVALS = st.fixed_dictionaries(
    {"rows": st.integers(1, 9)},
    optional={
        "every_steps": st.integers(1, 7),
        "every_epochs": st.integers(1, 3),
        "batch_size": st.integers(1, 6),
    },
)
CHECKPOINTS = st.fixed_dictionaries({}, optional={"every_steps": st.integers(1, 7)})
JOBS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 12),
        "shards": st.integers(1, 4),
        "epochs": st.integers(1, 4),
        "max_steps": st.none() | st.integers(1, 20),
        "drop_last": st.booleans(),
    }
)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.integers(1, 24), JOBS, st.none() | EVALS, CHECKPOINTS, st.booleans())
def test_a_training_does_what_the_plan_says(
    rows: int, keys: dict[str, Any], evaluation: dict[str, Any] | None, checkpoint: dict[str, Any], is_clocked: bool
) -> None:
    reads: list[str] = []
    data: dict[str, Any] = {"dataset": Counted(rows, "train", reads)}
    if evaluation is not None:
        others = {key: value for key, value in evaluation.items() if key != "rows"}
        data["eval"] = {"dataset": Counted(evaluation["rows"], "eval", reads), **others}
    clock = "auto" if is_clocked else None
    with TemporaryDirectory() as folder:
        given_keys = keys_of(
            **data, **keys, checkpoint={"keep": 99, "every_seconds": clock, **checkpoint}, storage=folder, name="run"
        )
        job = {key: value for key, value in given_keys.items() if key != "quiet"}
        if keys["drop_last"] and rows < keys["batch_size"]:
            for runs in (lambda: dp_ray.run(**given_keys), lambda: planned(**job)):
                with pytest.raises(DataError, match="drop_last: drops all"):
                    runs()
            return
        plan = planned(**job)
        assert not reads, "a plan reads no sample"
        result = dp_ray.run(**given_keys)
        history = result.history
        kept = {int(re.findall(r"\d+", path.name)[0]) for path in Path(folder, "run", "checkpoints").iterdir()}
        shapes = shapes_of(result)
    epochs = epochs_of(plan)
    steps = [batch for epoch in epochs for batch in epoch]
    check_batches(plan, rows, keys["drop_last"])
    assert [row["rows"] for row in history] == [batch["rows"] for batch in steps]
    assert [row["epoch"] for row in history] == [number for number, epoch in enumerate(epochs) for _ in epoch]
    assert shapes == [[size for size in batch["shard_rows"] if size] for batch in steps]
    assert (plan["rows"], plan["batch_size"], plan["shards"]) == (rows, result.batch_size, result.shards)
    assert plan["padded"] == 0
    assert plan["dropped"] == rows - result.rows

    evaluated = due(plan["evaluate"], epochs) if evaluation else []
    assert ("evaluate" in plan) == (evaluation is not None)
    assert [row["step"] + 1 for row in history if row.get("eval_loss") is not None] == evaluated
    order = []
    for done, batch in enumerate(steps, 1):
        order += ["train"] * batch["rows"] + ["eval"] * (
            evaluation["rows"] if evaluation and done in evaluated else 0
        )
    assert sorted(reads) == sorted(order)
    if evaluation:
        assert plan["evaluate"]["rows"] == evaluation["rows"]
        check_batches({**plan["evaluate"], "shards": plan["shards"]}, evaluation["rows"])

    promised = set(due(plan["checkpoints"], epochs))
    assert kept >= promised if is_clocked else kept == promised


@pytest.mark.slow
@settings(max_examples=examples(15))
@given(
    st.sampled_from(["predict", "evaluate"]), st.integers(1, 24), st.integers(1, 12), st.integers(1, 4), st.booleans()
)
def test_a_prediction_and_an_evaluation_do_what_the_plan_says(
    task: str, rows: int, batch_size: int, shards: int, drop_last: bool
) -> None:
    drop_last = drop_last and rows >= batch_size
    keys = {"task": task, "model": nn.Identity, "dataset": Pairs(rows), "inputs": "first", "batch_size": batch_size}
    keys |= {"shards": shards, "drop_last": drop_last, "workers": 0, "loss": "torch.nn:CrossEntropyLoss"}
    keys |= {"model": "tests.support.training:mlp", "name": "run"}
    with TemporaryDirectory() as folder:
        plan = planned(**keys, storage=folder)
        result = dp_ray.run(**keys, storage=folder, quiet=True)
        shapes = shapes_of(result)
    (steps,) = epochs_of(plan)
    check_batches(plan, rows, drop_last)
    assert shapes == [[size for size in batch["shard_rows"] if size] for batch in steps]
    assert (plan["steps"], rows - plan["dropped"]) == (result.steps, result.rows)
    assert not {"evaluate", "checkpoints", "total_steps", "min_workers", "blocks"} & plan.keys()


def test_a_dataset_of_random_length_has_the_runs_length(tmp_path: Path) -> None:
    keys = keys_of(dataset=f"{HERE}:of_random_length", storage=str(tmp_path), name="run", epochs=1)
    del keys["quiet"]
    rows = planned(**keys)["rows"]
    assert rows == dp_ray.run(**keys, quiet=True).rows


@pytest.mark.full
def test_it_has_without_torch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_data.py").write_text(
        "import random\n\ndef rows():\n    return [0] * random.randrange(9, 9999)\n"
    )
    (tmp_path / "job.yaml").write_text("{model: 'torch.nn:Identity', dataset: 'plain_data:rows', batch_size: 3}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "dp_ray", "plan", "job.yaml", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    monkeypatch.chdir(tmp_path)
    keys = {"model": "torch.nn:Identity", "dataset": "plain_data:rows", "batch_size": 3}
    assert json.loads(done.stdout)["rows"] == planned(**keys)["rows"]


EVAL = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4}


def trainings(folder: Path, **keys: Any) -> dict[str, Any]:
    """The keys of a training of 26 steps an epoch; without `quiet`, which is no key of a job."""
    found = keys_of(storage=str(folder), name="run", eval=EVAL, epochs=1, **{"seed": 3, **keys})
    return {key: value for key, value in found.items() if key != "quiet"}


def test_the_command_plans_the_run_of_another_name_and_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that its remark is about is that of STORAGE/NAME."""
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(trainings(tmp_path / "first") | {"name": "one"}))
    dp_ray.run(job, quiet=True)

    def shown(*args: str) -> str:
        assert status_of(monkeypatch, "plan", str(job), *args) == 0
        return capsys.readouterr().out

    assert f"{tmp_path}/first/one holds this run, finished" in shown()
    assert "a run would not start" not in shown("--name", "two")
    assert "a run would not start" not in shown("--storage", str(tmp_path / "second"))


def test_a_training_that_is_longer_now_is_planned_as_it_goes_on(tmp_path: Path) -> None:
    first = dp_ray.run(**trainings(tmp_path), quiet=True)
    keys = trainings(tmp_path) | {"epochs": 2}
    plan = plan_job(Job.make(keys, "run"))
    assert plan.remarks == (f"resumes {tmp_path}/run after 26 of 52 steps",)
    result = dp_ray.run(**keys, quiet=True)
    assert (first.total_steps, result.total_steps) == (26, plan.split.total_steps) == (26, 52)
    evaluated = [row["step"] + 1 for row in result.history if row["eval_loss"] is not None]
    # 26 was the end of the first run.
    assert evaluated == sorted({26, *due(plan.to_json()["evaluate"], epochs_of(plan.to_json()))})


def began_with(folder: Path, **keys: Any) -> None:
    """A run of the training that has kept nothing yet."""
    run_dir_of(folder, Job.make(trainings(folder, **keys), "run"), rows={"dataset": 101, "eval.dataset": 20})


def test_a_run_is_planned_with_the_shards_with_which_it_began(tmp_path: Path) -> None:
    began_with(tmp_path, workers=3, batch_size=6)
    keys = trainings(tmp_path, workers={"min": 1, "max": 4}, batch_size=6)
    plan = plan_job(Job.make(keys, "run"))
    shards = "shards: 3, as when this run began; so at most 3 workers run, not 4"
    assert plan.remarks == (shards, f"resumes {tmp_path}/run from its start, since no step is kept yet")
    assert (plan.to_json()["shards"], plan.to_json()["min_workers"], plan.to_json()["workers"]) == (3, 1, 3)
    keys = trainings(tmp_path, batch_size=6)
    job = Job.make(keys, "run")
    assert prepare(job, Console("run", quiet=True)).plan.split == plan_job(job).split
    assert dp_ray.run(**keys, quiet=True).shards == 3


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "holds this run, finished"),
        ({"batch_size": 5}, "holds a run of a different job (batch_size: 4 there, 5 here)"),
        ({"max_steps": 20}, "which has done 26 steps, and this job has 20 (max_steps: none before, 20 now)"),
    ],
    ids=["finished", "another job", "shorter"],
)
def test_a_run_that_would_not_start_says_so_in_its_plan(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    dp_ray.run(**trainings(tmp_path), shards=2, quiet=True)
    given_keys = {**trainings(tmp_path), **keys}
    plan = plan_job(Job.make(given_keys, "run"))
    assert plan.split.shards == 1, "a run of its own"
    (remark,) = plan.remarks
    assert remark.startswith("a run would not start: ")
    assert says in remark
    with pytest.raises(JobError, match=re.escape(says)):
        dp_ray.run(**given_keys, quiet=True)


def test_a_storage_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    keys = {**trainings(tmp_path), "storage": "nowhere://bucket/runs"}
    (remark,) = plan_job(Job.make(keys, "run")).remarks
    assert remark.startswith("whether an earlier run would be resumed is not known: ")


def test_a_training_for_reading(tmp_path: Path) -> None:
    keys = trainings(tmp_path, workers={"min": 1, "max": 2}, checkpoint={"best": "eval_loss", "keep": 3})
    assert plan_table(plan_job(Job.make({**keys, "epochs": 3, "max_steps": 60}, "run"))).splitlines() == [
        "101 rows in global batches of 4: 26 steps, 2 shards on 1 to 2 workers, shown for 2; padded 0, dropped 0",
        "3 epochs, 60 steps in all, the last one ends after 8",
        "25 x 4 rows",
        "  ranks 0-1     2 rows each",
        "1 x 1 row",
        "  rank 0        1 row",
        "  rank 1        0 rows",
        "evaluations every 4 steps: 15 times",
        "  20 rows in global batches of 4: 5 steps",
        "  5 x 4 rows",
        "    ranks 0-1     2 rows each",
        "checkpoints every epoch and after the last step: 3 times; more by the clock; one more for each better "
        "eval_loss; kept: the newest 3 and the best",
    ]


def test_a_plan_is_as_small_for_any_number_of_steps(tmp_path: Path) -> None:
    keys = {"epochs": 10**6, "checkpoint": {"every_steps": 7, "every_seconds": None}}
    plan = plan_job(Job.make({**trainings(tmp_path), **keys}, "run")).to_json()
    assert plan["evaluate"]["times"] == 26 * 10**6 // 4
    assert plan["checkpoints"] == {"every_steps": 7, "times": 26 * 10**6 // 7 + 1, "keep": 2}
    assert len(json.dumps(plan)) < 1000


def own_steps(run: Any, batches: Any) -> None:
    """A loop of the user's own."""
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for inputs, target in batches:
        nn.functional.cross_entropy(run.model(inputs), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def test_a_job_that_says_no_task_trains_with_an_optimizer_or_a_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {key: value for key, value in trainings(tmp_path).items() if key != "task"}
    said = dp_ray.run(**{**given, "task": "train", "name": "said"}, quiet=True)
    left_out = dp_ray.run(**given)
    assert left_out.task == "train"
    assert left_out.weights_sha256 == said.weights_sha256
    line = "task: train, because the job has optimizer; set task to say another"
    assert capsys.readouterr().err.count(line) == 1
    assert line in plan_job(Job.make({**given, "name": "other"}, "run")).remarks
    assert not [line for line in plan_job(Job.make({**given, "task": "train"}, "run")).remarks if "task:" in line]

    job = Job.make({**given, "optimizer": None}, "run")
    assert (job.task, job.why_trains) == ("predict", ""), "with one of them, and only then"
    assert job_from(job, {"optimizer": given["optimizer"]}).task == "train", "what was not said is not kept"
    assert job_from(Job.make(given, "run"), {"optimizer": None}).task == "predict"
    assert Job.make({**given, "task": "predict"}, "run").task == "predict"
    without = {key: value for key, value in given.items() if key not in ("optimizer", "loss", "eval", "metrics")}
    assert Job.make({**without, "loop": own_steps}, "run").why_trains == "loop"
    with pytest.raises(JobError, match=r"loss: is missing; .*; task is left out, and is train because of optimizer"):
        Job.make({**without, "optimizer": given["optimizer"]}, "run")


def test_a_prediction_that_an_earlier_version_began_goes_on_as_one(tmp_path: Path) -> None:
    given = {key: value for key, value in trainings(tmp_path).items() if key != "task"}
    predicts = {**given, "task": "predict"}
    whole = dp_ray.run(**{**predicts, "name": "whole"}, quiet=True)
    run_dir_of(tmp_path, Job.make(predicts, "run"), rows={"dataset": 101})
    (tmp_path / "run" / "parts").mkdir(exist_ok=True)
    (tmp_path / "run" / "notes.txt").write_text("it has kept something")
    plan = plan_job(Job.make(given, "run"))
    assert plan.remarks[0] == "task: predict, as when this run began; set task to say another"
    result = dp_ray.run(**given, quiet=True)
    assert (result.task, result.outputs_sha256) == ("predict", whole.outputs_sha256)
    with pytest.raises(JobError, match=r"a run of a different job \(task: 'predict' there, 'train' here\)"):
        dp_ray.run(**given, quiet=True)

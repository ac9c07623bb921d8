"""A step of a training that runs again has the history's loss, whatever the run went through, and names its rows."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.results.replayed import compared
from tests.support import forked, training
from tests.support.bad_data import Broken
from tests.support.builders import run_dir_of
from tests.support.cli import status_of
from tests.support.group import StopsBefore, history_of, run_group
from tests.support.replays import replayed
from tests.support.s3 import Server
from tests.support.trainings import STEPS_OF_22, job_of, keys_of

pytestmark = pytest.mark.usefixtures("in_project")

IMAGES = {"target": "tests.support.training:Images", "args": {"length": 70, "augment": True}}
PLATEAU = {
    "target": "torch.optim.lr_scheduler:ReduceLROnPlateau",
    "args": {"patience": 0, "factor": 0.1, "threshold": 0.5},
    "per": "epoch",
    "metric": "eval_loss",
}
EVAL = {"dataset": {"target": "tests.support.training:Images", "args": {"length": 20}}}


def trained(job: Job, folder: Path, *lives: tuple[int, int | None]) -> Path:
    """A run in several lives, without a driver: each on so many workers, and to the step before which all die."""
    run = run_dir_of(folder, job, rows={"dataset": 70}).storage
    for workers, dies in lives:
        control = None if dies is None else StopsBefore(dies)
        run_group(job.model_copy(update={"workers": workers}), run.location, control)
    return Path(run.location)


def files_of(run: Path) -> dict[str, tuple[int, bytes]]:
    """All files and folders of a run, with what they hold and when they were written."""
    found = sorted(run.rglob("*"))
    return {str(one): (one.stat().st_mtime_ns, one.read_bytes() if one.is_file() else b"") for one in found}


@pytest.mark.slow
def test_each_step_of_a_bitwise_run_has_its_bits_after_a_kill_and_a_resize(tmp_path: Path) -> None:
    """With BatchNorm, augmentation, AdamW and a scheduler; of twelve steps, the last two checkpoints are kept."""
    run = trained(job_of("conv", IMAGES, workers=3, **STEPS_OF_22), tmp_path, (3, 5), (2, None))
    history = history_of(run)
    before = files_of(run)
    found = [replayed(run, step) for step in range(12)]
    assert [one.loss for one in found] == [row["loss"] for row in history], "bit for bit"
    assert {one.compared for one in found} == {"bitwise equal"}
    assert [one.start for one in found] == [0] * 10 + [10] * 2
    assert files_of(run) == before, "it writes nothing"
    assert [len(one.rows) for one in found] == [row["rows"] for row in history]
    for epoch in range(3):
        samples = [row.sample or 0 for one in found[4 * epoch : 4 * epoch + 4] for row in one.rows]
        assert sorted(samples) == list(range(70)), "each sample of an epoch once"
    assert not any(one.weights or one.batch or one.output or one.gradient for one in found)


@pytest.mark.slow
def test_a_scheduler_that_watches_evaluations_goes_the_same_way_again(tmp_path: Path) -> None:
    keys = {**STEPS_OF_22, "scheduler": PLATEAU, "eval": EVAL, "checkpoint": {"every_steps": 100}}
    run = trained(job_of("conv", IMAGES, workers=2, **keys), tmp_path, (2, None))
    rates = {row["learning_rate"] for row in history_of(run)}
    assert len(rates) > 1, "the scheduler has lowered the rate"
    assert [replayed(run, step).compared for step in (5, 9, 11)] == ["bitwise equal"] * 3
    (run / "history" / "steps-0-12.parquet").unlink()
    with pytest.raises(JobError, match="the scheduler watches eval_loss, and the run's history lacks step 0"):
        replayed(run, 5)


@pytest.mark.slow
def test_each_step_of_another_run_is_within_rounding(tmp_path: Path) -> None:
    keys = {**STEPS_OF_22, "bitwise": False, "checkpoint": {"every_steps": 2, "keep": 100}}
    run = trained(job_of("mlp", "Pairs", workers=3, **keys), tmp_path, (3, 5), (2, None))
    for step, row in enumerate(history_of(run)):
        found = replayed(run, step)
        assert found.compared in ("bitwise equal", "within rounding, 3e-07 relative")
        assert found.loss == pytest.approx(row["loss"], rel=3e-7) and not found.bitwise
        assert not any("bitwise:" in line for line in found.lines())


@pytest.mark.slow
def test_a_model_on_two_devices_has_its_bits(tmp_path: Path) -> None:
    keys = {**STEPS_OF_22, "batch_size": 50, "epochs": 1, "devices": ["cpu", "cpu"]}
    data = {"target": "jobs.digits:Digits", "args": {"split": "test"}}
    run = in_process(tmp_path, model="jobs.model_parallel:TwoParts", dataset=data, **keys)
    losses = [row["loss"] for row in dp_ray.load(run).history]
    found = [replayed(run, step) for step in range(len(losses))]
    assert [one.loss for one in found] == losses
    assert {one.compared for one in found} == {"bitwise equal"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_run_of_one_gpu_is_replayed_on_a_cpu(tmp_path: Path) -> None:
    run = trained(job_of("mlp", "Pairs", workers=1), tmp_path, (1, None))
    kept = json.loads((run / "run.json").read_text())
    for keys in ({"gpus_per_worker": 1}, {"devices": ["cuda:0"], "input_device": "cuda:0"}):
        (run / "run.json").write_text(json.dumps({**kept, "job": {**kept["job"], **keys}}))
        assert replayed(run, 3).loss == history_of(run)[3]["loss"]
    both = {**kept["job"], "devices": ["cuda:0", "cuda:1"]}
    (run / "run.json").write_text(json.dumps({**kept, "job": both}))
    with pytest.raises(JobError, match=r"^devices: cuda:0 is named, and torch finds no GPU on this machine"):
        replayed(run, 3)


def compiled_training_and_replay(folder: str) -> None:
    """Train a compiled model and replay its last step: a program, for torch.compile leaves much behind."""
    run = in_process(folder, **{**STEPS_OF_22, "batch_size": 50, "epochs": 1, "compile": True})
    found = replayed(run, 2)
    print(found.compared, found.loss == dp_ray.load(run).history[2]["loss"])


@pytest.mark.full
@pytest.mark.slow
def test_a_compiled_model_has_its_bits(tmp_path: Path) -> None:
    ended = forked.ended(compiled_training_and_replay, str(tmp_path))
    assert ended.stdout.splitlines()[-1] == "bitwise equal True", ended.stderr


def test_how_losses_compare() -> None:
    assert compared(0.1, 0.1) == compared(math.nan, math.nan) == compared(math.inf, math.inf) == "bitwise equal"
    assert compared(1.0, 1.0 + 2e-7) == "within rounding, 3e-07 relative"
    assert compared(1.0, 1.0 + 4e-7) == compared(math.nan, 1.0) == compared(1.0, math.inf) == "differs"
    assert compared(1.0, None) == compared(None, 1.0) == "not compared"


@pytest.mark.full
@pytest.mark.slow
def test_a_run_whose_workers_held_parts_of_the_model(tmp_path: Path) -> None:
    run = trained(job_of("conv", IMAGES, workers=2, strategy="fsdp", **STEPS_OF_22), tmp_path, (2, 5), (3, None))
    assert list((run / "checkpoints" / "pieces").iterdir())
    assert [replayed(run, step).loss for step in (3, 10, 11)] == [
        history_of(run)[step]["loss"] for step in (3, 10, 11)
    ]


def in_process(folder: Path | str, **keys: Any) -> str:
    """A run in this process; its location."""
    result = dp_ray.run(**keys_of(**{"storage": str(folder), "name": "run", "shuffle": True, **keys}))
    return result.location


class WritesLargeData(nn.Module):
    """A model whose forwards write a buffer that is not small through `.data`, and go by it."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("bank", torch.ones(70_000))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.bank.data.mul_(0.9)
        outputs: torch.Tensor = self.layer(inputs) * self.bank[:3]
        return outputs


def test_rows_are_those_of_the_state_before_the_step_whatever_forwards_write(tmp_path: Path) -> None:
    model = {"target": "tests.replay.test_replay:WritesLargeData"}
    job = job_of(model, "Pairs", workers=1, shards=1, checkpoint={"every_steps": 3})
    found = replayed(trained(job, tmp_path, (1, None)), 4)
    assert found.compared == "bitwise equal"
    assert sum(row.loss or 0.0 for row in found.rows) / len(found.rows) == pytest.approx(found.loss, rel=1e-6)


class Outliers(Broken):
    """Pairs of which one is far from the others, and of a wrong class."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return (inputs * 1000, (target + 1) % 3) if index == 4321 else (inputs, target)


@pytest.mark.full(but=["Broken-1234"])
@pytest.mark.parametrize(("kind", "sample"), [("Broken", 1234), ("Outliers", 4321)])
def test_a_poisoned_row_in_10000_is_named_first(tmp_path: Path, kind: str, sample: int) -> None:
    where = "tests.support.bad_data:Broken" if kind == "Broken" else "tests.replay.test_replay:Outliers"
    bad = {"nan": [1234]} if kind == "Broken" else {}
    data = {"target": where, "args": {"length": 10_000, **bad}}
    run = in_process(tmp_path, dataset=data, batch_size=10_000, shards=4)
    found = replayed(run, 0)
    assert found.rows[0].sample == sample and len(found.rows) == 10_000
    assert [row.shard for row in found.rows].count(3) == 2500
    if kind == "Broken":
        assert found.rows[0].loss is not None and math.isnan(found.rows[0].loss)
        assert found.output is not None and (found.output["module"], found.output["kind"]) == ("0", "Linear")
        assert found.output["shard"] == found.rows[0].shard and found.batch is not None
        assert all(row.loss is not None and math.isfinite(row.loss) for row in found.rows[1:])
    else:
        torch.manual_seed(0)
        item = Outliers(10_000)[sample]
        expected = nn.functional.cross_entropy(training.mlp()(item[0][None]), item[1][None]).item()
        assert found.rows[0].loss == pytest.approx(expected, rel=1e-5)
        assert not (found.output or found.gradient or found.weights or found.batch)


def test_only_a_shard(tmp_path: Path) -> None:
    run = in_process(tmp_path, shards=3, bitwise=True, model="tests.replay.test_replay:Counted")
    whole, Counted.rows = replayed(run, 2), []
    found = replayed(run, 2, shard=1)
    assert {row.shard for row in found.rows} == {1} and found.loss is None
    assert set(found.rows) == {row for row in whole.rows if row.shard == 1}
    assert Counted.rows == [2] * 5, "both shards of steps 0 and 1, and that one of step 2"
    with pytest.raises(JobError, match="--shard 2: step 2 has 2 shards, counted from 0"):
        replayed(run, 2, shard=2)
    with pytest.raises(JobError, match="--step 26: the training has 26 steps, counted from 0"):
        replayed(run, 26)


class Counted(nn.Sequential):
    """Counts the rows of its forwards."""

    rows: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(inputs))
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


class Rooted(nn.Module):
    """Finite outputs, whose gradient is not: that of a root at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.body(inputs) + torch.sqrt(torch.relu(self.body(inputs)) * 0))
        return outputs


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    run = in_process(tmp_path, model="tests.replay.test_replay:Rooted", max_steps=2)
    first, second = replayed(run, 0), replayed(run, 1)
    assert first.output is None and first.gradient is not None and math.isfinite(first.loss or math.nan)
    assert (first.gradient["module"], first.gradient["what"]) == ("body", "gradient of the output")
    assert second.weights == "body.weight", "the step before has spoilt it"


def per_row(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss for each row."""
    return nn.functional.cross_entropy(outputs, target, reduction="none")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"loss": "tests.replay.test_replay:per_row"}, "what the loss returned for each row"),
        ({}, "the loss of each row's outputs and target, one row at a time"),
    ],
)
def test_the_losses_of_rows_are_plain_torchs(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    run = in_process(tmp_path, shards=3, **keys)
    found = replayed(run, 0)
    torch.manual_seed(0)
    data = training.Pairs()
    losses = per_row(training.mlp()(data.inputs), data.targets)
    assert {row.sample: row.loss for row in found.rows} == pytest.approx(
        {row.sample: losses[row.sample].item() for row in found.rows}, rel=1e-5
    )
    order = [row.loss for row in found.rows]
    assert order == sorted(order, key=lambda one: -(one or 0.0)) and len(order) == 4
    assert found.row_losses == says and found.compared == "bitwise equal"


def test_a_loss_of_tokens_gives_means_of_rows(tmp_path: Path) -> None:
    sentences = {"target": "tests.support.training:Sentences", "args": {"length": 8}}
    model = {"target": "tests.support.training:Transformer", "args": {"dropout": 0.0}}
    run = in_process(tmp_path, shards=2, model=model, dataset=sentences, shuffle=False)
    torch.manual_seed(0)
    plain, data = training.Transformer(0.0), training.Sentences(8)
    for row in replayed(run, 0).rows:
        assert row.sample is not None
        tokens, target = data[row.sample]
        expected = nn.functional.cross_entropy(plain(tokens[None]), target[None]).item()
        assert row.loss == pytest.approx(expected, rel=1e-5), "without what is ignored"


def test_rows_that_are_left_out_are_none(tmp_path: Path) -> None:
    data = {"target": "tests.support.bad_data:Broken", "args": {"length": 32, "nan": [5], "raises": [7]}}
    keys = {"on_error": {"quarantine": 3, "finite": True}, "skip": [9], "shuffle": False, "bitwise": True}
    run = in_process(tmp_path, dataset=data, shards=2, **keys)
    found = [replayed(run, step) for step in range(8)]
    assert {one.compared for one in found} == {"bitwise equal"}
    samples = {row.sample for one in found for row in one.rows}
    assert samples == set(range(32)) - {5, 7, 9}


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"holds no run.json: name the run directory of a training"):
        replayed(tmp_path, 0)
    predicted = dp_ray.run(
        **keys_of(storage=str(tmp_path), name="predicted", task="predict", inputs="first", optimizer=None, loss=None)
    )
    with pytest.raises(JobError, match="is a run of task predict; only a training has steps to replay"):
        replayed(predicted.run_dir, 0)
    with pytest.raises(JobError, match="model was given as a Python object"):
        replayed(in_process(tmp_path, model=training.mlp(), max_steps=1), 0)
    for name, keys, says in (
        ("norm", {"sync_batchnorm": True, "shards": 2, "workers": 2}, "sync_batchnorm takes its statistics from all"),
        ("mixed", {"strategy": "fsdp", "fsdp": {"mixed_precision": {"param": "bf16"}}}, "fsdp.mixed_precision"),
    ):
        job = Job.make(
            {key: value for key, value in {**keys_of(**keys), "name": name}.items() if key != "quiet"}, name
        )
        run_dir_of(tmp_path, job)
        with pytest.raises(JobError, match=says):
            replayed(tmp_path / name, 0)


def test_a_run_without_what_its_start_writes_is_left_as_it_is(tmp_path: Path) -> None:
    """It was claimed, and its workers have never begun: nothing says which sample is its reference."""
    values = keys_of(on_error={"quarantine": 1})
    del values["quiet"]
    run_dir_of(tmp_path, Job.make({**values, "name": "run"}, "run"))
    before = files_of(tmp_path)
    with pytest.raises(dp_ray.errors.StorageError, match="a replay writes nothing"):
        replayed(tmp_path / "run", 0)
    assert {name: held for name, (_, held) in files_of(tmp_path).items()} == {
        name: held for name, (_, held) in before.items()
    }


class Raises(nn.Module):
    """Raises for the row of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        secret = 41 + 1
        if (inputs == training.Pairs().inputs[30]).all(1).any():
            raise ValueError(f"row of sample 30, not {secret}")
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"target": "tests.support.bad_data:Broken", "args": {"nan": [17]}}
    run = in_process(tmp_path, dataset=data, shards=2, shuffle=False, bitwise=True)
    capsys.readouterr()
    assert status_of(monkeypatch, "replay", run, "--step", "4", "--json") == 0
    told = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert told["loss"] == told["history_loss"] == told["rows"][0]["loss"] == "nan"
    assert told["rows"][0] == {"loss": "nan", "sample": 17, "shard": 0, "position": 17}
    assert (told["compared"], told["output"]["module"], told["weights"]) == ("bitwise equal", "0", None)
    assert status_of(monkeypatch, "replay", run, "--step", "3") == 0
    out, err = capsys.readouterr()
    assert "bitwise equal" in out and "finite: the weights before the step" in out
    assert err == "from the state after 0 steps: 3 steps to run again\n"
    assert status_of(monkeypatch, "replay", run, "--step", "26") == 2
    assert "error: --step 26: the training has 26 steps" in capsys.readouterr().err


def test_the_debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It stops in the forward of the module to look at, and where a step raised; quitting it is no failure."""
    answers: list[str] = []
    monkeypatch.setattr("builtins.input", lambda _: answers.pop(0))
    tracing = sys.gettrace()
    data = {"target": "tests.support.bad_data:Broken", "args": {"nan": [17]}}
    run = in_process(tmp_path, dataset=data, shards=2, shuffle=False, max_steps=6)
    answers[:] = ["p 'in ' + type(self).__name__, input.isnan().sum().item()", "q"]
    assert status_of(monkeypatch, "replay", run, "--step", "4", "--pdb") == 0
    assert "('in Linear', 1)" in capsys.readouterr().err
    answers[:] = ["p 'on ' + type(self).__name__", "c"]
    assert status_of(monkeypatch, "replay", run, "--step", "3", "--pdb") == 0
    assert "'on Sequential'" in capsys.readouterr().err

    with pytest.raises(ModelError, match="row of sample 30"):
        in_process(tmp_path, name="raises", model="tests.replay.test_replay:Raises", shuffle=False)
    answers[:] = ["p secret", "q"]
    assert status_of(monkeypatch, "replay", str(tmp_path / "raises"), "--step", "7", "--pdb") == 1
    assert not answers and "42" in capsys.readouterr().err.splitlines()
    assert sys.gettrace() is tracing


@pytest.mark.full
@pytest.mark.slow
def test_a_run_in_an_object_store(server: Server) -> None:
    keys = {"shards": 2, "bitwise": True, "epochs": 2, "checkpoint": {"every_steps": 20}, "max_steps": 50}
    run = in_process(server.url("replays"), **keys)
    before = server.log.read_text()
    found = replayed(run, 45)
    assert (found.compared, found.start) == ("bitwise equal", 40)
    assert server.log.read_text() == before, "no request that writes"


def step_alone(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


@pytest.mark.parametrize("several", [False, True])
def test_evaluations_that_round_the_weights_do_so_again(tmp_path: Path, several: bool) -> None:
    """As those of a model that merges a part into its weights in `eval()`."""
    evaluation = {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 2}
    keys: dict[str, Any] = {"eval": {"a": evaluation, "a_b": evaluation} if several else evaluation}
    keys |= {"checkpoint": {"every_steps": 100}, "bitwise": True, "shards": 2, "batch_size": 35}
    keys |= {"loss": None, "step": "tests.replay.test_replay:step_alone"}
    job = job_of({"target": "tests.support.own_modes:rounds"}, workers=1, **keys)
    run = trained(job.model_copy(update={"epochs": 4}), tmp_path, (1, None))
    found = replayed(run, 11)
    assert found.compared == "bitwise equal" and found.start == 0
    assert found.row_losses == "not known: the function returns the sum and weight of a shard"

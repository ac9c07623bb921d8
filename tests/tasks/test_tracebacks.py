"""A user's mistake: which of the job's keys raised, what it got, and the user's own frames alone."""

import contextlib
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray import messages
from dp_ray.cluster import group, worker
from dp_ray.cluster.channel import WorkerConfig
from dp_ray.engine.forward.step import build_step
from dp_ray.engine.world import World
from dp_ray.errors import DataError, Error, JobError, ModelError, StorageError, WorkerError, frames_of
from dp_ray.job.job import Job
from dp_ray.messages import Failed, error_of
from tests.support import training
from tests.support.cli import status_of
from tests.support.group import ProcessExit, run_group
from tests.support.trainings import keys_of

MINE = """
import torch

def measure(outputs, target):
    return helper(outputs)

def helper(outputs):
    raise ValueError("no labels of mine")

def loss(outputs, target):
    return torch.nn.functional.cross_entropy(outputs, target.repeat(8), reduction="none")
"""

JOB = """
task: train
model: 'tests.support.training:mlp'
dataset: 'tests.support.training:Pairs'
batch_size: 4
workers: 0
loss: 'torch.nn:CrossEntropyLoss'
optimizer: {target: 'torch.optim:SGD', args: {lr: 0.1}}
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of the user's and a job file, in which we stand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_traces.py").write_text(MINE)
    (tmp_path / "job.yaml").write_text(JOB)
    yield tmp_path
    sys.modules.pop("mine_of_traces", None)


def files_in(text: str) -> set[str]:
    """The names of the files of the frames in a text."""
    return {Path(name).name for name in re.findall(r'File "([^"]+)"', text)}


def test_a_mistake_shows_the_users_frames_once_then_one_sentence(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["run", "job.yaml", "--set", "metrics.accuracy=mine_of_traces:measure"]
    assert status_of(monkeypatch, *args) == 1
    told = capsys.readouterr().err
    assert told.splitlines()[-1] == (
        "error: step 0, shard 0: metrics.accuracy raised ValueError: no labels of mine; "
        "it got outputs float32 [4, 3], target int64 [4]"
    )
    assert files_in(told) == {"mine_of_traces.py"}
    assert (told.count('File "'), told.count("ValueError")) == (2, 2), "once in the code, once in the sentence"
    assert status_of(monkeypatch, *args, "--overwrite", "--verbose") == 1
    told = capsys.readouterr().err
    assert {"mine_of_traces.py", "step.py", "replica.py"} <= files_in(told)


def test_a_loss_that_raises_says_what_it_got(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "run", "job.yaml", "--set", "loss=mine_of_traces:loss") == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: step 0, shard 0: loss raised ValueError: Expected input batch_size (4)")
    assert last.endswith("; it got outputs float32 [4, 3], target int64 [4]")


def test_a_module_that_cannot_be_imported_shows_where(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "wrong_of_traces.py").write_text("x = 1\ndef f(:\n    pass\n")
    assert status_of(monkeypatch, "plan", "job.yaml", "--set", "dataset=wrong_of_traces:f") == 2
    told = capsys.readouterr().err
    assert files_in(told) == {"wrong_of_traces.py"}
    assert "line 2" in told and "def f(:" in told


class Fails(nn.Module):
    """Fails on its way there, or on its way back."""

    def __init__(self, back: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.back = back

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.back:
            raise LookupError("nothing there")
        return FailsBack.apply(self.layer(inputs))  # type: ignore[no-any-return,no-untyped-call]


class FailsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise LookupError("nothing there")


class FailingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise LookupError("nothing there")


class FailingSchedule:
    def __init__(self, optimizer: Any) -> None:
        pass

    def step(self) -> None:
        raise LookupError("nothing there")

    def state_dict(self) -> dict[str, Any]:
        return {}


class FailingPairs(training.Pairs):
    def __getitem__(self, index: int) -> Any:
        raise LookupError("nothing there")


class FailingMetric:
    """As torchmetrics' are; fails as it is told to."""

    def __init__(self, where: str = "update") -> None:
        self.where = where

    def to(self, device: Any) -> "FailingMetric":
        return self

    def update(self, outputs: Any, target: Any) -> None:
        if self.where == "update":
            fails()

    def compute(self) -> float:
        if self.where == "compute":
            fails()
        return 0.0

    def reset(self) -> None: ...
    def merge_state(self, other: Any) -> None: ...
    def __call__(self) -> None: ...


def fails(*given: Any, **keys: Any) -> None:
    raise LookupError("nothing there")


HERE = "tests.tasks.test_tracebacks"
GOT = "; it got outputs float32 [4, 3], target int64 [4]"
EVAL = {"dataset": "tests.support.training:Pairs"}


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        (
            {"model": f"{HERE}:Fails"},
            ModelError,
            "step 0, shard 0: model raised LookupError: nothing there; it got float32 [4, 6]",
        ),
        (
            {"model": {"target": f"{HERE}:Fails", "args": {"back": True}}},
            ModelError,
            "step 0, shard 0: backward raised LookupError: nothing there",
        ),
        (
            {"model": f"{HERE}:Fails", "task": "predict", "inputs": "first"},
            ModelError,
            "step 0, shard 0: model raised LookupError: nothing there; it got float32 [4, 6]",
        ),
        (
            {"model": f"{HERE}:Fails", "task": "evaluate"},
            ModelError,
            "evaluation step 0, shard 0: model raised LookupError: nothing there; it got float32 [4, 6]",
        ),
        (
            {"loss": f"{HERE}:fails"},
            ModelError,
            "step 0, shard 0: loss raised LookupError: nothing there" + GOT,
        ),
        (
            {"loss": None, "step": f"{HERE}:fails"},
            ModelError,
            "step 0, shard 0: step raised LookupError: nothing there",
        ),
        (
            {"collate": f"{HERE}:fails"},
            DataError,
            "step 0, shard 0: collate raised LookupError: nothing there; it got samples 0, 1, 2, 3",
        ),
        (
            {"dataset": f"{HERE}:FailingPairs"},
            DataError,
            "step 0, shard 0: sample 0 of the dataset raised LookupError: nothing there",
        ),
        (
            {"eval": {"dataset": f"{HERE}:FailingPairs"}},
            DataError,
            "evaluation step 0, shard 0: sample 0 of eval.dataset raised LookupError: nothing there",
        ),
        (
            {"optimizer": {"target": f"{HERE}:FailingSGD", "args": {"lr": 0.1}}},
            ModelError,
            "step 0: optimizer raised LookupError: nothing there",
        ),
        (
            {"optimizer": fails},
            JobError,
            "optimizer: tests.tasks.test_tracebacks:fails raised LookupError: nothing there",
        ),
        ({"scheduler": f"{HERE}:FailingSchedule"}, ModelError, "step 0: scheduler raised LookupError: nothing there"),
        (
            {"scheduler": {"target": f"{HERE}:FailingSchedule", "per": "epoch"}},
            ModelError,
            "step 25: scheduler raised LookupError: nothing there",
        ),
        (
            {"eval": EVAL, "metrics": {"f1": {"target": f"{HERE}:FailingMetric"}}},
            ModelError,
            "evaluation step 0, shard 0: metrics.f1 raised LookupError: nothing there" + GOT,
        ),
        (
            {"eval": EVAL, "metrics": {"f1": {"target": f"{HERE}:FailingMetric", "args": {"where": "compute"}}}},
            ModelError,
            "metrics.f1.compute raised LookupError: nothing there",
        ),
    ],
)
def test_what_raised_is_named(tmp_path: Path, keys: dict[str, Any], error: type[Error], says: str) -> None:
    with pytest.raises(error) as raised:
        dp_ray.run(**keys_of(storage=str(tmp_path), **keys))
    assert str(raised.value) == says
    assert files_in(frames_of(raised.value)) == {"test_tracebacks.py"}
    assert "LookupError:" not in frames_of(raised.value), "the sentence says it"


@pytest.mark.full(but=["keys0"])
@pytest.mark.parametrize("keys", [{"dataset": f"{HERE}:FailingPairs"}, {"collate": f"{HERE}:fails"}])
def test_what_a_loaders_process_raised_is_told_as_if_it_were_the_worker(tmp_path: Path, keys: dict[str, Any]) -> None:
    said = []
    for processes in (0, 1):
        with pytest.raises(DataError) as raised:
            dp_ray.run(**keys_of(storage=str(tmp_path), loader={"processes": processes}, **keys), overwrite=True)
        said.append(str(raised.value))
        assert files_in(frames_of(raised.value)) == {"test_tracebacks.py"}
    assert said[0] == said[1]


@pytest.mark.parametrize("failing", ["loss", "step"])
def test_what_raised_is_named_on_every_worker_of_a_group(tmp_path: Path, failing: str) -> None:
    keys = keys_of(**{"loss": None, failing: "tests.support.odd:fails"}, workers=2)
    del keys["quiet"]
    with pytest.raises(ProcessExit, match=rf"step 0, shard \d: {failing} raised LookupError: nothing there"):
        run_group(Job.make(keys, "job"), tmp_path)


def test_a_worker_sends_the_users_frames_and_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Failed] = []
    monkeypatch.setattr(group, "send", lambda channel, message, number: told.append(message))

    given: Any = WorkerConfig(None, False)
    with contextlib.suppress(messages.WorkerExit), worker.reported_errors(given, "a", World(1, 2), lambda: False):
        step = worker_step()
        step(nn.Linear(6, 3), (torch.ones(4, 6), torch.ones(4)))
    (failed,) = told
    assert (failed.kind, failed.text.partition(";")[0]) == (ModelError, "loss raised LookupError: nothing there")
    (short,) = error_of(failed).__notes__
    (whole,) = error_of(failed, is_verbose=True).__notes__
    assert files_in(short) == {"test_tracebacks.py"}
    assert files_in(whole) >= {"test_tracebacks.py", "step.py", "worker.py"}


class NoSample(DataError):
    """An error that a user derives from one of ours."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (JobError("oh"), JobError),
        (Error("oh"), Error),
        (NoSample("oh"), DataError),
        (LookupError("oh"), Error),
        (WorkerError("oh"), WorkerError),
    ],
)
def test_a_workers_error_reaches_the_driver_as_the_class_of_ours_that_it_is(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Error]
) -> None:
    told: list[bytes] = []
    monkeypatch.setattr(group, "send", lambda channel, message, number: told.append(pickle.dumps(message)))
    given: Any = WorkerConfig(None, False)
    with contextlib.suppress(messages.WorkerExit), worker.reported_errors(given, "a", World(1, 2), lambda: False):
        raise error
    assert type(error_of(pickle.loads(told[0]))) is kind


def keys_of_job() -> dict[str, Any]:
    keys = keys_of()
    del keys["quiet"]
    return keys


def worker_step() -> Any:
    return build_step(Job.make({**keys_of_job(), "loss": f"{HERE}:fails"}, "job"), World())


def test_an_error_that_python_shows_has_no_frames_but_the_users(tmp_path: Path) -> None:
    """What a script or a notebook shows: its own call, and what raised."""
    with pytest.raises(ModelError) as raised:
        dp_ray.run(**keys_of(storage=str(tmp_path), loss=f"{HERE}:fails"))
    shown: list[str] = []
    trace, cause = raised.value.__traceback__, raised.value.__cause__
    while trace is not None:
        shown.append(Path(trace.tb_frame.f_code.co_filename).name)
        trace = trace.tb_next
    assert shown == ["test_tracebacks.py"]
    assert isinstance(cause, LookupError) and cause.__traceback__ is not None
    assert Path(cause.__traceback__.tb_frame.f_code.co_filename).name == "test_tracebacks.py"
    assert cause.__traceback__.tb_next is None


def test_what_is_no_mistake_in_code_shows_no_frames(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be made") as raised:
        dp_ray.run(**keys_of(storage=str(tmp_path / "file")))
    assert frames_of(raised.value) == ""


def test_a_chain_of_the_users_own_is_shown() -> None:
    def chained() -> None:
        try:
            fails()
        except LookupError as error:
            raise ValueError("second") from error

    try:
        try:
            chained()
        except ValueError as error:
            raise ModelError("model raised ValueError: second") from error
    except ModelError as error:
        text = frames_of(error)
    assert "LookupError: nothing there" in text and "ValueError: second" not in text
    assert "direct cause" in text

"""Args that are Python objects: two jobs whose args differ are two, and the same args made again are the same."""

import dataclasses
import datetime
import decimal
import functools
import json
import math
import operator
import pathlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dp_ray.driver.from_run import check_no_objects
from dp_ray.driver.replay import replay
from dp_ray.errors import JobError
from dp_ray.job.files import differences
from dp_ray.job.job import Job
from dp_ray.replay.replay import StepChoice
from dp_ray.results.compare import differing_keys
from dp_ray.storage import Storage
from tests.support.builders import run_dir_of
from tests.support.cluster import ROOT

LONG = np.arange(5000.0)
CHANGED = np.where(np.arange(5000) == 2500, -1.0, LONG)  # its text is the same, with "..." in the middle


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Config:
    width: int
    scale: Any = None


class Jitter:
    """An object of a plain class: its attributes are all it has."""

    def __init__(self, by: Any) -> None:
        self.by = by


class Sized:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by


def values(**keys: Any) -> dict[str, Any]:
    return {"model": "a:b", "batch_size": 8, **keys}


def nobody(_: object) -> None:
    pass


def double(value: float) -> float:
    return 2 * value


def job(**args: Any) -> Job:
    return Job.make(values(dataset={"target": "tests.support.training:Pairs", "args": args}), "job")


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a long array": (lambda: LONG.copy(), lambda: CHANGED.copy()),
    "a long tensor": (lambda: torch.tensor(LONG), lambda: torch.tensor(CHANGED)),
    "a rate": (lambda: torch.tensor(0.00012345), lambda: torch.tensor(0.00012349)),
    "an array's dtype": (lambda: np.zeros(3, np.int32), lambda: np.zeros(3, np.int64)),
    "a tensor's dtype": (lambda: torch.zeros(3), lambda: torch.zeros(3, dtype=torch.bfloat16)),
    "an array's size": (lambda: np.zeros((2, 3000)), lambda: np.zeros((3000, 2))),
    "an array's number": (lambda: np.float32(0.1), lambda: np.float64(np.float32(0.1))),
    "an array of texts": (lambda: np.array(["a"] * 2000 + ["b"]), lambda: np.array(["a"] * 2001)),
    "an array of objects": (lambda: np.array(["a", None], object), lambda: np.array(["a", 1], object)),
    "an array of records": (lambda: np.array([(1, 2.0)], "i4,f8"), lambda: np.array([(1, 3.0)], "i4,f8")),
    "an array inside": (lambda: {"a": [1, (LONG.copy(),)]}, lambda: {"a": [1, (CHANGED.copy(),)]}),
    "a float": (lambda: 0.1, lambda: math.nextafter(0.1, 1)),
    "an enum": (lambda: Color.RED, lambda: Color.BLUE),
    "a path": (lambda: pathlib.Path("a"), lambda: pathlib.Path("b")),
    "a time": (lambda: datetime.datetime(2026, 1, 1), lambda: datetime.datetime(2026, 1, 1, 0, 0, 0, 1)),
    "a decimal": (lambda: decimal.Decimal("0.1"), lambda: decimal.Decimal("0.10")),
    "a dataclass": (lambda: Config(1, LONG.copy()), lambda: Config(1, CHANGED.copy())),
    "a function": (lambda: double, lambda: operator.neg),
    "a class": (lambda: Config, lambda: Jitter),
    "a partial": (lambda: functools.partial(double, value=1), lambda: functools.partial(double, value=2)),
    "a pattern": (lambda: re.compile("a" * 300 + "b"), lambda: re.compile("a" * 300 + "c")),
    "bytes": (lambda: b"a" * 300 + b"b", lambda: b"a" * 300 + b"c"),
    "a set": (lambda: {"a", "b", "c"}, lambda: {"a", "b", "d"}),
    "a dtype": (lambda: torch.float32, lambda: torch.float16),
    "an object": (lambda: Jitter(0.1), lambda: Jitter(0.2)),
    "an object with an array": (lambda: Jitter([LONG.copy()]), lambda: Jitter([CHANGED.copy()])),
    "a module": (lambda: layer(1), lambda: layer(2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_args_are_two_jobs_and_the_same_args_are_one(name: str) -> None:
    first, other = PAIRS[name]
    prints = [job(value=make()).fingerprint() for make in (first, first, other)]
    assert prints[0] == prints[1] != prints[2]
    assert job(value=first()).is_all_targets
    assert pickle.loads(pickle.dumps(job(value=first()))).fingerprint() == prints[0]


def test_args_change_in_place_after_the_job_is_made_without_a_change_of_its_fingerprint() -> None:
    given = LONG.copy()
    made = job(value=given)
    before = made.fingerprint()
    given -= given.mean()
    assert made.fingerprint() == before != job(value=given).fingerprint()


@pytest.mark.full
@pytest.mark.slow
def test_a_sets_order_does_not_count() -> None:
    code = "from tests.job.test_args import job; print(job(value={'a', 'b', 'c', 'd', 'e'}).fingerprint())"
    prints = set()
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, capture_output=True)
        prints.add(done.stdout)
    assert len(prints) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda value: value,
        lambda: Sized(0.1),
        lambda: np.random.default_rng(0),
        lambda: torch.Generator(),
        lambda: Jitter(lambda value: value),
        lambda: Jitter(0.1).__init__,  # type: ignore[misc]
        lambda: torch.eye(3).to_sparse(),
        lambda: Jitter(itself()),
    ],
)
def test_what_cannot_be_told_resumes_only_with_resume(tmp_path: Path, make: Callable[[], Any]) -> None:
    base = Storage(str(tmp_path))
    run_dir_of(base, job(value=[make()]))
    with pytest.raises(
        JobError, match=r"a run of Python objects \(dataset\.args\.value\.0\); .* resume=True resumes"
    ):
        run_dir_of(base, job(value=[make()]))
    assert run_dir_of(base, job(value=[make()]), resume=True).is_resumed


def test_the_error_names_the_key_and_both_values(tmp_path: Path) -> None:
    base = Storage(str(tmp_path))
    run_dir_of(base, job(samples=LONG, rates={"first": torch.tensor([0.5, 0.25])}))
    assert run_dir_of(base, job(samples=LONG.copy(), rates={"first": torch.tensor([0.5, 0.25])})).is_resumed
    array = r"'\(numpy\) float64 \[5000\] sha256 [0-9a-f]{32}'"
    with pytest.raises(JobError, match=rf"\(dataset\.args\.samples: {array} there, {array} here\)"):
        run_dir_of(base, job(samples=CHANGED, rates={"first": torch.tensor([0.5, 0.25])}))
    said = (
        r"rates\.first: '\(torch\) float32 \[2\]: 0\.5, 0\.25, sha256 .* there, '\(torch\) float32 \[2\]: 0\.5, 0\.1"
    )
    with pytest.raises(JobError, match=said):
        run_dir_of(base, job(samples=LONG, rates={"first": torch.tensor([0.5, 0.125])}))


def test_the_error_of_a_long_list_is_short(tmp_path: Path) -> None:
    base = Storage(str(tmp_path))
    run_dir_of(base, job(values=list(range(1000))))
    with pytest.raises(JobError, match=r"values\.7: 7 there, 8 here; and 992 more\); give") as raised:
        run_dir_of(base, job(values=list(range(1, 1001))))
    assert len(str(raised.value)) < 1000


def test_args_that_hold_themselves_are_an_error() -> None:
    with pytest.raises(JobError, match=r"dataset: .*args\.value\.0: holds itself"):
        job(value=itself())


def test_differences_tell_apart_what_a_job_counts_as_two() -> None:
    assert list(differences({"a": 1, "b": math.nan}, {"a": 1.0, "b": math.nan})) == ["a: 1 there, 1.0 here"]
    long = "x" * 100
    (said,) = differences({"a": long + "1"}, {"a": long + "2"})
    assert said == f"a: ...'{'x' * 20}1' there, ...'{'x' * 20}2' here"


def test_compare_finds_nan_the_same_as_itself() -> None:
    told = {"model": {"args": {"fill": math.nan, "shares": [math.nan]}}}
    runs: Any = [SimpleNamespace(job=told), SimpleNamespace(job=json.loads(json.dumps(told)))]
    assert differing_keys(runs) == {}


IN_FULL = {"a float", "a path", "a time", "a decimal", "a dtype"}


@pytest.mark.parametrize("name", sorted(PAIRS.keys() - IN_FULL))
def test_a_run_whose_args_no_file_holds_is_not_run_again_from_its_file(tmp_path: Path, name: str) -> None:
    """Else the target would be called with the text that stands for the object."""
    given = {**values(task="train", loss="a:d", optimizer="a:e"), "storage": str(tmp_path)}
    made = Job.make({**given, "dataset": {"target": "a:c", "args": {"value": PAIRS[name][0]()}}}, "job")
    run_dir_of(tmp_path, made)
    run = Storage(str(tmp_path / "job"))
    kept = json.loads((tmp_path / "job" / "run.json").read_text())["job"]
    with pytest.raises(JobError, match=r"dataset\.args\.value\S* was given as a Python object"):
        check_no_objects(run, "evaluate", kept, {})
    with pytest.raises(JobError, match=r"dataset\.args\.value\S* was given as a Python object"):
        list(replay(str(run), StepChoice(1), nobody))
    check_no_objects(run, "evaluate", kept, {"dataset": "a:b"})

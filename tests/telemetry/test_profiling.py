"""Traces of single steps: they are what they say they are, and change nothing."""

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import dp_ray
from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.plan.costs import Profiled, profiled_of
from dp_ray.storage import Storage
from dp_ray.telemetry.times import read_step_times
from tests.support.group import run_group
from tests.support.slowness import Slow
from tests.support.training import Pairs

if TYPE_CHECKING:
    from tests.support.s3 import Server

STEPS, LINEARS = 12, 2  # of tests.support.training:mlp


def keys_of(**keys: Any) -> dict[str, Any]:
    given = {
        "task": "train",
        "model": "tests.support.training:mlp",
        "dataset": {"target": "tests.support.training:Pairs", "args": {"length": STEPS * 8}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
    }
    return {**given, "batch_size": 8, **keys}


def ran(folder: Path, name: str, **keys: Any) -> dp_ray.Result:
    return dp_ray.run(**keys_of(workers=0, quiet=True, storage=str(folder), name=name, **keys))


def traced(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, as any reader of JSON sees them."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def steps_in(events: list[dict[str, Any]]) -> list[str]:
    return sorted({event["name"] for event in events if event.get("name", "").startswith("dp_ray step ")})


def num_of(events: list[dict[str, Any]], name: str) -> int:
    return sum(event.get("name") == name and event.get("ph") == "X" for event in events)


@pytest.mark.usefixtures("in_project")
def test_a_trace_has_the_forwards_of_its_steps_and_changes_no_bit(tmp_path: Path) -> None:
    with_trace = ran(tmp_path, "with", profile="3-5")
    without = ran(tmp_path, "without")
    assert with_trace.weights_sha256 == without.weights_sha256
    events = traced(tmp_path / "with" / "profile" / "rank-0.json.gz")
    assert steps_in(events) == ["dp_ray step 3", "dp_ray step 4", "dp_ray step 5"]
    assert num_of(events, "aten::linear") == 3 * LINEARS
    assert num_of(events, "Optimizer.step#SGD.step") == 3
    assert not (tmp_path / "without" / "profile").exists()


@pytest.mark.usefixtures("in_project")
@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_other_tasks_are_traced_too(tmp_path: Path, task: str) -> None:
    ran(tmp_path, task, task=task, profile="0-1:0")
    events = traced(tmp_path / task / "profile" / "rank-0.json.gz")
    assert steps_in(events) == ["dp_ray step 0", "dp_ray step 1"]
    assert num_of(events, "aten::linear") == 2 * LINEARS  # what a prediction asks before its steps is not traced


@pytest.mark.usefixtures("in_project")
@pytest.mark.parametrize("task", ["train", "predict", "evaluate"])
def test_a_run_that_fails_traces_no_more(tmp_path: Path, task: str) -> None:
    data = {"target": "tests.support.bad_data:Broken", "args": {"raises": [5 * 8 + 1]}}
    with pytest.raises(DataError, match="no such image"):
        ran(tmp_path, task, task=task, dataset=data, profile="3-9:0")
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    assert not (tmp_path / task / "profile").exists()


@pytest.mark.full
def test_the_slowest_rank_is_traced(tmp_path: Path) -> None:
    run_group(Job.make(keys_of(workers=2, profile="4-5:slowest"), "job"), tmp_path, Slow(1, 0.02))
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "rank-1.json.gz"
    assert steps_in(traced(trace)) == ["dp_ray step 4", "dp_ray step 5"]


def test_the_steps_that_a_profile_names() -> None:
    assert profiled_of("10-20:3", 30) == Profiled(10, 20, 3)
    assert profiled_of("7") == Profiled(7, 7, 0)
    assert profiled_of("10-20:slowest") == Profiled(10, 20, None)
    assert profiled_of("slowest", 1000) == Profiled(10, 14, None)
    assert profiled_of("slowest", 12) == Profiled(7, 11, None)
    assert profiled_of("slowest", 3) == Profiled(0, 2, None)
    assert [step for step in range(30) if step in Profiled(10, 12, 0)] == [10, 11, 12]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"profile": "20-10"}, "profile: the last step must not be before the first; got '20-10'"),
        ({"profile": "fast"}, "profile: must be STEPS or STEPS:RANK, like 10-20 or 10-20:3, .* got 'fast'"),
        ({"profile": "1-2:1"}, "profile: the job has 1 worker, ranks from 0; got '1-2:1'"),
        ({"profile": "1-2:slowest", "task": "predict"}, "profile: only the workers of a training know"),
        ({"profile": "10-12"}, "profile: the job has 12 steps, numbered from 0 to 11; got '10-12'"),
    ],
)
def test_a_wrong_profile_is_told_before_anything_runs(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says) as raised:
        ran(tmp_path, "run", dataset=Pairs(STEPS * 8), **given)
    assert raised.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_a_profile_does_not_make_another_job() -> None:
    plain, profiling = (Job.make(keys_of(workers=2, **given), "job") for given in ({}, {"profile": "1-2:1"}))
    assert plain.fingerprint() == profiling.fingerprint()


@pytest.mark.full
@pytest.mark.slow
def test_a_trace_and_the_times_go_to_an_object_store(server: "Server", in_project: Path) -> None:
    result = dp_ray.run(**keys_of(workers=0, quiet=True, storage=server.url("traced"), name="run", profile="1"))
    names = {name.rpartition("/")[0].rpartition("/")[2] for name in server.objects("traced")}
    assert {"profile", "times"} <= names
    storage = Storage(server.url("traced")).child("run")
    events = json.loads(gzip.decompress(storage.child("profile").read_bytes("rank-0.json.gz")))["traceEvents"]
    assert steps_in(events) == ["dp_ray step 1"]
    assert read_step_times(storage).num_rows == STEPS
    assert result.time_split is not None

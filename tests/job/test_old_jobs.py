"""Job files of earlier versions mean today what they meant then: the same keys and values, fingerprint and plan.

tests/kept/VERSION/jobs has those of jobs/ and of the pages; jobs.json has what that version made of them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from dp_ray.driver import planning
from dp_ray.driver.planning import plan_job
from dp_ray.errors import JobError
from dp_ray.job.files import differences, load_job
from dp_ray.job.job import Job
from dp_ray.rundir.settled import other_job
from dp_ray.tasks.checkpoints import check_updates
from tests.support import training
from tests.support.cluster import ROOT

DATA = ROOT / "tests" / "kept"
FILES = sorted(DATA.glob("*/jobs/*.yaml"))
# Keys that an earlier version did not have, and what a job without them means today: what it did then.
# But without `on_lost_worker` survivors go on today, on CPUs; the result is the same.
NEW_IN_0_3 = [
    "outputs.ragged: not set there, False here",
    "loop: not set there, None here",
    "pack: not set there, None here",
    "on_lost_worker: not set there, None here",
    "evaluation: not set there, None here",
    "audit: not set there, None here",
    "timeouts.rejoin: not set there, 10 here",
    "blocks: None there, not set here",
    "scatter: 'samples' there, not set here",
    "loader.context: None there, not set here",
]
# What a job file of an earlier version has, and is now answered with what to write.
GONE: dict[str, list[tuple[str, str]]] = {"bad-records-1.yaml": [("on_error", "timeout")]}
NEW: dict[str, list[str]] = {
    "0.2.0": NEW_IN_0_3,
}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")


def made(path: Path) -> dict[str, Any]:
    """What the file's version made of it."""
    found: dict[str, Any] = json.loads((path.parents[1] / "jobs.json").read_text())[path.name]
    return found


def without_what_went(path: Path) -> Job:
    """The job of a file, without the keys that have gone."""
    values = yaml.safe_load(path.read_text())
    for part, name in GONE.get(path.name, []):
        del values[part][name]
    return Job.make(values, path.stem)


@each_file
def test_an_old_job_file_is_the_same_job(path: Path) -> None:
    then, job = made(path), without_what_went(path)
    for part, name in GONE.get(path.name, []):
        with pytest.raises(JobError, match=rf"{part}\.{name}: is no key of a job; here it is "):
            load_job(path)
        del then["job"][part][name]
    described = json.loads(json.dumps(job.describe()))
    assert set(differences(then["job"], described)) == set(NEW[path.parts[-3]])
    assert job.has_fingerprint(then["fingerprint"]), "its runs are resumed"


# What each version made of the job below.
OF_OBJECTS = {
    "0.2.0": (
        "264f97780eebe5d9a307381c6ba6b4c32135a859e4c78d78aa2247ba6827fd23",
        "(torch) float32 []: 0.5, sha256 d99e58435243d9fef9c88273b8d553b4",
    ),
}


@pytest.mark.parametrize("version", OF_OBJECTS)
def test_an_old_run_of_classes_and_functions_is_of_the_same_job(version: str) -> None:
    """That version kept the name of each as a type's, `<module:Class>`."""

    def job_of(lr: float) -> Job:
        keys = {"model": {"target": training.mlp, "args": {"dropout": 0.5}}, "dataset": training.Pairs}
        keys |= {"loss": nn.CrossEntropyLoss, "metrics": {"right": "tests.support.training:right"}}
        keys |= {"optimizer": {"target": torch.optim.SGD, "args": {"lr": torch.tensor(lr)}}}
        return Job.make({"task": "train", "batch_size": 10, **keys}, "job")

    (fingerprint, lr), job = OF_OBJECTS[version], job_of(0.5)
    assert job.has_fingerprint(fingerprint) and not job_of(0.25).has_fingerprint(fingerprint)
    optimizer = {"target": "<torch.optim.sgd:SGD>", "args": {"lr": lr}, "groups": []}
    kept: Any = {"optimizer": optimizer, "scheduler": None}
    assert check_updates("it", kept, job, "start anew") is None
    with pytest.raises(JobError, match=r"optimizer\.args\.lr"):
        check_updates("it", kept, job_of(0.25), "start anew")
    there = {"fingerprint": fingerprint, "job": {**job.describe("0.2"), "optimizer": optimizer}}
    assert other_job(there, job) == ""
    differs = other_job(there, job_of(0.25))
    assert differs.startswith("optimizer.args.lr: ") and ";" not in differs, "the classes are the same"


@pytest.mark.parametrize(
    ("fingerprint", "goes_on"),
    [
        ("cd62d86e77682c01831e9ec2f60713a3a017be53115bea025b01d09757ed544f", True),  # loader.context, too
        ("ead69ecfe078f00b42b765110ad2ba5eac9f4057e3f2e5285f8ecb9689004379", True),  # call: one
        ("311273d7b9854f97b047ce1f37b3359310f5d8d31f02fc086ddd8e5c84636b24", False),  # scatter: batch
    ],
)
def test_an_old_run_with_a_key_that_has_gone_is_of_the_job_without_it(fingerprint: str, goes_on: bool) -> None:
    """As 0.2.0 itself hashed the job with each of these keys."""
    keys = {"task": "train", "model": "a:b", "dataset": "a:c", "batch_size": 8, "loss": "a:l", "optimizer": "a:o"}
    assert Job.make(keys, "job").has_fingerprint(fingerprint) == goes_on
    assert not Job.make({**keys, "seed": 1}, "job").has_fingerprint(fingerprint)


@pytest.mark.slow
@pytest.mark.usefixtures("in_project")
@pytest.mark.parametrize("version", NEW)
def test_old_job_files_have_the_same_plan(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "check_targets", lambda _: None)  # the models of the pages are not here
    planned = 0
    for path in FILES:
        if path.parts[-3] == version and (then := made(path)["plan"]) is not None:
            planned += 1
            now = json.loads(json.dumps(plan_job(without_what_went(path)).to_json()))
            assert {key: now.get(key) for key in then} == then, path.name
    assert planned >= 12, "data of the others are not here"

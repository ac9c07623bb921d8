"""The JSON schema of a job file accepts what `Job` accepts, and tells a wrong key or value."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match

from dp_ray.errors import JobError
from dp_ray.job.files import json_schema
from dp_ray.job.job import Job
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.fresh import loaded_by

GOOD: dict[str, Any] = {"model": "a:b", "dataset": "a:c", "batch_size": 30}
TRAIN = {"task": "train", "loss": "a:l", "optimizer": "a:o", "eval": {"dataset": "a:e"}}
FULL = {
    **GOOD,
    **TRAIN,
    "model_args": {"width": 3},
    "optimizer": {"target": "a:o", "args": {"lr": 0.1}, "groups": [{"match": "bias", "args": {"lr": 0}}]},
    "scheduler": {"target": "a:s", "per": "epoch", "metric": "eval_loss"},
    "metrics": {"f1": "a:m", "other": {"target": "a:m", "args": {"k": None}}},
    "eval": {"dataset": {"target": "a:e"}, "every_steps": 5, "every_epochs": None, "batch_size": 2},
    "checkpoint": {"every_steps": 10, "every_seconds": 1.5, "keep": 1, "best": "eval_loss"},
    "workers": {"min": 1, "max": 8},
    "gpus_per_worker": 0.5,
    "loader": {"processes": 2, "pin_memory": False},
    "timeouts": {"step": None, "capacity": 0.5},
    "resources_per_worker": {"slot": 1},
    "env": {"A": "b"},
    "init_from": "runs/first",
}
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 1.5, "", "auto", "a:b", "fp16", {}, {"target": "a:b"}, {"target": "x"}, {"metric": "m"}),
    *({"min": 1, "max": 2}, {"target": "a:b", "args": {"x": 1}}, {"processes": 1}, {"dataset": "a:b"}, ["cpu"], []),
    *({"step": 1}, {"a": "b"}, {"a": 1}, {"every_steps": 1}, {"every_steps": 0}, {"a": {"target": "a:b"}}),
]
CHECKS = Draft202012Validator(json_schema())


def is_a_job(values: dict[str, Any]) -> bool:
    try:
        Job.make(copy.deepcopy(values), "job")
    except JobError:
        return False
    return True


def test_it_is_a_json_schema() -> None:
    Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_jobs_of_this_project_are_valid(path: Path) -> None:
    job = yaml.safe_load(path.read_text())
    CHECKS.validate(job)
    assert not CHECKS.is_valid({**job, "batch_sise": 30}), "the schema tells a wrong key"


def test_a_job_with_a_value_in_every_part_is_valid() -> None:
    assert is_a_job(FULL)
    CHECKS.validate(FULL)


@pytest.mark.parametrize("key", Job.model_fields)
def test_what_a_job_accepts_is_valid(key: str) -> None:
    for value in VALUES:
        values = {**GOOD, key: value}
        # From Python a list may be a dataset, say; in a file a target is text or a mapping.
        is_object = key in Job.TARGETED and isinstance(value, list)
        assert CHECKS.is_valid(values) or is_object or not is_a_job(values), f"{key}: {value!r} is valid"


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"batchsize": 3}, []),
        ({"split": "auto"}, []),
        ({"batch_size": "30"}, ["batch_size"]),
        ({"batch_size": 0}, ["batch_size"]),
        ({"task": "trian"}, ["task"]),
        ({"precision": "bf8"}, ["precision"]),
        ({"model": "jobs.tutorial"}, ["model"]),
        ({"model": 5}, ["model"]),
        ({"model": {"target": "a:b", "width": 1}}, ["model"]),
        ({"loader": {"num_workers": 2}}, ["loader"]),
        ({"loader": {"prefetch": 0}}, ["loader", "prefetch"]),
        ({"workers": {"min": 1}}, ["workers"]),
        ({"devices": []}, ["devices"]),
        ({"env": {"A": 1}}, ["env", "A"]),
    ],
)
def test_a_wrong_key_or_value_is_told(keys: dict[str, Any], where: list[str]) -> None:
    values = {**GOOD, **keys}
    assert not is_a_job(values)
    error = best_match(CHECKS.iter_errors(values))
    assert error is not None
    assert list(error.absolute_path)[: len(where)] == where


@pytest.mark.parametrize("missing", GOOD)
def test_a_missing_key_is_told(missing: str) -> None:
    with pytest.raises(ValidationError, match=f"'{missing}' is a required property"):
        CHECKS.validate({key: value for key, value in GOOD.items() if key != missing})


def test_every_key_is_described_with_its_default() -> None:
    schema = json_schema()
    of_jobs = schema["properties"]
    assert of_jobs.keys() == Job.model_fields.keys() | {f"{key}_args" for key in Job.TARGETED}
    for part in [schema, *schema["$defs"].values()]:
        for name, key in part["properties"].items():
            assert key["description"], name
    assert of_jobs["shards"]["default"] is None
    assert of_jobs["loader"]["default"]["prefetch"] == 2


def test_the_command_prints_it_or_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert status_of(monkeypatch, "schema") == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    path = tmp_path / "job.schema.json"
    assert status_of(monkeypatch, "schema", "--out", str(path)) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(path.read_text()) == json_schema()
    assert status_of(monkeypatch, "schema", "--out", str(tmp_path / "none" / "x.json")) == 2


def test_it_needs_neither_torch_nor_ray() -> None:
    code = "from dp_ray.cli.main import cli\ncli(['schema'], standalone_mode=False)"
    assert not {"torch", "ray", "pyarrow"} & loaded_by(code)

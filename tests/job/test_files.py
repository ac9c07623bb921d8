"""The job file: YAML, settings laid over it, keywords from Python."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dp_ray.errors import JobError
from dp_ray.job.files import job_from, load_job, parse_setting, parse_workers
from dp_ray.job.job import Job
from dp_ray.job.keys import Target

GOOD: dict[str, Any] = {"model": "jobs.tutorial:Model", "dataset": "jobs.tutorial:RandomDataset", "batch_size": 30}


def write(folder: Path, values: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def test_a_job_file_is_read_with_settings_laid_over_it(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "loader": {"processes": 1}})
    overrides = {"loader.prefetch": 4, "model.args.width": 64, "workers": 2, "env.A": "b"}
    job = load_job(path, overrides)
    assert job.run_name == "job"
    assert (job.loader.processes, job.loader.prefetch) == (1, 4)
    assert job.model == Target(target="jobs.tutorial:Model", args={"width": 64})
    assert job.env == {"A": "b"}


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "is not YAML"), ("- 1", "must hold keys and values"), ("", "must hold keys and values")],
)
def test_a_file_that_is_no_job_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(JobError, match=says) as caught:
        load_job(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        load_job(tmp_path / "none.yaml")


def test_a_setting_below_a_plain_value_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(JobError, match="batch_size is 30, which has no keys"):
        load_job(path, {"batch_size.x": 1})


@pytest.mark.parametrize(("text", "value"), [("4", 4), ("0", 0), ("1:8", {"min": 1, "max": 8})])
def test_workers_are_a_number_or_a_range(text: str, value: Any) -> None:
    assert parse_workers(text) == value


@pytest.mark.parametrize("text", ["", "x", "1:", "-1", "1:2:3", "1.5"])
def test_other_workers_are_an_error(text: str) -> None:
    with pytest.raises(JobError, match=r"must be N, like 4 .* or MIN:MAX"):
        parse_workers(text)


@pytest.mark.parametrize(
    ("text", "setting"),
    [("a.b=c", ("a.b", "c")), ("a=[1, 2]", ("a", [1, 2])), ("a=", ("a", None)), ("a=b=c", ("a", "b=c"))],
)
def test_a_setting_is_a_key_and_a_yaml_value(text: str, setting: tuple[str, Any]) -> None:
    assert parse_setting(text) == setting


@pytest.mark.parametrize("text", ["a", "=1", "a=[1"])
def test_other_settings_are_an_error(text: str) -> None:
    with pytest.raises(JobError, match="--set"):
        parse_setting(text)


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {target: 'a:b', args: {lr: 1e-3, eps: -2E+4, name: 1e, half: .5e1}}\ndataset: a:b\nbatch_size: 2"
    )
    assert load_job(path).model.args == {"lr": 0.001, "eps": -20000.0, "name": "1e", "half": 5.0}
    assert parse_setting("optimizer.args.lr=3e-4") == ("optimizer.args.lr", 0.0003)


@pytest.mark.parametrize("text", ["1e5abc", "3e-run", "1e-2)", "1e3-4", "1e3.5"])
def test_text_that_begins_like_a_number_is_text(text: str) -> None:
    assert parse_setting(f"model.args.tag={text}") == ("model.args.tag", text)


def test_a_key_given_twice_is_told(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: a:b\ndataset: a:b\nbatch_size: 2\nmodel: c:d")
    with pytest.raises(JobError, match=r"'model' is given twice.*line 4"):
        load_job(path)


@pytest.mark.parametrize("keys", [{}, {"batch_size": 7}])
def test_a_job_without_a_name_is_named_by_its_time(keys: dict[str, Any]) -> None:
    nameless = Job.model_validate(GOOD)
    job = job_from(nameless, keys)
    assert job.run_name.startswith("run-20")
    assert dict(job) == {**dict(nameless), **keys, "name": job.run_name}
    assert job_from(Job.make(GOOD, "mine"), keys).run_name == "mine"

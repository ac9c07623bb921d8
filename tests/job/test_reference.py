"""docs/job-file.md holds the reference of the job file, as it is made from the model."""

import re
import runpy
from collections.abc import Callable

import pytest
import yaml

from dp_ray.job.job import Job
from dp_ray.job.keys import CheckpointKeys, Loader
from tests.support.cluster import ROOT

PAGE = (ROOT / "docs" / "job-file.md").read_text()
updated: Callable[[str], str] = runpy.run_path(str(ROOT / "docs" / "reference.py"))["updated"]


def rows() -> dict[str, list[str]]:
    """The cells of each row of the table, by its key."""
    found = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    return {key.strip("`"): cells for key, *cells in found}


def test_the_reference_is_up_to_date() -> None:
    assert updated(PAGE) == PAGE, "docs/job-file.md is not what the model says: run `make docs`"


def test_a_table_that_is_out_of_date_is_written_anew() -> None:
    assert updated(PAGE.replace("| `seed` |", "| `sed` |")) == PAGE
    with pytest.raises(AssertionError, match="no markers"):
        updated("# The job file\n")


def test_every_key_has_its_row_and_its_description() -> None:
    assert [key for key in rows() if "." not in key] == list(Job.model_fields)
    for name, field in Job.model_fields.items():
        assert field.description is not None
        assert rows()[name][-1] == " ".join(field.description.split())
    assert [key for key in rows() if key.startswith("loader.")] == [f"loader.{name}" for name in Loader.model_fields]


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("batch_size", ["a whole number from 1 up", "required"]),
        ("workers", ["a whole number from 0 up, a mapping", "`1`"]),
        ("task", ["`predict`, `evaluate`, `train`", "`predict`"]),
        ("model", ["a target", "required"]),
        ("metrics", ["targets by name", "`{}`"]),
        ("optimizer.groups[].match", ["text", "required"]),
        ("checkpoint.every_seconds", ["`auto`, a number from 0 up, `null`", "`auto`"]),
        ("checkpoint.best.mode", ["`min`, `max`", "`min`"]),
        ("timeouts.capacity", ["a number above 0, `null`", "`600`"]),
        ("devices", ["a list of text, `null`", "`null`"]),
    ],
)
def test_values_and_defaults(key: str, cells: list[str]) -> None:
    assert rows()[key][:2] == cells


def test_the_defaults_are_those_of_a_job() -> None:
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 1}, "job").model_dump(mode="json")
    parts = {
        f"{part}.{key}": value for part in ("loader", "checkpoint", "timeouts") for key, value in job[part].items()
    }
    for key, value in {**job, **parts, "name": None}.items():
        default = rows()[key][1]
        assert default in ("required", "") or yaml.safe_load(default.strip("`")) == value, key


def test_the_job_of_the_page_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    job = Job.make(yaml.safe_load(text), "train")
    assert job.checkpoint == CheckpointKeys.model_validate({"best": {"metric": "eval_loss"}})

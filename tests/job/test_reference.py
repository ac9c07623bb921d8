"""docs/job-file.md and docs/errors.md hold what the code says: the keys of a job, and the errors."""

import re
import runpy
from typing import Any

import pytest
import yaml

from dp_ray import errors
from dp_ray.job.job import Job
from dp_ray.job.keys import CheckpointKeys, Loader
from tests.support.cluster import ROOT

PAGE = (ROOT / "docs" / "job-file.md").read_text()
written: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "reference.py"))
KEY = re.compile(r'^\| <a id="([\w.]+)"></a>`([\w.\[\]]+)` \| (.*) \|$', re.M)


def rows() -> dict[str, list[str]]:
    """The cells of each row of the tables, by its key."""
    return {key: cells.split(" | ") for _, key, cells in KEY.findall(PAGE)}


@pytest.mark.parametrize("name", written["PAGES"])
def test_what_is_written_from_the_code_is_up_to_date(name: str) -> None:
    source, write = written["PAGES"][name]
    page = (ROOT / "docs" / name).read_text()
    assert written["updated"](page, source, write) == page, f"docs/{name} is not what {source} says: run `make docs`"


def test_a_table_that_is_out_of_date_is_written_anew() -> None:
    source, write = written["PAGES"]["job-file.md"]
    assert written["updated"](PAGE.replace("`seed`", "`sed`"), source, write) == PAGE
    with pytest.raises(AssertionError, match="no markers"):
        written["updated"]("# The job file\n", source, write)


def test_every_key_has_its_row_once_and_its_description() -> None:
    keys = [key for _, key, _ in KEY.findall(PAGE)]
    assert len(keys) == len(set(keys))
    assert {key for key in keys if "." not in key} == Job.model_fields.keys()
    for name, field in Job.model_fields.items():
        assert field.description is not None
        meaning = re.sub(r" \[[^\]]+\]\([^)]+\)$", "", rows()[name][-1])
        assert meaning == " ".join(field.description.split())


def test_every_key_has_an_anchor_of_its_own() -> None:
    headings = {re.sub(r"\W", "-", line).lower() for line in re.findall(r"^#+ (.*)$", PAGE, re.M)}
    assert all(anchor == key.replace("[]", "") for anchor, key, _ in KEY.findall(PAGE))
    assert not headings & {anchor for anchor, _, _ in KEY.findall(PAGE)}


def test_the_first_table_has_ten_keys_with_which_a_job_trains() -> None:
    (_, ten, *_) = PAGE.split("\n### ")
    keys = [key for _, key, _ in KEY.findall(ten)]
    assert len(keys) == 10
    given = {
        "model": "a:b",
        "dataset": "a:c",
        "optimizer": "a:d",
        "loss": "a:e",
        "eval": {"dataset": "a:c"},
        "task": "train",
    }
    assert given.keys() <= set(keys)
    assert Job.make({**given, "batch_size": 1}, "job").task == "train"


def test_every_error_has_its_part_and_its_exit_status() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    kinds = {name: kind for name, kind in vars(errors).items() if re.search(r"Error$|Lost$|Interrupted$", name)}
    assert parts.keys() == kinds.keys()
    for name, kind in kinds.items():
        assert f"Exit status {kind.exit_status}" in parts[name]
        assert "What to do: " in parts[name] or name == "Error"

    assert [key for key in rows() if key.startswith("loader.")] == [f"loader.{name}" for name in Loader.model_fields]


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("batch_size", ["a whole number from 1 up", "required"]),
        ("workers", ["a whole number from 0 up, a mapping", "`1`"]),
        ("task", ["`predict`, `evaluate`, `train`", "`predict`"]),
        ("model", ["a target", "required"]),
        ("metrics", ["targets by name", "`{}`"]),
        ("optimizer", ["a target, a list of targets, `null`", "`null`"]),
        ("optimizer.groups[].match", ["text", "required"]),
        ("optimizer[].match", ["text, `null`", "`null`"]),
        ("checkpoint.every_seconds", ["`auto`, a number from 0 up, `null`", "`auto`"]),
        ("checkpoint.best.mode", ["`min`, `max`", "`min`"]),
        ("timeouts.rejoin", ["a number from 3 up", "`10`"]),
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

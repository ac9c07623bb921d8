"""A key that gets a new name is taken under its old one, with a warning, until a version that the table names."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import dp_ray
from dp_ray.errors import JobError
from dp_ray.job import old_keys
from dp_ray.job.files import job_maker, load_job
from dp_ray.job.job import Job
from dp_ray.job.old_keys import OLD_KEYS, OldKey, OldKeyWarning, has, key_moved, of_a_run
from tests.support import forked
from tests.support.cluster import ROOT

# As a later version might have them: at the top, in a mapping, from one mapping into another, a whole mapping.
TAKEN = (
    OldKey("rounds", "epochs", since="98.1.0", gone="98.2.0"),
    OldKey("checkpoint.steps", "checkpoint.every_steps", since="98.1.0", gone="98.2.0"),
    OldKey("loader.spare", "timeouts.capacity", since="98.1.0", gone="98.2.0"),
    OldKey("load", "loader", since="98.1.0", gone="98.2.0"),
)
GONE = OldKey("laps", "epochs", since="0.1.0", gone="0.2.0")
JOB: dict[str, Any] = {
    "model": {"target": "jobs.tutorial:Model", "args": {"input_size": 5, "output_size": 2}},
    "dataset": {"target": "jobs.tutorial:RandomDataset", "args": {"size": 5, "length": 100}},
    "batch_size": 30,
}
SAYS = "write {}, its name since version 98.1.0; from 98.2.0 on the old one is an error"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_keys, "OLD_KEYS", (*TAKEN, GONE, *OLD_KEYS))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rounds": 3}, {"epochs": 3}),
        ({"checkpoint": {"steps": 7, "keep": 2}}, {"checkpoint": {"every_steps": 7, "keep": 2}}),
        ({"loader": {"spare": 9}}, {"timeouts": {"capacity": 9}}),
        ({"loader": {"spare": 9, "prefetch": 3}, "timeouts": {"step": 4}},
         {"loader": {"prefetch": 3}, "timeouts": {"step": 4, "capacity": 9}}),
        ({"load": {"prefetch": 3}}, {"loader": {"prefetch": 3}}),
    ],
)  # fmt: skip
def test_a_job_with_old_names_is_that_with_the_new_ones_and_warns(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any]
) -> None:
    kept = json.dumps(old)
    with pytest.warns(OldKeyWarning) as told:
        made = Job.make({**JOB, **old}, "job")
    assert made == Job.make({**JOB, **new}, "job")
    assert json.dumps(old) == kept, "the caller's mapping is left alone"
    (line,) = {str(warning.message) for warning in told}
    (key,) = [old_key for old_key in TAKEN if line.startswith(f"{old_key.name}: ")]
    assert line == f"{key.name}: {SAYS.format(key.new)}"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, **old}))
    with pytest.warns(OldKeyWarning) as told:
        assert load_job(tmp_path / "job.yaml") == made
    assert len(told) == 1


@pytest.mark.usefixtures("table")
def test_settings_have_old_names_too_and_go_over_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**JOB, "rounds": 3, "load": {"prefetch": 2}}))
    with pytest.warns(OldKeyWarning) as told:
        make = job_maker(path)
    assert len(told) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make({}).epochs == 3, "a sweep's trials do not warn of the file again"
        assert make({"epochs": 5, "loader.prefetch": 4}).loader.prefetch == 4
    with pytest.warns(OldKeyWarning, match=r"^rounds: "):
        assert make({"rounds": 4}).epochs == 4
    with pytest.warns(OldKeyWarning, match=r"^load: "):
        assert make({"load.prefetch": 5}).loader.prefetch == 5


@pytest.mark.usefixtures("table")
@pytest.mark.filterwarnings("ignore::dp_ray.job.old_keys.OldKeyWarning")
def test_both_names_at_once_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"^rounds: is the old name of epochs, which is set too; leave rounds out$"):
        Job.make({**JOB, "rounds": 3, "epochs": 3}, "job")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**JOB, "checkpoint": {"steps": 3, "every_steps": 3}}))
    with pytest.raises(JobError, match=rf"^{re.escape(str(path))}: checkpoint\.steps: is the old name of"):
        load_job(path)


@pytest.mark.usefixtures("table")
def test_a_name_that_is_gone_is_an_error_and_read_in_the_jobs_of_old_runs() -> None:
    with pytest.raises(JobError, match=r"^laps: is no key of a job"):
        Job.make({**JOB, "laps": 3}, "job")
    assert of_a_run({"laps": 3, "load": {"prefetch": 1}}) == {"epochs": 3, "loader": {"prefetch": 1}}


@pytest.mark.parametrize("key", OLD_KEYS, ids=lambda key: key.name)
def test_a_real_old_name_leads_to_a_key_and_was_taken_for_a_minor_version(key: OldKey) -> None:
    assert has(dp_ray.Job.make(JOB, "job").describe(), key.new)
    since, gone = ([int(part) for part in version.split(".")] for version in (key.since, key.gone))
    promised = since >= [0, 3, 0]  # nothing was before
    assert not promised or gone >= [since[0], since[1] + 1, 0]
    if not key.is_taken:
        with pytest.raises(
            JobError, match=rf"here it is {re.escape(key.new)}: the new name of {re.escape(key.name)}"
        ):
            Job.make(key_moved({**JOB, "new": 3}, "new", key.name), "job")


names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map(".".join)


@given(st.dictionaries(names, st.integers(), max_size=5), names, names)
def test_a_moved_key_is_that_of_flat_keys(flat: dict[str, int], old: str, new: str) -> None:
    """Of keys none of which lies within another."""
    keys = {**flat, old: 0}
    every = [*keys, new]
    if old == new or any(f"{key}.".startswith(f"{other}.") for key in every for other in every if key != other):
        return
    nested: dict[str, Any] = {}
    for name, value in keys.items():
        *parents, last = name.split(".")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    kept = json.dumps(nested)
    expected = {(new if name == old else name): value for name, value in keys.items() if name != new}
    assert dict(flattened(key_moved(nested, old, new))) == expected
    assert json.dumps(nested) == kept


def flattened(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def program_with_the_table(*arguments: str) -> None:
    """Be `dp-ray` of a version that has renamed keys."""
    old_keys.OLD_KEYS = (*TAKEN, *OLD_KEYS)
    forked.dp_ray_program(*arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("in_project")
def test_the_program_runs_the_job_and_says_one_line(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({**JOB, "rounds": 1, "checkpoint": {"steps": 3}}))
    done = forked.ended(program_with_the_table, "run", str(job), "--workers", "0", "--storage", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "98" in line and line.startswith("warning: ")]
    assert lines == [f"warning: {key.name}: {SAYS.format(key.new)}" for key in TAKEN[:2]]
    assert dp_ray.load(tmp_path / "job").rows == 100


def test_the_page_of_versions_has_the_table() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    assert all(f"| `{key.name}` | `{key.new}` | {key.since} | {key.gone} |" in page for key in OLD_KEYS)

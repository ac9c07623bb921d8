"""Job files of earlier versions mean today what they meant then: the same keys and values, fingerprint and plan.

tests/kept/VERSION/jobs has those of jobs/ and of the pages; jobs.json has what that version made of them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dp_ray.driver import planning
from dp_ray.driver.planning import plan_job
from dp_ray.job.files import differences, load_job
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
    "timeouts.rejoin: not set there, 10 here",
]
NEW: dict[str, list[str]] = {
    "90f781f": ["strict: not set there, True here", "bucket_cap_mb: not set there, None here", *NEW_IN_0_3],
    "0.2.0": NEW_IN_0_3,
}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")


def made(path: Path) -> dict[str, Any]:
    """What the file's version made of it."""
    found: dict[str, Any] = json.loads((path.parents[1] / "jobs.json").read_text())[path.name]
    return found


@each_file
def test_an_old_job_file_is_the_same_job(path: Path) -> None:
    then, job = made(path), load_job(path)
    described = json.loads(json.dumps(job.describe()))
    assert set(differences(then["job"], described)) == set(NEW[path.parts[-3]])
    assert job.has_fingerprint(then["fingerprint"]), "its runs are resumed"


@pytest.mark.slow
@pytest.mark.usefixtures("in_project")
@pytest.mark.parametrize("version", NEW)
def test_old_job_files_have_the_same_plan(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "check_targets", lambda _: None)  # the models of the pages are not here
    planned = 0
    for path in FILES:
        if path.parts[-3] == version and (then := made(path)["plan"]) is not None:
            planned += 1
            now = json.loads(json.dumps(plan_job(load_job(path)).to_json()))
            assert {key: now.get(key) for key in then} == then, path.name
    assert planned >= 12, "data of the others are not here"

"""What a run keeps of its code and command: the commit, changed files, no secrets."""

import subprocess
import threading
import time
from pathlib import Path

import pytest

from dp_ray.rundir.files import ABOUT_JSON, command_of, recorded_about
from dp_ray.storage import Storage
from dp_ray.system.process import git_state


def git(*arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_what_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert git_state() is None
    git("init", "-q", "-b", "here")
    for name in ("a b.py", "c.py", "d.py"):
        (tmp_path / name).write_text("1\n" * 20)
    git("add", ".")
    git("commit", "-qm", "first")
    clean = git_state()
    assert clean == {"commit": git("rev-parse", "HEAD"), "branch": "here", "changed": [], "num_changed": 0}
    (tmp_path / "a b.py").write_text("2")
    git("mv", "c.py", "e.py")
    (tmp_path / "new.py").write_text("not known to git")
    dirty = git_state()
    assert dirty is not None and sorted(dirty["changed"]) == ["a b.py", "e.py"] and dirty["num_changed"] == 2


def test_a_command_is_kept_without_secrets() -> None:
    given = ["/usr/bin/python3", "/venv/bin/dp-ray", "run", "my job.yaml", "--set", "env.TOKEN=abc"]
    told = command_of([*given, "--storage", "s3://KEY:SECRET@bucket/runs"])
    assert told == "dp-ray run 'my job.yaml' --set 'env.TOKEN=(not shown)' --storage s3://bucket/runs"
    assert command_of(["/usr/bin/python3", "-m", "dp_ray", "run", "a.yaml"]) == "python3 -m dp_ray run a.yaml"
    assert command_of(["python", "-c", "import dp_ray"]) == "python -c 'import dp_ray'"


@pytest.mark.parametrize("is_forked", [True, False])
def test_nothing_that_may_fork_runs_while_git_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_forked: bool
) -> None:
    """A forked loader would hold git's pipes open, and git's answer would wait for the loader's end."""
    asked = threading.Event()

    def slow() -> None:
        time.sleep(0.2)
        asked.set()

    monkeypatch.setattr("dp_ray.rundir.files.git_state", slow)
    with recorded_about(Storage(str(tmp_path)), "plan", is_forked):
        assert asked.is_set() == is_forked
    (driver,) = ABOUT_JSON.read(Storage(str(tmp_path))).drivers
    assert (driver["git"], driver["plan"]) == (None, "plan")

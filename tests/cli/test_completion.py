"""Tab behind `dp-ray`, in the shells themselves."""

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from dp_ray.cli import main
from dp_ray.cli.completion import RUNS, VARIABLE
from dp_ray.job.job import Job
from dp_ray.rundir.files import RUN
from tests.support.cli import status_of
from tests.support.cluster import ROOT
from tests.support.fresh import loaded_by

SECONDS = 120  # the machine may be busy
CASES = [  # what is typed, and what Tab makes of it or shows
    ("init --template ta", "table"),
    ("run ot", "other.yaml"),
    ("verify jo", "jobs/"),
    ("sweep jobs/", "jobs/inner.json"),
    ("report ru", "runs/first"),
    ("compare runs/first elsewhere/s", "elsewhere/second"),
    ("stop elsewhere/s", "elsewhere/second"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with job files, and with runs in two places."""
    for run in ("runs/first", "elsewhere/second"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / RUN).write_text("{}")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "jobs").mkdir()
    for name in ("other.yaml", "other.py", "other\udcff.yaml", "jobs/inner.json"):
        (tmp_path / name).write_text("")
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    """As in an activated environment, in which `dp-ray` is that of these sources."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(home), "TERM": "dumb", "PS1": "$ "}


@contextmanager
def typing_into(shell: list[str], folder: Path) -> Iterator[Callable[[str, str], str]]:
    """A function that types into an interactive shell, waits until it shows a text, and returns what it has shown."""
    ours, theirs = pty.openpty()
    where = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "cwd": folder, "env": environment(folder)}
    with subprocess.Popen(shell, start_new_session=True, **where) as process:  # type: ignore[call-overload]
        os.close(theirs)

        def typed(text: str, awaited: str) -> str:
            os.write(ours, text.encode())
            shown, until = "", time.monotonic() + SECONDS
            while awaited not in shown:
                assert wait([ours], max(0, until - time.monotonic())), f"{awaited!r}: got {shown!r}"
                shown += re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\x07", "", os.read(ours, 4096).decode())
            return shown

        try:
            yield typed
        finally:
            process.kill()
            os.close(ours)


def try_all(typed: Callable[[str, str], str]) -> None:
    for text, whole in CASES:
        shown = typed(f"dp-ray {text}\t", whole)
        assert "notes" not in shown and "other.py " not in shown
        typed("\x15echo done-$((40 + 2))\r", "done-42")  # ^U removes the line


@pytest.mark.full
@pytest.mark.slow
def test_bash(folder: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    with typing_into(["bash", "--norc", "--noprofile", "-i"], folder) as typed:
        typed('eval "$(dp-ray completion bash)"; echo ready-$((40 + 2))\r', "ready-42")
        try_all(typed)


@pytest.mark.slow
def test_zsh(folder: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    with typing_into(["zsh", "-f", "-i"], folder) as typed:
        typed("autoload -U compinit; compinit -D -u; echo ready-$((40 + 1))\r", "ready-41")
        typed('eval "$(dp-ray completion zsh)"; echo ready-$((40 + 2))\r', "ready-42")
        try_all(typed)


@pytest.mark.slow
def test_fish(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    lines = ["dp-ray completion fish | source", *(f"complete -C 'dp-ray {text}'; echo ===" for text, _ in CASES)]
    asked = ["fish", "--no-config", "-c", "\n".join(lines)]
    done = subprocess.run(asked, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=SECONDS)
    offered = done.stdout.split("===\n")[:-1]
    assert done.returncode == 0 and len(offered) == len(CASES), done.stderr
    for (_, whole), lines_of_one in zip(CASES, offered, strict=True):
        assert whole in [line.partition("\t")[0] for line in lines_of_one.splitlines()]
        assert "notes" not in lines_of_one and "other.py" not in lines_of_one


def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What the program tells a shell that asks for the last of these words."""
    given = {VARIABLE: "bash_complete", "COMP_WORDS": " ".join(["dp-ray", *words]), "COMP_CWORD": str(len(words))}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert status_of(monkeypatch) == 0
    for name in given:
        monkeypatch.delenv(name)
    return [line.removeprefix("plain,") for line in capsys.readouterr().out.split() if line.startswith("plain,")]


def test_the_newest_run_comes_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for number in (3, 1, 2):
        (folder / RUNS / f"run-{number}").mkdir()
        (folder / RUNS / f"run-{number}" / RUN).write_text("{}")
        os.utime(folder / RUNS / f"run-{number}" / RUN, (0, 10**10 + number))
    runs = [f"{RUNS}/run-3", f"{RUNS}/run-2", f"{RUNS}/run-1"]
    assert offered(monkeypatch, capsys, "report", "runs/r") == runs
    assert offered(monkeypatch, capsys, "evaluate", "run") == [*runs, f"{RUNS}/first"]


@pytest.mark.parametrize("text", ["s3://bucket/ru", "nowhere/", "other.yaml/", "\udcff"])
def test_what_cannot_be_looked_into_offers_nothing(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for command in ("run", "report", "list"):
        assert offered(monkeypatch, capsys, command, text) == []


def test_runs_are_looked_for_where_jobs_keep_them() -> None:
    assert Job.model_fields["storage"].default == RUNS


@pytest.mark.full(but=["dp-ray run o-other.yaml"])
@pytest.mark.parametrize(("words", "given"), [("dp-ray report r", "runs/first"), ("dp-ray run o", "other.yaml")])
def test_it_imports_neither_torch_nor_ray(words: str, given: str, folder: Path, tmp_path: Path) -> None:
    asked = {VARIABLE: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
    code = f"import os, sys\nos.chdir({str(folder)!r}); os.environ.update({asked!r})\nfrom dp_ray.cli import main\n"
    code += "try:\n    main.main()\nexcept SystemExit as leaving:\n    assert not leaving.code\n"
    loaded = loaded_by(code)
    assert f"plain,{given}" in loaded or f"plain,{given.partition('.')[0]}" in loaded  # it has printed this
    assert not {"torch", "ray", "pyarrow", "numpy"} & loaded


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_asks_by_the_name_that_the_program_answers_to(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "completion", shell) == 0
    assert f"{VARIABLE}={shell}_complete" in capsys.readouterr().out


def test_every_argument_that_is_a_run_or_a_job_is_completed() -> None:
    named = {"run_dir", "run_dirs", "run", "job_file", "job_files", "storage"}
    found = [
        parameter for command in main.cli.commands.values() for parameter in command.params if parameter.name in named
    ]
    assert {one.name for one in found} == named
    for one in found:
        is_on_cluster = getattr(one, "help", None) == "Folder or URL of the run directories, as the cluster sees it."
        assert is_on_cluster or one._custom_shell_complete is not None, one.name

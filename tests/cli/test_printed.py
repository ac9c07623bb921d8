"""What a command prints is used as it stands: a user copies the run, the command or the URL that a line names."""

import re
import shlex
from pathlib import Path

import pytest

import dp_ray
from dp_ray.errors import JobError, StorageError
from tests.support.cli import status_of
from tests.support.trainings import short_training

OF_A_RUN = {
    "evaluate": ["evaluate"],
    "predict": ["predict"],
    "retry": ["retry"],
    "replay": ["replay", "--step", "0"],
    "track": ["track"],
    "report": ["report"],
    "report-html": ["report", "--html"],
    "compare": ["compare", "runs/another"],
    "stop": ["stop"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dp_ray.Result:
    return short_training(tmp_path_factory.mktemp("my work") / "runs", "another", epochs=1)


def used(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run all commands that a line names; which they are."""
    found = re.findall(r"dp-ray (\w+ (?:'[^']*'|[^\s,;)`]+))", line)
    for command in found:
        assert status_of(monkeypatch, *shlex.split(command)) == 0, command
    return [command.split()[0] for command in found]


@pytest.mark.parametrize("command", OF_A_RUN)
def test_a_run_that_is_not_there_has_those_named_that_are(
    command: str, run: dp_ray.Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Be it misspelt, the folder of the runs, or a name alone; what is named is taken."""
    monkeypatch.chdir(Path(run.run_dir).parents[1])
    name, *more = OF_A_RUN[command]
    for wrong in ("runs/nobody", "runs", "nobody"):
        assert status_of(monkeypatch, name, wrong, *more) != 0
        told = capsys.readouterr().err.splitlines()[-1]
        _, mark, there = told.partition("; the runs there: ")
        assert mark, told
        assert shlex.split(there) == ["runs/another"]
        assert Path(*shlex.split(there), "run.json").exists()


def test_where_no_run_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(monkeypatch, "report", "nobody") != 0
    assert capsys.readouterr().err == (
        "error: nobody: holds no result.json: not a run directory (if a cluster ran it, `dp-ray fetch nobody . "
        "--address http://HEAD:8265` brings it here)\n"
    )


def test_the_newest_run_is_named_first_and_of_many_only_some(
    tmp_path: Path, run: dp_ray.Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(10):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "run.json").write_bytes(Path(run.run_dir, "run.json").read_bytes())
    assert status_of(monkeypatch, "evaluate", "run-10") == 2
    shown = ", ".join(f"run-{number}" for number in range(9, 1, -1))
    assert capsys.readouterr().err.endswith(f"the runs there: {shown}, ... (10 in all)\n")


def test_the_commands_that_a_line_names_take_a_path_with_spaces(
    run: dp_ray.Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StorageError, match="has no merged outputs") as no_outputs:
        run.outputs()
    assert used(str(no_outputs.value), monkeypatch) == ["predict"]
    with pytest.raises(JobError, match="holds this run, finished") as finished:
        short_training(Path(run.run_dir).parent, "another", epochs=1)
    assert used(str(finished.value), monkeypatch) == ["evaluate", "predict"]


def test_a_run_without_a_result_names_the_command_that_shows_it(
    tmp_path: Path, run: dp_ray.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / "my run"
    unfinished.mkdir()
    (unfinished / "run.json").write_bytes(Path(run.run_dir, "run.json").read_bytes())
    with pytest.raises(StorageError, match="the run has not finished") as going:
        dp_ray.load(unfinished)
    assert used(str(going.value), monkeypatch) == ["report"]

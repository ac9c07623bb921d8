"""The job's `env` is set wherever the user's code runs, and nowhere else; its values are not shown."""

import gc
import importlib
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dp_ray
from dp_ray.cli.main import cli
from dp_ray.system.imports import collector_paused, end_imports, prepare_imports
from dp_ray.system.process import environment, importing_from_here, is_env, without_values
from tests.support import models

pytestmark = pytest.mark.usefixtures("in_project")


class Needs(models.Rows):
    """Nine rows, if the environment says so."""

    def __init__(self) -> None:
        super().__init__(int(os.environ["DP_RAY_ROWS"]))


JOB: dict[str, Any] = {
    "model": "tests.support.models:Doubler",
    "dataset": "tests.system.test_environment:Needs",
    "batch_size": 4,
    "env": {"DP_RAY_ROWS": "9"},
}


def test_the_driver_builds_the_dataset_with_it(tmp_path: Path) -> None:
    assert dp_ray.run(**JOB, workers=0, storage=str(tmp_path), quiet=True).rows == 9
    assert "DP_RAY_ROWS" not in os.environ


def test_so_does_a_plan(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(repr(JOB))
    done = CliRunner().invoke(cli, ["plan", str(tmp_path / "job.yaml"), "--json"], standalone_mode=False)
    assert done.exception is None and '"rows": 9' in done.output
    assert "DP_RAY_ROWS" not in os.environ


def test_what_was_set_before_is_set_again_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        assert (os.environ["DP_RAY_A"], os.environ["DP_RAY_B"]) == ("a", "b")
        raise ValueError("oh")

    monkeypatch.setenv("DP_RAY_A", "before")
    with pytest.raises(ValueError, match="oh"), environment({"DP_RAY_A": "a", "DP_RAY_B": "b"}):
        fail()
    assert os.environ["DP_RAY_A"] == "before"
    assert "DP_RAY_B" not in os.environ


def test_a_command_line_is_shown_without_the_values() -> None:
    line = "dp-ray run a.yaml --set env.A=hush --set=env.B='hush hush' --set env='{C: hush}' --set seed=3"
    shown = shlex.join(without_values(shlex.split(line)))
    assert "hush" not in shown
    assert "env.A=" in shown and "env.B=" in shown and "seed=3" in shown
    assert is_env("env.A=b") and is_env("env={}")
    assert not is_env("environment=3") and not is_env("model.args.env=3")


@pytest.mark.full
def test_the_collector_rests_while_large_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DP_RAY_IMPORTS", raising=False)
    frozen = gc.get_freeze_count()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen
    gc.unfreeze()
    frozen = gc.get_freeze_count()
    try:
        prepare_imports({"DP_RAY_IMPORTS": "1"})
        assert (gc.isenabled(), os.environ.pop("DP_RAY_IMPORTS")) == (False, "1")
    finally:
        end_imports()
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen
    gc.unfreeze()


def test_modules_are_found_where_the_current_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is for a worker whose code a further node of Ray on its machine has unpacked anew."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with importing_from_here():
        assert importlib.import_module("colorsys").rgb_to_hsv

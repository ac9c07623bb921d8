"""A Ray too old for dp_ray ends with one clear line, before anything of Ray is touched; an unknown one is tried."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from dp_ray.cluster import ray_version
from dp_ray.cluster.internals.quick_start import SWITCH, is_quick
from dp_ray.cluster.ray_version import RANGE, TRIED, check_ray, unknown_ray
from dp_ray.errors import ClusterError
from tests.support import forked
from tests.support.cluster import ROOT


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = [one for one in project["dependencies"] if one.startswith("ray")]
    assert ray == f"ray[default,train]{RANGE}"
    assert f'"{ray}"' in (ROOT / "cluster.yaml").read_text()
    (tested,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert ray_version.AT_LEAST <= ray_version._minor(tested) < ray_version.BELOW


@pytest.mark.parametrize("version", ["2.60.0", "2.60.3", "2.60.0rc1", "2.60", "2.56.0"])
def test_versions_that_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(ray_version, "installed", lambda: version)
    monkeypatch.delenv(SWITCH, raising=False)
    check_ray()
    assert unknown_ray() is None and is_quick()


@pytest.mark.parametrize("version", ["2.61.0", "2.600.0", "3.0.0.dev0", "unknown"])
def test_unknown_versions_are_tried_without_the_quick_start(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(ray_version, "installed", lambda: version)
    monkeypatch.delenv(SWITCH, raising=False)
    check_ray()
    assert str(unknown_ray()).startswith(f"Ray {version} is installed, and dp_ray was tested with >=2.56,<2.61: ")
    assert not is_quick()
    monkeypatch.setenv(SWITCH, "1")
    assert is_quick(), "the user has the last word"
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv(TRIED, version)
    assert unknown_ray() is None and is_quick()


@pytest.mark.parametrize("version", ["2.55.9", "2.6.0", "1.60.0"])
def test_versions_that_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(ray_version, "installed", lambda: version)
    with pytest.raises(
        ClusterError, match=re.escape(f"Ray {version} is installed, and dp_ray works with Ray >=2.56")
    ):
        check_ray()
    monkeypatch.setenv(TRIED, version)
    check_ray()


def test_no_ray_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_version, "installed", lambda: None)
    with pytest.raises(ClusterError, match="Ray is not installed"):
        check_ray()


@pytest.fixture
def another_ray(tmp_path: Path) -> Path:
    """A folder for a process's path: Ray 2.9.9 is installed there, which cannot even be imported."""
    there = tmp_path / "site"
    (there / "ray").mkdir(parents=True)
    (there / "ray" / "__init__.py").write_text("raise AssertionError('Ray was touched')\n")
    (there / "ray-2.9.9.dist-info").mkdir()
    (there / "ray-2.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.9.9\n")
    return there


def program_with(packages: str, *args: str) -> None:
    """Be `dp-ray` where these packages come first."""
    assert "ray" not in sys.modules
    sys.path.insert(0, packages)
    forked.dp_ray_program(*args)


def program(another_ray: Path, folder: Path, *args: str) -> forked.Ended:
    return forked.ended(program_with, str(another_ray), *args, "--storage", str(folder / "runs"))


@pytest.mark.parametrize(
    "args",
    [
        ["run", "jobs/tutorial.yaml", "--workers", "2"],
        ["submit", "jobs/tutorial.yaml", "--address", "http://127.0.0.1:1"],
    ],
    ids=["run", "submit"],
)
def test_another_ray_ends_a_run_with_one_line(another_ray: Path, tmp_path: Path, args: list[str]) -> None:
    done = program(another_ray, tmp_path, *args)
    assert done.returncode == 1
    *before, line = done.stderr.splitlines()
    assert all(one.endswith(": importing torch and Ray") for one in before)
    assert line == (
        "error: Ray 2.9.9 is installed, and dp_ray works with Ray >=2.56,<2.61: run `python -m pip install "
        "'ray[default,train]>=2.56,<2.61'`, or set workers to 0, which needs no Ray"
    )
    assert not (tmp_path / "runs").exists(), "nothing has been begun"


def test_a_run_without_workers_needs_no_ray(another_ray: Path, tmp_path: Path) -> None:
    done = program(another_ray, tmp_path, "run", "jobs/tutorial.yaml", "--workers", "0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "tutorial" / "result.json").exists()

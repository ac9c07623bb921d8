"""The quick start of README, from an installed wheel, in a folder that holds nothing else."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import dp_ray
from dp_ray.cluster.internals.variables import ADDRESS
from tests.support.cluster import ROOT, Cluster
from tests.support.pages import blocks_of

QUICK_START = {block.file_name: block.text for block in blocks_of(ROOT / "README.md") if block.file_name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what it is made of."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "dp_ray", source / "dp_ray", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    pip("wheel", *offline, "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed into."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in QUICK_START.items():
        (tmp_path / str(name)).write_text(text)
    return tmp_path


def pip(*args: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run(installed: Path, folder: Path, *args: str, **environment: str) -> str:
    """Run Python on the wheel and on the packages of this environment, but for what is installed from the repository.

    Without `site` (-S) no .pth file puts the repository on the path.
    """
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    line = [sys.executable, "-S", *args]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def files_of_the_package() -> set[str]:
    """All that it needs: its modules, and what they read, like the templates of `init`."""
    files = [path for path in (ROOT / "dp_ray").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(ROOT).as_posix() for path in files}


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dp_ray"}
    assert "dp_ray/py.typed" in names and any(name.endswith("/licenses/LICENSE") for name in names)
    assert {name for name in names if name.startswith("dp_ray/")} == files_of_the_package()


@pytest.mark.full
@pytest.mark.slow
def test_sdist_and_wheel_are_the_same_bytes_each_time(wheel: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--directory"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1764000000"}
    for name in ("one", "two"):
        subprocess.run([*build, str(tmp_path / name)], cwd=wheel.parent / "source", env=environment, check=True)
        (wheel.parent / "source" / "README.md").touch()
    one, two = (
        {path.name: hashlib.sha256(path.read_bytes()).digest() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert one == two and len(one) == 2
    (sdist,) = (tmp_path / "one").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files_of_the_package() <= names


def test_the_version_is_the_newest_in_the_changelog() -> None:
    released = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == dp_ray.__version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == dp_ray.__version__ and cited["license"] == "Apache-2.0"


@pytest.mark.full
@pytest.mark.slow
def test_the_repository_is_not_on_the_path(installed: Path, folder: Path) -> None:
    code = "import importlib.util, dp_ray; print(dp_ray.__file__, importlib.util.find_spec('jobs'))"
    assert run(installed, folder, "-c", code).split() == [str(installed / "dp_ray" / "__init__.py"), "None"]


@pytest.mark.full
@pytest.mark.slow
def test_the_first_job_is_made_and_planned(installed: Path, tmp_path: Path) -> None:
    run(installed, tmp_path, "-m", "dp_ray", "init")
    assert "2,000 rows in global batches of 40" in run(installed, tmp_path, "-m", "dp_ray", "plan", "job.yaml")


@pytest.mark.full
@pytest.mark.slow
def test_the_quick_start_without_ray(installed: Path, folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(script.read_text().replace("workers=2", "workers=0"))
    assert "'epoch_loss'" in run(installed, folder, "train.py")
    run(installed, folder, "-m", "dp_ray", "run", "train.yaml", "--workers", "0")
    assert (folder / "runs" / "train" / "weights.safetensors").exists()


@pytest.mark.full
@pytest.mark.ray
def test_the_quick_start_as_it_stands(installed: Path, folder: Path, cluster: Cluster) -> None:
    assert "'epoch_loss'" in run(installed, folder, "train.py", **{ADDRESS: cluster.address})

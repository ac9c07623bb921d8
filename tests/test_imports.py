"""The house: packages import in one order, heavy libraries stand where they belong, the public face is small."""

import ast
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import ray  # noqa: F401  (its first import sets an environment variable)

import dp_ray
from tests.support.fresh import loaded_by, modules_of
from tests.support.sources import ORDER, nodes_of

PACKAGE = Path(dp_ray.__file__).parent
INNER = {"plan", "job", "tensors", "engine", "rundir", "outputs", "telemetry"}
# What any package may import: text, errors, files, arithmetic and the process. It knows nothing of a run.
GROUND = {"text", "errors", "storage", "records", "tables", "plan", "system"}
# Each satellite could be removed as a folder. Which modules it imports beside the ground, and which modules elsewhere
# plug it in. Neither list may grow: what a satellite needs beside it is to become one small interface.
SATELLITES = {
    "data": ({"job.targets"}, {"__init__.py"}),
    "report": (
        {
            *("engine.clock", "job.keys", "outputs.columns", "outputs.files", "outputs.previews"),
            *("results.compare", "results.text", "rundir.files", "rundir.history", "rundir.incidents"),
            *("rundir.quarantine", "rundir.unfinished", "telemetry.times"),
        },
        {"driver/run.py", "sweeps/run.py", "cli/runs.py"},
    ),
    "trackers": (
        {"job.files", "rundir.files", "rundir.history", "rundir.lease"},
        {"driver/run.py", "cli/runs.py"},
    ),
    "sweeps": (
        {
            *("driver.checks", "driver.run", "driver.sessions", "job.files", "job.job", "monitor.console"),
            *("report.comparison", "results.text", "rundir.files", "rundir.lease"),
            *("rundir.replaced", "rundir.settled"),
        },
        {"cli/sweep.py"},
    ),
    "places": (
        {"cluster.internals.variables", "rundir.files"},
        {"cli/in_kubernetes.py", "cli/places.py"},
    ),
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it, but under TYPE_CHECKING."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""}
    return names


def package(module: str) -> str:
    return module.split(".")[1]


def module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


def test_packages_import_in_one_order() -> None:
    for path in modules():
        if path == PACKAGE / "__init__.py":
            continue
        own = package(module_name(path))
        for module in imported(path):
            if module.startswith("dp_ray."):
                assert ORDER.index(package(module)) <= ORDER.index(own), f"{relative(path)} imports {module}"
                assert own not in INNER or package(module) not in SATELLITES, f"{relative(path)} imports {module}"


@pytest.mark.parametrize("satellite", SATELLITES)
def test_a_satellite_imports_no_more_than_it_did(satellite: str) -> None:
    own = [path for path in modules() if PACKAGE / satellite in path.parents]
    foreign = {module for path in own for module in imported(path) if module.startswith("dp_ray.")}
    found = {module.partition(".")[2] for module in foreign if package(module) not in GROUND | {satellite}}
    allowed, _ = SATELLITES[satellite]
    assert not found - allowed, f"{satellite} imports more"
    assert not allowed - found, f"{satellite} needs these no more: take them off the list"


@pytest.mark.parametrize("satellite", SATELLITES)
def test_a_satellite_is_plugged_in_where_it_is_used(satellite: str) -> None:
    """What its own commands and one or two others import of it, they import within the function that uses it."""
    _, plugs = SATELLITES[satellite]
    found = set()
    for path in modules():
        if PACKAGE / satellite in path.parents:
            continue
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        late = {inner for outer in ast.walk(tree) if is_late(outer) for inner in ast.walk(outer)}
        for node in ast.walk(tree):
            if satellite in satellites_of(node):
                found.add(name)
                assert node in late or name == "cli/in_kubernetes.py", f"{name} imports {satellite} as it is imported"
    assert found == plugs


def is_late(node: ast.AST) -> bool:
    """A function, or a block that only mypy reads."""
    of_mypy = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return of_mypy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def satellites_of(node: ast.AST) -> set[str]:
    """The packages of dp_ray that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = []
    return {package(name) for name in names if name.startswith("dp_ray.")}


def test_places_know_nothing_of_the_engine() -> None:
    """They start programs; no other package imports them, but the command line."""
    foreign = {
        "engine",
        "tensors",
        "tasks",
        "telemetry",
        "outputs",
        "monitor",
        "parallel",
        "driver",
        "sweeps",
        "data",
    }
    for path in modules():
        own = package(module_name(path)) if path != PACKAGE / "__init__.py" else ""
        of_dp_ray = {module for module in imported(path) if module.startswith("dp_ray.")}
        if own == "places":
            assert not {package(module) for module in of_dp_ray} & foreign, relative(path)
            assert not {module for module in of_dp_ray if module.startswith("dp_ray.cluster.")} - {
                "dp_ray.cluster.internals.variables"
            }, relative(path)
        elif own != "cli":
            assert not [module for module in of_dp_ray if package(module) == "places"], relative(path)


# Which files may import a library, wherever in them. CONTRIBUTING.md has the same table.
HOMES = {"ray": ("cluster/",)}
PLAIN = ("plan/", "job/", "system/", "cli/", "errors.py", "text.py")
WITHOUT = {"torch": (*PLAIN, "storage.py", "records.py", "tables.py", "messages.py"), "pyarrow": PLAIN}


def test_heavy_libraries_stand_where_they_belong() -> None:
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        roots = {module.split(".")[0] for module in imported(path)}
        for library in roots & HOMES.keys():
            assert name.startswith(HOMES[library]), f"{name} imports {library}"
        for library in roots & WITHOUT.keys():
            assert not name.startswith(WITHOUT[library]), f"{name} imports {library}"


def test_no_import_cycle() -> None:
    """Each module is importable first, alone."""
    graph = {module_name(path): imported(path) for path in modules()}
    graph = {name: needs & graph.keys() for name, needs in graph.items()}
    done: set[str] = {"dp_ray"}
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done}:
        done |= ready
    assert done == set(graph), f"in a cycle: {set(graph) - done}"


def test_the_public_face() -> None:
    functions = ["data", "devices", "errors", "load", "run", "session"]
    assert dp_ray.__all__ == ["DataParallel", "Error", "Job", "Loop", "Result", "Session", *functions]
    assert dir(dp_ray) == dp_ray.__all__
    for name in dp_ray.__all__:
        assert getattr(dp_ray, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        dp_ray.rnu  # noqa: B018


def test_importing_dp_ray_waits_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray", "pyarrow", "pydantic", "numpy"} & loaded_by("import dp_ray")


def test_a_plan_waits_for_no_ray(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("{model: 'plain:model', dataset: {target: 'plain:rows', args: {n: 10}}, batch_size: 3}")
    (tmp_path / "plain.py").write_text("def rows(n):\n    return list(range(n))\n\n\ndef model():\n    pass\n")
    code = f"import os; os.chdir({str(tmp_path)!r})\nfrom dp_ray.cli.main import cli\n"
    code += f"cli(['plan', {str(job)!r}], standalone_mode=False)"
    assert "ray" not in loaded_by(code)


@pytest.mark.full(but=["all"])
@pytest.mark.slow
@pytest.mark.parametrize("removed", [*SATELLITES, "all"])
def test_a_run_that_does_not_use_a_satellite_does_without_its_folder(removed: str, tmp_path: Path) -> None:
    gone = shutil.ignore_patterns("__pycache__", *(SATELLITES if removed == "all" else [removed]))
    shutil.copytree(PACKAGE, tmp_path / "dp_ray", ignore=gone)
    shutil.copy(PACKAGE.parent / "jobs" / "tutorial.py", tmp_path)
    job = {"model": {"target": "tutorial:Model", "args": {"input_size": 5, "output_size": 2}}}
    job |= {"dataset": {"target": "tutorial:RandomDataset", "args": {"size": 5, "length": 100}}}
    (tmp_path / "job.json").write_text(json.dumps({**job, "batch_size": 30, "trackers": []}))
    code = "import dp_ray\nassert dp_ray.__file__.startswith(sys.argv[1])\nfrom dp_ray.cli.main import cli\n"
    code += "for line in ['plan job.json', 'run job.json --workers 0', 'report runs/job', 'list']:\n"
    code += "    cli(line.split(), standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("no page of the run" in done.stderr) == (removed in ("report", "all"))
    assert dp_ray.load(tmp_path / "runs" / "job").outputs.shape == (100, 2)


def test_a_stop_waits_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & loaded_by("import dp_ray.rundir.lease, dp_ray.cli.main")


@pytest.mark.full
def test_a_worker_that_serves_modules_imports_what_they_need() -> None:
    loaded = modules_of("import dp_ray.cluster.loop, dp_ray.cluster.worker, dp_ray.tasks.serve")
    own = {name for name in loaded if name.partition(".")[0] == "dp_ray"}
    assert "dp_ray.tasks.serve" in own
    assert len(own) <= 71, sorted(own)  # of rooms alone, three


def test_ray_train_is_imported_without_ray_data_and_pandas() -> None:
    """It would import both, which takes a second of a core in the driver, the controller and each worker."""
    for path in sorted((PACKAGE / "cluster").rglob("*.py")):
        nodes = list(nodes_of(path))
        blocks = [node for node in nodes if isinstance(node, ast.With) and "postponed(" in ast.unparse(node.items[0])]
        postponed = {inner for block in blocks for inner in ast.walk(block)}
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            heavy = [name for name in names if name.startswith(("ray.train", "ray.air"))]
            assert not heavy or node in postponed, f"{relative(path)} imports {heavy[0]} without `postponed`"


def test_no_test_imports_a_test() -> None:
    """What tests share stands in tests/support."""
    for path in sorted((PACKAGE.parent / "tests").rglob("*.py")):
        found = [module for module in imported(path) if module.startswith(("tests.test_", "tests.conftest"))]
        assert not found, f"{relative(path)} imports {found[0]}"

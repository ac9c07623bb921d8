"""The house: imports point down, Ray stands in one floor, the public face is small and quick."""

import ast
from functools import cache
from pathlib import Path

import pytest
import ray  # noqa: F401  (its first import sets an environment variable)

import dp_ray
from tests.support.fresh import loaded_by
from tests.support.sources import nodes_of

PACKAGE = Path(dp_ray.__file__).parent
FLOORS = [
    "secrets",
    "errors",
    "text",
    "tracebacks",
    "system",
    "plan",
    "key_hints",
    "job_args",
    "job_target",
    "job_parts",
    "job_outputs",
    "job_keys",
    "job_errors",
    "job_metrics",
    "job",
    "job_file",
    "job_schema",
    "job_plan",
    "uploads",
    "storage",
    "data",
    "tensors",
    "replica",
    "rundir",
    "results",
    "trackers",
    "task",
    "monitor",
    "report",
    "watch",
    "cluster",
    "planning",
    "checks",
    "in_process",
    "following",
    "finding_shards",
    "outcome",
    "preparing",
    "driver",
    "sessions",
    "several",
    "follow_up",
    "retry",
    "stopping",
    "replay",
    "verify",
    "early_start",
    "cli_errors",
    "sweeps",
    "cli_options",
    "cli_runs",
    "cli_jobs",
    "cli_sweep",
    "cli",
    "__main__",
]
# What imports inside functions: what is slow to import, or needs Ray, where it is used.
LAZY = {
    "dp_ray/__init__.py",
    "dp_ray/__main__.py",
    "dp_ray/cli.py",
    "dp_ray/cli_runs.py",
    "dp_ray/cli_jobs.py",
    "dp_ray/cli_sweep.py",
    "dp_ray/driver.py",
    "dp_ray/sweeps/running.py",
    "dp_ray/early_start.py",
    "dp_ray/planning.py",
    "dp_ray/several.py",
    "dp_ray/sweeps/lanes.py",
    "dp_ray/cluster/ray_internals/core.py",
    "dp_ray/trackers/child.py",
    "dp_ray/data/decode.py",
    "dp_ray/replica/strategy.py",
    "dp_ray/replica/trainer.py",
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


def floor(module: str) -> int:
    return FLOORS.index(module.split(".")[1])


def module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


def test_imports_point_down() -> None:
    for path in modules():
        if path == PACKAGE / "__init__.py":
            continue
        own = floor(relative(path).removesuffix(".py").replace("/", "."))
        for module in imported(path):
            if module.startswith("dp_ray."):
                assert floor(module) <= own, f"{relative(path)} imports {module} from a floor above"


def test_ray_and_torch_stand_where_they_belong() -> None:
    for path in modules():
        roots = {module.split(".")[0] for module in imported(path)}
        if PACKAGE / "cluster" not in path.parents:
            assert "ray" not in roots, relative(path)
        if "plan" in path.parts or path.name.startswith("job") or path.name == "errors.py":
            assert "torch" not in roots, relative(path)


def test_imports_stand_at_the_top() -> None:
    for path in modules():
        functions = (one for one in nodes_of(path) if isinstance(one, ast.FunctionDef))
        for function in functions if relative(path) not in LAZY else ():
            inside = [one for one in ast.walk(function) if isinstance(one, ast.Import | ast.ImportFrom)]
            assert not inside, f"{relative(path)}:{function.name} imports inside a function"


def test_no_import_cycle() -> None:
    """Each module is importable first, alone."""
    graph = {module_name(path): imported(path) for path in modules()}
    graph = {name: needs & graph.keys() for name, needs in graph.items()}
    done: set[str] = {"dp_ray"}
    while ready := {name for name, needs in graph.items() if name not in done and needs <= done}:
        done |= ready
    assert done == set(graph), f"in a cycle: {set(graph) - done}"


def test_the_public_face() -> None:
    assert dp_ray.__all__ == ["Error", "Job", "Result", "Session", "devices", "errors", "load", "run", "session"]
    assert dir(dp_ray) == dp_ray.__all__
    for name in dp_ray.__all__:
        assert getattr(dp_ray, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        dp_ray.rnu  # noqa: B018


def test_importing_dp_ray_waits_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray", "pyarrow", "pydantic", "numpy"} & loaded_by("import dp_ray")


def test_a_plan_waits_for_neither_torch_nor_ray(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("{model: 'builtins:dict', dataset: {target: 'builtins:bytes', args: {}}, batch_size: 3}")
    (tmp_path / "plain.py").write_text("def rows(n):\n    return list(range(n))\n")
    job.write_text("{model: 'plain:rows', dataset: {target: 'plain:rows', args: {n: 10}}, batch_size: 3}")
    code = f"import os; os.chdir({str(tmp_path)!r})\nfrom dp_ray.cli import cli\n"
    code += f"cli(['plan', {str(job)!r}], standalone_mode=False)"
    assert not {"torch", "ray", "pyarrow"} & loaded_by(code)


def test_a_stop_waits_for_neither_torch_nor_ray() -> None:
    assert not {"torch", "ray"} & loaded_by("import dp_ray.stopping, dp_ray.cli")


def test_no_test_imports_a_test() -> None:
    """What tests share stands in tests/support."""
    for path in sorted((PACKAGE.parent / "tests").rglob("*.py")):
        found = [module for module in imported(path) if module.startswith(("tests.test_", "tests.conftest"))]
        assert not found, f"{relative(path)} imports {found[0]}"

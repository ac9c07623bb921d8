"""The syntax trees of source files, and the order of dp_ray's packages."""

import ast
from collections.abc import Iterator
from pathlib import Path

# A module imports from its own package and from those before it. CONTRIBUTING.md draws it.
ORDER = ["text", "errors", "plan", "storage", "records", "tables", "system", "job", "tensors", "data", "engine"]
ORDER += [
    "rundir",
    "messages",
    "outputs",
    "trackers",
    "telemetry",
    "results",
    "process",
    "serving",
    "trials",
    "tasks",
    "replay",
    "report",
    "monitor",
    "cluster",
    "parallel",
    "driver",
    "sweeps",
    "places",
    "cli",
]
ORDER += ["__main__"]


def nodes_of(path: Path) -> Iterator[ast.AST]:
    """All nodes of a file's syntax tree."""
    return ast.walk(ast.parse(path.read_text()))


def calls_of(path: Path) -> set[str]:
    """The full names of what a file imports from dp_ray and calls: as `dp_ray.engine.trainer.Trainer`."""
    nodes = list(nodes_of(path))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dp_ray")
        for alias in node.names
    }
    called = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            first, *rest = ast.unparse(node.func).split(".")
            called.add(".".join([imported.get(first, first), *rest]))
    return called

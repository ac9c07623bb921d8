"""The sizes that keep the code readable: of functions, files and the two largest classes of state."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.sources import nodes_of

FOLDERS = ("dp_ray", "benchmarks", "jobs", "docs", "tests")
FUNCTION_LINES = 60
FILE_LINES = 800
CLASS_LINES = 150


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """How many lines a definition has, from its `def` to its last, its docstring too."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@cache
def functions(folder: str) -> dict[str, int]:
    """The lines of each function, by its place."""
    return {
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}": lines_of(node)
        for path in sources(folder)
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_is_too_long(folder: str) -> None:
    long = {name: lines for name, lines in functions(folder).items() if lines > FUNCTION_LINES}
    assert not long, f"functions of more than {FUNCTION_LINES} lines: {long}; split them"


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "tests"])
def test_no_file_is_too_long(folder: str) -> None:
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources(folder)}
    long = {name: count for name, count in lines.items() if count > FILE_LINES}
    assert not long, f"files of more than {FILE_LINES} lines: {long}; split them"


@pytest.mark.parametrize(("module", "name"), [("replica/trainer.py", "Trainer"), ("monitor/monitor.py", "Monitor")])
def test_a_class_of_state_stays_small(module: str, name: str) -> None:
    (found,) = [
        node for node in nodes_of(ROOT / "dp_ray" / module) if isinstance(node, ast.ClassDef) and node.name == name
    ]
    assert lines_of(found) < CLASS_LINES, f"{name} has {lines_of(found)} lines; take a responsibility out of it"

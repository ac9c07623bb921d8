"""The rules that keep the code readable: no function is too long or takes too much, no module is too large."""

import ast
import io
import os
import re
import subprocess
import tokenize
import tomllib
from itertools import chain, combinations
from pathlib import Path

import pytest

from tests.support.builders import CONSTRUCTORS
from tests.support.cluster import ROOT
from tests.support.sources import calls_of, nodes_of

FOLDERS = ("dp_ray", "benchmarks", "jobs", "docs", "tests", "tools")
FUNCTION_LINES = 60
MODULE_LINES = 800  # of code
PARAMETERS = 7  # `self` and the commands of click do not count
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def name_of(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{function.name}"


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function has, from its `def` to its last, its docstring too."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def code_lines(path: Path) -> int:
    """How many lines of a file hold code: not blank ones, comments and docstrings."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many values a caller may have to give: those of a command of click are the user's."""
    if any("command(" in ast.unparse(decorator) for decorator in function.decorator_list):
        return 0
    taken = function.args
    names = [arg.arg for arg in [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]]
    names += [one.arg for one in (taken.vararg, taken.kwarg) if one is not None]
    return len([name for name in names if name not in ("self", "cls")])


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_is_too_long(folder: str) -> None:
    long = {
        name_of(path, function): lines_of(function)
        for path in sources(folder)
        for function in functions(path)
        if lines_of(function) > FUNCTION_LINES
    }
    assert not long, f"functions of more than {FUNCTION_LINES} lines: {long}"


def test_no_function_takes_too_much() -> None:
    many = [
        name_of(path, function)
        for path in sources("dp_ray")
        for function in functions(path)
        if parameters(function) > PARAMETERS
    ]
    assert not many, f"functions of more than {PARAMETERS} parameters, commands of click and self aside: {many}"


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "tests"])
def test_no_module_is_too_large(folder: str) -> None:
    sizes = {path.relative_to(ROOT).as_posix(): code_lines(path) for path in sources(folder)}
    large = {name: lines for name, lines in sizes.items() if lines > MODULE_LINES}
    assert not large, f"modules of more than {MODULE_LINES} lines of code: {large}"


def test_nobody_waits_with_select() -> None:
    """It takes no file number above 1,023: a process with more open files would fail."""
    sources_of_all = (path for folder in FOLDERS for path in sources(folder) if path != Path(__file__))
    waits = [path.relative_to(ROOT).as_posix() for path in sources_of_all if "select.select(" in path.read_text()]
    assert not waits, f"use select.poll or multiprocessing.connection.wait: {waits}"


def test_only_the_builders_call_constructors_of_inner_objects() -> None:
    missing = [name for name in CONSTRUCTORS if not is_defined(name)]
    assert not missing, f"tests/support/builders.py names what is not there: {missing}"
    builders = ROOT / "tests" / "support" / "builders.py"
    calls = {
        path.relative_to(ROOT).as_posix(): found
        for path in sources("tests")
        if path != builders and (found := sorted(CONSTRUCTORS & calls_of(path)))
    }
    assert not calls, f"build them with tests/support/builders.py: {calls}"


def is_defined(name: str) -> bool:
    """Whether a module of dp_ray defines the function or class of this full name."""
    module, _, own = name.rpartition(".")
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
    return own in [one.name for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef)]


# What is there by design: a command has the name of what it runs, and programs begin in `main`. What a worker runs in
# each view has the other three: a job's tasks, and the calls of modules.
SAME_NAMES = {"main", "run_task", "Held", "hold_in_advance"}


def test_a_public_name_stands_for_one_thing() -> None:
    """A function or a class at the top of a module: who reads the name somewhere need not ask which."""
    homes: dict[str, set[str]] = {}
    for path in sorted((ROOT / "dp_ray").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            is_command = isinstance(node, ast.FunctionDef) and path.parent.name == "cli" and node.decorator_list
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not is_command:
                homes.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    assert {name: found for name, found in homes.items() if len(found) > 1 and name not in SAME_NAMES} == {}


def test_each_test_is_in_one_part_of_each_tier_but_places() -> None:
    """Whatever marks a test has: `make test` takes it or `make eighth` does, and `make full` takes both."""
    marks = [line.split(":")[0] for line in pytest_settings()["markers"]]
    chosen = {target: expressions_of(target) for target in ("test", "eighth", "full")}
    assert all(len(expressions) == 2 for expressions in chosen.values()), "below Ray, and on it"
    for own in map(set, chain.from_iterable(combinations(marks, size) for size in range(len(marks) + 1))):
        has = {mark: mark in own for mark in marks}
        times = {target: sum(eval(text, has) for text in expressions) for target, expressions in chosen.items()}
        assert times["test"] + times["eighth"] == times["full"] == ("places" not in own), (own, times)


def expressions_of(target: str) -> list[str]:
    """The marks by which a target of the Makefile chooses tests, as make itself gives them."""
    line = ["make", "--dry-run", "--no-print-directory", "--assume-old=.venv/installed", target]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # `make test` runs this
    printed = subprocess.run(line, cwd=ROOT, env=clean, check=True, capture_output=True, text=True).stdout
    return re.findall(r"pytest -m '([^']+)'", printed)


def pytest_settings() -> dict[str, list[str]]:
    """What `pyproject.toml` tells pytest."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]  # type: ignore[no-any-return]

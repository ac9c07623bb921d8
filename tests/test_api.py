"""docs/api.md: it shows each public name, and each of them has an example that does what it says."""

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray import errors
from tests.support.cluster import ROOT

SHOWN: list[str] = re.findall(
    r"^<!-- autodoc: \w+ ([\w.]+)(?:: .*)? -->$", (ROOT / "docs" / "api.md").read_text(), re.M
)
ON_RAY = {"dp_ray.session", "dp_ray.Session"}
# What the user gets in the example of another one.
PARTS = {"dp_ray.tasks.own_loop.LoopStep", "dp_ray.tasks.own_loop.LoopUpdate"}
# No example could raise them here, or none alone.
WITHOUT_EXAMPLE = {f"dp_ray.errors.{name}" for name in ("Error", "ClusterError", "ClusterLost", "WorkerError")}
WITHOUT_EXAMPLE |= {"dp_ray.errors.RunInterrupted", *PARTS}


def found(name: str) -> Any:
    """What a dotted name stands for."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_every_public_name_is_shown_once() -> None:
    modules = {"data", "errors"}
    public = {f"dp_ray.{name}" for name in dp_ray.__all__ if name not in {*modules, "Error"}}
    public |= {f"dp_ray.data.{name}" for name in dp_ray.data.__all__}
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, BaseException)]
    public |= {f"dp_ray.errors.{kind.__name__}" for kind in kinds if kind.__module__ == "dp_ray.errors"}
    assert sorted(SHOWN) == sorted({*public, *PARTS, "dp_ray.tasks.hooks.TrainingView"})


@pytest.mark.parametrize("line", re.findall(r"^<!-- autodoc.*", (ROOT / "docs" / "api.md").read_text(), re.M))
def test_every_member_that_is_shown_is_there_and_says_what_it_is(line: str) -> None:
    name, members = re.fullmatch(r"<!-- autodoc: \w+ ([\w.]+)(?:: (.*))? -->", line).groups()  # type: ignore[union-attr]
    for shown in [found(name), *(getattr(found(name), member) for member in (members or "").split(", ") if member)]:
        assert inspect.getdoc(shown), line


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ray] if name in ON_RAY else []) for name in SHOWN]
)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = found(name)
    tests = doctest.DocTestFinder(recurse=False).find(shown, name, module=False, globs={})
    assert any(test.examples for test in tests) == (name not in WITHOUT_EXAMPLE), f"{name}: no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in tests:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)

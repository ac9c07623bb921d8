"""Imports large modules in less time: without the garbage collector, and without libraries that nobody uses.

The collector takes a fifth of the time of an import, and finds nothing.
"""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from dp_ray.system.environment import set_environment


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within the block, nothing is collected; what it has made is not looked through after it either."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def prepare_imports(variables: dict[str, str]) -> None:
    """Set environment variables in a process that is about to import torch, and collect nothing meanwhile."""
    set_environment(variables)
    gc.disable()


def end_imports() -> None:
    """Collect again; what was imported is not looked through any more."""
    gc.freeze()
    gc.enable()


class Postponed(ModuleType):
    """Stands for a module in the modules that import it; it is imported when one of them first uses it."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__ = spec, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())  # its submodules can be imported without it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _remove([self])
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Within the block, an import of these modules imports nothing yet; after it, they are imported as ever.

    Modules that were imported within the block import them when they use them, in most cases never.
    """
    stand_ins = []
    for name in names:
        if name not in sys.modules and (spec := find_spec(name)) is not None:
            stand_ins.append(Postponed(spec))
            sys.modules[name] = stand_ins[-1]
    try:
        yield
    finally:
        _remove(stand_ins)


def _remove(stand_ins: list[Postponed]) -> None:
    for one in stand_ins:
        if sys.modules.get(one.__name__) is one:
            del sys.modules[one.__name__]

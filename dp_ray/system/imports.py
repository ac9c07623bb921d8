"""Imports large modules in less time: without the garbage collector, and without libraries that nobody uses.

The collector takes a fifth of the time of an import, and finds nothing.
"""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
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
    """Stands for a module in the modules that import it; it is imported when one of them first uses it.

    While `postponing`, a name of it is a PostponedName.
    """

    def __init__(self, spec: ModuleSpec, postponing: "_Postponing") -> None:
        super().__init__(spec.name)
        self.__postponing = postponing

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return PostponedName(self.__name__, name) if self.__postponing.goes_on else _imported(self.__name__, name)


class PostponedName:
    """Stands for what a module has by a name; imports the module when it is called, or asked for an attribute."""

    def __init__(self, module: str, name: str) -> None:
        self.__module = module
        self.__name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _imported(self.__module, self.__name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_imported(self.__module, self.__name), name)

    def __instancecheck__(self, one: object) -> bool:
        return isinstance(one, _imported(self.__module, self.__name))

    def __or__(self, other: Any) -> Any:  # in an annotation
        return self

    __ror__ = __or__


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


class _Postponing(MetaPathFinder, Loader):
    """Finds stand-ins for modules and their submodules, as long as it `goes_on`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.goes_on = True
        self._made: list[str] = []
        self._names = [name for name in names if name not in sys.modules and find_spec(name) is not None]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """A stand-in's, if it is one of the modules or in one of them."""
        is_postponed = any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)
        return ModuleSpec(fullname, self, is_package=True) if is_postponed else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The stand-in."""
        self._made.append(spec.name)
        return Postponed(spec, self)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""

    def end(self) -> None:
        """Forget the stand-ins: an import finds the modules themselves."""
        self.goes_on = False
        for name in reversed(self._made):  # a package after what is in it
            module, (parent, _, child) = sys.modules.pop(name, None), name.rpartition(".")
            if parent and vars(sys.modules[parent]).get(child) is module:
                delattr(sys.modules[parent], child)


@contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Within the block, an import of these modules and their submodules imports nothing; after it, all is as ever.

    Modules that were imported within the block import them when they use them, in most cases never. What they
    have imported from them by name may be called or asked for attributes later, and stand in annotations, but it can
    be no base class.
    """
    postponing = _Postponing(names)
    sys.meta_path.insert(0, postponing)
    try:
        yield
    finally:
        sys.meta_path.remove(postponing)
        postponing.end()

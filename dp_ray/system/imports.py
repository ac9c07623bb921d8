"""Import large modules in less time, and notice that the source files of imported modules were edited.

Imports run without the garbage collector, which takes a fifth of their time and finds nothing, and without libraries
that nobody uses.
"""

import functools
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from dp_ray.errors import JobError, is_users


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage in the block, nor its objects after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def check_installed(what: str, package: str, extra: str) -> None:
    """Raise JobError, which says what to install, if the package of an extra is missing."""
    if find_spec(package) is None:
        raise JobError(f"{what} is not installed; pip install 'dp-ray[{extra}]'")


def prepare_imports(variables: dict[str, str]) -> None:
    """Set environment variables in a process that is about to import torch, and collect nothing meanwhile."""
    os.environ.update(variables)
    gc.disable()


def end_imports() -> None:
    """Collect garbage again, but not what was imported."""
    gc.freeze()
    gc.enable()


class Postponed(ModuleType):
    """A stand-in for a module in the modules that import it; it is imported when one of them first uses it.

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
    """A stand-in for a name of a module; it imports the module when it is called, or asked for an attribute."""

    def __init__(self, module: str, name: str) -> None:
        self.__module = module
        self.__name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _imported(self.__module, self.__name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_imported(self.__module, self.__name), name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _imported(self.__module, self.__name))

    def __or__(self, other: Any) -> Any:  # in an annotation
        return self

    __ror__ = __or__


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


class _Postponing(MetaPathFinder, Loader):
    """The finder of stand-ins for modules and their submodules, as long as it `goes_on`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.goes_on = True
        self._made: list[str] = []
        self._names = [name for name in names if name not in sys.modules and find_spec(name) is not None]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return a stand-in's, if it is one of the modules or in one of them."""
        is_postponed = any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)
        return ModuleSpec(fullname, self, is_package=True) if is_postponed else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the stand-in."""
        self._made.append(spec.name)
        return Postponed(spec, self)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""

    def end(self) -> None:
        """Forget the stand-ins: an import finds the modules themselves."""
        self.goes_on = False
        for name in reversed(self._made):  # a package after its modules
            module, (parent, _, child) = sys.modules.pop(name, None), name.rpartition(".")
            if parent and vars(sys.modules[parent]).get(child) is module:
                delattr(sys.modules[parent], child)


@contextmanager
def postponed(*names: str) -> Iterator[None]:
    """Within the block, an import of these modules and their submodules imports nothing; after it, all is as ever.

    Modules that were imported within the block import them when they use them, in most cases never. Names that they
    import from the stand-ins may be called or asked for attributes later, and stand in annotations, but cannot be
    base classes.
    """
    postponing = _Postponing(names)
    sys.meta_path.insert(0, postponing)
    try:
        yield
    finally:
        sys.meta_path.remove(postponing)
        postponing.end()


Stamp = tuple[int, int]

NOT_SOURCES = {"__pycache__", "node_modules", "runs", "site-packages"}
OURS = __name__.partition(".")[0]
_is_users = functools.cache(is_users)


class Sources:
    """Source files below a folder, as they were when noted: those of imported modules, or all that were sent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._noted: dict[str, Stamp | None] = {}
        self._noted_at = 0  # in nanoseconds
        self._is_sent = False

    def note(self) -> None:
        """Note the files of modules that were imported since the last call; nothing if all were noted as sent."""
        self._noted_at = time.time_ns()
        for path in () if self._is_sent else _files_of_modules(self._folder):
            self._noted.setdefault(path, _stamp(path))

    def note_imported(self, files: Iterable[str]) -> None:
        """Note files that other processes imported since the last call of `note`.

        One that was edited since then counts as edited, since the import may have come before.
        """
        for path in () if self._is_sent else files:
            if _is_below(path, self._folder):
                stamp = _stamp(path)
                self._noted.setdefault(path, None if stamp and stamp[0] > self._noted_at else stamp)

    def note_sent(self) -> None:
        """Note all files below the folder, since all of them are sent to a cluster now, and no later one is there."""
        self._is_sent = True
        self._noted = {path: _stamp(path) for path in _files_below(self._folder)}

    def edited(self) -> list[str]:
        """Return the noted files that were edited or removed since, relative to the folder."""
        return sorted(os.path.relpath(path, self._folder) for path in self._edited())

    def forget(self) -> None:
        """Have this process import the edited modules again, and those that use them; then no file is noted."""
        stale = {name for path in self._edited() for name in _files_of_modules(self._folder).get(path, ())}
        names = {name for names in _files_of_modules(self._folder).values() for name in names}
        while more := {name for name in names - stale if _uses(sys.modules[name], stale)}:
            stale |= more
        for name in stale:
            del sys.modules[name]
        self._noted.clear()
        importlib.invalidate_caches()

    def _edited(self) -> list[str]:
        there = {*self._noted, *(_files_below(self._folder) if self._is_sent else ())}
        return [path for path in there if _stamp(path) != self._noted.get(path)]


def own_folders() -> list[str]:
    """Return the folders of modules that are neither Python's nor of installed packages, as a script adds them."""
    return [os.path.abspath(folder) for folder in sys.path if is_users(folder) and os.path.isdir(folder)]


def import_from(folders: Iterable[str]) -> None:
    """Have modules be found in these folders too, as far as they are here."""
    sys.path += [folder for folder in folders if folder not in sys.path and os.path.isdir(folder)]


def replaced_in_modules() -> list[str]:
    """Return the names in modules, and in their classes, under which a function or class of the script stands."""
    found = []
    for name, module in list(sys.modules.items()):
        if name in SCRIPT or type(module) is not ModuleType:
            continue
        for key, value in list(vars(module).items()):
            owner = value.__module__ if issubclass(type(value), FunctionType | type) else None
            if owner in SCRIPT:
                found.append(f"{name}.{key}")
            elif owner == name and issubclass(type(value), type):
                parts = list(vars(value).items())
                found += [
                    f"{name}.{key}.{at}"
                    for at, part in parts
                    if type(part) is FunctionType and part.__module__ in SCRIPT
                ]
    return found


SCRIPT = ("__main__", "__mp_main__")


def imported_files() -> tuple[str, ...]:
    """Return the source files of the modules that this process has imported, without ours and installed ones."""
    return tuple(path for path in _files_of_modules(Path("/")) if _is_users(path))


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the source files below a folder, without installed packages and hidden folders."""
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NOT_SOURCES]
        yield from (os.path.join(here, name) for name in files if name.endswith(".py"))


def _uses(module: ModuleType, others: set[str]) -> bool:
    """Return whether a module holds one of the other modules, or something that is defined there."""
    values = list(vars(module).values())
    return any(
        (item.__name__ if isinstance(item, ModuleType) else getattr(item, "__module__", "")) in others
        for item in values
    )


def _files_of_modules(folder: Path) -> dict[str, list[str]]:
    """Return the names of imported modules by their source files, for those below the folder and not installed."""
    names: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not os.path.isabs(path) or name == "__main__" or name.partition(".")[0] == OURS:
            continue
        if _is_below(path, folder) and "site-packages" not in path:
            names.setdefault(path, []).append(name)
    return names


def _is_below(path: str, folder: Path) -> bool:
    return path.startswith(os.path.join(folder, ""))


def _stamp(path: str) -> Stamp | None:
    """Return what changes if a file is edited; None if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size

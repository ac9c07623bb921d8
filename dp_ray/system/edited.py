"""Notices that the source files of imported modules were edited."""

import importlib
import os
import sys
from pathlib import Path

Stamp = tuple[int, int]

OURS = __name__.partition(".")[0]


class Sources:
    """The source files of the modules that this process has imported from below a folder, as they were when noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._noted: dict[str, Stamp | None] = {}

    def note(self) -> None:
        """Note the files of modules that were imported since the last call."""
        for path in _files_of_modules(self._folder):
            self._noted.setdefault(path, _stamp(path))

    def edited(self) -> list[str]:
        """The noted files that were edited or removed since, relative to the folder."""
        changed = [path for path, noted in self._noted.items() if _stamp(path) != noted]
        return sorted(os.path.relpath(path, self._folder) for path in changed)

    def forget(self) -> None:
        """Forget all files and have this process import their modules anew."""
        paths = _files_of_modules(self._folder)
        for path in self._noted:
            for name in paths.get(path, ()):
                sys.modules.pop(name, None)
        self._noted.clear()
        importlib.invalidate_caches()


def _files_of_modules(folder: Path) -> dict[str, list[str]]:
    """The names of the imported modules by their source files, for files below the folder that are not installed."""
    found: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or name == "__main__" or name.partition(".")[0] == OURS:
            continue
        if "site-packages" in path:
            continue  # at once: most are installed, and to resolve a path takes longer than all else here
        resolved = Path(path).resolve()
        if resolved.is_relative_to(folder) and "site-packages" not in resolved.parts:
            found.setdefault(str(resolved), []).append(name)
    return found


def _stamp(path: str) -> Stamp | None:
    """What changes if a file is edited; None if there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size

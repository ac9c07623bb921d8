"""Where a folder of runs is, or a path in one, so that all workers find it."""

import os
from pathlib import Path


def located_at(location: str) -> str:
    """The path or URL of a folder of runs, or of a path in one.

    In a submitted Ray job, a relative path is below the home directory: Ray removes the copied working directory.
    """
    if "://" in location or Path(location).is_absolute() or not _in_shipped_folder():
        return location
    return str(Path.home() / location)


def _in_shipped_folder() -> bool:
    return "runtime_resources" in Path(os.getcwd()).parts

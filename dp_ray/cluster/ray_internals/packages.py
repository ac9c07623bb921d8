"""What Ray packs of a folder that it sends to a cluster."""

import os
from collections.abc import Sequence
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE
from ray._private.runtime_env import packaging


def packed_files(folder: str, excludes: Sequence[str]) -> list[Path]:
    """The files of a folder that Ray packs: without the excluded ones, and those that its ignore files name.

    Public: none; Ray says only how large a package is, once it is made.
    """
    found: list[Path] = []

    def take(path: Path) -> None:
        if path.is_file():
            found.append(path)

    root = Path(folder).absolute()
    excluded = [packaging._get_excludes(root, list(excludes))]
    heeds_git = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    packaging._dir_travel(root, excluded, take, include_gitignore=heeds_git)
    return found

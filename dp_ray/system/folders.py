"""Temporary folders that a driver makes for itself; the next driver removes those whose owner was killed."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from dp_ray.system.process import Process, is_dead, this_process

PREFIX = "dp_ray-"
OWNER = "dp_ray-owner.json"


@contextmanager
def own_folder(parent: str | None = None) -> Iterator[str]:
    """A temporary folder, gone when the block ends; those of drivers that are certainly dead go now."""
    remove_orphans(Path(parent or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        (Path(folder) / OWNER).write_text(json.dumps(asdict(this_process())))
        yield folder


def remove_orphans(parent: Path) -> None:
    """Remove the folders in `parent` whose owner is certainly dead."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, TypeError):  # of another user, just being made, or not ours
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                owner = Process(**json.loads((folder / OWNER).read_text()))
                if is_dead(owner):
                    shutil.rmtree(folder, ignore_errors=True)

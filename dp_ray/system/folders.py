"""Temporary folders of a driver; if a driver is killed, the next one removes its folders."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from dp_ray.system.process import Process, is_dead, this_process
from dp_ray.system.stop_signals import has_begun

PREFIX = "dp_ray-"
OWNER = "dp_ray-owner.json"


def short_folder() -> str | None:
    """The parent of folders that hold sockets, whose paths are limited to 107 characters; TMPDIR is not."""
    return "/tmp" if os.path.isdir("/tmp") else None


@contextmanager
def own_folder(parent: str | None = None) -> Iterator[str]:
    """A temporary folder, removed when the block ends; first remove those of drivers that are certainly dead."""
    has_begun()
    remove_orphans(Path(parent or tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        (Path(folder) / OWNER).write_text(json.dumps(asdict(this_process())))
        yield folder


def remove_orphans(parent: Path) -> None:
    """Remove the folders in `parent` whose owner is certainly dead."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError, TypeError):  # another user's, not complete yet, or not dp_ray's
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                owner = Process(**json.loads((folder / OWNER).read_text()))
                if is_dead(owner):
                    shutil.rmtree(folder, ignore_errors=True)

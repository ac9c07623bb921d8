"""Offer the files of a run through Ray's dashboard: the program that `dp-ray fetch` starts on the head node.

Ray's dashboard serves the files in the log folder of each node, and follows links there. So this program makes a
folder of its own in it: with a link to each file, by its number, and with `content.json`, which lists the files with
their SHA-256. Files of an object store are copied there. The folder is removed when `dp-ray fetch` ends the program,
or has not been heard for `SILENT_SECONDS`.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ray.exceptions import RayError

from dp_ray.cluster.connect import address_of, authenticate
from dp_ray.cluster.internals.core import own_log_folder, place_on_head, take_from_head
from dp_ray.errors import DONE, Error
from dp_ray.rundir.content import CONTENT_JSON, content_of
from dp_ray.storage import PIECE, Storage

LISTING = "content.json"
SILENT_SECONDS = 180.0
RENEW_SECONDS = 20.0  # between two signs of life of `dp-ray fetch`
LOOK_SECONDS = 2.0


def main(place: str, name: str, *kinds_and_offer: str) -> int:
    """Offer the files of these kinds of a run in the log folder's OFFER; return the exit status."""
    *kinds, offer = kinds_and_offer
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(DONE))
    try:
        is_below_home = "://" not in place and not Path(place).expanduser().is_absolute()
        base = Storage(str(Path.home() / place) if is_below_home else place)
        with _folder(own_log_folder() / offer) as folder:
            os.chdir(folder)  # so that errors name whole paths
            _fill(folder, base, name, kinds)
            _wait(offer)
    except Error as error:
        print(error, flush=True)
        return error.exit_status
    return DONE


def _fill(folder: Path, base: Storage, name: str, kinds: list[str]) -> None:
    """Put the files into the folder, by their numbers; the listing comes last, so who sees it has them all."""
    content = content_of(base, name, kinds)
    hashed = {}
    for number, (path, entry) in enumerate(content.files.items()):
        hashed[path] = replace(entry, sha256=base.sha256(path))
        if base.is_local:
            (folder / str(number)).symlink_to(base.file(path))
        else:
            with base.open(path) as source, (folder / str(number)).open("wb") as copy:
                while piece := source.read(PIECE):
                    copy.write(piece)
    CONTENT_JSON.write(Storage(str(folder)), replace(content, files=hashed), LISTING)


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _wait(offer: str) -> None:
    """Wait until `dp-ray fetch`, which leaves a sign of life on the head node, is silent."""
    address = address_of(None) or ""
    authenticate(address)
    until = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        with suppress(OSError, RuntimeError, RayError):
            if take_from_head(address, place_on_head(offer)) is not None:
                until = time.monotonic() + SILENT_SECONDS


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

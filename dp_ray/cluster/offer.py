"""Offer the files of a run through Ray's dashboard: the program that `dp-ray fetch` starts on the head node.

Ray's dashboard serves the files in the log folder of each node, and follows links there. So this program makes a
folder of its own in it: with a link to each file, by its SHA-256, and with `content.json`, which lists the files with
theirs. The folder is removed when `dp-ray fetch` ends the program, or after `HOURS` if it was killed.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dp_ray.cluster.internals.core import own_log_folder
from dp_ray.errors import DONE, Error
from dp_ray.rundir.content import CONTENT_JSON, content_of
from dp_ray.storage import Storage

LISTING = "content.json"
HOURS = 12


def main(place: str, name: str, *kinds_and_offer: str) -> int:
    """Offer the files of these kinds of a run in the log folder's OFFER; return the exit status."""
    *kinds, offer = kinds_and_offer
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(DONE))
    base, folder = Storage(str(Path.home() / Path(place).expanduser())), own_log_folder() / offer
    folder.mkdir()
    try:
        os.chdir(folder)  # so that errors name whole paths
        content = content_of(base, name, kinds)
        hashed = {path: replace(entry, sha256=base.sha256(path)) for path, entry in content.files.items()}
        for path, entry in hashed.items():
            with suppress(FileExistsError):  # another file has the same bytes
                (folder / entry.sha256).symlink_to(base.file(path))
        # Last: who sees the list has all files.
        CONTENT_JSON.write(Storage(str(folder)), replace(content, files=hashed), LISTING)
        time.sleep(HOURS * 3600)
    except Error as error:
        print(error, flush=True)
        return error.exit_status
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return DONE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

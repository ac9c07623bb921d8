"""The private interfaces of Ray that this package alone uses: bytes left on the head, logs of nodes, files to send.

See `cluster/internals/` for all others.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import ray._raylet
import requests
from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE
from ray._private.runtime_env import packaging

LOG_SECONDS = 7 * 24 * 3600  # how long Ray may take to send a file
PIECE = 1 << 20


def leave_on_head(client: Any, data: bytes, name: str = "") -> str:
    """Upload bytes as Ray's job client uploads code packages, and return their address, which holds `name`.

    Ray removes them after ten minutes without use. Raises RuntimeError if Ray refuses them.
    Public: none; Ray logs all that `submit_job` carries.
    """
    place = place_on_head(name or uuid.uuid4().hex)
    answer = client._do_request("PUT", f"/api/packages/{place.replace('://', '/')}", data=data)
    if answer.status_code != 200 or not client._package_exists(place):
        raise RuntimeError(f"it does not take the values of env: status {answer.status_code}")
    return place


def place_on_head(name: str) -> str:
    """Return the address of bytes that are left on the head under a name. Public: none."""
    return f"gcs://_ray_pkg_{name}.zip"


def take_from_head(address: str, place: str) -> bytes | None:
    """Take and remove the bytes that `leave_on_head` uploaded; None if they are gone. Public: none."""
    head = ray._raylet.GcsClient(address=address)
    left: bytes | None = head.internal_kv_get(place.encode(), None)
    head.internal_kv_del(place.encode(), False, None)
    return left


@contextmanager
def log_file(client: Any, node_id: str, name: str, seconds: float) -> Iterator[Iterator[bytes]]:
    """Within the block, read a file below a node's log folder, in pieces; `seconds` is how long a piece may take.

    Raises FileNotFoundError if there is none, or requests' errors if the connection breaks.
    Public: ray.util.state.get_log, which waits for ever where a connection is silent.
    """
    given = {"node_id": node_id, "filename": name, "lines": -1, "timeout": LOG_SECONDS}
    url = f"{client._address}/api/v0/logs/file?{urlencode(given)}"
    own = {"headers": client._headers, "cookies": client._cookies, "verify": client._verify}
    with requests.get(url, stream=True, timeout=seconds, **own) as answer:
        if answer.status_code != requests.codes.ok:
            raise FileNotFoundError(f"{name}: {answer.text}")
        yield answer.iter_content(PIECE)


def packed_files(folder: str, excludes: Sequence[str]) -> list[Path]:
    """Return the files of a folder that Ray packs: without the excluded ones, and those that its ignore files name.

    Public: none; Ray says only how large a package is, once it is made.
    """
    paths: list[Path] = []
    root = Path(folder).absolute()
    excluded = [packaging._get_excludes(root, list(excludes))]
    heeds_git = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    packaging._dir_travel(root, excluded, paths.append, include_gitignore=heeds_git)
    return [path for path in paths if path.is_file()]

"""A program, `ray start`, whose workers are forked by dp_ray's fork server, as those of a Ray that dp_ray starts.

A worker that Ray starts anew imports Ray and torch for three seconds of a core, and the tests start hundreds. Code
of the project is not imported before the fork: each worker imports what its job has sent. All hosts of
`tests/support/hosts.py` share one server.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dp_ray.cluster import fork_server
from dp_ray.cluster.internals import quick_start

HERE = Path(__file__).parent
SETUP = str(HERE / "ray_setup.py")
SOCKET = "forks"  # the server's, in the cluster's folder
# What dp_ray's modules import, and the tests' own; `ray_posed` is beside this file.
MODULES = ["ray_posed", *(one for one in quick_start.MODULES if not one.startswith("dp_ray."))]
MODULES += ["torch", "torch._dynamo", "torch.utils.data", "pandas", "pyarrow.parquet", "pyarrow.fs"]
MODULES += ["sklearn.datasets", "tensorboardX", "click", "rich", "attr", "pytest", "hypothesis"]


def main() -> None:
    """Start the fork server in the folder that the first argument names, then be `ray` with the others.

    If a server is there already, take that one. Without the quick start, be Ray's own `ray` alone.
    """
    folder, *arguments = sys.argv[1:]
    path = Path(folder) / SOCKET
    with ExitStack() as forking:
        if quick_start.is_quick():
            serving = nullcontext(path) if path.exists() else served(path, gcs_address(arguments))
            forking.enter_context(forked_by(forking.enter_context(serving)))
        from ray.scripts import scripts

        sys.argv = ["ray", *arguments]
        scripts.main()


@contextmanager
def served(path: Path, cluster: str, program: str = fork_server.__file__) -> Iterator[Path]:
    """Run the fork server while the block runs. It imports nothing from PYTHONPATH: each worker has one of its own.

    `cluster` is an argument by which its workers find their cluster. `program` is the server's own.
    """
    given = json.dumps([[str(HERE), *sys.path], MODULES])
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(quick_start.WAITING)
        line = [sys.executable, program, str(listener.fileno()), given, cluster]
        server = subprocess.Popen(line, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=own)
    try:
        yield path
    finally:
        server.kill()
        server.wait()


def gcs_address(arguments: list[str]) -> str:
    """The argument of a raylet that names its cluster."""
    (port,) = (argument.removeprefix("--port=") for argument in arguments if argument.startswith("--port="))
    return f"--gcs-address=127.0.0.1:{port}"


@contextmanager
def forked_by(server: Path) -> Iterator[None]:
    """Within the block, a raylet that is started has its workers forked; they enter their job's environment first."""
    from ray._private.parameter import RayParams

    before = RayParams.update_if_absent

    def with_setup(params: Any, **keys: Any) -> None:
        before(params, **keys | ({"setup_worker_path": SETUP} if "setup_worker_path" in keys else {}))

    RayParams.update_if_absent = with_setup
    try:
        with quick_start.workers_forked_by(server):
            yield
    finally:
        RayParams.update_if_absent = before


if __name__ == "__main__":
    main()

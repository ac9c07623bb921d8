"""dp_ray's fork server, of which each worker enters the host whose Ray node asks for it.

A host is a network and a mount namespace, as `tests/support/hosts.py` makes them. Nothing of the project is imported.
"""

import ctypes
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

SERVER = Path(__file__).parents[2] / "dp_ray" / "cluster" / "fork_server.py"
RAYLET = "RAY_RAYLET_PID"  # in the environment of each worker


def main() -> None:
    """Serve, with the arguments of the fork server."""
    spec: Any = spec_from_file_location("fork_server", SERVER)
    server: Any = module_from_spec(spec)
    spec.loader.exec_module(server)
    take_place = server.take_place

    def take_place_on_host(request: Any) -> None:
        enter_host_of(int(request.environment[RAYLET]))
        take_place(request)

    server.take_place = take_place_on_host
    server.main(int(sys.argv[1]), *json.loads(sys.argv[2]))


def enter_host_of(pid: int) -> None:
    """Enter the namespaces of a process; raises OSError if it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}") as entered:
            if libc.setns(entered.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of process {pid}")


if __name__ == "__main__":
    main()

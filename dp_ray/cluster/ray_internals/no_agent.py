"""Runs as a process of its own in place of a node's dashboard agent, which would take over a second to start.

It imports nothing of Ray or dp_ray. The raylet waits for the agent's ports before it registers its node, and ends
with its agent; -1 is what Ray's own agent writes where the packages of the dashboard are not installed.
"""

import os
import sys
import time
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
LOOK_SECONDS = 1.0


def main(arguments: list[str]) -> None:
    """Say that no port is in use, and live as long as the raylet."""
    raylet = int(os.environ["RAY_RAYLET_PID"])  # which may have ended before this process has begun
    given = dict(
        argument[2:].split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument
    )
    for name in PORTS:
        write(Path(given["session-dir"]) / f"{name}_{given['node-id']}")
    while os.getppid() == raylet:
        time.sleep(LOOK_SECONDS)


def write(path: Path) -> None:
    """Write that a port is not in use; the file appears whole."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("-1")
    unfinished.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])

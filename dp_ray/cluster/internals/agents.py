"""A process of its own in place of one of a node's two agents, each of which takes a second to start.

The raylet waits for the ports of both before it registers its node, and ends with them. It imports nothing of Ray or
dp_ray. The dashboard's agent never comes: -1 is the port that Ray's own writes where the dashboard's packages are not
installed. The agent of runtime environments comes when it is first asked.
"""

import os
import select
import socket
import sys
import time
from pathlib import Path

DASHBOARDS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
ENVIRONMENTS = "runtime_env_agent_port"
OPTION = "--runtime-env-agent-port="
LOOK_SECONDS = 1.0


def main(role: str, command: list[str]) -> None:
    """Stand in for the agent that `command` runs: `never` runs it, or `late`, once somebody asks it."""
    raylet = int(os.environ["RAY_RAYLET_PID"])  # which may have ended before this process has begun
    given = dict(argument[2:].split("=", 1) for argument in command if argument.startswith("--") and "=" in argument)
    if role == "late":
        wait_until_asked(given, command, raylet)
        return
    for name in DASHBOARDS:
        write_port(given, name, -1)
    while os.getppid() == raylet:
        time.sleep(LOOK_SECONDS)


def wait_until_asked(given: dict[str, str], command: list[str], raylet: int) -> None:
    """Become the agent at its first request, which the raylet repeats after a second; end with the raylet."""
    family, _, _, _, address = socket.getaddrinfo(given["node-ip-address"], 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address, family=family) as listener:  # it sets SO_REUSEADDR, for the agent to bind too
        port = listener.getsockname()[1]
        write_port(given, ENVIRONMENTS, port)
        waiting = select.poll()  # select() takes no file number above 1,023, and a raylet may pass on many files
        waiting.register(listener, select.POLLIN)
        while not waiting.poll(1000 * LOOK_SECONDS):
            if os.getppid() != raylet:
                return
        listener.accept()[0].close()
    os.execv(command[0], [f"{OPTION}{port}" if argument.startswith(OPTION) else argument for argument in command])


def write_port(given: dict[str, str], name: str, port: int) -> None:
    """Write an agent's port for the raylet, which waits for it; the file appears whole."""
    path = Path(given["session-dir"]) / f"{name}_{given['node-id']}"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(str(port))
    unfinished.replace(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

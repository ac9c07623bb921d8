"""Runs in place of Ray's `default_worker.py`: has the fork server fork this worker, and ends.

It hands over what the raylet has given it. Without a server that answers, it becomes Ray's own worker.
It starts once for each worker, so it imports nothing of Ray or dp_ray.
"""

import marshal
import os
import signal
import socket
import sys

SERVER = "DP_RAY_FORK_SERVER"  # the environment variable with the path of the server's socket
DEFAULT_WORKER = "DP_RAY_DEFAULT_WORKER"  # and with that of Ray's program
FORKED = b"forked"  # the server's answer


def main() -> None:
    """Have the worker forked, else become it."""
    server, program = os.environ.pop(SERVER), os.environ.pop(DEFAULT_WORKER)
    if not is_forked(server, [program, *sys.argv[1:]]):
        os.execv(sys.executable, [sys.executable, program, *sys.argv[1:]])


def is_forked(server: str, arguments: list[str]) -> bool:
    """Whether the server has forked a worker with these arguments, and with what else this process was given."""
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    is_leader = os.getpgid(0) == os.getpid()
    request = marshal.dumps((arguments, dict(os.environ), os.getcwd(), blocked, is_leader, os.getppid()))
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server)
            sent = socket.send_fds(connection, [request], [0, 1, 2])
            connection.sendall(request[sent:])
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(len(FORKED)) == FORKED
    except OSError:
        return False


if __name__ == "__main__":
    main()

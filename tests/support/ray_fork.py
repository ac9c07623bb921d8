"""A program that Ray starts in place of its `setup_worker.py`: has `ray_forks.py` fork the worker, and ends.

It becomes Ray's own program where no server answers. It imports little, since it runs once for each worker.
"""

import json
import os
import signal
import socket
import sys


def is_forked(server: str) -> bool:
    """Whether the server has forked a worker with what this process was given."""
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server)
            data = json.dumps([sys.argv[1:], dict(os.environ), blocked]).encode()
            sent = socket.send_fds(connection, [data], [0, 1, 2])
            connection.sendall(data[sent:])
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(6) == b"forked"
    except OSError:
        return False


if __name__ == "__main__" and not is_forked(os.environ["DP_RAY_TESTS_FORKS"]):
    os.execv(sys.executable, [sys.executable, os.environ["DP_RAY_TESTS_SETUP_WORKER"], *sys.argv[1:]])

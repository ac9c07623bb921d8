"""A program, `ray start`, whose workers are forked from a process that has imported what they import.

A worker that Ray starts anew imports Ray and torch for three seconds of a core, and the tests start hundreds. Code
of the project is not imported before the fork: each worker imports what its job has sent. The hosts of
`tests/support/hosts.py` and the nodes of `tests/test_cluster.py` have Ray's own workers.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

SOCKET = "DP_RAY_TESTS_FORKS"  # the environment variable with the path of the server's socket
SETUP = "DP_RAY_TESTS_SETUP_WORKER"  # and with that of Ray's own program, for a worker that nobody forks
# Not Ray, which reads variables of its environment when it is imported.
MODULES = [
    "torch",
    "torch._dynamo",
    "torch.utils.data",
    "pandas",
    "pyarrow.parquet",
    "pyarrow.fs",
    "sklearn.datasets",
]
MODULES += ["tensorboardX", "pydantic", "requests", "yaml", "fsspec", "jsonschema", "click", "rich", "filelock"]
MODULES += ["google.protobuf.json_format", "attr", "pytest", "hypothesis"]
ASKS = str(Path(__file__).with_name("ray_fork.py"))
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="  # arguments of Ray's setup_worker.py alone


def main() -> None:
    """Start the server of forks in the folder that the first argument names, then be `ray` with the others."""
    folder, *arguments = sys.argv[1:]
    os.environ[SOCKET] = f"{folder}/forks"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[SOCKET])
        listener.listen(64)
        line = [sys.executable, __file__, "--serve", str(listener.fileno()), gcs_address(arguments)]
        own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        server = subprocess.Popen(line, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=own)
    try:
        start_ray(arguments)
    finally:
        server.kill()
        server.wait()


def gcs_address(arguments: list[str]) -> str:
    """The argument of a raylet that names its cluster."""
    (port,) = (one.removeprefix("--port=") for one in arguments if one.startswith("--port="))
    return f"--gcs-address=127.0.0.1:{port}"


def start_ray(arguments: list[str]) -> None:
    """Be `ray`, with `ray_fork.py` in place of its `setup_worker.py`."""
    from ray._private.parameter import RayParams
    from ray.scripts import scripts

    before = RayParams.update_if_absent

    def with_forks(params: Any, **keys: Any) -> None:
        if "setup_worker_path" in keys:
            os.environ[SETUP] = keys["setup_worker_path"]
            keys["setup_worker_path"] = ASKS
        before(params, **keys)

    RayParams.update_if_absent = with_forks
    sys.argv = ["ray", *arguments]
    scripts.main()


def serve(listener: socket.socket) -> None:
    """Fork a worker for each request, until the standard input ends."""
    del sys.path[0]  # this file's folder
    # Workers know their cluster by the raylet that is their parent: here this process is.
    Path("/proc/self/comm").write_text("raylet")
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            (arguments, environment, blocked), files = received(connection)
            is_worker = os.fork() == 0
            if is_worker:
                connection.sendall(b"forked")
        if is_worker:
            listener.close()
            be_worker(arguments, environment, blocked, files)
            return
        for file in files:
            os.close(file)


def received(connection: socket.socket) -> tuple[Any, list[int]]:
    """A request, and the files that came with it."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while more := connection.recv(1 << 16):
        data += more
    return json.loads(data), files


def be_worker(arguments: list[str], environment: dict[str, str], blocked: list[int], files: list[int]) -> None:
    """Be what Ray's `setup_worker.py` and `default_worker.py` make of a fresh process."""
    os.setpgid(0, 0)  # Ray kills the process group of a worker
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    program, *rest = [one for one in arguments if not one.startswith((CONTEXT, LANGUAGE))]
    for one in arguments:
        if one.startswith(CONTEXT):
            enter(json.loads(one.removeprefix(CONTEXT)))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.path.dirname(program), *paths, *sys.path]
    sys.argv = [program, *rest]
    runpy.run_path(program, run_name="__main__")


def enter(context: dict[str, Any]) -> None:
    """Set the environment variables of a runtime_env, and go to its working directory."""
    for name, value in context.get("env_vars", {}).items():
        os.environ[name] = os.path.expandvars(value)
    if context.get("command_prefix"):
        _, folder, _ = context["command_prefix"]  # cd FOLDER &&
        os.chdir(folder)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        main()

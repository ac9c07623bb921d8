"""The quick start of a Ray of dp_ray's own, all of it. DP_RAY_QUICK_START=0 leaves it out.

Without it, `start_local` is a plain `ray.init`, and each worker starts as Ray starts it: the same results, some
seconds later.

Workers are forked from a server, a process with torch imported (`cluster/fork_server.py`): each would take three
seconds to import it.
The processes that nobody would ask anything are not started; each takes a second of a core.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dp_ray.cluster import fork_server
from dp_ray.cluster.internals import forked_worker
from dp_ray.cluster.ray_version import unknown_ray
from dp_ray.job.job import Job
from dp_ray.job.keys import ModuleKeys, WorkerKeys
from dp_ray.system.linux import forks_after_imports
from dp_ray.system.process import environment, own_folder, patched, short_folder

SWITCH = "DP_RAY_QUICK_START"

# What a worker imports, but for Ray itself and what imports Ray: what Ray needs of others, and before that our own,
# for a job or for parallel modules.
OTHERS = (
    "filelock",
    "fsspec.implementations.local",
    "google.protobuf.json_format",
    "jsonschema",
    "logging.config",
    "msgpack",
    "psutil",
    "pydantic.dataclasses",
    "pydantic.deprecated.class_validators",
    "requests",
    "tqdm.auto",
    "yaml",
)
MODULES = (
    "dp_ray.tasks.task",
    "dp_ray.messages",
    "dp_ray.monitor.faults",
    "dp_ray.rundir.claim",
    "dp_ray.system.imports",
    *OTHERS,
)
OF_SERVING = (
    "dp_ray.tasks.serve",
    "dp_ray.process.numerics",
    "dp_ray.job.keys",
    "dp_ray.messages",
    "dp_ray.system.imports",
    *OTHERS,
)
OF_TRAINING = ("torch._dynamo",)  # torch imports it with the first optimizer, for nearly two seconds of a core
THREADS = "OMP_NUM_THREADS"
WAITING = 128  # requests that may wait until the server has imported what it needs

DEFAULT_WORKER = "workers/default_worker.py"  # in Ray's private package
# The driver would wait for them with Python's lock held, so that it imports nothing meanwhile.
WITHOUT_SPARE_WORKERS = {"prestart_worker_first_driver": False}
AGENTS = [sys.executable, "-S", "-E", str(Path(__file__).with_name("agents.py"))]


def is_quick() -> bool:
    """Return whether a Ray of dp_ray's own starts quickly: as the user says, else with a known Ray on Linux."""
    return os.environ.get(SWITCH, "0" if unknown_ray() or not forks_after_imports() else "1") != "0"


@contextmanager
def forking(keys: WorkerKeys) -> Iterator[Path | None]:
    """Start a fork server, which ends with the block; gives the path of its socket.

    None with `env`, which has to be set in a worker before torch is imported there.
    """
    if keys.env or not is_quick():
        yield None
        return
    with own_folder(short_folder()) as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "fork-server"
        listener.bind(str(path))
        listener.listen(WAITING)
        with _started(listener, threads_of(keys), imports_of(keys)):
            listener.close()  # so that nobody waits for an answer once the server has ended
            yield path


def threads_of(keys: WorkerKeys) -> str:
    """Return the number of threads that Ray sets for a worker: torch reads it when it is imported."""
    return os.environ.get(THREADS, str(max(int(keys.cpus_per_worker), 1)))


def imports_of(keys: WorkerKeys) -> Sequence[str]:
    """Return the modules to import for a job or for parallel modules; a session does not know yet what it runs."""
    if isinstance(keys, ModuleKeys):
        return OF_SERVING
    return MODULES + OF_TRAINING if isinstance(keys, Job) and keys.task == "train" else MODULES


@contextmanager
def _started(listener: socket.socket, threads: str, modules: Sequence[str]) -> Iterator[None]:
    """Run the server's program while the block runs; should this process be killed, the program's stdin ends."""
    given = json.dumps([list(map(str, sys.path)), modules])
    line = [sys.executable, fork_server.__file__, str(listener.fileno()), given]
    nowhere, pipe = subprocess.DEVNULL, subprocess.PIPE
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is the driver's
    try:
        with environment({THREADS: threads}):
            server = subprocess.Popen(line, stdin=pipe, stdout=nowhere, stderr=nowhere, pass_fds=[listener.fileno()])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with server:
        try:
            yield
        finally:
            server.kill()


def start_local(num_cpus: int, folder: str, logs: bool, fork_server: Path | None, **keys: Any) -> None:
    """Start an embedded Ray in a folder of its own; `logs` says whether the driver prints the workers' logs.

    `fork_server` is the socket of the server that forks its workers; None for Ray's own way. Public: none; ray.init
    documents no argument for the folder, nor for the processes.
    """
    import ray

    with _without_needless_processes(logs) if is_quick() else nullcontext(), workers_forked_by(fork_server):
        ray.init(
            "local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=logs,
            _temp_dir=folder,
            _system_config=None if fork_server is None else WITHOUT_SPARE_WORKERS,
            **keys,
        )


@contextmanager
def workers_forked_by(server: Path | None) -> Iterator[None]:
    """Within the block, a raylet that is started has its workers forked by the server at this socket."""
    if server is None:
        yield
        return
    import ray._private.node

    node = ray._private.node.Node
    before = node.start_raylet
    program = Path(ray._private.__path__[0]) / DEFAULT_WORKER
    given = {forked_worker.SERVER: str(server), forked_worker.DEFAULT_WORKER: str(program)}

    def start_raylet(self: Any, *args: Any, **keys: Any) -> Any:
        self._ray_params.worker_path = forked_worker.__file__
        return before(self, *args, **keys)

    with patched(node, start_raylet=start_raylet), environment(given):
        yield


@contextmanager
def _without_needless_processes(logs: bool) -> Iterator[None]:
    """Within the block, a node is started without what nobody would ask anything here.

    That is the dashboard's server and its agent, for which the node would wait; the autoscaler's monitor, which has
    no nodes to add; and the reader of the logs. The agent of environments comes when it is asked. Nor does Ray look
    whether the packages of the dashboard's agent are there, which would import all of them.
    """
    import ray._private.node
    import ray._private.services
    import ray._private.utils
    from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT

    services = ray._private.services
    starts = ["start_api_server", "start_monitor", *([] if logs else ["start_log_monitor"])]
    roles = {PROCESS_TYPE_DASHBOARD_AGENT: "never", PROCESS_TYPE_RUNTIME_ENV_AGENT: "late"}
    before = services._build_python_executable_command_memory_profileable

    def command(component: str, *args: Any, **keys: Any) -> list[str]:
        own = list(before(component, *args, **keys))
        return [*AGENTS, roles[component], *own] if component in roles else own

    with (
        patched(ray._private.node.Node, **dict.fromkeys(starts, lambda *_, **__: None)),
        patched(services, _build_python_executable_command_memory_profileable=command),
        patched(ray._private.utils, get_dashboard_dependency_error=lambda: None),
    ):
        yield

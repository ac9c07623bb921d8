"""Ray Core: enter a cluster, look at its nodes, drain one on purpose, and send files to it."""

import json
import os
import secrets
import shlex
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
import ray
import ray._private.ray_constants
import ray._private.state
import ray._private.utils
import ray._private.worker
import ray._raylet
import requests
import yaml
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS, RAY_RUNTIME_ENV_IGNORE_GITIGNORE
from ray._private.runtime_env import packaging
from ray.core.generated import autoscaler_pb2

from dp_ray.cluster.internals.variables import AUTH_MODE, AUTH_TOKEN, JOB_CONFIG, USE_TLS, UV_RUN, VARIABLES
from dp_ray.cluster.resources import NodeType
from dp_ray.system import linux
from dp_ray.system.process import patched

CONNECT_SECONDS = 10.0
LOG_SECONDS = 7 * 24 * 3600  # how long Ray may take to send a file
PIECE = 1 << 20
_GCS = "--gcs-address="  # an argument of each raylet
_LOGS, _CLUSTER_FILE = "--logs-dir", "--autoscaling-config"  # arguments of the head's monitor


def find_users_token() -> bool:
    """Show the user's token to the cluster from now on; return whether there is one.

    The user's variable is heeded if it is set. Public: none; ray.init does so only at an address that it finds by
    itself, and before 2.59 not at all.
    """
    if AUTH_MODE in os.environ:
        return os.environ[AUTH_MODE].lower() == "token"
    if not ray._raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return False
    os.environ[AUTH_MODE] = "token"
    ray._raylet.Config.initialize("")  # Ray reads its variables only once
    return True


def give_token() -> None:
    """Give the Ray that is to be started here a token of its own, if the user has none and ~/.ray cannot hold one.

    Its processes inherit it. Public: RAY_AUTH_TOKEN; without it ray.init fails where it cannot write a token.
    """
    loader = ray._raylet.AuthenticationTokenLoader.instance()
    if os.environ.get(AUTH_MODE, "token").lower() != "token" or loader.has_token(ignore_auth_mode=True):
        return
    folder = os.path.expanduser("~/.ray")
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        os.environ[AUTH_TOKEN] = secrets.token_hex(32)
        loader.reset_cache()


@contextmanager
def connecting(shown: Sequence[str] | None, heeds_uv: bool) -> Iterator[None]:
    """Within the block, `ray.init` sets no handlers of signals, and has the dashboard show a command line `shown`.

    The handlers in C are for SIGTERM too, from the midst of `ray.init` on, for all threads: they print stacks, and
    3 s later abort the process. For a crash, Python's faulthandler prints them, which Ray turns on.
    Unless it `heeds_uv`, or the user has set Ray's variable, a driver under `uv run` connects as any other does. Ray
    would start each worker by the driver's `uv run` line, in a copy of the working directory: another environment, or
    none where uv is not found or its lock file was left out. Such workers never come, and Ray tells nobody.
    Public: none for the command line; for the rest Ray's variables, which it reads when it is imported.
    """
    constants, utils = ray._private.ray_constants, ray._private.utils
    takes_uv = heeds_uv or UV_RUN in os.environ
    with (
        patched(constants, RAY_DISABLE_FAILURE_SIGNAL_HANDLER=True),
        patched(utils, set_sigterm_handler=lambda _: None),
        nullcontext() if takes_uv else patched(constants, RAY_ENABLE_UV_RUN_RUNTIME_ENV=False),
        patched(utils, get_entrypoint_name=lambda: shlex.join(shown)) if shown else nullcontext(),
    ):
        yield


def wants_token(address: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Return whether the Ray at HOST:PORT demands its token. Public: none; ray.init fails minutes later.

    Raises ConnectionError if no Ray answers within `seconds`; Ray itself retries a dead address for minutes.
    """
    import grpc
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            stub.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=seconds)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise ConnectionError(f"{error.code().name.lower()}, {error.details()}") from None
    return False


def head_answers(address: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Return whether a Ray answers at HOST:PORT; one whose traffic is encrypted need only take a connection."""
    if USE_TLS in os.environ:
        host, _, port = address.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), seconds):
            return True
        return False
    with suppress(ConnectionError):
        wants_token(address, seconds)
        return True
    return False


def put_apart(value: Any) -> Any:
    """Do `ray.put` with a reference that no other Ray of this process has given out. Public: none.

    Ray numbers the objects of the thread that has connected, from 1 in each Ray. A reference that is left of an
    earlier Ray would free the object of the same number when it is collected. Another thread's have random names.
    """
    with ThreadPoolExecutor(1) as other:
        return other.submit(ray.put, value).result()


def address_of_own_raylet() -> str | None:
    """Return the address of the cluster whose raylet started this process, or one of its parents; None if none did.

    Ray sets RAY_ADDRESS in a job to the cluster that was started last on the job's host, which may be another one.
    Public: none; RAY_ADDRESS, where a host has a single Ray.
    """
    for parent in psutil.Process().parents():
        if parent.name() == "raylet":
            return next(argument.removeprefix(_GCS) for argument in parent.cmdline() if argument.startswith(_GCS))
    return None


def raylets_hushed(verbose: bool) -> AbstractContextManager[None]:
    """Keep Ray from printing a page to stdout for each dead worker. Public: none; log_to_driver does not help."""
    return patched(ray._private.worker, _worker_logs_enabled=verbose)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Undo what Ray leaves in os.environ while the block runs, and have Ray read the rest again."""
    before = set(os.environ)
    try:
        yield
    finally:
        for key in os.environ.keys() - before:
            if key.startswith(VARIABLES) or key == "PYTHONBREAKPOINT":
                del os.environ[key]
        read_variables_anew()


def read_variables_anew() -> None:
    """Have Ray read its variables from os.environ again; it reads them only once. Public: none; a fresh process.

    It also forgets the token: a driver that knows one demands it from workers, which a cluster without has not.
    """
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


STATUS_SECONDS = 10.0


def autoscales() -> bool:
    """Return whether the cluster has an autoscaler that may add nodes. Public: `ray status`, as text.

    Each Ray has a monitor, which reports as an autoscaler does. One that adds no nodes knows no types of nodes, or
    makes a type of each node that there is.
    """
    if ray._private.state.state.get_max_resources_from_cluster_config():  # nothing in open-source Ray reports it
        return True
    reply = _cluster_status()
    if reply.HasField("autoscaling_state"):  # by the second version of the autoscaler
        return any(node.ray_node_type_name for node in reply.cluster_resource_state.node_states)
    status = ray._private.worker.global_worker.gcs_client.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), None)
    report = json.loads(status or "{}").get("autoscaler_report") or {}
    return any(kind != f"node_{node}" for node, kind in (report.get("node_type_mapping") or {}).items())


def node_types() -> tuple[NodeType, ...] | None:
    """Return the types of nodes that the cluster's autoscaler may have up; None if this process cannot learn them.

    They stand in the cluster's file, which the monitor reads: on the head node, which runs the drivers as a rule.
    KubeRay's monitor is in another container. Public: none.
    """
    config = ray._private.state.state.get_cluster_config()
    if config is not None and config.node_group_configs:
        return tuple(
            NodeType(group.name, dict(group.resources), group.max_count) for group in config.node_group_configs
        )
    session = _cluster_status().cluster_resource_state.cluster_session_name
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        given = dict(option.split("=", 1) for option in line if option.startswith("--") and "=" in option)
        if _CLUSTER_FILE in given and given.get(_LOGS, "").endswith(f"/{session}/logs"):
            with suppress(OSError, yaml.YAMLError):  # another user's, or one that is being written
                return types_in(yaml.safe_load(Path(given[_CLUSTER_FILE]).expanduser().read_text()))
    return None


def types_in(cluster_file: Mapping[str, Any]) -> tuple[NodeType, ...]:
    """Return the types of nodes in a cluster's file, but for the head's. Public: the file's format is documented."""
    most = cluster_file.get("max_workers", 2)  # as many as Ray takes
    return tuple(
        NodeType(name, node_type.get("resources") or {}, min(most, node_type.get("max_workers", most)))
        for name, node_type in (cluster_file.get("available_node_types") or {}).items()
        if name != cluster_file.get("head_node_type")
    )


def type_of(node: Mapping[str, Any]) -> str:
    """Return the type of a node of ray.nodes(); "" if Ray does not tell. Public: the label "ray.io/node-group"."""
    return str((node.get("Labels") or {}).get(ray._raylet.RAY_NODE_GROUP_KEY, ""))


def _cluster_status() -> Any:
    """Return what the head knows of the nodes and of the autoscaler."""
    reply = ray._private.worker.global_worker.gcs_client.get_cluster_status(timeout_s=STATUS_SECONDS)
    return autoscaler_pb2.GetClusterStatusReply.FromString(reply)


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that will be taken away. Public: none; ray.util.state does not report them."""
    return frozenset(ray._private.state.state.get_draining_nodes())


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by its id. Public: ray.available_resources, only for all together."""
    return dict(ray._private.state.available_resources_per_node())


def label_of(*node_ids: str) -> dict[str, str]:
    """Return the label selector of these nodes. Public: the label "ray.io/node-id", which is documented."""
    return {ray._raylet.RAY_NODE_ID_KEY: node_ids[0] if len(node_ids) == 1 else f"in({','.join(node_ids)})"}


def drain_this_node(seconds: float | None) -> str | None:
    """Tell Ray that this node will be taken away; return why Ray refuses, else None. Public: `ray drain-node`."""
    deadline = 0 if seconds is None else time.time_ns() // 10**6 + round(seconds * 1000)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    context = ray.get_runtime_context()
    head = ray._raylet.GcsClient(address=context.gcs_address)
    accepted, why = head.drain_node(context.get_node_id(), reason, "fault injection", deadline)
    return None if accepted else str(why)


def raylet_of_this_worker() -> psutil.Process:
    """Return the raylet of this worker's node; the node's workers are its child processes. Public: none."""
    raylet = psutil.Process().parent()
    assert raylet is not None and "raylet" in raylet.name(), "a worker's parent is its node's raylet"
    return raylet


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


def own_log_folder() -> Path:
    """Return the log folder of the node on which this submitted job runs: its own output is a file in it.

    Ray's dashboard serves the files of this folder, and follows links in it. Public: none.
    """
    return Path(linux.path_of_stdout()).parent


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


def name_own_job(address: str, names: Mapping[str, str]) -> None:
    """Add names, each under its key, to the metadata of the submitted job that this process is in.

    Those that it has stay.

    The job's supervisor writes the same record before the program starts and after it has ended, and keeps this.
    Public: none; only `submit_job` takes metadata.
    """
    from ray.dashboard.modules.job.common import JobInfoStorageClient  # slow to import, and only a job needs it

    submission = json.loads(os.environ[JOB_CONFIG])["metadata"]["job_submission_id"]
    record = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=submission).encode()
    head, jobs = ray._raylet.GcsClient(address=address), ray._private.ray_constants.KV_NAMESPACE_JOB
    known = json.loads(head.internal_kv_get(record, jobs))
    if names.keys() - (known["metadata"] or {}).keys():
        known["metadata"] = {**names, **(known["metadata"] or {})}
        head.internal_kv_put(record, json.dumps(known).encode(), True, jobs)


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

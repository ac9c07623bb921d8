"""Find the cluster, or start one; ship the code to it; say at once what can never fit into it."""

import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.state import state as ray_state
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

import dp_ray
from dp_ray.errors import ClusterError
from dp_ray.job import Job
from dp_ray.system.environment import is_env, without_values
from dp_ray.system.folders import own_folder
from dp_ray.system.stop_signals import handlers_kept

Resources = Mapping[str, float]
CONNECT_SECONDS = 10.0

# Told to Ray Train in the driver's environment, from where it carries them to its own processes.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # its 2 s are waited for at start, at the end and at a failure
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # would print each line twice
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a user's relative paths keep their meaning
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process more; `policy` looks at the nodes itself
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",  # of its 60: what was free a moment ago is there, or is not
}


@contextmanager
def connected(job: Job, address: str | None, verbose: bool) -> Iterator[None]:
    """Ray, for as long as the block lasts: the caller's own, the one at an address, or an embedded one.

    An address comes from `address`, or from RAY_ADDRESS, which Ray sets in its jobs.
    Raises ClusterError where no Ray answers there.
    """
    if ray.is_initialized():
        yield
        return
    # An embedded Ray gets a folder of its own: the usual one holds the address of the Ray that was started last, and
    # some of Ray Train's actors would wait for one that died, or ask the wrong one.
    short = "/tmp" if os.path.isdir("/tmp") else None  # a socket's path may have 107 characters, TMPDIR many
    with _environment_kept(), handlers_kept(), own_folder(short) as folder, _raylets_hushed(verbose):
        _start(job, address_of(address), verbose, folder)
        try:
            yield
        finally:
            ray.shutdown()


def address_of(given: str | None) -> str | None:
    """Where the Ray is that the user means; None for one of our own."""
    return given or os.environ.get("RAY_ADDRESS")


@contextmanager
def _raylets_hushed(verbose: bool) -> Iterator[None]:
    """Keep Ray from printing a page to stdout for each worker that dies, whatever `log_to_driver` says."""
    before = ray._private.worker._worker_logs_enabled
    ray._private.worker._worker_logs_enabled = verbose
    try:
        yield
    finally:
        ray._private.worker._worker_logs_enabled = before


def _start(job: Job, address: str | None, verbose: bool, folder: str) -> None:
    level = "INFO" if verbose else "ERROR"
    logging.getLogger("ray").setLevel(level)
    quiet: dict[str, Any] = {"log_to_driver": verbose, "logging_level": level}
    try:
        with _command_line_hushed():
            if address:
                authenticate(address)
                ray.init(address, runtime_env=None if in_ray_job() else code_to_ship(), **quiet)
            else:
                ray.init("local", num_cpus=_logical_cpus(job), include_dashboard=False, _temp_dir=folder, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"no Ray answers at {address or 'local'}: {error}") from error


@contextmanager
def _command_line_hushed() -> Iterator[None]:
    """Keep values of `env` out of the command line of this driver, which Ray keeps and its dashboard shows."""
    before = ray._private.utils.get_entrypoint_name
    if any(map(is_env, sys.orig_argv)):
        ray._private.utils.get_entrypoint_name = lambda: shlex.join(without_values(sys.orig_argv))
    try:
        yield
    finally:
        ray._private.utils.get_entrypoint_name = before


def wants_token(address: str) -> bool:
    """Whether the Ray at HOST:PORT takes only those who show its token.

    Raises ConnectionError where none answers within CONNECT_SECONDS: Ray itself asks a dead address for minutes.
    """
    with grpc.insecure_channel(address) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            stub.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise ConnectionError(f"{error.code().name.lower()}, {error.details()}") from None
    return False


def authenticate(address: str) -> None:
    """Show the user's token to a Ray that wants it: Ray does so by itself only at an address that it found."""
    is_host_and_port = re.fullmatch(r"\S+:\d+", address) and "://" not in address
    if not is_host_and_port or "RAY_AUTH_MODE" in os.environ or "RAY_USE_TLS" in os.environ:
        return
    if wants_token(address) and not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
        raise ConnectionError("it wants its token, put that into ~/.ray/auth_token or RAY_AUTH_TOKEN")


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo what Ray leaves in os.environ."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for key in os.environ.keys() - before.keys():
            if key.startswith("RAY_") or key == "PYTHONBREAKPOINT":
                del os.environ[key]
        Config.initialize("")  # Ray has read the variables once and would go by what they were


@contextmanager
def train_environment() -> Iterator[None]:
    """What Ray Train shall know, in os.environ where the user has not set it, for as long as the block lasts."""
    added = {key: value for key, value in TRAIN_ENVIRONMENT.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def worker_resources(job: Job) -> dict[str, float]:
    """What one worker takes; `gpus_per_worker: auto` is 1 where the cluster has GPUs."""
    gpus = job.gpus_per_worker
    if gpus == "auto":
        gpus = 1 if ray.cluster_resources().get("GPU", 0) > 0 and job.devices is None else 0
    wanted = {"CPU": job.cpus_per_worker, "GPU": gpus, **job.resources_per_worker}
    return {name: amount for name, amount in wanted.items() if amount}


def check_fits(job: Job, each: Resources) -> str | None:
    """What the job must wait for, if anything; ClusterError where it can never fit."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = room_for(each, nodes, job.placement, job.accelerator_type)
    if room < job.min_workers:
        says = (
            f"{job.min_workers} workers need {times(each, job.min_workers)}{_on(job.accelerator_type)} "
            f"({text_of(each)} each, {job.placement}); the cluster of {len(nodes)} nodes has "
            f"{text_of(_total(nodes, each))}, room for {room} workers{_too_large(each, nodes)}"
        )
        if not ray_state.get_max_resources_from_cluster_config():
            raise ClusterError(f"{says}, and no autoscaler that could add nodes")
        return f"{says}; waiting for the autoscaler"
    free = ray.available_resources()
    lacking = {name for name, amount in each.items() if free.get(name, 0) < amount * job.min_workers}
    if lacking:
        return (
            f"{job.min_workers} workers need {times(each, job.min_workers)}; "
            f"free are {text_of({name: free.get(name, 0) for name in each})}: waiting for other jobs to end"
        )
    return None


def _too_large(each: Resources, nodes: list[dict[str, float]]) -> str:
    """What one worker takes that no node has: all of it must be on one."""
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in each}
    lacking = {name: amount for name, amount in each.items() if amount > most[name]}
    if not lacking:
        return ""
    largest = text_of({name: most[name] for name in lacking})
    return f": one worker takes {text_of(lacking)} of ONE node, and the largest has {largest}"


def room_for(
    each: Resources, nodes: list[dict[str, float]], placement: str = "PACK", accelerator_type: str | None = None
) -> int:
    """How many workers that take `each` the nodes hold, if they were idle."""
    if accelerator_type:
        nodes = [node for node in nodes if f"accelerator_type:{accelerator_type}" in node]
    if not each:
        return 1 << 30 if nodes else 0
    counts = [min(_fit(name, node.get(name, 0), amount) for name, amount in each.items() if amount) for node in nodes]
    if placement == "STRICT_PACK":
        return max(counts, default=0)
    return sum(min(count, 1) for count in counts) if placement == "STRICT_SPREAD" else sum(counts)


def _fit(name: str, there: float, amount: float) -> int:
    """How many times `amount` is there; a part of a GPU is a part of one."""
    if name == "GPU" and amount < 1:
        whole, rest = divmod(there, 1)
        return int(whole) * int(1 / amount + 1e-9) + int(rest / amount + 1e-9)
    return int(there / amount + 1e-9)


def _logical_cpus(job: Job) -> int:
    """Enough for the workers, whatever the machine has: a laptop runs 8 workers on 2 cores, slowly."""
    return max(os.cpu_count() or 1, math.ceil(job.max_workers * job.cpus_per_worker))


def in_ray_job() -> bool:
    """Whether this process was started by `ray job submit`, which has shipped the code already."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def code_to_ship() -> dict[str, Any]:
    """The working directory and dp_ray itself, for every node; Ray leaves out what .gitignore names."""
    here = Path.cwd()
    excludes = [f"/{name}/" for name in (".git", ".venv", "runs") if (here / name).is_dir()]
    return {
        "working_dir": str(here),
        "excludes": excludes,
        "py_modules": [str(Path(dp_ray.__file__).parent)],
    }


def _total(nodes: list[dict[str, float]], each: Resources) -> Resources:
    return {name: sum(node.get(name, 0) for node in nodes) for name in each}


def times(each: Resources, count: int) -> str:
    return text_of({name: amount * count for name, amount in each.items()})


def text_of(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _on(accelerator_type: str | None) -> str:
    return f" on {accelerator_type} nodes" if accelerator_type else ""

"""Finds or starts the cluster, ships the code to it, and rejects a job that can never fit."""

import logging
import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray

import dp_ray
from dp_ray.cluster.decisions import Resources, addable, capacity_for, free_for, gpus_by_default, text_of, times
from dp_ray.cluster.fast_start import EarlyConnection, forking
from dp_ray.cluster.internals.core import (
    address_of_own_raylet,
    autoscales,
    find_users_token,
    forget_variables,
    node_types,
    raylets_hushed,
    read_variables_anew,
    shown_as,
    shows_token,
    start_local,
    type_of,
    wants_token,
    workers_without_uv,
)
from dp_ray.cluster.internals.variables import ADDRESS, AUTH_MODE, AUTH_TOKEN, JOB_CONFIG, TRAIN_ENVIRONMENT, USE_TLS
from dp_ray.errors import ClusterError, Error, JobError
from dp_ray.job.keys import WorkerKeys
from dp_ray.system.process import environment, own_folder, short_folder, without_values
from dp_ray.system.threads import handlers_kept
from dp_ray.text import hide

_ENVIRONMENT = threading.Lock()  # several sessions may start workers at the same time


@contextmanager
def connected(keys: WorkerKeys, address: str | None, verbose: bool) -> Iterator[None]:
    """Connect to Ray while the block runs: the caller's own, the one at an address, or an embedded one.

    A connection that `connected_early` has begun is taken over. The address is `address`, in a job that of its
    cluster, else RAY_ADDRESS. Raises ClusterError if no Ray answers.
    """
    if early := EarlyConnection.take():
        with early:
            yield
    elif ray.is_initialized():
        _check_heard()
        yield
    else:
        with _connected(keys, address, verbose):
            yield


@contextmanager
def _connected(keys: WorkerKeys, address: str | None, verbose: bool) -> Iterator[None]:
    # An embedded Ray gets a folder of its own. The default folder holds the address of the Ray that was started last,
    # so some of Ray Train's actors would wait for a dead Ray, or ask the wrong one.
    found = address_of(address)
    with (
        nullcontext() if found else forking(keys) as fork_server,
        _environment_kept(),
        own_folder(short_folder()) as folder,
        raylets_hushed(verbose),
    ):
        with handlers_kept():
            _start_ray(keys, found, verbose, folder, fork_server)
        try:
            yield
        finally:
            ray.shutdown()


def _check_heard() -> None:
    """Raise ClusterError if this process, which the caller has connected, would refuse all calls from its Ray.

    A process that was in a Ray with a token keeps that, and demands it in the next Ray too, which may have none. Ray
    would then end each actor before it starts, since "all references to the actor were removed".
    """
    address = ray.get_runtime_context().gcs_address
    with suppress(ConnectionError):
        if shows_token() and USE_TLS not in os.environ and not wants_token(address):
            raise ClusterError(
                f"this process still has the token of an earlier Ray, and the Ray at {address} has none, so it could "
                f"not be heard here; call ray.shutdown() and give dp_ray the address (address={address!r}), or "
                "connect in a new process"
            )


def is_connected() -> bool:
    """Whether this process is connected to a Ray, by the caller's own ray.init or by a session."""
    return bool(ray.is_initialized()) and EarlyConnection.begun is None


@contextmanager
def connected_early(keys: WorkerKeys, address: str | None, verbose: bool) -> Iterator[EarlyConnection]:
    """Begin to connect in a thread; the first `connected` within the block takes the connection over.

    After the block the connection has ended.
    """
    early = EarlyConnection.begun = EarlyConnection(lambda: _connected(keys, address, verbose))
    early.start()
    try:
        yield early
    finally:
        EarlyConnection.begun = None
        early.end()


def what_begins(address: str | None) -> str:
    """The first phase to show: what the user waits for until Ray is there."""
    if is_connected():
        return "looking at the cluster"
    found = address_of(address)
    return f"connecting to Ray at {found}" if found else "starting Ray"


def ships_callers_code() -> bool:
    """Whether the caller's own ray.init has sent code to the cluster; workers import that, not later edits."""
    sent: dict[str, Any] = ray.get_runtime_context().runtime_env
    return "working_dir" in sent or "py_modules" in sent


def address_of(given: str | None) -> str | None:
    """The address of the Ray to use; None for an embedded one. A job's is that of the cluster that runs it."""
    own = address_of_own_raylet() if in_ray_job() else None
    return given or own or os.environ.get(ADDRESS)


def _start_ray(
    keys: WorkerKeys, address: str | None, verbose: bool, folder: str, fork_server: Path | None = None
) -> None:
    level = "INFO" if verbose else "ERROR"
    logging.getLogger("ray").setLevel(level)
    read_variables_anew()  # and forget the token of a Ray of the caller's that has ended
    try:
        # In a Ray job the code is on the cluster, and `uv run` as the job's command is a choice that Ray follows.
        with shown_as(_shown_command_line()), nullcontext() if in_ray_job() else workers_without_uv():
            if address:
                authenticate(address)
                code = None if in_ray_job() else code_to_ship()
                ray.init(address, runtime_env=code, log_to_driver=verbose, logging_level=level)
            else:
                start_local(_logical_cpus(keys), folder, verbose, fork_server, logging_level=level)
    except Exception as error:  # Ray's own of many types, and a bare Exception if a node does not start in time
        says = f"no Ray answers at {address}" if address else "cannot start Ray on this machine"
        raise ClusterError(f"{says}: {error}") from error


def _shown_command_line() -> list[str] | None:
    """The command line that Ray may show for this driver, without secrets; None if it has none."""
    shown = [hide(one) for one in without_values(sys.orig_argv)]
    return shown if shown != sys.orig_argv else None


def authenticate(address: str) -> None:
    """Show the user's token to a Ray that wants it; Ray itself does so only at an address that it found.

    Raises ConnectionError if the Ray wants a token and the user has none, or if no Ray answers.
    """
    is_host_and_port = re.fullmatch(r"\S+:\d+", address) and "://" not in address
    if not is_host_and_port or USE_TLS in os.environ:
        return
    wants = wants_token(address)
    if not wants and os.environ.get(AUTH_MODE) == "token":
        raise ConnectionError(
            f"it has no token, and {AUTH_MODE}=token, which a ray.init sets too, demands one of it; unset {AUTH_MODE}"
        )
    if wants and AUTH_MODE not in os.environ and not find_users_token():
        raise ConnectionError(f"it wants a token: put it into ~/.ray/auth_token or {AUTH_TOKEN}")


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo what Ray leaves in os.environ."""
    before = dict(os.environ)
    try:
        yield
    finally:
        forget_variables(os.environ, keep=list(before))


@contextmanager
def train_environment() -> Iterator[None]:
    """Set Ray Train's variables in os.environ while the block runs; those that the user has set stay."""
    with _ENVIRONMENT, environment({key: value for key, value in TRAIN_ENVIRONMENT.items() if key not in os.environ}):
        yield


def worker_resources(keys: WorkerKeys) -> dict[str, float]:
    """The resources of one worker.

    `gpus_per_worker: auto` is as many as `devices` name of a worker's own; without `devices`, it is 1 if the cluster
    has GPUs, or its autoscaler may add some.
    """
    gpus = keys.gpus_per_worker
    if gpus == "auto":
        gpus = _gpus_by_default() if keys.devices is None else keys.own_gpus
    wanted = {"CPU": keys.cpus_per_worker, "GPU": gpus, **keys.resources_per_worker}
    return {name: amount for name, amount in wanted.items() if amount}


def _gpus_by_default() -> int:
    up = ray.cluster_resources().get("GPU", 0)
    return gpus_by_default(up, node_types() if not up and autoscales() else None)


def without_gpus(keys: WorkerKeys, each: Resources) -> str | None:
    """What to tell of workers with the resources `each` that take no GPU, where an autoscaler might add some."""
    is_by_default = keys.gpus_per_worker == "auto" and keys.devices is None and "GPU" not in each
    if not (is_by_default and autoscales() and node_types() is None):
        return None
    return (
        "gpus_per_worker: auto takes no GPU, since no GPU node is up, and which nodes the autoscaler may add is not "
        "known here: the workers run on CPUs; set gpus_per_worker: 1 to have it add GPU nodes"
    )


def check_fits(keys: WorkerKeys, each: Resources) -> str | None:
    """What the job must wait for, None if nothing.

    Raises ClusterError if it can never fit, or JobError if `devices` names more GPUs than there can ever be.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if (capacity := _capacity(keys, each, nodes)) < keys.min_workers:
        says = (
            f"{keys.min_workers} workers need {times(each, keys.min_workers)}{_on(keys.accelerator_type)} "
            f"({text_of(each)} each, {keys.placement}); the cluster of {len(nodes)} nodes has "
            f"{text_of(_total(nodes, each))}, room for {capacity} workers{_too_large(each, nodes)}"
        )
        advice = "ask for fewer workers, or for less for each"
        if not autoscales():
            raise _misfit(keys, each, nodes, f"{says}, and no autoscaler that could add nodes; {advice}")
        if (types := node_types()) is not None:
            up = [type_of(node) for node in ray.nodes() if node["Alive"]]
            nodes = [*nodes, *addable(types, up, keys.min_workers)]
            if (at_most := _capacity(keys, each, nodes)) < keys.min_workers:
                says += f"; with all nodes that its autoscaler may add it has room for {at_most}"
                raise _misfit(keys, each, nodes, f"{says}; {advice}")
        return f"{says}; waiting for the autoscaler"
    free = ray.available_resources()
    lacking = {name for name, amount in each.items() if free.get(name, 0) < amount * keys.min_workers}
    if lacking:
        return (
            f"{keys.min_workers} workers need {times(each, keys.min_workers)}; "
            f"free are {text_of({name: free.get(name, 0) for name in each})}: waiting for other jobs to end"
        )
    return None


def _capacity(keys: WorkerKeys, each: Resources, nodes: list[dict[str, float]]) -> int:
    return capacity_for(each, nodes, keys.placement, keys.accelerator_type)


def _misfit(keys: WorkerKeys, each: Resources, nodes: list[dict[str, float]], says: str) -> Error:
    """The error of workers that can never fit; it names `devices` if those are why the nodes have too few GPUs."""
    gpus = {"GPU": each.get("GPU", 0)}
    if keys.own_gpus and gpus["GPU"] and _capacity(keys, gpus, nodes) < keys.min_workers:
        return JobError(f"devices: {', '.join(keys.devices or ())} are of each worker's own GPUs; {says}")
    return ClusterError(says)


def sessions_that_fit(keys: WorkerKeys, wanted: int | None) -> int:
    """How many sessions with these keys shall run at a time: `wanted`, or as many as there are free resources for.

    Without an autoscaler at most as many as fit, and always one.
    """
    each = worker_resources(keys)
    if wanted is not None and (wanted == 1 or autoscales()):
        return wanted
    if not each:  # a worker takes nothing, so there is room for any number
        return wanted or 1
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    workers = free_for(each, nodes, ray.available_resources(), keys.placement, keys.accelerator_type)
    fits = max(1, workers // keys.max_workers)
    return fits if wanted is None else min(wanted, fits)


def _too_large(each: Resources, nodes: list[dict[str, float]]) -> str:
    """Name the resources of which one worker needs more than any node has; "" if there are none."""
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in each}
    lacking = {name: amount for name, amount in each.items() if amount > most[name]}
    if not lacking:
        return ""
    largest = text_of({name: most[name] for name in lacking})
    return f": one worker takes {text_of(lacking)} of ONE node, and the largest has {largest}"


def _logical_cpus(keys: WorkerKeys) -> int:
    """Enough CPUs for all workers, even if the machine has fewer: a laptop runs 8 workers on 2 cores, slowly."""
    return max(os.cpu_count() or 1, math.ceil(keys.max_workers * keys.cpus_per_worker))


def in_ray_job() -> bool:
    """Whether this process belongs to a submitted Ray job, whose code is shipped already."""
    return JOB_CONFIG in os.environ


def code_to_ship() -> dict[str, Any]:
    """The runtime_env that ships the working directory and dp_ray to every node, without what .gitignore excludes."""
    here = Path.cwd()
    excludes = [f"/{name}/" for name in (".git", ".venv", "runs") if (here / name).is_dir()]
    return {
        "working_dir": str(here),
        "excludes": excludes,
        "py_modules": [str(Path(dp_ray.__file__).parent)],
    }


def _total(nodes: list[dict[str, float]], each: Resources) -> Resources:
    return {name: sum(node.get(name, 0) for node in nodes) for name in each}


def _on(accelerator_type: str | None) -> str:
    return f" on {accelerator_type} nodes" if accelerator_type else ""

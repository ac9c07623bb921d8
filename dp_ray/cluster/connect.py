"""Find or start the cluster, ship the code to it, and reject a job that can never fit."""

import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

import dp_ray
from dp_ray.cluster.internals import core
from dp_ray.cluster.internals.quick_start import forking, start_local
from dp_ray.cluster.internals.variables import ADDRESS, AUTH_MODE, AUTH_TOKEN, JOB_CONFIG, USE_TLS
from dp_ray.cluster.resources import (
    Resources,
    addable,
    capacity_for,
    free_for,
    gpus_by_default,
    resources_text,
    times,
)
from dp_ray.errors import ClusterError, Error, JobError
from dp_ray.job.keys import ModuleKeys, WorkerKeys, runs_anywhere
from dp_ray.system.process import own_folder, short_folder, without_values
from dp_ray.system.threads import handlers_kept, signals_put_off
from dp_ray.text import counted, hide

RUN_NAME = "dp_ray_run"  # in a Ray job's metadata: the run's name
RUN_STORAGE = "dp_ray_storage"  # and in which folder or URL its directory is, as the driver sees it
OF_MODULES = "dp_ray.DataParallel"  # the namespace of an embedded Ray that is there for parallel modules alone
END_SECONDS = 20.0  # for which a second Ctrl-C is needed to leave a Ray that does not end
AWAIT_SECONDS = 10.0  # after which a line says that Ray is waited for


class EarlyConnection(threading.Thread):
    """A connection that a thread makes, holds and ends.

    The thread lives as long as the connection: the kernel ends an embedded Ray with the thread that started it.
    """

    def __init__(self, connect: Callable[[], AbstractContextManager[None]]) -> None:
        # At its end Python waits for threads that are no daemons before it runs what is to end the connection.
        super().__init__(name="connection to Ray", daemon=True)
        self._connect = connect
        self._is_there: Future[None] = Future()
        self._ends = threading.Event()
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Connect, and hold the connection until it is to end."""
        try:
            with self._connect():
                self._is_there.set_result(None)
                self._ends.wait()
        except BaseException as error:
            if not self._is_there.done():
                self._is_there.set_exception(error)
        finally:
            self._has_ended.set()

    def wait(self) -> None:
        """Wait until the connection is made or has failed."""
        futures.wait([self._is_there])

    def end(self) -> None:
        """End the connection, also where Ctrl-C comes meanwhile: a Ray that ends is in the way of the next one.

        After a `join` that Ctrl-C has ended, Python takes the thread for one that has ended, so that waits for none.
        """
        try:
            self._ends.set()
            self._has_ended.wait()
        except BaseException:
            self._ends.set()  # it may have come before that
            self._has_ended.wait(END_SECONDS)
            raise

    def __enter__(self) -> None:
        """Wait for the connection; raises what it has failed with."""
        self._is_there.result()

    def __exit__(self, *_: object) -> None:
        """End the connection."""
        self.end()


@contextmanager
def connected(keys: WorkerKeys, address: str | None, verbose: bool) -> Iterator[None]:
    """Connect to Ray while the block runs: the caller's own, the one at an address, or an embedded one.

    The address is `address`, in a job that of its cluster, else RAY_ADDRESS. Raises ClusterError if no Ray answers.
    """
    if ray.is_initialized():
        if ray.get_runtime_context().namespace == OF_MODULES:  # which leave no room for others
            raise ClusterError(
                "this process has started its Ray for dp_ray.DataParallel, which is open: close that first"
            )
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
        core.environment_kept(),
        own_folder(short_folder()) as folder,
        core.raylets_hushed(verbose),
    ):
        try:
            _start_ray(keys, found, verbose, folder, fork_server)
            yield
        finally:
            with signals_put_off():  # half of an embedded Ray would go on as long as this process, and nothing end it
                ray.shutdown()


def is_connected() -> bool:
    """Return whether this process is connected to a Ray, whoever has connected it."""
    return bool(ray.is_initialized())


@contextmanager
def connected_early(keys: WorkerKeys, address: str | None, verbose: bool) -> Iterator[EarlyConnection]:
    """Begin to connect in a thread; who is given the connection waits for it by entering it, and ends it.

    After the block it has ended in any case.
    """
    early = EarlyConnection(lambda: _connected(keys, address, verbose))
    early.start()
    try:
        yield early
    finally:
        early.end()


def what_begins(address: str | None) -> str:
    """Return the first phase to show: what the user waits for until Ray is there."""
    if is_connected():
        return "looking at the cluster"
    found = address_of(address)
    return f"connecting to Ray at {found}" if found else "starting Ray"


def what_is_awaited(address: str | None) -> str:
    """Return the line to show if Ray is not there after a while."""
    if (found := address_of(address)) is None:
        return "waiting for Ray to start on this machine"
    takes_code = "" if in_ray_job() else f", and to take the code in {os.getcwd()}"
    return f"waiting for the Ray at {found} to answer{takes_code}"


def ships_callers_code() -> bool:
    """Return whether the caller's own ray.init has sent code to the cluster; workers import that, not later edits."""
    sent: dict[str, Any] = ray.get_runtime_context().runtime_env
    return "working_dir" in sent or "py_modules" in sent


def address_of(address: str | None) -> str | None:
    """Return the address of the Ray to use; None for an embedded one. A job's is that of the cluster that runs it."""
    own = core.address_of_own_raylet() if in_ray_job() else None
    return address or own or os.environ.get(ADDRESS)


def _start_ray(
    keys: WorkerKeys,
    address: str | None,
    verbose: bool,
    folder: str,
    fork_server: Path | None = None,
) -> None:
    level = "INFO" if verbose else "ERROR"
    logging.getLogger("ray").setLevel(level)
    core.read_variables_anew()  # and forget the token of a Ray of the caller's that has ended
    try:
        # In a Ray job the code is on the cluster, and `uv run` as the job's command is a choice that Ray follows.
        shown = [hide(argument) for argument in without_values(sys.orig_argv)]  # the command line without secrets
        if address:
            authenticate(address)
        else:
            core.give_token()
        with (
            core.connecting(shown if shown != sys.orig_argv else None, in_ray_job()),
            signals_put_off(),
            handlers_kept(),
        ):
            if address:
                code = None if in_ray_job() else code_to_ship()
                ray.init(address, runtime_env=code, log_to_driver=verbose, logging_level=level)
            else:
                # Enough for all workers, even if the machine has fewer: a laptop runs 8 workers on 2 cores, slowly.
                namespace = OF_MODULES if isinstance(keys, ModuleKeys) else None
                cpus = max(os.cpu_count() or 1, math.ceil(keys.max_workers * keys.cpus_per_worker))
                start_local(cpus, folder, verbose, fork_server, logging_level=level, namespace=namespace)
    except Exception as error:  # Ray's own of many types, and a bare Exception if a node does not start in time
        says = f"no Ray answers at {address}" if address else "cannot start Ray on this machine"
        raise ClusterError(f"{says}: {error}") from error


def authenticate(address: str) -> None:
    """Show the user's token to a Ray that wants it; Ray itself does so only at an address that it found.

    Raises ConnectionError if the Ray wants a token and the user has none, or if no Ray answers.
    """
    is_host_and_port = re.fullmatch(r"\S+:\d+", address) and "://" not in address
    if not is_host_and_port or USE_TLS in os.environ:
        return
    wants = core.wants_token(address)
    if not wants and os.environ.get(AUTH_MODE) == "token":
        raise ConnectionError(
            f"it has no token, and {AUTH_MODE}=token, which a ray.init sets too, demands one of it; unset {AUTH_MODE}"
        )
    if wants and AUTH_MODE not in os.environ and not core.find_users_token():
        raise ConnectionError(f"it wants a token: put it into ~/.ray/auth_token or {AUTH_TOKEN}")


def worker_resources(keys: WorkerKeys) -> dict[str, float]:
    """Return the resources of one worker.

    `gpus_per_worker: auto` is as many as `devices` name of a worker's own; without `devices`, it is 1 if the cluster
    has GPUs, or its autoscaler may add some.
    """
    gpus = keys.gpus_per_worker
    if gpus == "auto":
        gpus = keys.own_gpus
        if keys.devices is None:
            up = ray.cluster_resources().get("GPU", 0)
            gpus = gpus_by_default(up, core.node_types() if not up and core.autoscales() else None)
    wanted = {"CPU": keys.cpus_per_worker, "GPU": gpus, **keys.resources_per_worker}
    return {name: amount for name, amount in wanted.items() if amount}


def without_gpus(keys: WorkerKeys, each: Resources) -> str | None:
    """Return a line on workers with the resources `each` that take no GPU, where an autoscaler might add some."""
    is_by_default = keys.gpus_per_worker == "auto" and keys.devices is None and "GPU" not in each
    if not (is_by_default and core.autoscales() and core.node_types() is None):
        return None
    return (
        "gpus_per_worker: auto takes no GPU, since no GPU node is up, and which nodes the autoscaler may add is not "
        "known here: the workers run on CPUs; set gpus_per_worker: 1 to have it add GPU nodes"
    )


def check_fits(keys: WorkerKeys, each: Resources) -> str | None:
    """Return what the job must wait for, None if nothing.

    Raises ClusterError if it can never fit, or JobError if it asks for GPUs that there can never be.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    need = f"{counted(keys.min_workers, 'worker')} {'needs' if keys.min_workers == 1 else 'need'}"
    if (capacity := _capacity(keys, each, nodes)) < keys.min_workers:
        on = f" on {keys.accelerator_type} nodes" if keys.accelerator_type else ""
        parts = [f"{resources_text(each)} each"] if keys.min_workers > 1 else []
        parts += [] if keys.placement == "PACK" else [keys.placement]
        split = f" ({', '.join(parts)})" if parts else ""
        there = {name: sum(node.get(name, 0) for node in nodes) for name in each}
        too_large = _too_large(each, nodes)
        says = (
            f"{need} {times(each, keys.min_workers)}{on}{split}; the cluster of "
            f"{counted(len(nodes), 'node')} has {resources_text(there)}, room for "
            f"{counted(capacity, 'worker')}{too_large}"
        )
        advice = f"ask for {'fewer workers, or for ' if capacity else ''}less for each worker"
        if not core.autoscales():
            raise _misfit(keys, each, nodes, f"{says}, and no autoscaler that could add nodes; {advice}")
        if (types := core.node_types()) is not None:
            up = [core.type_of(node) for node in ray.nodes() if node["Alive"]]
            nodes = [*nodes, *addable(types, up, keys.min_workers)]
            if (at_most := _capacity(keys, each, nodes)) < keys.min_workers:
                says += f"; with all nodes that its autoscaler may add it has room for {at_most}"
                raise _misfit(keys, each, nodes, f"{says}; {advice}")
        return f"{says}; waiting for the autoscaler"
    free = ray.available_resources()
    lacking = {name for name, amount in each.items() if free.get(name, 0) < amount * keys.min_workers}
    if lacking:
        return (
            f"{need} {times(each, keys.min_workers)}; "
            f"free are {resources_text({name: free.get(name, 0) for name in each})}: waiting for other jobs to end"
        )
    return None


def _capacity(keys: WorkerKeys, each: Resources, nodes: list[dict[str, float]]) -> int:
    return capacity_for(each, nodes, keys.placement, keys.accelerator_type)


def _misfit(keys: WorkerKeys, each: Resources, nodes: list[dict[str, float]], says: str) -> Error:
    """Return the error of workers that can never fit.

    It names `devices` if those are why the nodes have too few GPUs, and `gpus_per_worker` if no node has any.
    """
    gpus = {"GPU": each.get("GPU", 0)}
    names = f"{', '.join(keys.devices or ())} {'is' if len(keys.devices or ()) == 1 else 'are'}"
    own = f"devices: {names} of each worker's own GPUs"
    if gpus["GPU"] and not any(node.get("GPU") for node in nodes):
        asks = own if keys.own_gpus else f"gpus_per_worker: each worker asks for {resources_text(gpus)}"
        scaler = "its autoscaler adds none" if core.autoscales() else "no autoscaler that could add some"
        return JobError(f"{asks}, and the cluster has none, and {scaler}; {runs_anywhere(gpus['GPU'])}")
    if keys.own_gpus and gpus["GPU"] and _capacity(keys, gpus, nodes) < keys.min_workers:
        return JobError(f"{own}; {says}")
    return ClusterError(says)


def sessions_that_fit(keys: WorkerKeys, wanted: int | None) -> int:
    """Return how many sessions with these keys shall run at a time: `wanted`, or as many as free resources allow.

    Without an autoscaler at most as many as fit, and always one.
    """
    each = worker_resources(keys)
    if wanted is not None and (wanted == 1 or core.autoscales()):
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
    largest = resources_text({name: most[name] for name in lacking})
    return f": one worker takes {resources_text(lacking)} of ONE node, and the largest has {largest}"


def in_ray_job() -> bool:
    """Return whether this process belongs to a submitted Ray job, whose code is shipped already."""
    return JOB_CONFIG in os.environ


def name_ray_job(name: str, storage: str) -> None:
    """Have the Ray job of this process go by the name of its first run, where `dp-ray submit` has not named it.

    `dp-ray status`, `logs` and `stop` find it by that, and `dp-ray fetch` its directory by the storage. A run does
    without, if Ray does not take them.
    """
    address = core.address_of_own_raylet()
    if address is not None and in_ray_job():
        with suppress(OSError, RuntimeError, ValueError, LookupError, TypeError, RayError), core.environment_kept():
            authenticate(address)
            core.name_own_job(address, {RUN_NAME: name, RUN_STORAGE: storage})


def code_to_ship() -> dict[str, Any]:
    """Return the runtime_env that ships the working directory, without what .gitignore excludes, and dp_ray."""
    here = Path.cwd()
    excludes = [f"/{name}/" for name in (".git", ".venv", "runs", ".dp-ray") if (here / name).is_dir()]
    excludes += ["*dp-ray-meeting.json*"]  # with the token of a Ray whose hosts meet below this folder
    return {"working_dir": str(here), "excludes": excludes, "py_modules": [str(Path(dp_ray.__file__).parent)]}

"""Every private interface of Ray that dp_ray uses, here and nowhere else.

Private means not documented by Ray: modules and names with an underscore, `ray.train.v2`, `ray.core.generated`,
names of its classes and texts of its messages, and its environment variables, a few of which are documented.
Each item says what it is for and, after "Public:", which public interface could replace it.
`tests/test_ray_internals.py` checks by name that Ray still has them; CONTRIBUTING.md says how to try a new Ray.

Every worker imports this module, so slow imports, such as grpc, are inside the functions that need them.
"""

import re
import shlex
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from dp_ray.cluster.ray_version import check_ray

check_ray()  # before anything below is touched

import ray
import ray._private.state
import ray._private.utils
import ray._private.worker
import ray._raylet
import ray.train
from ray._private.authentication import authentication_token_setup
from ray.core.generated import autoscaler_pb2
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.state import ReschedulingState
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from dp_ray.cluster.restart_decision import Do, StartFailed, StartTrouble, WorkersFailed
from dp_ray.monitor.messages import WorkerExit

# Environment variables of Ray. Public: ADDRESS to USE_TLS are documented; for the rest there is no argument of
# ray.init or of ray.train.RunConfig.

VARIABLES = "RAY_"  # the prefix of all names
TRAIN_VARIABLES = "RAY_TRAIN_"
ADDRESS = "RAY_ADDRESS"  # where a driver finds its cluster; Ray sets it in its jobs
AUTH_MODE = "RAY_AUTH_MODE"  # "token": show one
AUTH_TOKEN = "RAY_AUTH_TOKEN"
API_SERVER_ADDRESS = "RAY_API_SERVER_ADDRESS"  # where `ray job` finds the dashboard
TMPDIR = "RAY_TMPDIR"  # where a Ray that is started here keeps its sessions
USE_TLS = "RAY_USE_TLS"  # if set, an address cannot be probed in plain text
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in each process of a submitted job
_WARN_BLOCKING = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"  # the controller waits for our channel in its event loop

# Set in the driver's environment, from where Ray Train copies them to its own processes.
TRAIN_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # Ray's 2 s delay each start, end and failure
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # the patch would print each line twice
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a user's relative paths keep their meaning
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # saves a process; our scaling checks the nodes itself
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",  # not Ray's 60: workers start only where room was just free
}


def forget_variables(environment: MutableMapping[str, str], keep: Sequence[str] = ()) -> None:
    """Remove Ray's variables from an environment, except the names to keep, and have Ray read the rest again."""
    for key in environment.keys() - set(keep):
        if key.startswith(VARIABLES) or key == "PYTHONBREAKPOINT":
            del environment[key]
    read_variables_anew()


def read_variables_anew() -> None:
    """Have Ray read its variables from os.environ again; it reads them only once. Public: none; a fresh process."""
    ray._raylet.Config.initialize("")


# Finding, starting and authenticating

CONNECT_SECONDS = 10.0


def start_local(num_cpus: int, folder: str, **keys: Any) -> None:
    """Start an embedded Ray in a folder of its own. Public: none; ray.init documents no argument for the folder."""
    ray.init("local", num_cpus=num_cpus, include_dashboard=False, _temp_dir=folder, **keys)


def find_users_token() -> bool:
    """Show the user's token to the cluster from now on; return whether there is one.

    Public: none; ray.init does so only at an address that it finds by itself.
    """
    setup = authentication_token_setup.maybe_enable_token_auth_if_token_available
    return bool(setup(warn_if_disabled=False))


def wants_token(address: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Whether the Ray at HOST:PORT demands its token. Public: none; ray.init fails minutes later.

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


@contextmanager
def raylets_hushed(verbose: bool) -> Iterator[None]:
    """Keep Ray from printing a page to stdout for each dead worker. Public: none; log_to_driver does not help."""
    before = ray._private.worker._worker_logs_enabled
    ray._private.worker._worker_logs_enabled = verbose
    try:
        yield
    finally:
        ray._private.worker._worker_logs_enabled = before


@contextmanager
def shown_as(arguments: Sequence[str] | None) -> Iterator[None]:
    """Have Ray's dashboard and logs show `arguments` as this driver's command line. Public: none."""
    before = ray._private.utils.get_entrypoint_name
    if arguments is not None:
        ray._private.utils.get_entrypoint_name = lambda: shlex.join(arguments)
    try:
        yield
    finally:
        ray._private.utils.get_entrypoint_name = before


# What the cluster is like


def autoscales() -> bool:
    """Whether the cluster has an autoscaler that may add nodes. Public: none."""
    return bool(ray._private.state.state.get_max_resources_from_cluster_config())


def draining_nodes() -> frozenset[str]:
    """The ids of the nodes that are about to be taken away. Public: none; ray.util.state does not report them."""
    return frozenset(ray._private.state.state.get_draining_nodes())


def free_resources() -> dict[str, dict[str, float]]:
    """The free resources of each node, by its id. Public: ray.available_resources, only for all nodes together."""
    return dict(ray._private.state.available_resources_per_node())


def label_of(*node_ids: str) -> dict[str, str]:
    """The label selector of these nodes. Public: the label "ray.io/node-id", which is documented."""
    return {ray._raylet.RAY_NODE_ID_KEY: node_ids[0] if len(node_ids) == 1 else f"in({','.join(node_ids)})"}


def check_cluster_file(config: dict[str, Any]) -> None:
    """Raise if `ray up` would reject a cluster file. Public: none; `ray up` itself starts machines."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(config))


# Faults on purpose


def drain_this_node(seconds: float | None) -> str | None:
    """Tell Ray that this node will be taken away; return why Ray refuses, else None. Public: `ray drain-node`."""
    deadline = 0 if seconds is None else time.time_ns() // 10**6 + round(seconds * 1000)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    context = ray.get_runtime_context()
    head = ray._raylet.GcsClient(address=context.gcs_address)
    accepted, why = head.drain_node(context.get_node_id(), reason, "fault injection", deadline)
    return None if accepted else str(why)


def raylet_of_this_worker() -> psutil.Process:
    """The raylet of this worker's node; the node's workers are its child processes. Public: none."""
    raylet = psutil.Process().parent()
    assert raylet is not None and "raylet" in raylet.name(), "a worker's parent is its node's raylet"
    return raylet


# Parts of the command lines of Ray Train's processes. Public: `ray list actors`.
WORKER_PROCESS, CONTROLLER_PROCESS = "RayTrainWorker", TrainController.__name__


# Bytes on the head node for a submitted job


def leave_on_head(client: Any, data: bytes) -> str:
    """Upload bytes as Ray's job client uploads code packages, and return their address.

    Ray removes them after ten minutes without use. Raises RuntimeError if Ray refuses them.
    Public: none; Ray logs all that `submit_job` carries.
    """
    name = f"_ray_pkg_{uuid.uuid4().hex}.zip"
    answer = client._do_request("PUT", f"/api/packages/gcs/{name}", data=data)
    if answer.status_code != 200 or not client._package_exists(f"gcs://{name}"):
        raise RuntimeError(f"it does not take the values of env: status {answer.status_code}")
    return f"gcs://{name}"


def take_from_head(address: str, place: str) -> bytes | None:
    """Take and remove the bytes that `leave_on_head` uploaded; None if they are gone. Public: none."""
    head = ray._raylet.GcsClient(address=address)
    left: bytes | None = head.internal_kv_get(place.encode(), None)
    head.internal_kv_del(place.encode(), False, None)
    return left


# What Ray Train's errors say

_DEATHS = {
    "running low on memory": "its node ran low on memory, and Ray killed it",
    "has been marked dead because": "its node was lost",
    "node was terminated": "its node was lost",
    "its node has died": "its node was lost",
    "temporarily unavailable": "it does not answer",
    "connection error code 2": "its process was killed, or crashed",
    "SYSTEM_ERROR": "its process was killed, or crashed",
}
_EXIT_DETAIL = "Worker exit detail: "


def why_failed(error: Any) -> str:
    """Why a worker failed, in one line; Ray's own text is a page. Public: none; Ray's errors have no such field."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    text = str(error).strip()
    for sign, says in _DEATHS.items():
        if sign in text:
            return says
    if detail := re.search(f"{_EXIT_DETAIL}([^.]+)", text):
        return detail[1]
    return text.splitlines()[0] if text else type(error).__name__


def is_death(error: BaseException) -> bool:
    """Whether a worker's process died, rather than raised. Public: ray.exceptions, except for the health checks."""
    deaths = ray.exceptions.RayActorError | ray.exceptions.NodeDiedError
    return isinstance(error, deaths | WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)


def failure_of(error: Exception) -> WorkersFailed | StartFailed:
    """Translate a failure that Ray Train's controller reports into the types of `restart_decision`."""
    if isinstance(error, ray.train.WorkerGroupError):
        failures = error.worker_failures
        ended = {rank: one for rank, one in failures.items() if isinstance(one, WorkerExit)}
        return WorkersFailed(ended, {rank: why_failed(one) for rank, one in failures.items() if rank not in ended})
    cause = getattr(error, "controller_failure", error)
    if isinstance(cause, WorkerGroupStartupTimeoutError):
        return StartFailed(StartTrouble.NO_CAPACITY, why_failed(cause))
    is_lost = isinstance(cause, WorkerGroupStartupFailedError | ray.exceptions.RayError)
    return StartFailed(StartTrouble.LOST if is_lost else StartTrouble.ERROR, why_failed(cause))


# Ray Train's controller and its policies. Public: ray.train.UserCallback gets only reports and failures;
# ScalingConfig and FailureConfig choose only among Ray's own policies.


class WorkersStart(WorkerGroupCallback):  # type: ignore[misc]
    """Called while workers start, before torch or user code is imported in their processes."""

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Called by Ray Train before it places workers."""
        self.on_placing(worker_group_context.num_workers)

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Called by Ray Train when the workers' processes run; no context is added."""

        def call(do: Callable[..., Any], *args: Any) -> list[Any]:
            return list(ray.get([worker.execute_async(do, *args) for worker in workers]))

        self.on_processes(len(workers), call)
        return {}

    @abstractmethod
    def on_placing(self, count: int) -> None:
        """Called when `count` workers are about to be placed on nodes."""

    @abstractmethod
    def on_processes(self, count: int, call: Callable[..., list[Any]]) -> None:
        """Called when the processes run; `call(do, *args)` calls `do` in each and returns all results."""


@dataclass(frozen=True)
class RunningWorkers:
    """The running workers: the id of each one's node, and when they started, on time.monotonic's clock."""

    node_ids: tuple[str, ...]
    started: float


class WorkerScaling(ScalingPolicy):  # type: ignore[misc]
    """Decides how many workers Ray Train's controller starts; it lives in the controller's process."""

    max_workers: int

    @abstractmethod
    def workers_to_start(self) -> int | None:
        """How many workers to start now; None: none yet. The controller polls it while no workers run."""

    @abstractmethod
    def while_running(self, workers: RunningWorkers) -> None:
        """The controller polls this while workers run."""

    @abstractmethod
    def usable_nodes(self) -> Sequence[str] | None:
        """The ids of the nodes on which workers may start; None: all."""

    @abstractmethod
    def start_failed(self) -> None:
        """Called when workers could not be started."""

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Called by Ray Train's controller while no workers run."""
        self._request_nodes()
        workers = self.workers_to_start()
        if workers is None:
            return NoopDecision()
        each = self.scaling_config._resources_per_worker_not_none  # includes the accelerator's type
        return ResizeDecision(num_workers=workers, resources_per_worker=each)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Called by Ray Train's controller while workers run; it never resizes them itself."""
        self._request_nodes()
        node_ids = tuple(worker.metadata.node_id for worker in worker_group_state.workers)
        self.while_running(RunningWorkers(node_ids, worker_group_state.start_time))
        return NoopDecision()

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Called by Ray Train's controller; rescheduling means that a start has failed."""
        if isinstance(current_state, ReschedulingState):
            self.start_failed()

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """Called by Ray Train's controller before a start; returns the label selector of the usable nodes."""
        usable = self.usable_nodes()
        return None if usable is None else label_of(*usable)

    # Ray Train's own coordinator asks the autoscaler for nodes, if there is one

    def _get_num_workers_for_resource_request(self) -> int:
        return self.max_workers

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray Train's controller when it starts; asks an autoscaler for nodes only if there is one."""
        TrainController.worker_group_cls = CleanWorkerGroup  # in the controller's own process
        if autoscales():
            super().after_controller_start(train_run_context)

    def _request_nodes(self) -> None:
        if self._coordinator_client is not None:
            self._maybe_send_resource_request()


class CleanWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """A WorkerGroup that frees its resources if workers fail while they form their process group.

    Public: none; Ray's own keeps the resources of such workers.
    """

    def _start(self) -> None:
        try:
            super()._start()
        except Exception:
            if self.has_started():
                self._worker_group_state.shutdown()
                self._clear_state()
            raise


_DECISIONS = {Do.RESTART: FailureDecision.RETRY, Do.GIVE_UP: FailureDecision.RAISE, Do.WAIT: FailureDecision.NOOP}


class WorkerRestarts(FailurePolicy):  # type: ignore[misc]
    """Decides whether Ray Train's controller restarts failed workers; it lives in the controller's process."""

    @abstractmethod
    def on_failure(self, failure: WorkersFailed | StartFailed) -> Do:
        """What to do after a failure; after WAIT the controller calls again soon, with the failures known then."""

    def make_decision(self, training_failed_error: Exception) -> Any:
        """Called by Ray Train's controller after a failure."""
        return _DECISIONS[self.on_failure(failure_of(training_failed_error))]


class ControlledTrainer(TorchTrainer):  # type: ignore[misc]
    """A TorchTrainer with our policies, which can be aborted and starts no needless process.

    `is_own` says that its Ray, or its job there, ends with the run. Public: none; TorchTrainer takes no policies.
    """

    def __init__(
        self,
        *args: Any,
        scaling: Callable[[Any], WorkerScaling],
        restarts: Callable[[Any], WorkerRestarts],
        start: WorkersStart,
        is_own: bool,
        **keys: Any,
    ) -> None:
        super().__init__(*args, **keys)
        self._on_start = start
        self._unneeded: tuple[type[Any], ...] = (DatasetsCallback,)  # for Ray Data, which is not used
        if is_own:
            self._unneeded += (PlacementGroupCleanerCallback,)  # the end of the job cleans up instead
        self._controller: Any = None
        self._policies = {
            "scaling_policy": scaling(self.scaling_config),
            "failure_policy": restarts(self.run_config.failure_config),
        }

    def _create_default_callbacks(self) -> list[Any]:
        """Add our callback, and drop those that start a needless process: together two seconds of each run."""
        made = super()._create_default_callbacks()
        return [self._on_start, *(one for one in made if type(one) not in self._unneeded)]

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        """Run Ray Train's controller on this node so that it can be aborted at any time.

        Ray's own method asks the controller to abort itself, but a controller that waits for capacity does not react.
        """
        here = label_of(ray.get_runtime_context().get_node_id())
        variables = {_WARN_BLOCKING: "0", **get_env_vars_to_propagate()}
        actor = ray.remote(num_cpus=0, label_selector=here, runtime_env={"env_vars": variables})(TrainController)
        self._controller = actor.remote(**{**given, **self._policies})
        try:
            ray.get(self._controller.run.remote())
            return ray.get(self._controller.get_result.remote())
        except KeyboardInterrupt:
            self.abort()
            raise

    def abort(self) -> None:
        """Kill the controller, and with it its workers."""
        if self._controller is not None:
            ray.kill(self._controller)

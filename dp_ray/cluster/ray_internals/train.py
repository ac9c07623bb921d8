"""Runs Ray Train's controller with our policies.

Public: ray.train.UserCallback gets only reports and failures; ScalingConfig and FailureConfig choose only among Ray's
own policies.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.state import ReschedulingState
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from dp_ray.cluster.ray_internals.core import autoscales, label_of
from dp_ray.cluster.ray_internals.failures import failure_of
from dp_ray.cluster.ray_internals.variables import WARN_BLOCKING
from dp_ray.cluster.restart_decision import Do, StartFailed, WorkersFailed

# Parts of the command lines of Ray Train's processes. Public: `ray list actors`.
WORKER_PROCESS, CONTROLLER_PROCESS = "RayTrainWorker", TrainController.__name__


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
    """A WorkerGroup that frees its resources if workers fail while they start.

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

    `is_own` says that its Ray, or the connection to it, ends with these workers. Public: none; TorchTrainer takes no
    policies.
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
        self._ended: Future[Any] = Future()
        self._policies = {
            "scaling_policy": scaling(self.scaling_config),
            "failure_policy": restarts(self.run_config.failure_config),
        }

    def _create_default_callbacks(self) -> list[Any]:
        """Add our callback, and drop those that start a needless process: together two seconds of each run."""
        made = super()._create_default_callbacks()
        return [self._on_start, *(one for one in made if type(one) not in self._unneeded)]

    def start(self) -> None:
        """Start Ray Train's controller, which starts the workers; does not wait for them."""
        self.fit()

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        """Start Ray Train's controller on this node, so that it can be aborted at any time.

        Ray's own method waits for the controller's end. It asks the controller to abort itself, but a controller that
        waits for capacity does not react.
        """
        here = label_of(ray.get_runtime_context().get_node_id())
        variables = {WARN_BLOCKING: "0", **get_env_vars_to_propagate()}
        actor = ray.remote(num_cpus=0, label_selector=here, runtime_env={"env_vars": variables})(TrainController)
        self._controller = actor.remote(**{**given, **self._policies})
        self._ended = self._controller.run.remote().future()
        return _Begun()

    @property
    def has_ended(self) -> bool:
        """Whether the controller has ended, and its workers with it."""
        return self._ended.done()

    def when_ended(self, do: Callable[[], None]) -> None:
        """Call `do` in another thread when the controller has ended, or at once if it has."""
        self._ended.add_done_callback(lambda _: do())

    def wait(self, seconds: float) -> None:
        """Wait for the controller's end, at most so long."""
        futures.wait([self._ended], seconds)

    def failure(self) -> BaseException | None:
        """The error with which the controller has ended; None if it ended without."""
        error: BaseException | None
        try:
            self._ended.result()
            error = ray.get(self._controller.get_result.remote()).error
        except ray.exceptions.RayError as lost:
            error = lost
        return error

    def abort(self) -> None:
        """Kill the controller, and with it its workers."""
        if self._controller is not None:
            ray.kill(self._controller)


@dataclass(frozen=True)
class _Begun:
    """What `fit` gets from a controller that has begun: it looks for an error there."""

    error: None = None

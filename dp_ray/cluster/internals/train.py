"""The ways of `policies.py` into Ray Train's controller, and the controller: all of it without torch.

Public: ray.train.UserCallback gets only reports and failures; ScalingConfig and FailureConfig choose only among Ray's
own policies.
"""

import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from dp_ray.cluster.channel import GROUP, encoded
from dp_ray.cluster.decisions import Restart, StartFailed, StartTrouble, WorkersFailed
from dp_ray.cluster.internals.controller import NoSynchronization
from dp_ray.cluster.internals.core import autoscales, label_of
from dp_ray.cluster.internals.train_worker import MESSAGES, RayTrainWorker, enter_process
from dp_ray.messages import Starting, WorkerExit
from dp_ray.system.imports import postponed, prepare_imports
from dp_ray.text import counted

with postponed("ray.data", "pandas"):
    import ray.train
    import ray.train.v2._internal.callbacks  # which the controller gets
    import ray.train.v2._internal.execution.worker_group.state
    import ray.train.v2._internal.execution.worker_group.worker_group
    from ray.train.v2._internal.constants import get_env_vars_to_propagate
    from ray.train.v2._internal.exceptions import (
        WorkerGroupStartupFailedError,
        WorkerGroupStartupTimeoutError,
        WorkerHealthCheckFailedError,
    )
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
    from ray.train.v2._internal.execution.controller.state import ReschedulingState, RunningState, SchedulingState
    from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
    from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
    from ray.train.v2._internal.util import bundle_to_remote_args

if TYPE_CHECKING:
    from dp_ray.cluster.policies import ElasticScalingPolicy, RestartPolicy

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
    """Say why a worker failed, in a line; Ray's own text is a page. Public: none; Ray's errors have no such field."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    text = str(error).strip()
    for sign, says in _DEATHS.items():
        if sign in text:
            return says
    if detail := re.search(f"{_EXIT_DETAIL}([^.]+)", text):
        return detail[1]
    return text.splitlines()[0] if text else type(error).__name__


def failure_of(error: Exception) -> WorkersFailed | StartFailed:
    """Translate a failure that Ray Train's controller reports into the types of `decide_restart`."""
    if isinstance(error, ray.train.WorkerGroupError):
        failures = error.worker_failures
        ended = {rank: failure for rank, failure in failures.items() if isinstance(failure, WorkerExit)}
        return WorkersFailed(
            ended, {rank: why_failed(error) for rank, error in failures.items() if rank not in ended}
        )
    cause = getattr(error, "controller_failure", error)
    if isinstance(cause, WorkerGroupStartupTimeoutError):
        return StartFailed(StartTrouble.NO_CAPACITY, why_failed(cause))
    is_lost = isinstance(cause, WorkerGroupStartupFailedError | ray.exceptions.RayError)
    return StartFailed(StartTrouble.LOST if is_lost else StartTrouble.ERROR, why_failed(cause))


# A part of the command line of its process. Public: `ray list actors`.
WORKER_PROCESS = RayTrainWorker.__name__


class WorkersStart(WorkerGroupCallback):  # type: ignore[misc]
    """Called while workers start: it reports how far they are, and sets `env` in each worker's process.

    It sets `env` before torch or user code is imported there. Ray's runtime_env must not hold the values, since Ray's
    agent logs it.
    """

    def __init__(self, env: dict[str, str], channel: Any) -> None:
        self.env, self._channel = env, channel
        self._group = ""  # the id of those that are started together, and of others in their places
        self._starts_all = True

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Called by Ray Train before it places workers."""
        self._group, self._starts_all = uuid.uuid4().hex, True
        self._say(f"starting {counted(worker_group_context.num_workers, 'worker')}")

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Called by Ray Train when the workers' processes run; no context is added."""

        def call(do: Callable[..., Any], *args: Any) -> None:
            ray.get([worker.execute_async(do, *args) for worker in workers])

        call(enter_process, get_env_vars_to_propagate())
        if self._starts_all:
            self._say(f"{counted(len(workers), 'worker')} importing torch")
        self._starts_all = False
        call(prepare_imports, {**self.env, GROUP: self._group})
        return {}

    def _say(self, phase: str) -> None:
        ray.get(self._channel.put_phase.remote(encoded(Starting(phase))))


class WorkerScaling(ScalingPolicy):  # type: ignore[misc]
    """Decides how many workers Ray Train's controller starts; it lives in the controller's process."""

    def __init__(self, scaling_config: Any, policy: "ElasticScalingPolicy") -> None:
        super().__init__(scaling_config)
        self._policy = policy
        self._asks_autoscaler = False

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Called by Ray Train's controller, again and again, while no workers run."""
        self._request_nodes()
        workers = self._policy.workers_to_start()
        if workers is None:
            return NoopDecision()
        return ResizeDecision(num_workers=workers, resources_per_worker=self._resources)

    @property
    def _resources(self) -> Any:
        return self.scaling_config._resources_per_worker_not_none  # includes the accelerator's type

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Called by Ray Train's controller, again and again, while workers run."""
        self._request_nodes()
        workers, failed = worker_group_state.workers, worker_group_status.errors
        node_ids = [worker.metadata.node_id for rank, worker in enumerate(workers) if rank not in failed]
        num_lost = len(workers) - len(node_ids)
        num_workers = self._policy.while_running(node_ids, worker_group_state.start_time, num_lost)
        return NoopDecision() if num_workers is None else Growth(num_workers, self._resources)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Called by Ray Train's controller; rescheduling means that a start has failed."""
        if isinstance(current_state, ReschedulingState):
            self._policy.start_failed()

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """Called by Ray Train's controller before a start; returns the label selector of the usable nodes."""
        usable = self._policy.usable_nodes
        return None if usable is None else label_of(*usable)

    # Ray Train's own coordinator asks the autoscaler for nodes, if there is one

    def _get_num_workers_for_resource_request(self) -> int:
        return self._policy.max_workers

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray Train's controller when it starts; asks an autoscaler for nodes only if there is one."""
        if autoscales():
            self._asks_autoscaler = True
            super().after_controller_start(train_run_context)

    def _request_nodes(self) -> None:
        if self._asks_autoscaler:
            self._maybe_send_resource_request()

    def _cancel_resource_request(self) -> None:
        """Called by Ray Train when the controller ends; Ray 2.56 would start a coordinator only to tell it."""
        if self._asks_autoscaler:
            super()._cancel_resource_request()


class CleanWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """A WorkerGroup that frees its resources if workers fail while they start, grows, and starts no needless process.

    Public: none; Ray's own keeps the resources of such workers, and has its placement group from its start.
    """

    _worker_cls = RayTrainWorker
    idle_starts = 0.0  # how many of the next starts may take processes that Ray holds ready
    _worker_group_state: Any

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._further: dict[int, Any] = {}  # the placement groups of workers that came later, by their ranks

    def grow(self, num_workers: int, label_selector: dict[str, str]) -> range | None:
        """Start further workers, up to so many in all, in a placement group of their own; return their ranks.

        None if there is no room for it after all. If one of them is lost as it starts, none of them has started, and
        this raises an error of Ray or Ray Train.
        """
        context, state = self.get_worker_group_context(), self._worker_group_state
        ranks, each = range(len(self), num_workers), context.resources_per_worker
        places = placement_group(
            [each] * len(ranks), context.placement_strategy, bundle_label_selector=[label_selector] * len(ranks)
        )
        try:
            if not places.wait(ROOM_SECONDS):
                remove_placement_group(places)
                return None
            workers = self._create_workers(
                len(ranks), places, each, starting_world_rank=ranks[0], world_size=num_workers, replica_group_size=1
            )
            self._init_train_context(workers, state.sync_actor)
            groups = [ReplicaGroup([worker], each, self._replica_group_callbacks) for worker in workers]
            for group in groups:
                group.start_training(context)
        except Exception:
            remove_placement_group(places)  # which ends what runs there
            raise
        self._worker_group_state = replace(state, workers=[*state.workers, *workers])
        self._replica_groups += groups
        self._worker_rank_to_replica_group_rank.update(zip(ranks, ranks, strict=True))
        self._further.update(dict.fromkeys(ranks, places))
        return ranks

    def places(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the ids of the nodes where workers of these ranks would be replaced, "" where Ray has none yet."""
        state, found = self._worker_group_state, {}
        for rank in ranks:
            group = self._further.get(rank, state.placement_group_handle.placement_group)
            nodes = placement_group_table(group)["bundles_to_node_id"]
            found[rank] = nodes.get(state.workers[rank].placement_group_bundle_index) or ""
        return found

    def _create_workers(self, num_workers: int, placement_group: Any, *given: Any, **keys: Any) -> Any:
        """Start workers; one in the place of a lost one starts in the placement group of that."""
        places = self._further.get(keys.get("starting_world_rank", 0), placement_group)
        return super()._create_workers(num_workers, places, *given, **keys)

    def _clear_state(self) -> None:
        super()._clear_state()
        for places in set(self._further.values()):
            remove_placement_group(places)
        self._further.clear()

    def _start(self) -> None:
        try:
            super()._start()
        except Exception:
            if self.has_started():
                self._worker_group_state.shutdown()
                self._clear_state()
            raise

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
        """An environment without variables, which is the job's own, else one that gets new processes.

        `WorkersStart` sets the variables. For an environment of the workers' own Ray starts its agent first: that is
        half of a restart.
        """
        if CleanWorkerGroup.idle_starts > 0:
            CleanWorkerGroup.idle_starts -= 1
            return custom_runtime_env
        return WorkerGroup._get_worker_runtime_env(custom_runtime_env)


POLL_SECONDS = 1.0  # for a worker's answer, before others are replaced
ROOM_SECONDS = 1.0  # for a placement group, where there was room just now


@dataclass
class Growth(ResizeDecision):  # type: ignore[misc]
    """A decision to have so many workers, of which those that are there run on."""


def _kill_unless_missing(actor: Any) -> None:
    if not isinstance(actor, NoSynchronization):
        ray.kill(actor)


def _with_messages(resources: dict[str, float]) -> dict[str, Any]:
    """Return the options of the workers' actors, which take messages in a thread of their own."""
    return {**bundle_to_remote_args(resources), "concurrency_groups": {MESSAGES: 1}}


class OwnController(TrainController):  # type: ignore[misc]
    """Ray Train's controller, which starts no needless process, and can replace failed workers alone, or add some.

    Ray Train replaces workers as its replica groups, each of one worker. A backend can have it do that always; then
    each worker would have the local rank 0.
    """

    worker_group_cls = CleanWorkerGroup

    def __init__(self, idle_starts: float, **given: Any) -> None:
        CleanWorkerGroup.idle_starts = idle_starts
        package = ray.train.v2._internal.execution.worker_group  # in this process, which is the controller's own
        package.worker_group.SynchronizationActor = NoSynchronization
        package.worker_group.bundle_to_remote_args = _with_messages
        package.state._shutdown_sync_actor = _kill_unless_missing
        self._to_replace: set[int] = set()  # the ranks of failed workers
        super().__init__(**given)

    def _execute_failure_decision(self, failure_decision: Any, training_failed_error: Any, **keys: Any) -> Any:
        self._manages_replica_groups = False
        if failure_decision is not Restart.REPLACE:
            return super()._execute_failure_decision(failure_decision, training_failed_error, **keys)
        group = self._worker_group
        status = group and group.get_latest_poll_status()
        instead = FailureDecision.RETRY
        if status and status.failing_replica_group_indices != status.all_replica_group_indices:
            if not status.finished:
                return TrainControllerLoopIterationResult(
                    run_attempt_id=self._get_run_attempt_id(),
                    previous_state=self.get_state(),
                    next_state=self._state_after_loss(group, status),
                    training_failed_error=training_failed_error,
                )
            instead = FailureDecision.RAISE  # the others have left, and nobody waits for those that failed
        return super()._execute_failure_decision(instead, training_failed_error, **keys)

    def _state_after_loss(self, group: Any, status: Any) -> Any:
        """Replace those failed workers that there is room for now; else go on, and look at the cluster."""
        self._to_replace = self._failure_policy.policy.with_room(group.places(status.errors))
        if self._to_replace:
            self._manages_replica_groups = True
            each = group.get_worker_group_context().resources_per_worker
            return SchedulingState(ResizeDecision(num_workers=len(group), resources_per_worker=each))
        # Ray Train does not ask it while some have failed.
        state = group.get_worker_group_state()
        decision = self._scaling_policy.make_decision_for_running_worker_group(state, status)
        return SchedulingState(decision) if isinstance(decision, Growth) else RunningState()

    def _execute_resize_decision(self, decision: Any) -> Any:
        if isinstance(decision, Growth):  # for which Ray Train would start all anew
            self._grow(decision.num_workers)
            return TrainControllerLoopIterationResult(self._get_run_attempt_id(), self.get_state(), RunningState())
        if self._manages_replica_groups:
            status = self._worker_group.poll_status(timeout=POLL_SECONDS)  # more may have failed since the last one
            self._failure_policy.policy.on_more(failure_of(status.get_worker_group_error()))
        return super()._execute_resize_decision(decision)

    def _grow(self, num_workers: int) -> None:
        selector = self._scaling_policy.on_controller_start_worker_group(scaling_config=None, num_workers=num_workers)
        try:
            ranks = self._worker_group.grow(num_workers, selector)
        except (WorkerGroupStartupFailedError, ray.exceptions.RayError) as error:
            self._failure_policy.policy.count_failed_start(why_failed(error.__cause__ or error))
        else:
            if ranks is not None:
                self._failure_policy.policy.has_grown(ranks, num_workers)

    def _replace_bad_workers(self, poll_status: Any) -> None:
        """Replace those that there is room for.

        All that have failed are shut down first: where Ray Train replaces one, it waits for an answer of all others.
        """
        groups, failing = self._worker_group.get_replica_groups(), poll_status.failing_replica_group_indices
        for index in failing:
            groups[index].shutdown()
        for index in sorted(failing & self._to_replace):
            self._worker_group.replace_replica_group(index)
            self._failure_policy.policy.has_replaced(index)

    def _start_worker_group(self, **given: Any) -> None:
        self._failure_policy.policy.begin()
        super()._start_worker_group(**given)


_DECISIONS = {
    Restart.RESTART: FailureDecision.RETRY,
    Restart.GIVE_UP: FailureDecision.RAISE,
    Restart.WAIT: FailureDecision.NOOP,
}


class WorkerRestarts(FailurePolicy):  # type: ignore[misc]
    """Decides whether Ray Train's controller restarts failed workers; it lives in the controller's process."""

    def __init__(self, failure_config: Any, policy: "RestartPolicy") -> None:
        super().__init__(failure_config)
        self.policy = policy

    def make_decision(self, training_failed_error: Exception) -> Any:
        """Called by Ray Train's controller after a failure; after NOOP again soon, with the failures known then.

        So it is called while workers wait to be replaced, with the same failures.
        """
        do = self.policy.on_failure(failure_of(training_failed_error))
        return _DECISIONS.get(do, do)  # the rest is for OwnController

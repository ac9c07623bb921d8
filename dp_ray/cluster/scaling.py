"""With how many workers Ray Train's controller starts, and when they are to stop for there to be more or fewer.

Ray's own elastic policy believes in a lost node until a placement has timed out (60 s), and resizes without a word to
the workers. This one looks at the nodes that answer, and asks the workers to stop between two steps first.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._private.state import state as ray_state
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.state import ReschedulingState
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from dp_ray.cluster.channel import tell
from dp_ray.cluster.connect import Resources, room_for, text_of, times
from dp_ray.errors import ClusterError
from dp_ray.monitor.messages import Waits

ANSWER_SECONDS = 2.0  # in which a node that is there takes a connection
LOOK_SECONDS = 1.0  # between two looks at the cluster
SETTLE_SECONDS = 3.0  # for which the cluster must look the same before workers are started or asked to stop
GROW_AFTER_SECONDS = 10.0  # of running: what a start costs should be worth it
SAY_SECONDS = 30.0


@dataclass(frozen=True)
class Wanted:
    """What the job asks of the cluster: `each` are one worker's resources; `room_seconds` as in its `timeouts`."""

    min_workers: int
    max_workers: int
    each: Resources
    placement: str
    accelerator_type: str | None
    can_stop: bool
    room_seconds: float | None

    def room(self, nodes: list[dict[str, float]]) -> int:
        return min(self.max_workers, room_for(self.each, nodes, self.placement, self.accelerator_type))


class ElasticScalingPolicy(ScalingPolicy):  # type: ignore[misc]
    """How many workers: as many as the nodes that answer have room for, between the job's least and most."""

    def __init__(self, config: ScalingConfig, wanted: Wanted, channel: Any) -> None:
        super().__init__(config)
        self._wanted = wanted
        self._channel = channel
        self._held: dict[str, int] = {}  # workers of ours, by the id of the node that they hold room on
        self._has_started = False  # then a node may have gone that the cluster still believes in
        self._may_hold = False  # the last workers keep their room until they are told to make way for new ones
        self._waiting_since: float | None = None
        self._said = float("-inf")
        self._looked = float("-inf")
        self._seen: tuple[int, float] = (0, 0.0)
        self._ordered = ""
        self._usable: list[str] | None = None

    # While no workers run

    def make_decision_for_non_running_worker_group(self) -> Any:
        now = time.monotonic()
        self._request_nodes()
        if self._waiting_since is None:
            self._waiting_since = now
        nodes = self._nodes(must_answer=self._has_started)
        room = self._wanted.room(_free(nodes, self._held, self._wanted.each))
        idle_room = self._wanted.room([node["Resources"] for node in nodes])
        waited = now - self._waiting_since
        is_settled = room == max(self._wanted.min_workers, idle_room) or waited > SETTLE_SECONDS
        if room >= self._wanted.min_workers and is_settled:
            return self._start(room, nodes)
        if self._may_hold and idle_room >= self._wanted.min_workers and waited > 2 * SETTLE_SECONDS:
            return self._start(self._wanted.min_workers, nodes)  # it may be our own last workers who hold the rest
        if room < self._wanted.min_workers:
            self._wait(now, idle_room, nodes)
        time.sleep(0.2)  # the controller would ask again at once
        return NoopDecision()

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if isinstance(current_state, ReschedulingState):
            self._may_hold = False  # the start failed: there are no last workers

    def _start(self, workers: int, nodes: list[dict[str, Any]]) -> Any:
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        usable = [node["NodeID"] for node in nodes]
        self._usable = usable if len(usable) < len(alive) else None
        self._waiting_since = None
        self._held = {}  # they go before the new ones come
        self._may_hold = self._has_started = True
        self._ordered = ""
        self._seen = (workers, time.monotonic())
        ray.get(self._channel.order.remote("", ""))
        each = self.scaling_config._resources_per_worker_not_none  # with the accelerator's type
        return ResizeDecision(num_workers=workers, resources_per_worker=each)

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """Only nodes that answer, where the cluster still believes in others."""
        if self._usable is None:
            return None
        return {ray._raylet.RAY_NODE_ID_KEY: f"in({','.join(self._usable)})"}

    def _wait(self, now: float, idle_room: int, nodes: list[dict[str, Any]]) -> None:
        assert self._waiting_since is not None
        wanted, waited = self._wanted, now - self._waiting_since
        needs = f"{wanted.min_workers} workers need {times(wanted.each, wanted.min_workers)}"
        cannot_fit = idle_room < wanted.min_workers
        who = f"{len(nodes)} nodes have room for {idle_room}" if cannot_fit else "others hold it"
        limit = wanted.room_seconds
        if cannot_fit and self._has_started and not _autoscales() and limit is not None and waited > limit:
            raise ClusterError(
                f"{needs} ({text_of(wanted.each)} each); {who}, and none came in {limit:g} s (timeouts.capacity); "
                "run the job again when there are more, or with fewer workers: it carries on"
            )
        if now - self._said > SAY_SECONDS:
            self._said = now
            tell(self._channel, Waits(f"{needs}; {who}: waiting"))

    # While workers run

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return NoopDecision()
        self._looked = now
        self._request_nodes()
        self._held = {}
        for worker in worker_group_state.workers:
            node = worker.metadata.node_id
            self._held[node] = self._held.get(node, 0) + 1
        if self._ordered != "stop":
            self._look(now, worker_group_state)
        return NoopDecision()

    def _look(self, now: float, group: Any) -> None:
        """Ask the workers to save or to stop where nodes are about to go, or there is room for more."""
        current, wanted = group.num_workers, self._wanted
        going = ray_state.get_draining_nodes().keys() & self._held.keys()
        if not going and (current == wanted.max_workers or now - group.start_time < GROW_AFTER_SECONDS):
            return
        nodes = self._nodes(must_answer=False)
        room = wanted.room(_free(nodes, self._held, wanted.each))
        if going:
            names = ", ".join(sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] in going))
            can_go_on = room >= wanted.min_workers and wanted.can_stop
            self._order("stop" if can_go_on else "save", f"Ray drains {names}")
        elif room <= current or room != self._seen[0]:
            self._seen = (room, now)
        elif now - self._seen[1] > SETTLE_SECONDS and wanted.can_stop:
            self._order("stop", f"there is room for {room} workers")

    def _order(self, what: str, why: str) -> None:
        if what != self._ordered:
            self._ordered = what
            ray.get(self._channel.order.remote(what, why))

    def _nodes(self, must_answer: bool) -> list[dict[str, Any]]:
        """The nodes that are there to stay."""
        going = ray_state.get_draining_nodes()
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in going]
        if not must_answer or len(nodes) == 1:
            return nodes
        with ThreadPoolExecutor(min(64, len(nodes) or 1)) as pool:
            answers = list(pool.map(answers_at, nodes))
        return [node for node, is_there in zip(nodes, answers, strict=True) if is_there]

    # An autoscaler, where there is one, is asked through Ray Train's own coordinator; else there is nobody to ask

    def _get_num_workers_for_resource_request(self) -> int:
        return self._wanted.max_workers

    def after_controller_start(self, train_run_context: Any) -> None:
        TrainController.worker_group_cls = CleanWorkerGroup  # in the controller's own process
        if _autoscales():
            super().after_controller_start(train_run_context)

    def _request_nodes(self) -> None:
        if self._coordinator_client is not None:
            self._maybe_send_resource_request()


class CleanWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """A WorkerGroup that leaves nothing behind where workers meet with an accident while they find one another."""

    def _start(self) -> None:
        try:
            super()._start()
        except Exception:
            if self.has_started():
                self._worker_group_state.shutdown()
                self._clear_state()
            raise


def answers_at(node: dict[str, Any]) -> bool:
    """Whether a node's raylet takes a connection: Ray itself believes in a lost one for up to a minute."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS):
            return True
    except OSError:
        return False


def _autoscales() -> bool:
    return bool(ray_state.get_max_resources_from_cluster_config())


def _free(nodes: list[dict[str, Any]], held: dict[str, int], each: Resources) -> list[dict[str, float]]:
    """What is free on each node, with what workers of ours hold there."""
    free = available_resources_per_node()
    found = []
    for node in nodes:
        here = dict(free.get(node["NodeID"], {}))
        for name, amount in each.items():
            here[name] = here.get(name, 0.0) + amount * held.get(node["NodeID"], 0)
        found.append(here)
    return found

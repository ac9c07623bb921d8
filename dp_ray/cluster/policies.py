"""How many workers to start, and when to stop them to resize.

Ray's own elastic policy counts a lost node until a placement times out (60 s), and resizes without telling the
workers. This one counts only nodes that answer, asks `scaling_decision`, and first stops the workers between two
steps.

Whether Ray Train's controller restarts workers after some were lost or raised; `restart_decision` decides.

Reports the progress of the workers' start; it runs in the controller's process, which imports no torch.
"""

import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray

from dp_ray.cluster.channel import GROUP, IDLE, NOTHING, Ask, Request, Terms, encoded, send
from dp_ray.cluster.decisions import (
    Idle,
    LastCount,
    Memory,
    Resize,
    Resources,
    Restart,
    Running,
    Snapshot,
    StartFailed,
    Wanted,
    WorkersFailed,
    decide_restart,
    decide_scaling,
    is_worth_a_look,
)
from dp_ray.cluster.internals.core import autoscales, draining_nodes, free_resources
from dp_ray.cluster.internals.train import RunningWorkers, WorkerRestarts, WorkerScaling, WorkersStart
from dp_ray.errors import ClusterError
from dp_ray.monitor.messages import GaveUp, Message, Starting, Waits
from dp_ray.system.imports import prepare_imports
from dp_ray.text import counted

ANSWER_SECONDS = 2.0  # a node that does not take a connection in this time counts as lost
LOOK_SECONDS = 1.0  # between two checks of the cluster


class ElasticScalingPolicy(WorkerScaling):
    """Runs as many workers as the nodes that answer have room for, between the session's minimum and maximum."""

    def __init__(self, config: Any, wanted: Wanted, channel: Any) -> None:
        super().__init__(config)
        self.max_workers = wanted.max_workers
        self._wanted = wanted
        self._channel = channel
        self._held: Mapping[str, int] = {}  # the number of our workers on each node, by its id
        self._has_started = False  # if so, a node may be lost that the cluster still lists
        self._may_hold = False  # the last workers keep their capacity until new ones start
        self._waiting_since: float | None = None
        self._said = float("-inf")
        self._looked = float("-inf")
        self._last_count = LastCount(0, 0.0)
        self._usable: list[str] | None = None

    def workers_to_start(self) -> int | None:
        """How many workers to start now; None: none yet. Raises ClusterError if it gives up waiting for capacity."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        nodes = self._nodes(must_answer=self._has_started)
        decision = decide_scaling(self._idle(nodes, self._waiting_since), now)
        if decision.do is Resize.START:
            self._prepare_start(decision.num_workers, nodes)
            return decision.num_workers
        if decision.do is Resize.GIVE_UP:
            raise ClusterError(decision.text)
        if decision.text:
            self._said = now
            send(self._channel, Waits(decision.text))
        time.sleep(0.2)  # the controller would ask again at once
        return None

    def _idle(self, nodes: list[dict[str, Any]], waiting_since: float) -> Idle:
        return Idle(
            self._wanted,
            capacity=self._capacity(nodes),
            idle_capacity=self._wanted.capacity([node["Resources"] for node in nodes]),
            num_nodes=len(nodes),
            has_started=self._has_started,
            may_hold=self._may_hold,
            autoscales=autoscales(),
            waiting_since=waiting_since,
            said=self._said,
        )

    def _prepare_start(self, workers: int, nodes: list[dict[str, Any]]) -> None:
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        usable = [node["NodeID"] for node in nodes]
        self._usable = usable if len(usable) < len(alive) else None
        self._waiting_since = None
        self._held = {}  # the last workers are gone before the new ones start
        self._may_hold = self._has_started = True
        self._last_count = LastCount(workers, time.monotonic())
        self._request(NOTHING)

    def usable_nodes(self) -> Sequence[str] | None:
        """The nodes that answer, if the cluster lists others too; None: all nodes."""
        return self._usable

    def start_failed(self) -> None:
        """Note that a start failed, so that no workers hold capacity."""
        self._may_hold = False  # no earlier workers are left

    def while_running(self, workers: RunningWorkers) -> None:
        """Check the cluster once a second, and ask the workers to save or stop if that is decided."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self._held = Counter(workers.node_ids)
        request, job = ray.get(self._channel.state.remote())
        if request.ask not in (Ask.RESTART, Ask.STOP):
            self._look(workers, request, job, now)

    def _look(self, workers: RunningWorkers, request: Request, job: Terms, now: float) -> None:
        draining = draining_nodes() & self._held.keys()
        wanted = self._wanted.of_job(job.workers, job.can_stop) if job.number else self._wanted
        running = Running(wanted, len(workers.node_ids), workers.started, self._last_count, _addresses(draining))
        if is_worth_a_look(running, now):
            running = replace(running, capacity=self._capacity(self._nodes(must_answer=False)))
        decision = decide_scaling(running, now)
        self._last_count = decision.last_count or self._last_count
        if decision.request is not None and decision.request.ask is not request.ask:
            self._request(decision.request)

    def _request(self, request: Request) -> None:
        ray.get(self._channel.request.remote(request))

    def _capacity(self, nodes: list[dict[str, Any]]) -> int:
        return self._wanted.capacity(_free(nodes, self._held, self._wanted.each))

    def _nodes(self, must_answer: bool) -> list[dict[str, Any]]:
        """The nodes that are alive and not draining; with `must_answer`, only those that take a connection."""
        draining = draining_nodes()
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]
        if not must_answer or len(nodes) == 1:
            return nodes
        with ThreadPoolExecutor(min(64, len(nodes) or 1)) as pool:
            answers = list(pool.map(answers_at, nodes))
        return [node for node, is_there in zip(nodes, answers, strict=True) if is_there]


def _addresses(node_ids: Set[str]) -> tuple[str, ...]:
    """The addresses of nodes, sorted."""
    nodes = ray.nodes() if node_ids else []
    return tuple(sorted(node["NodeManagerAddress"] for node in nodes if node["NodeID"] in node_ids))


def answers_at(node: dict[str, Any]) -> bool:
    """Whether a node's raylet takes a connection; Ray itself lists a lost node as alive for up to a minute."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS):
            return True
    except OSError:
        return False


def _free(nodes: list[dict[str, Any]], held: Mapping[str, int], each: Resources) -> list[dict[str, float]]:
    """The free resources of each node, plus those that our own workers hold there."""
    free = free_resources()
    found = []
    for node in nodes:
        here = dict(free.get(node["NodeID"], {}))
        for name, amount in each.items():
            here[name] = here.get(name, 0.0) + amount * held.get(node["NodeID"], 0)
        found.append(here)
    return found


class RestartPolicy(WorkerRestarts):
    """Remembers a job's earlier failures, and reports each decision to the driver."""

    def __init__(self, config: Any, channel: Any) -> None:
        super().__init__(config)
        self._channel = channel
        self._job = IDLE
        self._memory = Memory(IDLE.retries)

    def on_failure(self, failure: WorkersFailed | StartFailed) -> Restart:
        """Decide what to do after a failure, and report the decision to the driver.

        If a job is given up, the workers are started anew for the next one.
        """
        request, job = ray.get(self._channel.state.remote())
        if job.number != self._job.number:
            self._job, self._memory = job, Memory(job.retries)
        decision = decide_restart(Snapshot(failure, request, self._memory, job.workers or None), time.monotonic())
        self._memory = decision.memory
        if decision.message is not None:
            send(self._channel, decision.message)
        if decision.do is Restart.GIVE_UP and job.number and isinstance(failure, WorkersFailed):
            ray.get(self._channel.give_up.remote(job.number, encoded(GaveUp(failure.died))))
            return Restart.GIVE_UP if job.is_last else Restart.RESTART
        return decision.do


class StartCallback(WorkersStart):
    """Reports the progress of the workers' start to the driver, and sets `env` in each worker's process.

    It sets `env` before torch or user code is imported there. Ray's runtime_env must not hold the values, since Ray's
    agent logs it.
    """

    def __init__(self, env: dict[str, str], channel: Any) -> None:
        self._env = env
        self._channel = channel

    def on_placing(self, count: int) -> None:
        """Report that workers are being started."""
        self._say(Starting(f"starting {counted(count, 'worker')}"))

    def on_processes(self, count: int, call: Callable[..., list[Any]]) -> None:
        """Report that the workers import torch, and set their `env` and the group's id in each process."""
        self._say(Starting(f"{counted(count, 'worker')} importing torch"))
        call(prepare_imports, {**self._env, GROUP: uuid.uuid4().hex})

    def _say(self, phase: Message) -> None:
        ray.get(self._channel.put_phase.remote(encoded(phase)))

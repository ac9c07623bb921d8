"""The policies of Ray Train's controller: how many workers to start, when to resize, whether to restart.

They run in the controller's process, which imports no torch. They look at the cluster, have the pure functions of
`decisions.py` decide, and report to the driver. Ray's own elastic policy counts a lost node until a placement times
out (60 s), and resizes without telling the workers. This one counts only nodes that answer, and first stops the
workers between two steps.
"""

import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from dp_ray.cluster.channel import GROUP, IDLE, NOTHING, Ask, Request, Terms, encoded, send
from dp_ray.cluster.decisions import (
    Idle,
    LastCount,
    Memory,
    Resize,
    Restart,
    Running,
    Snapshot,
    StartFailed,
    WorkerDemand,
    WorkersFailed,
    decide_restart,
    decide_scaling,
    is_worth_a_look,
    survived,
)
from dp_ray.cluster.internals.core import autoscales, draining_nodes, free_resources
from dp_ray.errors import ClusterLost
from dp_ray.messages import Ending, GaveUp, Interrupted, Message, Note, Starting, Waits
from dp_ray.rundir.incidents import IncidentKind
from dp_ray.system.imports import prepare_imports
from dp_ray.text import counted, listed

ANSWER_SECONDS = 2.0  # a node that does not take a connection in this time counts as lost
LOOK_SECONDS = 1.0  # between two checks of the cluster


class ElasticScalingPolicy:
    """Runs as many workers as the nodes that answer have room for, between the session's minimum and maximum.

    `usable_nodes` are the ids of the nodes that answer, are not of another kind and, if there is room elsewhere, have
    no broken GPU, if the cluster lists others too; None: all nodes.
    """

    def __init__(self, wanted: WorkerDemand, channel: Any) -> None:
        self.max_workers = wanted.max_workers
        self.usable_nodes: list[str] | None = None
        self._wanted = wanted
        self._channel = channel
        self._avoided: Sequence[str] = ()  # ids of nodes
        self._broken: set[str] = set()  # those with a broken GPU, of the session's earlier jobs too
        self._told: set[str] = set()  # of these
        self._held: Mapping[str, int] = {}  # the number of our workers on each node, by its id
        self._has_started = False  # if so, a node may be lost that the cluster still lists
        self._may_hold = False  # the last workers keep their capacity until new ones start
        self._waiting_since: float | None = None
        self._said = float("-inf")
        self._looked = float("-inf")
        self._last_count = LastCount(0, 0.0)

    def workers_to_start(self) -> int | None:
        """Return how many workers to start now, None: none yet. Raises ClusterLost if no capacity comes in time."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        self._look_at(ray.get(self._channel.state.remote())[1])
        nodes = self._nodes(must_answer=self._has_started)
        decision = decide_scaling(self._idle(nodes, self._waiting_since), now)
        if decision.do is Resize.START:
            alive = [node for node in ray.nodes() if node["Alive"]]
            usable = [node["NodeID"] for node in nodes]
            self.usable_nodes = usable if len(usable) < len(alive) else None
            broken = [node for node in alive if node["NodeID"] in self._broken - {*usable, *self._told}]
            if broken:
                self._told.update(node["NodeID"] for node in broken)
                where = listed(node["NodeManagerAddress"] for node in broken)
                send(self._channel, Note(f"no workers are started on {where}, which has a broken GPU"))
            self._waiting_since = None
            self._held = {}  # the last workers are gone before the new ones start
            self._may_hold = self._has_started = True
            self._last_count = LastCount(decision.num_workers, time.monotonic())
            self._request(NOTHING)  # what the last workers were asked for is done
            return decision.num_workers
        if decision.do is Resize.GIVE_UP:
            raise ClusterLost(decision.text)
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

    def start_failed(self) -> None:
        """Note that a start failed, so that no workers hold capacity."""
        self._may_hold = False  # no earlier workers are left

    def while_running(self, node_ids: Sequence[str], started: float) -> None:
        """Check the cluster once a second, and ask the workers to save or stop if that is decided.

        The workers run on the nodes with these ids, one entry for each, since `started` on time.monotonic's clock.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self._held = Counter(node_ids)
        request, job = ray.get(self._channel.state.remote())
        if request.ask in (Ask.RESTART, Ask.STOP):
            return
        self._look_at(job)
        draining = draining_nodes() & self._held.keys()
        nodes = ray.nodes() if draining else []
        addresses = tuple(sorted(node["NodeManagerAddress"] for node in nodes if node["NodeID"] in draining))
        wanted = self._wanted.of_job(job.workers, job.can_stop) if job.number else self._wanted
        running = Running(wanted, len(node_ids), started, self._last_count, addresses)
        if is_worth_a_look(running, now):
            running = replace(running, capacity=self._capacity(self._nodes(must_answer=False)))
        decision = decide_scaling(running, now)
        self._last_count = decision.last_count or self._last_count
        if decision.request is not None and decision.request.ask is not request.ask:
            self._request(decision.request)

    def _look_at(self, job: Terms) -> None:
        self._avoided = job.avoided
        self._broken.update(job.broken)

    def _request(self, request: Request) -> None:
        ray.get(self._channel.request.remote(request))

    def _capacity(self, nodes: list[dict[str, Any]]) -> int:
        """Count the workers that fit on what is free on the nodes, plus what our own workers hold there."""
        free, capacities = free_resources(), []
        for node in nodes:
            resources = dict(free.get(node["NodeID"], {}))
            for name, amount in self._wanted.each.items():
                resources[name] = resources.get(name, 0.0) + amount * self._held.get(node["NodeID"], 0)
            capacities.append(resources)
        return self._wanted.capacity(capacities)

    def _nodes(self, must_answer: bool) -> list[dict[str, Any]]:
        """Return the nodes that may run workers: alive, not draining, not of another kind, and without a broken GPU.

        Those with a broken GPU are taken if the others have too little room. With `must_answer`, only those that take
        a connection.
        """
        out = draining_nodes() | set(self._avoided)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in out]
        if must_answer and len(nodes) != 1:
            with ThreadPoolExecutor(min(64, len(nodes) or 1)) as pool:
                answers = list(pool.map(answers_at, nodes))
            nodes = [node for node, is_there in zip(nodes, answers, strict=True) if is_there]
        usable = self._wanted.without_broken({node["NodeID"]: node["Resources"] for node in nodes}, self._broken)
        return [node for node in nodes if node["NodeID"] in usable]


def answers_at(node: dict[str, Any]) -> bool:
    """Return whether a node's raylet takes a connection; Ray itself lists a lost node as alive for up to a minute."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS):
            return True
    except OSError:
        return False


def all_answer(node_ids: Sequence[str]) -> bool:
    """Return whether all of these nodes are there, so that a worker can be replaced on them."""
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    return all(node_id in alive and answers_at(alive[node_id]) for node_id in node_ids)


@dataclass(eq=False)
class RestartPolicy:
    """Decides whether failed workers are restarted; it remembers a job's failures, and reports to the driver."""

    channel: Any
    _job: Terms = IDLE
    _memory: Memory = field(default_factory=lambda: Memory(IDLE.retries))

    def on_failure(self, failure: WorkersFailed | StartFailed) -> Restart:
        """Decide what to do after a failure, and report the decision to the driver.

        If a job is given up, the workers are started anew for the next one.
        """
        request, job = ray.get(self.channel.state.remote())
        if job.number != self._job.number:
            self._job, self._memory = job, Memory(job.retries, has_restarted=self._memory.has_restarted)
        if job.goes_on and isinstance(failure, WorkersFailed) and request.ask is not Ask.STOP:
            do = self._with_survivors(failure, job)
            if do is not None:
                return do
        if job.goes_on and isinstance(failure, StartFailed):
            what = f"no other worker could be started in the place of the lost one: {failure.cause}"
            send(self.channel, Interrupted(IncidentKind.RESIZE, what, ()))
        losses = ray.get(self.channel.count_loss.remote()) if job.serves else None
        snapshot = Snapshot(failure, request, self._memory, job.workers or None, losses)
        decision = decide_restart(snapshot, time.monotonic())
        self._memory = decision.memory
        if decision.do is not Restart.WAIT:  # a job that is given up leaves its memory to the next one's workers too
            self._memory = replace(self._memory, has_restarted=True)
        if decision.message is not None:
            send(self.channel, decision.message)
        if decision.do is Restart.GIVE_UP and job.number and not job.serves and isinstance(failure, WorkersFailed):
            ray.get(self.channel.give_up.remote(job.number, encoded(GaveUp(failure.died))))
            return Restart.GIVE_UP if job.is_last else Restart.RESTART
        return decision.do

    def on_more(self, failure: WorkersFailed | StartFailed) -> None:
        """Take in all failures that are known by now, before the failed workers are replaced."""
        job = ray.get(self.channel.state.remote())[1]
        if job.goes_on and isinstance(failure, WorkersFailed):
            self._with_survivors(failure, job)

    def _with_survivors(self, failure: WorkersFailed, job: Terms) -> Restart | None:
        """Replace lost workers alone, and tell the driver; None if all are to start again, or the job is given up."""
        if len(failure.of(Ending.LOST_PEER)) < len(failure.ended):
            return None  # an error of a survivor
        slots = *failure.died, *failure.ended
        loss = ray.get(self.channel.survey.remote(job.number, slots))
        if loss is None or not all_answer(loss.node_ids):
            return None
        if loss.losses > job.retries:
            self._memory = replace(self._memory, retries=0)
            return None
        told = survived(failure, loss.ranks)
        if told is not None:
            send(self.channel, told)  # first: the next view may begin at once
        ray.get(self.channel.lose.remote(job.number, slots))
        return Restart.REPLACE


@dataclass
class StartReports:
    """Reports the progress of the workers' start to the driver, and sets `env` in each worker's process.

    It sets `env` before torch or user code is imported there. Ray's runtime_env must not hold the values, since Ray's
    agent logs it.
    """

    env: dict[str, str]
    channel: Any
    _group: str = ""  # the id of those that are started together, and of others in their places
    _starts_all: bool = True

    def on_placing(self, count: int) -> None:
        """Report that workers are about to be placed on nodes."""
        self._group, self._starts_all = uuid.uuid4().hex, True
        self._say(Starting(f"starting {counted(count, 'worker')}"))

    def on_processes(self, count: int, call: Callable[..., list[Any]]) -> None:
        """Report that the workers import torch, and set their `env` and the group's id in each process.

        `call(do, *args)` calls `do` in each process, and returns all results.
        """
        if self._starts_all:
            self._say(Starting(f"{counted(count, 'worker')} importing torch"))
        self._starts_all = False
        call(prepare_imports, {**self.env, GROUP: self._group})

    def _say(self, phase: Message) -> None:
        ray.get(self.channel.put_phase.remote(encoded(phase)))

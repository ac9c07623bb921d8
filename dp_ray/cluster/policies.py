"""The policies of Ray Train's controller: how many workers to start, when to resize, whether to restart.

They run in the controller's process, which imports no torch. They look at the cluster, have the pure functions of
`decisions.py` decide, and report to the driver. Ray's own elastic policy counts a lost node until a placement times
out (60 s), and resizes without telling the workers. This one counts only nodes that answer, and first stops the
workers between two steps.
"""

import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from dp_ray.cluster.channel import IDLE, NOTHING, Ask, Terms, encoded, send
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
    what_failed,
)
from dp_ray.cluster.internals.core import autoscales, draining_nodes, free_resources
from dp_ray.errors import ClusterLost
from dp_ray.messages import GaveUp, Note, Waits, beat_interval
from dp_ray.text import counted, listed

ANSWER_SECONDS = 2.0  # a node that does not take a connection in this time counts as lost
LOOK_SECONDS = 1.0  # between two checks of the cluster
SILENT_BEATS = 5  # that do not come, after which it is asked whether a worker's node answers
REPLACING_STARTS = 3  # in a row, of workers in the places of lost ones


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
        idle = Idle(
            self._wanted,
            capacity=self._capacity(nodes),
            idle_capacity=self._wanted.capacity([node["Resources"] for node in nodes]),
            num_nodes=len(nodes),
            has_started=self._has_started,
            may_hold=self._may_hold,
            autoscales=autoscales(),
            waiting_since=self._waiting_since,
            said=self._said,
        )
        decision = decide_scaling(idle, now)
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
            ray.get(self._channel.request.remote(NOTHING))  # what the last workers were asked for is done
            return decision.num_workers
        if decision.do is Resize.GIVE_UP:
            raise ClusterLost(decision.text)
        if decision.text:
            self._said = now
            send(self._channel, Waits(decision.text))
        time.sleep(0.2)  # the controller would ask again at once
        return None

    def start_failed(self) -> None:
        """Note that a start failed, so that no workers hold capacity."""
        self._may_hold = False  # no earlier workers are left

    def while_running(self, node_ids: Sequence[str], started: float, num_lost: int = 0) -> int | None:
        """Check the cluster once a second, and ask the workers to save, leave or stop if that is decided.

        The workers run on the nodes with these ids, one entry for each, since `started` on time.monotonic's clock;
        `num_lost` others are lost. If further ones are to join them now, returns the number of all, with the lost
        ones; they are to start on `usable_nodes`.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        self._looked = now
        self._held = Counter(node_ids)
        request, job = ray.get(self._channel.state.remote())
        if request.ask in (Ask.RESTART, Ask.STOP):
            return None
        self._look_at(job)
        lose_cut_off(self._channel, job, len(node_ids) + num_lost)
        draining = draining_nodes() & self._held.keys()
        nodes = ray.nodes() if draining else []
        addresses = tuple(sorted(node["NodeManagerAddress"] for node in nodes if node["NodeID"] in draining))
        wanted = self._wanted.of_job(job.workers, job.can_stop) if job.number else self._wanted
        running = Running(wanted, len(node_ids), started, self._last_count, addresses, num_lost=num_lost)
        if job.may_shrink:
            num_staying = sum(node_id not in draining for node_id in node_ids)
            running = replace(running, num_staying=num_staying)
        if job.may_shrink or (not job.number and not self._wanted.each.get("GPU", 0)):
            is_strict = self._wanted.placement.startswith("STRICT")  # which holds within one placement group alone
            running = replace(running, takes_more=not is_strict, starts_fail=job.starts_fail)
        if is_worth_a_look(running, now):
            running = replace(running, capacity=self._capacity(self._nodes(must_answer=False)))
        decision = decide_scaling(running, now)
        self._last_count = decision.last_count or self._last_count
        if decision.request is not None and decision.request.ask is not request.ask:
            ray.get(self._channel.request.remote(decision.request))
        if decision.do is Resize.LEAVE:
            ray.get(self._channel.drain.remote(job.number, tuple(draining), decision.text))
        if decision.do is Resize.GROW:
            nodes = self._nodes(must_answer=True)
            self.usable_nodes = [node["NodeID"] for node in nodes]
            num_workers = min(decision.num_workers, self._capacity(nodes) + num_lost)
            return num_workers if num_workers > len(node_ids) + num_lost else None
        return None

    def _look_at(self, job: Terms) -> None:
        self._avoided = job.avoided
        self._broken.update(job.broken)

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

        Those with a broken GPU are taken if the others have too little room: it may compute again once it has a new
        process. With `must_answer`, only those that take a connection.
        """
        out = draining_nodes() | set(self._avoided)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in out]
        if must_answer and len(nodes) != 1:
            there = nodes_that_answer({node["NodeID"] for node in nodes})
            nodes = [node for node in nodes if node["NodeID"] in there]
        others = [node for node in nodes if node["NodeID"] not in self._broken]
        has_room = self._wanted.capacity([node["Resources"] for node in others]) >= self._wanted.min_workers
        return others if has_room else nodes


def answers_at(node: dict[str, Any]) -> bool:
    """Return whether a node's raylet takes a connection; Ray itself lists a lost node as alive for up to a minute."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS):
            return True
    except OSError:
        return False


def nodes_that_answer(node_ids: Collection[str]) -> set[str]:
    """Return the ids of those of these nodes that are alive and take a connection."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in node_ids]
    with ThreadPoolExecutor(min(64, len(nodes) or 1)) as pool:
        answers = list(pool.map(answers_at, nodes))
    return {node["NodeID"] for node, is_there in zip(nodes, answers, strict=True) if is_there}


def lose_cut_off(channel: Any, job: Terms, num_workers: int) -> None:
    """Have a job go on without the workers that give no sign, and whose nodes take no connection.

    Ray calls such a node dead after up to a minute. A worker that gives no sign on a node that answers may compute.
    """
    silent = ray.get(channel.silent.remote(job.number, SILENT_BEATS * beat_interval(num_workers)))
    there = nodes_that_answer({member.node_id for member in silent}) if silent else set()
    if slots := [member.slot for member in silent if member.node_id not in there]:
        failure = WorkersFailed({}, dict.fromkeys(slots, "its node does not answer"))
        if ray.get(channel.survey.remote(job.number, tuple(slots))) is not None:
            go_on_without(channel, job, failure)


def go_on_without(channel: Any, job: Terms, failure: WorkersFailed) -> None:
    """Have the others go on without these workers; the channel tells the driver."""
    ray.get(channel.lose.remote(job.number, (*failure.died, *failure.ended), what_failed(failure)))


@dataclass(eq=False)
class RestartPolicy:
    """Decides whether failed workers are restarted; it remembers a job's failures, and reports to the driver."""

    channel: Any
    _job: Terms = IDLE
    _memory: Memory = field(default_factory=lambda: Memory(IDLE.retries))
    _last: Restart | None = None  # its last decision
    _awaited: set[int] = field(default_factory=set)  # Ray Train's ranks of workers that are to be replaced alone
    _replaced: set[int] = field(default_factory=set)  # the same of workers that were started in such places
    _failed_starts: int = 0  # of such workers, one after another, that took no part
    _looked: float = float("-inf")
    _says_no_room: bool = False

    def begin(self) -> None:
        """Note that all workers are started anew."""
        self._awaited.clear()

    def on_failure(self, failure: WorkersFailed | StartFailed) -> Restart:
        """Decide what to do after a failure, and report the decision to the driver.

        If a job is given up, the workers are started anew for the next one. Failures of workers that are to be
        replaced are known: they are told again as long as these wait.
        """
        snapshot = self._snapshot(failure)
        self._last = Restart.REPLACE if snapshot is None else self._decide(snapshot)
        return self._last

    def on_more(self, failure: WorkersFailed | StartFailed) -> None:
        """Take in all failures that are known by now, before the failed workers are replaced."""
        snapshot = self._snapshot(failure)
        if snapshot is not None and snapshot.others_go_on:
            self._with_survivors(snapshot)

    def _decide(self, snapshot: Snapshot) -> Restart:
        failure = snapshot.failure
        decision, job = decide_restart(snapshot, time.monotonic()), snapshot.job
        self._memory = decision.memory
        if decision.do is Restart.REPLACE:
            self._with_survivors(snapshot)
            return Restart.REPLACE
        if decision.do is not Restart.WAIT:  # a job that is given up leaves its memory to the next one's workers too
            self._memory = replace(self._memory, has_restarted=True)
        if decision.message is not None:
            send(self.channel, decision.message)
        if decision.do is Restart.GIVE_UP and job.number and job.has_steps and isinstance(failure, WorkersFailed):
            died = snapshot.by_rank(failure.died) or dict(failure.died)
            ray.get(self.channel.give_up.remote(job.number, encoded(GaveUp(died))))
            return Restart.GIVE_UP if job.is_last else Restart.RESTART
        return decision.do

    def _snapshot(self, failure: WorkersFailed | StartFailed) -> Snapshot | None:
        """Return all facts of a decision, by what the channel says of the job's views; None if nothing is new."""
        if isinstance(failure, WorkersFailed):
            failure = failure.without(self._awaited)
            if not failure.ended and not failure.died:
                return None
        request, job = ray.get(self.channel.state.remote())
        self._look_at(job)
        if not job.has_steps and ray.get(self.channel.has_views.remote(job.number)):  # since the last start
            self._memory = replace(self._memory, retries=job.retries)
        if isinstance(failure, StartFailed):
            return Snapshot(failure, request, self._memory, job, replaces=self._last is Restart.REPLACE)
        slots = (*failure.died, *failure.ended)
        ranks, loss = ray.get(
            [self.channel.ranks.remote(job.number, slots), self.channel.survey.remote(job.number, slots)]
        )
        return Snapshot(failure, request, self._memory, job, ranks, loss)

    def _look_at(self, job: Terms) -> None:
        if job.number != self._job.number:
            self._job, self._memory = job, Memory(job.retries, has_restarted=self._memory.has_restarted)
            self._failed_starts = 0

    def _with_survivors(self, snapshot: Snapshot) -> None:
        """Have lost workers replaced alone, and tell the driver."""
        failure, loss = snapshot.failure, snapshot.loss
        if isinstance(failure, StartFailed):
            self.count_failed_start(failure.cause)
            return
        self._awaited |= failure.died.keys() | failure.ended.keys()
        go_on_without(self.channel, snapshot.job, failure)
        if loss is not None and (loss.ranks or loss.has_excluded):
            self._failed_starts = 0
        elif self._replaced & (failure.died.keys() | failure.ended.keys()):
            self.count_failed_start(what_failed(failure))
        elif failure.died:  # the next job is told too, if it begins before another worker is there
            told = f"a worker that took no part is lost, and another one starts in its place: {what_failed(failure)}"
            ray.get(self.channel.put_phase.remote(encoded(Note(told))))

    def has_grown(self, ranks: Collection[int], num_workers: int) -> None:
        """Note that further workers, with these of Ray Train's ranks, are there; then there are so many."""
        self._replaced.update(ranks)
        joins = "1 more joins" if len(ranks) == 1 else f"{len(ranks)} more join"
        send(self.channel, Note(f"there is room for {counted(num_workers, 'worker')}: {joins}"))

    def count_failed_start(self, why: str) -> None:
        """Note that a worker was lost as it started; after some in a row, no more are started."""
        self._failed_starts += 1
        if self._failed_starts == REPLACING_STARTS:
            times = f"{REPLACING_STARTS} were lost as they started: {why}"
            send(self.channel, Note(f"no other worker is started: {times}"))
            ray.get(self.channel.learn.remote(self._job.number, starts_fail=True))

    def with_room(self, places: Mapping[int, str]) -> set[int]:
        """Return which of these workers, by Ray Train's ranks, can be replaced now; it looks once a second.

        `places` has the ids of the nodes on which they would run, "" where Ray has none yet.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return set()
        self._looked = now
        request, job = ray.get(self.channel.state.remote())
        self._look_at(job)
        if self._failed_starts >= REPLACING_STARTS or request.ask is Ask.STOP:
            return set()
        out = draining_nodes() | set(job.avoided)
        waiting = self._awaited & places.keys()
        there = nodes_that_answer({places[rank] for rank in waiting} - out - {""})
        found = {rank for rank in waiting if places[rank] in there}
        if not found and not self._says_no_room:
            others = "wait for it" if job.needs_all else "go on without it"
            send(self.channel, Note(f"no node has room for another worker now: the others {others}"))
        self._says_no_room = not found
        return found

    def has_replaced(self, rank: int) -> None:
        """Note that another worker has been started in the place of this one, by Ray Train's rank."""
        self._awaited.discard(rank)
        self._replaced.add(rank)

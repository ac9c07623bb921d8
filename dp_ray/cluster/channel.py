"""The channel between workers and driver: an actor on the driver's node that holds messages until the driver reads.

Through it the workers also get their job, its terms, and requests between two steps. Messages are bytes to the actor,
so its process imports neither torch nor the user's modules. This module imports next to nothing of dp_ray, so that
the processes of the channel and of Ray Train's controller stay small.

The channel also makes the views of a job's workers (`membership.py`), and says who goes on where one is lost.
"""

import asyncio
import contextlib
import math
import pickle
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dp_ray.cluster.membership import Leave, Left, Loss, Member, Membership, Phase, View

GROUP = "DP_RAY_WORKER_GROUP"  # the environment variable with the id that all workers have that were started together
RUN, SERVE = "dp_ray.tasks.task", "dp_ray.tasks.serve"  # the modules of a job's tasks, and of calls


@dataclass(frozen=True)
class WorkerConfig:
    """The settings of a worker when it starts.

    `number` is that of the job that runs, `kind` that of its terms, `node_id` Ray's of the worker's node. `name` is
    that of the process in views, and `view` the number of its view, 0 before the first one. `imports` is the module
    whose `run_task` it needs first.
    """

    channel: Any
    keep_prints: bool
    driver_node: str = ""
    number: int = 0
    kind: str = ""
    node_id: str = ""
    imports: str = RUN
    name: str = ""
    view: int = 0


class Ask(StrEnum):
    """A request to the workers, which they look at between two steps."""

    NOTHING = ""
    SAVE = "save"
    RESTART = "restart"  # stop, to be started again with more or fewer workers
    LEAVE = "leave"  # stop, to go on at once in the next view
    LEAVE_NOW = "leave now"  # the same, and collectives will not end
    END = "end"  # at once, whatever it runs: the others go on without this worker
    STOP = "stop"  # for good: no later request replaces it while the job lasts


@dataclass(frozen=True)
class Request:
    """A request to the workers; `text` says why, for people. With `drains`, nodes are about to be taken away."""

    ask: Ask
    text: str = ""
    drains: bool = False


NOTHING = Request(Ask.NOTHING)
STOP = Request(Ask.STOP, "the user stops the run")


@dataclass(frozen=True)
class Terms:
    """A job as it is known without unpickling it; `number` counts a session's jobs from 1, 0: none runs.

    `can_stop` says whether the job keeps work to resume from, `is_last` whether the session ends with it. `outlives`
    is how many losses, with no step between them, the others survive in their processes; None: where one is lost, all
    end. `kind` is what a bitwise job's workers of its last attempt computed on, "" before there is one; `avoided` are
    the ids of the nodes whose workers would compute differently, `broken` those of nodes with a broken GPU. `rejoin`
    and `step` are seconds, those of the job's `timeouts`.
    `needs_all` says that no fewer workers can run the job, `starts_fail` that no more are started in the places of
    lost ones.
    """

    number: int = 0
    workers: int = 0
    retries: int = 3
    can_stop: bool = True
    is_last: bool = False
    outlives: float | None = None
    rejoin: float = 10.0
    step: float | None = None
    needs_all: bool = False
    kind: str = ""
    avoided: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    starts_fail: bool = False

    @property
    def may_shrink(self) -> bool:
        """Whether some of the workers can go on without the others."""
        return self.outlives is not None and not self.needs_all

    @property
    def has_steps(self) -> bool:
        """Whether it ends after some steps. Calls of modules have none: each loss between two calls is survived."""
        return self.outlives != math.inf


IDLE = Terms()


HOLD_SECONDS = 0.25
TAKE_SECONDS = 60.0  # until all have taken a job that none can run without the others; else all start again
LOOK_SECONDS = 1.0  # between two looks for members that give no sign
VIEWS = 8  # in a row in which no step is finished
SHORT_SECONDS = 60.0  # of a view whose connections never worked
OUT = "the others go on without this worker"


class Channel:
    """The actor: it holds the session's job, the workers' messages, the current request, and the workers' views.

    With `keeps_idle`, a lost worker that takes no part in a job is replaced alone.
    """

    def __init__(self, keeps_idle: bool = True) -> None:
        self._keeps_idle = keeps_idle
        self._messages: list[bytes] = []
        self._arrived = asyncio.Event()
        self._request = NOTHING
        self._terms = IDLE
        self._job: list[Any] = []
        self._phase: list[bytes] = []  # the last message on how far the workers' start is, until one has started
        self._is_closed = False
        self._group = ""  # of the workers that asked last for a job
        self._slots = {0}  # of these, and of further ones that came to them
        self._lost: set[int] = set()  # the slots of those that are lost, until others are there in their places
        self._given: dict[int, float] = {}  # when a job was given to the slots that have not said that they have it
        self._lost_group = ""  # of the workers whose job was given up
        self._fired: set[int] = set()  # the numbers of faults that were injected
        self._stores: dict[str, tuple[str, int]] = {}  # host and port, by attempt
        self._changed = asyncio.Condition()
        self._begin_views()
        self._finished = IDLE  # what has finished last, whose workers still say what they leave behind

    def _begin_views(self) -> None:
        self._membership: Membership | None = None  # of the job's workers
        self._started: set[int] = set()  # the slots of the workers that the job takes as it begins
        self._lost_early = 0  # how often workers were lost before the first view
        self._groups: list[str] = []  # of workers that have had views; the last one's are those of the membership
        self._heard: dict[str, float] = {}  # when each of them has last given a sign, by its name
        self._breaks_since: float | None = None  # the view of the membership
        self._viewed_at = 0.0  # when it was made
        self._ends: dict[int, dict[int, tuple[bool, bool]]] = {}  # what they say who have come to the end of a view
        self._rejoins: dict[int, bool] = {}  # by views that all have come to the end of: whether there is a next one

    async def put(self, message: bytes, number: int = 0, view: int = 0, name: str = "", step: int = 0) -> Ask:
        """Take in a message about job `number`, 0: about any; the answer is what the workers are asked to do now.

        Workers of a job that was given up may send until they are ended; what they send is dropped. A beat has the
        number of the `view` of its worker, the worker's `name`, and the `step` that it runs. Of a message with a name
        alone, as rows of the history are, what is sent once its worker is lost or excluded is dropped.
        """
        if name and not view and self._membership is not None and self._membership.is_gone(name):
            return Ask.END
        if number in (0, self._terms.number, self._finished.number):
            self._messages.append(message)
            self._arrived.set()
        if view and self._membership is not None:
            if self._membership.is_gone(name):
                return Ask.END
            self._heard[name] = time.monotonic()
            self._membership.reach(progress_at(step), view)
            asked = self._membership.asks(view)
            if asked is Leave.NOW:
                return Ask.LEAVE_NOW
            if asked is Leave.AFTER_A_STEP and self._request.ask not in (Ask.STOP, Ask.RESTART):
                return Ask.LEAVE
        if view and number == self._finished.number and not self._finished.has_steps:
            return Ask.LEAVE_NOW
        return self._request.ask

    async def receive(self, wait: bool = True) -> list[bytes]:
        """Return all messages since the last call; with `wait`, waits up to HOLD_SECONDS for the first one."""
        if not self._messages and wait:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), HOLD_SECONDS)
        messages, self._messages = self._messages, []
        return messages

    async def put_phase(self, message: bytes) -> None:
        """Take in a message on how far the workers' start is, which a job that begins meanwhile gets too."""
        self._phase = [message]
        await self.put(message)

    async def begin(self, terms: Terms, job: list[Any]) -> None:
        """Hand a job to the workers; `job` holds the reference of its bytes."""
        async with self._changed:
            self._messages = [*self._phase]  # what else there is concerns no job, such as workers lost while idle
            self._fired, self._stores, self._finished = set(), {}, IDLE
            self._begin_views()
            self._terms, self._job = terms, job
            self._changed.notify_all()

    async def finish(self, number: int) -> None:
        """End a job, so that no worker begins it any more."""
        if number == self._terms.number:
            self._finished = self._terms
            await self._become_idle()

    async def give_up(self, number: int, message: bytes) -> None:
        """End a job that has failed, and leave the message for the driver; nothing if the job has ended meanwhile."""
        if number == self._terms.number:
            self._lost_group = self._group
            await self._become_idle()
            await self.put(message)

    async def _become_idle(self) -> None:
        async with self._changed:
            self._terms, self._job, self._membership = IDLE, [], None
            if self._request.ask is Ask.STOP:  # which was for this job
                self._request = NOTHING
            self._changed.notify_all()
            self._arrived.set()

    async def close(self) -> None:
        """Have the workers leave."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    async def next_job(
        self, after: int, group: str = "", slot: int = 0, num_workers: int = 1
    ) -> tuple[Terms, list[Any]] | Ask:
        """Return the first job after `after`, once there is one; Ask.STOP or Ask.RESTART if the worker is to leave.

        An idle worker is asked to leave if the session ends, or if there are to be more or fewer workers. `group` is
        the id of the `num_workers` that were started together: those of a job that was given up get no other. The
        worker itself is the one in `slot`, as Ray Train numbers them. A further one, which was not started together
        with the others, gets no job that goes on with those that it has.
        """
        if group and group != self._group:
            self._group, self._slots, self._lost, self._given = group, set(range(num_workers)), set(), {}
        if group and slot not in self._slots and not self._terms.may_shrink:
            after = self._terms.number
        self._slots.add(slot)
        self._lost.discard(slot)
        self._phase = []  # this worker has started
        async with self._changed:
            while not self._is_closed:
                if not group or group != self._lost_group:
                    if self._terms.number > after:
                        self._given[slot] = time.monotonic()
                        return self._terms, self._job
                    if self._request.ask is Ask.RESTART and self._terms is IDLE:
                        return Ask.RESTART
                await self._changed.wait()
            return Ask.STOP

    async def has_job(self, slot: int) -> None:
        """Note that the worker in a slot has the job that it was given: it does not stand still."""
        self._given.pop(slot, None)
        self._lost.discard(slot)

    async def request(self, request: Request, number: int = 0) -> None:
        """Replace the current request; Ask.STOP is final while the job lasts, and no other replaces it.

        A request about job `number` counts only while that job runs; 0: at any time.
        """
        if self._request.ask is Ask.STOP or number not in (0, self._terms.number):
            return
        async with self._changed:
            self._request = request
            self._changed.notify_all()

    async def state(self) -> tuple[Request, Terms]:
        """Return the request to the workers, and the terms of the job that they run."""
        return self._request, self._terms

    async def learn(self, number: int, **found: Any) -> None:
        """Have job `number` go on with what was found out: see `Terms`. Nodes come to those that are known."""
        if number == self._terms.number:
            for name in found.keys() & {"avoided", "broken"}:
                found[name] = tuple(dict.fromkeys((*getattr(self._terms, name), *found[name])))
            self._terms = replace(self._terms, **found)

    async def fire(self, fault: int) -> bool:
        """Return whether a fault is still to be injected: true on the first call only, over all attempts."""
        is_first = fault not in self._fired
        self._fired.add(fault)
        return is_first

    async def end(self, view: int, rank: int, world_size: int, is_through: bool, is_kept: bool = True) -> bool:
        """Wait until all of a view have come to its end; return whether they are to ask for another one.

        Each is through with its task, or has left it after a step. Who has left stops as the user has asked, or to be
        started again, only if rank 0 has kept the work, `is_kept`; else all go on in another view, also who is
        through: in a prediction each stops by itself. So they do if one of them is lost before.
        """
        async with self._changed:
            ends = self._ends.setdefault(view, {})
            ends[rank] = is_through, is_kept
            if len(ends) == world_size:
                stops = ends[0][1] and self._request.ask in (Ask.STOP, Ask.RESTART)
                self._rejoins[view] = not stops and not all(is_through for is_through, _ in ends.values())
            self._changed.notify_all()
            await self._changed.wait_for(lambda: view in self._rejoins or self._is_broken(view))
            return self._rejoins.get(view, True)

    async def has_views(self, number: int, group: str = "") -> bool:
        """Return whether workers of this group, by default of the last one, run job `number` in views already."""
        membership = self._membership_in(number)
        is_theirs = not group or group in self._groups[-1:]
        return is_theirs and membership is not None and membership.view.number > 0

    def _membership_in(self, number: int) -> Membership | None:
        """Return the membership of job `number`; None if it does not run, or not yet."""
        return self._membership if number == self._terms.number else None

    async def gone(self, number: int, names: list[str]) -> set[str]:
        """Return those of these processes without which job `number` goes on, though they may live.

        They are waited for: a member among them that gives no sign, and asks for no view, is left out.
        """
        there = self._membership_in(number)
        if there is None:
            return set()
        async with self._changed:
            self._exclude_silent(there, [member.name for member in there.awaited() if member.name in names])
            self._settle(there)
        return {name for name in names if there.is_gone(name)}

    async def exclude(self, number: int, name: str, why: str) -> None:
        """Have job `number` go on without the process of this name."""
        if (membership := self._membership_in(number)) is not None:
            async with self._changed:
                membership.exclude([name], why)
                self._settle(membership)

    async def break_up(self, number: int, view: int) -> None:
        """Have the workers of job `number` leave the view of this number at once, and make another."""
        membership = self._membership_in(number)
        if membership is not None and membership.view.number == view:
            async with self._changed:
                membership.break_up()
                self._changed.notify_all()

    async def lost(self) -> set[int]:
        """Return the slots of the workers that are lost, and in whose places there are no others yet."""
        return self._lost

    async def ask(
        self, number: int, group: str, member: Member, progress: int, has_lost_peer: bool, expected: int
    ) -> View | str | None:
        """Return the next view of job `number` with this worker, None if the job has ended, or why it is to end.

        `group` is the id of the workers that were started together, `expected` how many of them the job takes.
        `progress` counts what the worker has finished.
        """
        async with self._changed:
            if self._terms.number != number:
                return None
            membership = self._membership_of(group, expected)
            if membership is None:
                return OUT
            membership.expected = self._expected()
            may_ask = membership.ask(member, progress, has_lost_peer)
            self._heard[member.name] = time.monotonic()
            self._settle(membership)
            while may_ask and membership.is_asking(member.name) and self._membership is membership:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_SECONDS)
                if self._membership is membership:  # else the job has ended, or all were started anew
                    must_be_all = not self._terms.may_shrink and not membership.view.number
                    if must_be_all and self._standing_still(TAKE_SECONDS):
                        return f"another worker has not taken the job for {TAKE_SECONDS:g} s"
                    self._leave_silent_out(membership)
            if self._terms.number != number:
                return None
            is_in = self._membership is membership and membership.view.rank(member.name) is not None
            if membership.failed_views > VIEWS:
                says = f"their connections failed in {VIEWS} process groups, one after another"
                return f"the workers live, but {says}: see the network between their nodes"
            return membership.view if may_ask and is_in else OUT

    async def is_out(self, name: str) -> bool:
        """Return whether the others go on without the process of this name, which may live."""
        return self._membership is None or self._membership.is_gone(name)

    def _membership_of(self, group: str, expected: int) -> Membership | None:
        """Return the membership of the workers of this group; None if all were started anew since."""
        earlier = self._groups
        if group not in earlier:
            self._begin_views()
            came = {slot for slot in self._slots if slot < self._terms.workers}
            self._groups, self._started = [*earlier, group], {*range(expected), *came}
            expected = len(self._started)
            self._membership = Membership(expected, 1 if self._terms.may_shrink else expected)
        return self._membership if group == self._groups[-1] else None

    def _expected(self) -> int:
        """Return for how many workers the first view waits: those that live, at least one."""
        return max(1, len(self._started - self._lost)) if self._terms.may_shrink else len(self._started)

    def _settle(self, membership: Membership) -> None:
        """Make the next view, if it can be; before any message of it, the driver is told who has left."""
        if membership.settle() is not None:
            now = time.monotonic()
            if now - self._viewed_at > SHORT_SECONDS:
                membership.failed_views = 0
            self._breaks_since, self._viewed_at = None, now
        self._messages += [encoded(left) for left in membership.take_left()]
        self._arrived.set()
        self._changed.notify_all()

    def _leave_silent_out(self, membership: Membership) -> None:
        """Exclude members that have given no sign for long, or compute for longer than a step may take.

        The first view waits for no worker that was idle, and does not take the job since it stands still.
        """
        now, step = time.monotonic(), self._terms.step
        if not membership.view.number:
            self._lost |= self._standing_still(self._terms.rejoin)
            membership.expected = self._expected()
            self._settle(membership)
        if membership.phase is not Phase.BREAKING:
            return
        self._breaks_since = self._breaks_since or now
        awaited = [member.name for member in membership.awaited()]
        self._exclude_silent(membership, awaited)
        if step is not None and now - self._breaks_since > step:
            membership.exclude(awaited, f"it did not leave its step within {step:g} s (timeouts.step)")
        self._settle(membership)

    def _standing_still(self, seconds: float) -> set[int]:
        """Return the slots of workers that were idle, and have not said for so long that they have the job."""
        late = time.monotonic() - seconds
        return {slot for slot, given in self._given.items() if given <= late and slot in self._started}

    def _exclude_silent(self, membership: Membership, names: list[str]) -> None:
        late, rejoin = time.monotonic() - self._terms.rejoin, self._terms.rejoin
        silent = [name for name in names if self._heard.get(name, late) <= late]
        membership.exclude(silent, f"it gave no sign for {rejoin:g} s (timeouts.rejoin)")

    async def survey(self, number: int, slots: tuple[int, ...]) -> Loss | None:
        """Return what the loss of the processes in these slots would be, as Ray Train numbers them.

        None if nobody goes on: all are to start again. On GPUs they always do: that NCCL's groups can be formed anew
        in the same processes is not proven.
        """
        membership, outlives = self._membership, self._terms.outlives
        if number != self._terms.number:
            return None
        if outlives is None and (not self._keeps_idle or await self.ranks(number, slots)):
            return None
        if membership is None or not membership.view.number:
            lives = self._slots.difference(self._lost, slots)
            return Loss((), self._lost_early + 1 if number else 0) if lives else None
        loss = membership.loss_of(slots)
        may_have_left = loss is not None and bool(loss.ranks) and not self._rejoins.get(membership.view.number, True)
        is_idle = membership.idle_views > max(VIEWS, outlives or 0)
        return None if may_have_left or is_idle else loss

    async def ranks(self, number: int, slots: tuple[int, ...]) -> dict[int, int]:
        """Return the ranks of those in these slots that take part and were not lost before, by their slots."""
        membership = self._membership_in(number)
        if membership is None or not membership.view.number:
            return {slot: slot for slot in slots if slot < self._terms.workers}
        return membership.ranks(slots)

    async def silent(self, number: int, seconds: float) -> list[Member]:
        """Return the members that have given no sign for so many seconds; none if no job runs in views."""
        membership = self._membership_in(number)
        if membership is None:
            return []
        late = time.monotonic() - seconds
        return [member for member in membership.awaited() if self._heard.get(member.name, late) <= late]

    async def drain(self, number: int, node_ids: tuple[str, ...], why: str) -> None:
        """Have the members on these nodes leave after a step, for good; then the driver is told why."""
        membership = self._membership_in(number)
        if membership is not None and membership.view.number:
            membership.drain(node_ids, why)

    async def lose(self, number: int, slots: tuple[int, ...], why: str) -> None:
        """Take in that the processes in these slots have died; the driver is told, if it does not know of them.

        With the number 0 no job runs.
        """
        if number != self._terms.number:
            return
        async with self._changed:
            self._lost.update(slots)
            if self._membership is None or not self._membership.view.number:
                self._lost_early += 1
            if self._membership is not None:
                self._membership.expected = self._expected()
                self._membership.lose(slots, why)
                self._settle(self._membership)

    def _is_broken(self, view: int) -> bool:
        return self._membership is None or self._membership.asks(view) is Leave.NOW

    async def set_store(self, attempt: str, host: str, port: int) -> None:
        """Say where rank 0 holds the attempt's store, at which its workers form their process group."""
        async with self._changed:
            self._stores[attempt] = host, port
            self._changed.notify_all()

    async def store(self, attempt: str, view: int, seconds: float) -> tuple[str, int] | None:
        """Return host and port of the attempt's store, as soon as rank 0 has opened it.

        None if its view breaks, or after so many seconds: rank 0 may stand still.
        """
        async with self._changed:
            opened = self._changed.wait_for(lambda: attempt in self._stores or self._is_broken(view))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(opened, seconds)
            return self._stores.get(attempt)


def progress_at(step: int) -> int:
    """Return the least progress of a worker that runs this step, as `Held.progress` counts it."""
    return 2 * step - 1


def step_at(progress: int) -> int:
    """Return the step that is run by a worker of so much progress."""
    return max(0, progress + 1) // 2


def open_channel(workers: int = 1, keeps_idle: bool = True) -> Any:
    """Start a Channel on the driver's node, which all `workers` may call at once; it ends with the driver."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Channel).options(num_cpus=0, scheduling_strategy=here, max_concurrency=1000 + 4 * workers)
    return actor.remote(keeps_idle)


def encoded(message: Any) -> bytes:
    """Return a message as the bytes that `Channel.put` takes."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def send(channel: Any, message: Any, number: int = 0, wait: bool = True, name: str = "") -> None:
    """Send a message about job `number`, 0: about any; with `wait`, return only once it has arrived.

    With the `name` of a worker it is dropped once that one is lost or excluded.
    """
    sent = channel.put.remote(encoded(message), number, name=name)
    if wait:
        ray.get(sent)


def receive(channel: Any, wait: bool = True) -> list[Any]:
    """Return the messages that have arrived, decoded; with `wait`, waits up to HOLD_SECONDS for one."""
    messages = [pickle.loads(message) for message in ray.get(channel.receive.remote(wait))]
    return [_told(message) if isinstance(message, Left) else message for message in messages]


def _told(left: Left) -> Any:
    """Return the message of members that have left; only who receives it imports its class."""
    from dp_ray.messages import Interrupted
    from dp_ray.rundir.incidents import IncidentKind, Level

    kind = IncidentKind.PREEMPTION if left.is_planned else IncidentKind.WORKER
    return Interrupted(kind, left.why, left.ranks, Level.MEMORY, step=step_at(left.progress))

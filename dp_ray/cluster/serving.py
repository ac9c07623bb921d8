"""Workers that serve a process's parallel modules, as the driver sees them: members, their group, answers and losses.

Messages and answers go between driver and worker directly. The channel brings what else happens: a worker begins to
serve, one is lost, or the workers wait for room. Survivors of a loss stay: they form another group, and the newcomer
joins it later.
"""

import math
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import torch
from ray.cloudpickle import CloudPickler
from ray.exceptions import RayActorError, RayError

from dp_ray.cluster.channel import receive
from dp_ray.cluster.resources import resources_text
from dp_ray.cluster.serving_messages import JoinGroup, LeaveGroup, Serves, framed, unframed
from dp_ray.engine.world import World
from dp_ray.errors import ClusterError, Error
from dp_ray.job.keys import WorkerKeys
from dp_ray.messages import Failed, Finished, Interrupted, Note, Starting, Waits, error_of
from dp_ray.rundir.numerics import Numerics, difference, kinds_of, refusal
from dp_ray.tasks.wire import Lost, ServingWorker, has_left
from dp_ray.text import counted

if TYPE_CHECKING:
    from dp_ray.cluster.workers import Say, StartedWorkers

START_SECONDS = 300.0  # until a worker has imported what it needs, on a node that has it on a slow disk
LOOK_SECONDS = 0.5  # between two looks at workers that may hang, once one is lost
HANG_SECONDS = 5.0  # in a collective with a peer that is gone, after which a worker is given up too
END_SECONDS = 10.0  # until workers have restored their processes for what comes next
GROUPS = 8  # that may fail to form, one after the other


@dataclass(eq=False, kw_only=True)
class RayMember(ServingWorker):
    """A worker that serves, on Ray; `slot` is its rank among those that were started."""

    slot: int
    handle: Any


class RayServing:
    """Workers that serve until `close`, which also calls `at_end`; with `is_last`, no job follows on them.

    Waits until all of them serve; raises an Error if they cannot be started.
    """

    pickler: ClassVar[type[pickle.Pickler]] = CloudPickler

    def __init__(
        self,
        workers: "StartedWorkers",
        keys: WorkerKeys,
        say: "Say",
        at_end: Callable[[], object],
        is_last: bool = False,
    ) -> None:
        self.keys = keys
        self.each = workers.each
        self._workers = workers
        self._say = say
        self._at_end = at_end
        self._is_last = is_last
        self.members: list[RayMember] = []
        self._unsettled: dict[RayMember, Any] = {}  # references to answers that nobody has waited for to the end
        self._num_workers = 0  # that serve or are about to; 0 until one has said how many
        self._has_changed = True
        self._num_groups = 0
        self._lost_since: float | None = None  # the first loss since the group has formed
        self._computes: Mapping[str, str] = {}  # what all members do, if their bits have to be the same
        self._began = time.monotonic()
        # What the thread has heard, under the condition's lock.
        self._heard = threading.Condition()
        self._arrived: list[Serves] = []
        self._placed_at: float | None = None  # when there was room for the workers
        self._failed: Failed | None = None
        self._why_lost = ""
        self._finished: list[Finished] = []
        self.is_closed = False
        self._gives_up = False  # to hear the rest
        self._thread = threading.Thread(target=self._listen, name="workers of modules", daemon=True)
        with ExitStack() as opening:
            self._job_number = workers.begin_serving(keys, is_last)
            self._thread.start()
            opening.callback(self.close)
            workers.trainer.when_ended(self._wake)
            self._await(lambda: 0 < self._num_workers <= len(self.members))
            opening.pop_all()

    # What the channel tells, in a thread of its own.

    def _listen(self) -> None:
        with suppress(RayError):  # whoever calls the workers finds out
            while not self._has_heard_all() and ray.is_initialized():  # else Ray would start another one
                for message in receive(self._workers.channel):
                    with self._heard:
                        self._hear(message)
                        self._heard.notify_all()
        self._wake()

    def _has_heard_all(self) -> bool:
        """Return whether nothing more is to come; at the end, workers that go on say what they leave behind."""
        if not self.is_closed:
            return False
        ended = self._is_last or self._workers.is_over or len(self._finished) >= len(self.members)
        return ended or self._gives_up

    def _wake(self) -> None:
        with self._heard:
            self._heard.notify_all()

    def _hear(self, message: Any) -> None:
        match message:
            case Serves():
                self._arrived.append(message)
            case Starting():
                self._placed_at = self._placed_at or time.monotonic()
            case Failed():
                self._failed = self._failed or message
            case Finished():
                self._finished.append(message)
            case Interrupted(what=what, ranks=ranks):
                if ranks:
                    self._workers.is_mended = True
                self._why_lost = what
                which = f"rank {', '.join(map(str, ranks))}: " if ranks else ""
                self._say(f"a worker is lost, and another one starts in its place ({which}{what})")
            case Note(text=text) | Waits(what=text):
                self._say(text)

    # Members, and their group.

    def ready(self) -> list[RayMember]:
        """Return the workers that are there, in the order of their ranks in one process group.

        Takes in those that have come, and waits for one if there is none. Raises ClusterError if none comes, or if
        they cannot form a group.
        """
        if not ray.is_initialized():
            raise ClusterError(
                "the Ray of the module's workers was shut down: make another dp_ray.DataParallel of it"
            )
        why = "workers are lost again and again"
        for _ in range(GROUPS + 1):
            self._settle()
            self._await(lambda: bool(self.members))
            if not self._has_changed:
                return list(self.members)
            if any(
                isinstance(answer, Lost) for answer in self.ask(dict.fromkeys(self.members, LeaveGroup())).values()
            ):
                continue
            self._lost_since = None
            failed = [answer for answer in self.ask(self._joins()).values() if answer is not None]
            why = next((answer for answer in failed if isinstance(answer, str)), why)
            self._has_changed = bool(failed)
        raise ClusterError(f"the workers cannot form a process group: {why}")

    def _joins(self) -> dict[RayMember, JoinGroup]:
        from dp_ray.cluster.workers import backend_of  # here: it comes with Ray Train

        members = self.members
        self._num_groups += 1
        node_ids = [member.place.node_id for member in members]
        nodes = list(dict.fromkeys(node_ids))
        joins = {}
        backend = backend_of(self.keys, self.each.get("GPU", 0))
        for rank, member in enumerate(members):
            world = World(
                rank=rank,
                world_size=len(members),
                local_rank=node_ids[:rank].count(member.place.node_id),
                node_rank=nodes.index(member.place.node_id),
                node=member.place.node,
                device=torch.device(member.place.device),
            )
            attempt = f"{self._job_number}-{self._num_groups}"
            joins[member] = JoinGroup(attempt, world, backend, node_ids.count(member.place.node_id))
        return joins

    def keep_one_kind(self) -> None:
        """Take no worker from now on that computes differently; raises JobError if there is one already."""
        members = enumerate(self.members)
        kinds = kinds_of((rank, member.place.node, Numerics(member.place.computes, {})) for rank, member in members)
        if len(kinds) > 1:
            raise refusal(kinds)
        self._computes = kinds[0].computes if kinds else {}

    def _await(self, is_enough: Callable[[], bool]) -> None:
        """Take in workers that have come, and wait until there are enough. Raises an Error if they do not come."""
        began = time.monotonic()
        with self._heard:
            while True:
                arrived, self._arrived = self._arrived, []
                for serves in arrived:
                    self._take_in(serves)
                if is_enough():
                    return
                if self.is_closed:
                    raise ClusterError("the workers serve no longer: they were closed")
                if self._failed is not None:
                    raise error_of(self._failed)
                if self._workers.is_over:
                    error = self._workers.cause(self._failed)
                    if self._why_lost and type(error) is Error:  # Ray Train's own, a page
                        error = ClusterError(f"all workers are lost, and no other one has started: {self._why_lost}")
                    raise error
                self._check_wait(began)
                self._heard.wait(LOOK_SECONDS)

    def _check_wait(self, began: float) -> None:
        """Raise ClusterError if the workers have been waited for too long."""
        now = time.monotonic()
        if self._num_workers:
            if now - began > START_SECONDS:
                few = f"only {len(self.members)} of {counted(self._num_workers, 'worker')} have started"
                raise ClusterError(few if self.members else "all workers are lost, and no other one has started")
        elif self._placed_at is None:
            seconds = self.keys.timeouts.capacity or math.inf
            if now - self._began > seconds:
                wanted = counted(self.keys.max_workers, "worker")
                raise ClusterError(f"{wanted} with {resources_text(self.each)} each found no room in {seconds:g} s")
        elif now - self._placed_at > START_SECONDS:
            raise ClusterError(f"no worker has started in {START_SECONDS:g} s")

    def _take_in(self, serves: Serves) -> None:
        self._num_workers = serves.num_workers
        if self._computes and serves.place.computes != self._computes:
            there = [("the others", self._computes), (serves.place.node, serves.place.computes)]
            self._say(f"no worker is taken on {serves.place.node}, which would change the bits: {difference(there)}")
            return
        others = [other for other in self.members if other.slot != serves.rank]  # one in its place is gone
        newcomer = RayMember(serves.place, slot=serves.rank, handle=serves.handle)
        self.members = sorted([*others, newcomer], key=lambda member: member.slot)
        self._has_changed = True

    # Messages.

    def ask(self, messages: Mapping[RayMember, Any]) -> dict[RayMember, Any]:
        """Have members answer a message each; return the answers, in order.

        The answer of a member that is gone is `Lost`. Raises what answering has raised, once all have ended.
        """
        self._settle()
        try:
            for member, message in messages.items():
                self._unsettled[member] = member.handle.answer.remote(framed(message))
        except BaseException:  # as of Ctrl-C: those that have a message may wait for others that have none
            self._has_changed, self._lost_since = True, self._lost_since or time.monotonic()
            raise
        try:
            framed_answers = ray.get(list(self._unsettled.values()))
            self._unsettled.clear()
            answers = dict(zip(messages, map(unframed, framed_answers), strict=True))
        except RayError:  # each is looked at alone
            found = self._settle()
            answers = {member: found[member] for member in messages}
        self._has_changed |= any(map(has_left, answers.values()))
        return answers

    def _settle(self) -> dict[RayMember, Any]:
        """Wait for all answers; give up workers that hang in a collective with one that is gone."""
        answers: dict[RayMember, Any] = {}
        failures: list[Exception] = []
        hangs_since: dict[RayMember, float] = {}
        while waiting := self._unsettled:
            references = list(waiting.values())
            ready, _ = ray.wait(references, num_returns=len(references), timeout=LOOK_SECONDS)
            for member, reference in list(waiting.items()):
                if reference in ready:
                    del waiting[member]
                    try:
                        answers[member] = unframed(ray.get(reference))
                    except RayActorError as error:
                        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                        answers[member] = Lost(" ".join(lines[:2]))
                        self._lose(member)
                    except RayError as error:
                        cause = getattr(error, "cause", None)  # of RayTaskError: what was raised there
                        failures.append(cause if isinstance(cause, Exception) else error)
                elif self._lost_since is not None and _hangs(member):
                    since = hangs_since.setdefault(member, time.monotonic())
                    if time.monotonic() - since > HANG_SECONDS:
                        ray.kill(member.handle)
                else:
                    hangs_since.pop(member, None)
        if failures:
            self._has_changed = True  # one that has failed may have left the group
            raise failures[0]
        return answers

    def _lose(self, member: RayMember) -> None:
        """Go on without a member, in whose place Ray Train's controller starts another worker."""
        with suppress(Exception):  # Ray's many types; it may be gone already
            ray.kill(member.handle)
        if member in self.members:
            self.members.remove(member)
        self._has_changed = True
        self._lost_since = self._lost_since or time.monotonic()

    def close(self) -> None:
        """Have the workers serve no longer, and end what was started for this."""
        if self.is_closed:
            return
        self.is_closed = True
        with suppress(RayError):  # the workers have ended, or the cluster has
            if ray.is_initialized():
                ray.get(self._workers.channel.finish.remote(self._job_number))
        self._thread.join(END_SECONDS)
        self._gives_up = True
        self._thread.join()
        if not self._is_last:
            self._workers.take_end(self._finished)
        self.members = []
        self._at_end()


def _hangs(member: RayMember) -> bool:
    from dp_ray.cluster.group import is_stuck  # here: it comes with Ray Train

    with suppress(RayError):
        return bool(ray.get(member.handle.execute.remote(is_stuck), timeout=LOOK_SECONDS))
    return False

"""Workers that serve a process's parallel modules, as the driver sees them: members, their view, answers and losses.

Messages and answers go between driver and worker directly. The channel makes the views, as for a job whose workers go
on, and brings what else happens: a worker serves in a view, one is lost, or the workers wait for room. Where others
come, all leave their view between two calls, once the driver says so.
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
from ray.cloudpickle import CloudPickler
from ray.exceptions import RayActorError, RayError

from dp_ray.cluster.channel import receive
from dp_ray.cluster.internals.train import why_failed
from dp_ray.cluster.resources import resources_text
from dp_ray.cluster.workers import Say, free_text
from dp_ray.errors import ClusterError, Error
from dp_ray.job.keys import WorkerKeys
from dp_ray.messages import (
    Failed,
    Finished,
    Interrupted,
    MayLeave,
    Note,
    Printed,
    Starting,
    Waits,
    WorkerPlace,
    WorkerReady,
    error_of,
)
from dp_ray.monitor.attempts import Attempts, LongWaits
from dp_ray.rundir.numerics import Numerics, difference, kinds_of, refusal
from dp_ray.serving.wire import Lost, ServingWorker, framed, has_left, unframed
from dp_ray.text import counted

if TYPE_CHECKING:
    from dp_ray.cluster.workers import StartedWorkers

START_SECONDS = 300.0  # until a worker has imported what it needs, on a node that has it on a slow disk
LOOK_SECONDS = 0.5  # between two looks at whether the others go on without a worker that is waited for
END_SECONDS = 10.0  # until workers have restored their processes for what comes next


@dataclass(eq=False, kw_only=True)
class RayMember(ServingWorker):
    """A worker that serves, on Ray: the process of this `name`, whose `handle` takes calls."""

    name: str
    handle: Any


def _member(ready: WorkerReady) -> RayMember:
    place = WorkerPlace(ready.world.node, ready.node_id, ready.pid, str(ready.world.device), ready.computes)
    return RayMember(place, name=ready.name, handle=ready.handle)


class RayServing:
    """Workers that serve until `close`, which also calls `at_end`; with `is_last`, no job follows on them.

    Waits until all of them serve; raises an Error if they cannot be started.
    """

    pickler: ClassVar[type[pickle.Pickler]] = CloudPickler

    def __init__(
        self,
        workers: "StartedWorkers",
        keys: WorkerKeys,
        say: Say,
        at_end: Callable[[], object],
        is_last: bool = False,
    ) -> None:
        self.keys = keys
        self.each = workers.each
        self._workers = workers
        self._say = say
        self._at_end = at_end
        self._is_last = is_last
        self.members: list[RayMember] = []  # of the view, by rank
        self._views = Attempts()
        self._unsettled: dict[RayMember, Any] = {}  # references to answers that nobody has waited for to the end
        self._has_served = False
        self._has_changed = True
        self._computes: Mapping[str, str] = {}  # what all members do, if their bits have to be the same
        self._began = time.monotonic()
        # What the thread has heard, under the condition's lock.
        self._heard = threading.Condition()
        self._arrived: list[WorkerReady | MayLeave | Interrupted] = []
        self._placed_at: float | None = None  # when there was room for the workers
        self._phase = "starting Ray Train"
        self._failed: Failed | None = None
        self._why_lost = ""
        self._finished: list[Finished] = []
        self.is_closed = False
        self._gives_up = False  # to hear the rest
        self._hears_no_more = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="workers of modules", daemon=True)
        with ExitStack() as opening:
            self._job_number = workers.begin_serving(keys, is_last)
            self._thread.start()
            opening.callback(self.close)
            workers.trainer.when_ended(self._wake)
            self.ready()
            opening.pop_all()

    # What the channel tells, in a thread of its own.

    def _listen(self) -> None:
        try:
            with suppress(RayError):  # whoever calls the workers finds out
                while not self._has_heard_all() and ray.is_initialized():  # else Ray would start another one
                    for message in receive(self._workers.channel):
                        with self._heard:
                            self._hear(message)
                            self._heard.notify_all()
        finally:
            self._hears_no_more.set()
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
            case WorkerReady() | MayLeave():
                self._arrived.append(message)
            case Starting(what=what):
                self._placed_at, self._phase = self._placed_at or time.monotonic(), what
            case Failed():
                self._failed = self._failed or message
            case Finished():
                self._finished.append(message)
            case Interrupted(what=what, ranks=ranks):
                self._why_lost = what
                self._arrived.append(message)
                which = f"rank {', '.join(map(str, ranks))}: " if ranks else ""
                self._say(f"a worker is lost, and another one starts in its place ({which}{what})")
            case Printed(world=world, lines=lines):
                for line in lines:
                    self._say(f"[rank {world.rank}] {line}")
            case Note(text=text) | Waits(what=text):
                self._say(text)

    # Members, and their view.

    def ready(self) -> list[RayMember]:
        """Return the workers that are there, in the order of their ranks in one process group.

        Takes in those that have come, and waits for one if there is none. Raises ClusterError if none comes, or if
        they form no group.
        """
        if not ray.is_initialized():
            raise ClusterError(
                "the Ray of the module's workers was shut down: make another dp_ray.DataParallel of it"
            )
        self._settle()
        self._await()
        return list(self.members)

    def _leave_view(self) -> None:
        """Have all leave their view, if they have not left it already: so a next one comes."""
        if ready := self._views.ready:
            self._workers.channel.break_up.remote(self._job_number, ready[0].view)
            for worker in ready:
                worker.handle.answer.remote(framed((worker.attempt, None)))

    def keep_one_kind(self) -> None:
        """Take no worker from now on that computes differently; raises JobError if there is one already."""
        members = enumerate(self.members)
        kinds = kinds_of((rank, member.place.node, Numerics(member.place.computes, {})) for rank, member in members)
        if len(kinds) > 1:
            raise refusal(kinds)
        self._computes = kinds[0].computes if kinds else {}

    def _await(self) -> None:
        """Wait for a view, and take in its members. Raises an Error if they do not come."""
        began, left, waits = time.monotonic(), "", None
        with self._heard:
            while True:
                while self._arrived:  # of an interrupt here, it is taken in again
                    self._take_in(self._arrived[0])
                    del self._arrived[0]
                if self.members and not self._has_changed:
                    return
                if self._views.is_whole and self._attempt != left:
                    self._leave_view()
                    left = self._attempt
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
                waits = waits or LongWaits(self.keys, self._num_ready, lambda: self._phase, self._say)
                waits.look(lambda: free_text(self.each))
                self._heard.wait(LOOK_SECONDS)

    def _check_wait(self, began: float) -> None:
        """Raise ClusterError if the workers have been waited for too long."""
        now = time.monotonic()
        if self._has_served:
            if now - began > START_SECONDS:
                raise ClusterError("all workers are lost, and no other one has started")
        elif self._placed_at is None:
            seconds = self.keys.timeouts.capacity or math.inf
            if now - self._began > seconds:
                wanted = counted(self.keys.max_workers, "worker")
                raise ClusterError(f"{wanted} with {resources_text(self.each)} each found no room in {seconds:g} s")
        elif now - self._placed_at > START_SECONDS:
            raise ClusterError(f"no worker has started in {START_SECONDS:g} s")

    def _num_ready(self) -> int:
        return 0 if self._views.is_whole else len(self._views.ready)

    @property
    def _attempt(self) -> str:
        """That of the newest view; "" before one of its members is ready."""
        return self._views.ready[0].attempt if self._views.ready else ""

    def _take_in(self, told: WorkerReady | MayLeave | Interrupted) -> None:
        """Take in who is in the newest view, or that it ends: of a view the channel tells before the next one."""
        self._has_changed = True
        if not isinstance(told, WorkerReady):
            return
        if self._computes and told.computes != self._computes:
            node = told.world.node
            there = [("the others", self._computes), (node, told.computes)]
            why = f"no worker is taken on {node}, which would change the bits: {difference(there)}"
            self._say(why)
            self._workers.channel.learn.remote(self._job_number, avoided=(told.node_id,))
            self._exclude(told.name, why)
            return
        self._has_served = True
        if workers := self._views.take(told):
            known = {member.name: member for member in self.members}  # with what they have loaded
            self.members = [known.get(worker.name) or _member(worker) for worker in workers]
            self._has_changed = False

    def _exclude(self, name: str, why: str) -> None:
        """Have the others go on without the worker of this name."""
        with suppress(RayError):  # the cluster is lost: whoever calls the workers finds out
            ray.get(self._workers.channel.exclude.remote(self._job_number, name, why))

    # Messages.

    def ask(self, messages: Mapping[RayMember, Any]) -> dict[RayMember, Any]:
        """Have members answer a message each; return the answers, in order.

        The answer of a member that is gone is `Lost`. Raises what answering has raised, once all have ended.
        """
        self._settle()
        try:
            for member, message in messages.items():
                self._unsettled[member] = member.handle.answer.remote(framed((self._attempt, message)))
        except BaseException:  # as of Ctrl-C: those that have a message may wait for others that have none
            self._has_changed = True
            self._leave_view()
            raise
        try:
            framed_answers = ray.get(list(self._unsettled.values()), timeout=LOOK_SECONDS)
            self._unsettled.clear()
            answers = dict(zip(messages, map(unframed, framed_answers), strict=True))
        except RayError:  # each is looked at alone, also if they take longer
            found = self._settle()
            answers = {member: found[member] for member in messages}
        self._has_changed |= any(map(has_left, answers.values()))
        return answers

    def _settle(self) -> dict[RayMember, Any]:
        """Wait for all answers; that of a worker without which the others go on is `Lost`."""
        answers: dict[RayMember, Any] = {}
        failures: list[Exception] = []
        while waiting := self._unsettled:
            by_reference = {reference: member for member, reference in waiting.items()}
            ready, _ = ray.wait(list(by_reference), num_returns=1, timeout=LOOK_SECONDS)
            for reference in ready:
                member = by_reference[reference]
                del waiting[member]
                try:
                    answers[member] = unframed(ray.get(reference))
                except RayActorError as error:
                    answers[member] = self._lose(member, why_failed(error))
                except RayError as error:
                    cause = getattr(error, "cause", None)  # of RayTaskError: what was raised there
                    failures.append(cause if isinstance(cause, Exception) else error)
            if not ready:
                names = [member.name for member in waiting]
                with self._workers.reached.kept():
                    gone = ray.get(self._workers.channel.gone.remote(self._job_number, names))
                for member in [member for member in waiting if member.name in gone]:
                    del waiting[member]
                    answers[member] = self._lose(member, "the others go on without it")
        if failures:
            self._has_changed = True  # one that has failed may have left the group
            raise failures[0]
        return answers

    def _lose(self, member: RayMember, why: str) -> Lost:
        """Go on without a member, in whose place Ray Train's controller starts another worker."""
        with suppress(Exception):  # Ray's many types; it may be gone already
            ray.kill(member.handle)
        self._exclude(member.name, why)
        if member in self.members:
            self.members.remove(member)
        self._has_changed = True
        return Lost(why)

    def close(self) -> None:
        """Have the workers serve no longer, and end what was started for this."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self._end()
        finally:  # Ctrl-C too: nothing would end them later
            self._gives_up = True
            self._hears_no_more.wait(END_SECONDS)  # a Ray that ends amid a call of the thread ends this process too
            self.members = []
            self._at_end()

    def _end(self) -> None:
        with suppress(RayError):  # the workers have ended, or the cluster has
            if ray.is_initialized():
                ray.get(self._workers.channel.finish.remote(self._job_number))
                self._leave_view()
        self._thread.join(END_SECONDS)
        self._gives_up = True
        self._thread.join()
        if not self._is_last:
            self._workers.take_end(self._finished)

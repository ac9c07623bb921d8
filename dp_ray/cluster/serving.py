"""Workers that serve a process's parallel modules, as the driver sees them: members, their view, answers and losses.

Messages and answers go between driver and worker directly. The channel makes the views, as for a job whose workers go
on, and brings what else happens: a worker will serve, one is lost, or the workers wait for room. All leave a view
where the driver says so, between two calls: after a loss, or since a newcomer has come.
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
from dp_ray.cluster.serving_messages import HasFormed, LeaveView, Serves, framed, unframed
from dp_ray.errors import ClusterError, Error
from dp_ray.job.keys import WorkerKeys
from dp_ray.messages import Failed, Finished, Interrupted, Note, Starting, Waits, error_of
from dp_ray.rundir.numerics import Numerics, difference, kinds_of, refusal
from dp_ray.tasks.wire import Lost, ServingWorker, has_left
from dp_ray.text import counted

if TYPE_CHECKING:
    from dp_ray.cluster.workers import Say, StartedWorkers

START_SECONDS = 300.0  # until a worker has imported what it needs, on a node that has it on a slow disk
LOOK_SECONDS = 0.5  # between two looks at whether the others go on without a worker that is waited for
END_SECONDS = 10.0  # until workers have restored their processes for what comes next
VIEWS = 8  # whose groups may fail to form, one after the other


@dataclass(eq=False, kw_only=True)
class RayMember(ServingWorker):
    """A worker that serves, on Ray: the process of this `name`; `slot` is its rank among those that were started."""

    name: str
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
        self.members: list[RayMember] = []  # of the view, by rank
        self._known: dict[str, RayMember] = {}  # by name: these, and others that have come since
        self._view = "", 0  # the id of the workers that were started together, and the number of their view
        self._unsettled: dict[RayMember, Any] = {}  # references to answers that nobody has waited for to the end
        self._has_served = False
        self._has_changed = True
        self._computes: Mapping[str, str] = {}  # what all members do, if their bits have to be the same
        self._began = time.monotonic()
        # What the thread has heard, under the condition's lock.
        self._heard = threading.Condition()
        self._arrived: list[Serves] = []
        self._placed_at: float | None = None  # when there was room for the workers
        self._failed: Failed | None = None
        self._why_lost = ""
        self._is_told_of_loss = False
        self._finished: list[Finished] = []
        self.is_closed = False
        self._gives_up = False  # to hear the rest
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
                self._why_lost, self._is_told_of_loss = what, True
                which = f"rank {', '.join(map(str, ranks))}: " if ranks else ""
                self._say(f"a worker is lost, and another one starts in its place ({which}{what})")
            case Note(text=text) | Waits(what=text):
                self._say(text)

    # Members, and their view.

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
        for _ in range(VIEWS + 1):
            self._settle()
            self._await(lambda: True)  # it takes in those that have come
            if self.members and not self._has_changed:
                return list(self.members)
            self.ask(dict.fromkeys(self.members, LeaveView(self._view[1])))
            self._take_next_view()
            self._has_changed = self._has_newcomer()
            formed = self.ask(dict.fromkeys(self.members, HasFormed(self._view[1])))
            failed = [answer for answer in formed.values() if answer]
            if not failed:
                return list(self.members)
            why = next((answer for answer in failed if isinstance(answer, str)), why)
            self._has_changed = True
        raise ClusterError(f"the workers cannot form a process group: {why}")

    def _take_next_view(self) -> None:
        """Go on with the next view, and its members by rank; wait for it, and for what they say of themselves.

        An interrupt leaves it undone as a whole: those that are asked to leave a view are all that are in it.
        """
        channel = self._workers.channel
        coming = channel.view_after.remote(self._job_number, *self._view)

        def has_come() -> bool:
            return bool(ray.wait([coming], timeout=0)[0])

        coming.future().add_done_callback(lambda _: self._wake())
        self._await(has_come)
        with self._workers.reached.kept():
            found = ray.get(coming)
        if found is None:
            raise ClusterError("the workers serve no longer: they were closed")
        group, view = found
        names = [member.name for member in view.members]
        self._await(lambda: self._known.keys() >= set(names))
        members = [self._known[name] for name in names]
        self._view, self.members = (group, view.number), members

    def _has_newcomer(self) -> bool:
        """Return whether a worker that has come is not in the view: it may have asked for one too late."""
        others = self._known.keys() - {member.name for member in self.members}
        if others:
            with self._workers.reached.kept():
                gone = ray.get(self._workers.channel.gone.remote(self._job_number, list(others)))
            for name in gone:
                del self._known[name]
        return len(self._known) > len(self.members)

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
                self._has_changed |= self._is_told_of_loss
                self._is_told_of_loss = False
                while self._arrived:  # of an interrupt here, it is taken in again
                    self._take_in(self._arrived[0])
                    del self._arrived[0]
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

    def _take_in(self, serves: Serves) -> None:
        self._has_served = True
        if self._computes and serves.place.computes != self._computes:
            there = [("the others", self._computes), (serves.place.node, serves.place.computes)]
            why = f"no worker is taken on {serves.place.node}, which would change the bits: {difference(there)}"
            self._say(why)
            self._workers.channel.learn.remote(self._job_number, avoided=(serves.place.node_id,))
            self._exclude(serves.name, why)
            return
        for other in [other for other in self._known.values() if other.slot == serves.slot]:
            if other not in self.members:  # it was lost before it took part
                del self._known[other.name]
        self._known[serves.name] = RayMember(serves.place, name=serves.name, slot=serves.slot, handle=serves.handle)
        self._has_changed = True

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
                self._unsettled[member] = member.handle.answer.remote(framed(message))
        except BaseException:  # as of Ctrl-C: those that have a message may wait for others that have none
            self._has_changed = True
            self._workers.channel.break_up.remote(self._job_number)
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
        self._known.pop(member.name, None)
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
            self.members = []
            self._at_end()

    def _end(self) -> None:
        with suppress(RayError):  # the workers have ended, or the cluster has
            if ray.is_initialized():
                ray.get(self._workers.channel.finish.remote(self._job_number))
        self._thread.join(END_SECONDS)
        self._gives_up = True
        self._thread.join()
        if not self._is_last:
            self._workers.take_end(self._finished)

"""A pool: processes on Ray that each hold an object and take calls in order; those that are lost are replaced.

`Pool` is the driver's side, `Host` the actor. A pool of `dp_ray.DataParallel` holds a `parallel.replica.Replicas` in
each process. Ray ends the actors with the process that started them.
"""

import importlib
import io
import os
import pickle
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dp_ray.cluster.connect import (
    AWAIT_SECONDS,
    address_of,
    check_fits,
    connected,
    held_for,
    is_connected,
    what_is_awaited,
    without_gpus,
    worker_resources,
)
from dp_ray.cluster.resources import text_of
from dp_ray.errors import ClusterError
from dp_ray.job.keys import WorkerKeys
from dp_ray.monitor.console import Console
from dp_ray.rundir.numerics import Numerics, difference, kinds_of, refusal
from dp_ray.system.process import bind_to
from dp_ray.system.threads import if_longer, waits_for
from dp_ray.text import counted

START_SECONDS = 300.0  # until a process has imported what it needs, on a node that has it on a slow disk
LOOK_SECONDS = 0.5  # between two looks at workers that may hang, once one is lost
HANG_SECONDS = 5.0  # in a collective with a peer that is gone, after which a worker is given up too
NO_LIMIT = 1e9
IN_LINE_BYTES = 1 << 15  # of an array that is copied into a message
STARTS = 3  # of a worker in place of a lost one, before its place stays empty


class Place(NamedTuple):
    """Where a process of the pool runs."""

    node: str  # its address
    node_id: str
    pid: int
    device: str
    computes: Mapping[str, str]  # by which workers give the same bits, or not


NOWHERE = Place("", "", 0, "", {})


class Lost(NamedTuple):
    """The answer of a worker that is gone."""

    why: str


class Host:
    """The actor: a process with an object that takes calls. It imports nothing slow before `env` is set."""

    def __init__(self, env: dict[str, str], target: str, device: str | None) -> None:
        os.environ.update(env)
        address = ray.util.get_node_ip_address()
        bind_to(address)
        context = ray.get_runtime_context()
        has_gpu = bool(context.get_accelerator_ids().get("GPU"))
        device = device or ("cuda:0" if has_gpu else "cpu")  # Ray shows an actor its own GPU alone
        module, _, name = target.partition(":")
        self._held = getattr(importlib.import_module(module), name)(device)
        from dp_ray.tasks.numerics import computes_on  # here: it imports torch

        self._place = Place(address, context.get_node_id(), os.getpid(), device, computes_on(device))

    def place(self) -> Place:
        """Return where this process runs; it is ready then."""
        return self._place

    def call(self, asked: Any) -> Any:
        """Call a method of the object; what is asked and returned is `encoded`."""
        method, *args = decoded(asked)
        return encoded(getattr(self._held, method)(*args))

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def waits_for(self) -> str:
        """Return what the present call waits for; it is answered meanwhile."""
        return waits_for()


@dataclass(eq=False)
class Member:
    """A process of a pool."""

    slot: int
    handle: Any
    begun: Any  # a reference to its place
    starts: int = 1
    place: Place = NOWHERE
    loaded: dict[int, Any] = field(default_factory=dict)  # what of each module it has: the exchange's notes

    def __str__(self) -> str:
        return f"process {self.place.pid} on {self.place.node}"


class Pool:
    """Processes on Ray that hold an object of the class `target`, `MODULE:NAME`, which gets the name of its device.

    Raises JobError or ClusterError if they can never fit.
    """

    def __init__(self, keys: WorkerKeys, target: str, address: str | None = None, quiet: bool = False) -> None:
        self.keys = keys
        is_embedded = not is_connected() and address_of(address) is None
        self.members: list[Member] = []
        self._target = target
        self._coming: list[Member] = []
        self._unsettled: dict[Member, Any] = {}
        self._has_changed = True
        self._computes: Mapping[str, str] = {}  # what all members do, if their bits have to be the same
        self._say = Console("parallel", quiet).say
        with ExitStack() as opening:
            with if_longer(AWAIT_SECONDS, lambda: self._say(what_is_awaited(address))):
                opening.enter_context(connected(keys, address, verbose=False))
            if is_embedded:
                opening.enter_context(held_for("dp_ray.DataParallel"))
            self.each = worker_resources(keys)
            self._group = self._reserve(opening)
            opening.callback(self._end)
            self._coming = [self._start(slot) for slot in range(keys.max_workers)]
            for member in list(self._coming):
                self._take_in(member, START_SECONDS)
            if self._coming or len(self.members) < keys.max_workers:
                raise ClusterError(f"only {len(self.members)} of {counted(keys.max_workers, 'worker')} have started")
            self._open = opening.pop_all()

    def _reserve(self, opening: ExitStack) -> Any:
        """Reserve the workers' resources, and return their placement group; None if they take nothing."""
        keys, each = self.keys, dict(self.each)
        for told in (without_gpus(keys, each), check_fits(keys, each)):
            if told:
                self._say(told)
        if keys.accelerator_type:
            each[f"accelerator_type:{keys.accelerator_type}"] = 0.001
        if not each:
            return None
        group = placement_group([each] * keys.max_workers, strategy=keys.placement)
        opening.callback(remove_placement_group, group)
        seconds = keys.timeouts.capacity or NO_LIMIT
        if not group.wait(seconds):
            raise ClusterError(
                f"{counted(keys.max_workers, 'worker')} with {text_of(self.each)} each found no room in {seconds:g} s"
            )
        return group

    def _start(self, slot: int, starts: int = 1) -> Member:
        """Start a process; does not wait for it."""
        each = dict(self.each)
        options: dict[str, Any] = {"num_cpus": each.pop("CPU", 0), "num_gpus": each.pop("GPU", 0), "resources": each}
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, slot)
        actor = ray.remote(concurrency_groups={"control": 1})(Host).options(max_restarts=0, **options)
        device = self.keys.devices[0] if self.keys.devices else None
        handle = actor.remote(dict(self.keys.env), self._target, device)
        return Member(slot, handle, handle.place.remote(), starts)

    def _take_in(self, member: Member, seconds: float) -> None:
        """Make a process that has started within the seconds a member; start another if it could not."""
        ready, _ = ray.wait([member.begun], timeout=seconds)
        if not ready:
            return
        self._coming.remove(member)
        try:
            member.place = ray.get(member.begun)
        except RayActorError as error:
            if member.starts >= STARTS or not self.members:
                # Ray's text ends with the traceback of what the process has raised.
                last = str(error).strip().splitlines()[-1]
                raise ClusterError(f"a worker could not be started: {_first_line(error)} {last}") from error
            self._coming.append(self._start(member.slot, member.starts + 1))
            return
        if self._computes and member.place.computes != self._computes:
            there = [("the others", self._computes), (member.place.node, member.place.computes)]
            self._say(f"no worker is taken on {member.place.node}, which would change the bits: {difference(there)}")
            ray.kill(member.handle)
            return
        self.members = sorted([*self.members, member], key=lambda one: one.slot)
        self._has_changed = True

    def keep_one_kind(self) -> None:
        """Take no worker from now on that computes differently; raises JobError if there is one already."""
        members = enumerate(self.members)
        kinds = kinds_of((rank, one.place.node, Numerics(one.place.computes, {})) for rank, one in members)
        if len(kinds) > 1:
            raise refusal(kinds)
        self._computes = kinds[0].computes if kinds else {}

    def renew(self) -> bool:
        """Take in processes that have started meanwhile; return whether the members have changed since the last call.

        If there is no member left, waits for one. Raises ClusterError if none comes.
        """
        self._settle()
        for member in list(self._coming):
            self._take_in(member, 0)
        until = time.monotonic() + START_SECONDS
        while not self.members:
            if not self._coming or time.monotonic() > until:
                raise ClusterError("all workers are lost, and no other one has started")
            for member in list(self._coming):
                self._take_in(member, LOOK_SECONDS)
        changed, self._has_changed = self._has_changed, False
        return changed

    def regroup(self) -> None:
        """Have the next `renew` tell that the members have changed, though they are the same."""
        self._has_changed = True

    def call(self, calls: Mapping[Member, tuple[Any, ...]]) -> dict[Member, Any]:
        """Call a method of the members' objects, each by its name and arguments; return the answers, in order.

        The answer of a member that is gone is `Lost`. Raises what a call has raised, once all have ended.
        """
        self._settle()
        for member, asked in calls.items():
            self._unsettled[member] = member.handle.call.remote(encoded(asked))
        try:
            answers = ray.get(list(self._unsettled.values()))
            self._unsettled.clear()
            return {member: decoded(answer) for member, answer in zip(calls, answers, strict=True)}
        except Exception:  # of Ray's many types; each is looked at alone
            return self._settle()

    def _settle(self) -> dict[Member, Any]:
        """Wait for the calls that are under way; give up workers that hang in a collective with one that is gone."""
        answers: dict[Member, Any] = {}
        failures: list[Exception] = []
        hangs_since: dict[Member, float] = {}
        while waiting := self._unsettled:
            references = list(waiting.values())
            ready, _ = ray.wait(references, num_returns=len(references), timeout=LOOK_SECONDS)
            for member, reference in list(waiting.items()):
                if reference in ready:
                    del waiting[member]
                    try:
                        answers[member] = decoded(ray.get(reference))
                    except RayActorError as error:
                        answers[member] = Lost(_first_line(error))
                        self._lose(member)
                    except Exception as error:
                        failures.append(error)
                elif self._is_in_collective(member):
                    since = hangs_since.setdefault(member, time.monotonic())
                    if time.monotonic() - since > HANG_SECONDS:
                        ray.kill(member.handle)
                else:
                    hangs_since.pop(member, None)
        if failures:
            self._has_changed = True  # one that has failed may have left the group
            raise failures[0]
        return answers

    def _is_in_collective(self, member: Member) -> bool:
        with suppress(ray.exceptions.RayError):
            return bool(ray.get(member.handle.waits_for.remote(), timeout=LOOK_SECONDS))
        return False

    def _lose(self, member: Member) -> None:
        """Start another process in place of a lost one."""
        with suppress(Exception):
            ray.kill(member.handle)
        self.members.remove(member)
        self._has_changed = True
        self._coming.append(self._start(member.slot))

    def close(self) -> None:
        """End the processes, and the connection if it is the pool's."""
        self._open.close()

    def _end(self) -> None:
        for member in [*self.members, *self._coming]:
            with suppress(Exception):  # it may have ended
                ray.kill(member.handle)
        self.members, self._coming = [], []


def encoded(value: Any) -> Any:
    """Return a value as bytes, or as a list of bytes and large arrays, which Ray ships in little time.

    Its classes must be ones that can be imported: `pickled` also takes those of `__main__`.
    """
    large: list[Any] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_LINE_BYTES:
            return True
        large.append(np.frombuffer(raw, np.uint8))
        return False

    head = pickle.dumps(value, 5, buffer_callback=is_small)
    return [head, *large] if large else head


def decoded(given: Any) -> Any:
    """Return the value that was encoded; its large arrays must not be written to."""
    if isinstance(given, bytes):
        return pickle.loads(given)
    return pickle.loads(given[0], buffers=given[1:])


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])


def pickled(value: Any) -> bytes:
    """Pickle a value as Ray does: classes of `__main__` by value."""
    data: bytes = ray.cloudpickle.dumps(value)
    return data


def pickled_apart(value: Any, apart: Mapping[int, int]) -> bytes:
    """Pickle a value as `pickled` does, but objects with the ids in `apart` by their numbers."""

    class Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
        def persistent_id(self, one: Any) -> int | None:
            return apart.get(id(one))

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()

"""Workers of parallel modules as real processes in a gloo group, without Ray; a lost one is replaced."""

import pickle
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from ray.cloudpickle import CloudPickler
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.cluster.own import OF_PROCESS
from dp_ray.engine.world import World, form_group, leave_group, show_alone
from dp_ray.job.keys import WorkerKeys
from dp_ray.messages import WorkerPlace
from dp_ray.serving.served import Served
from dp_ray.serving.wire import Lost, ServingWorker, has_left
from tests.support.forked import new_process
from tests.support.forked_python import FORKED

LOCALHOST = "127.0.0.1"


class LeaveGroup(NamedTuple):
    """Leave the group."""


class Join(NamedTuple):
    """Form a group."""

    rank: int
    size: int
    port: int


@dataclass(eq=False, kw_only=True)
class Process(ServingWorker):
    """A worker's process, and the pipe to it."""

    process: Any
    pipe: Connection

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join(60)

    def end(self) -> None:
        """End it, and forget it."""
        self.kill()
        self.pipe.close()
        self.process.close()


class Gloo:
    """Workers of a process's own: what `cluster.own` has on Ray."""

    owners: tuple[Any, ...] = (OF_PROCESS,)
    most: int | None = None

    def serve(self, keys: WorkerKeys) -> "GlooServing":
        """Start processes."""
        return GlooServing(keys)


class GlooServing:
    """Workers that serve in processes of their own: what `cluster.serving` has on Ray."""

    def __init__(self, keys: WorkerKeys) -> None:
        self.keys = keys
        self.each: Mapping[str, float] = {"CPU": keys.cpus_per_worker}
        self.pickler: type[pickle.Pickler] = CloudPickler
        self.members: list[Process] = []
        self.told: list[dict[Process, Any]] = []  # all messages
        self._has_changed = True

    def ready(self) -> list[Process]:
        """Return the members, each lost one replaced, in one group."""
        if self._has_changed:  # who is gone is known before others wait for it
            self._answers(dict.fromkeys(self.members, LeaveGroup()))
        while len(self.members) < self.keys.max_workers:
            here, there = FORKED.Pipe()
            process = new_process(_serve, there)
            process.start()
            there.close()
            place = WorkerPlace(LOCALHOST, "node", process.pid, "cpu", {})
            self.members.append(Process(place, process=process, pipe=here))
            self._has_changed = True
        if self._has_changed:
            store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
            joins = {one: Join(rank, len(self.members), store.port) for rank, one in enumerate(self.members)}
            self._has_changed = False
            if any(answer is not None for answer in self._answers(joins).values()):
                self._has_changed = True
                return self.ready()
        return list(self.members)

    def ask(self, messages: Mapping[Process, Any]) -> dict[Process, Any]:
        """Return the answers; raises what is no answer."""
        self.told.append(dict(messages))
        answers = self._answers(messages)
        self._has_changed |= any(map(has_left, answers.values()))
        return answers

    def _answers(self, messages: Mapping[Process, Any]) -> dict[Process, Any]:
        answers: dict[Process, Any] = {}
        for member, message in messages.items():
            with suppress(BrokenPipeError):
                member.pipe.send(message)
        for member in messages:
            try:
                answers[member] = member.pipe.recv()
            except (EOFError, ConnectionResetError):
                answers[member] = Lost("it has ended")
                self.members.remove(member)
                member.end()
                self._has_changed = True
        for answer in answers.values():
            if isinstance(answer, AssertionError):
                raise answer
        return answers

    def keep_one_kind(self) -> None:
        """They are of one machine."""

    def close(self) -> None:
        """End the processes."""
        for member in self.members:
            member.end()
        self.members = []


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    served = Served("cpu", CloudPickler)
    while True:
        try:
            asked = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            match asked:
                case LeaveGroup():
                    leave_group()
                    pipe.send(None)
                case Join():
                    pipe.send(_join(asked))
                case _:
                    pipe.send(served.answer(asked))
        except BaseException:
            pipe.send(AssertionError(traceback.format_exc()))


def _join(asked: Join) -> str | None:
    if asked.size == 1:
        show_alone("gloo")
        return None
    try:
        store = TCPStore(LOCALHOST, asked.port, is_master=False, wait_for_workers=False)
        form_group("gloo", store, World(asked.rank, asked.size), step_seconds=None)
    except RuntimeError as error:
        return str(error)
    return None

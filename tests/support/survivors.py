"""A job's workers as real processes without Ray, of which some are killed while the others go on.

This process makes the views, as the channel does, and starts another worker in the place of a dead one if it is told
to. A fault is due in a worker of a slot, in a step, at a part of it.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.cluster.membership import Leave, Member, Membership
from dp_ray.engine import trainer
from dp_ray.engine import world as engine_world
from dp_ray.engine.sharded import state as sharded
from dp_ray.engine.ship import pickled_copy
from dp_ray.engine.sums import reduce
from dp_ray.engine.user_code import free_memory
from dp_ray.engine.world import World, cut_groups, form_group, leave_group, without_frames
from dp_ray.errors import StorageError, WorkerError
from dp_ray.job.job import Job
from dp_ray.messages import Logged, StepControl, StopRequested
from dp_ray.rundir import checkpoint, ledger
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.system.linux import open_sockets
from dp_ray.system.threads import repeated
from dp_ray.tasks import checkpoints, evaluate, train
from dp_ray.tasks.held import Held
from dp_ray.tasks.task import run_task
from tests.support.forked import new_process
from tests.support.group import LOCALHOST

SECONDS = 60.0
SOON = timedelta(seconds=5)  # as in `cluster.group`, whose import of Ray takes as long as the rest of a start
SILENT = 0.5  # seconds of a worker that is stopped, before the others leave it

# Where a part of a step begins: what is called then, of which object.
PARTS_OF_A_STEP: dict[str, tuple[Any, str]] = {
    "backward": (trainer.Pass, "_backward"),
    "exchange": (reduce.DdpReduction, "finish"),
    "gather": (sharded.Gather, "__call__"),
    "scatter": (sharded.SumScatter, "_sum"),
    "restore": (train, "restored"),
    "level": (train, "levelled"),
    "update": (trainer.TrainingStep, "update"),
    "after": (train.AfterStep, "take"),
    "evaluation": (evaluate.Evaluator, "measure"),
    "second evaluation": (evaluate.Evaluator, "measure"),
    "checkpoint": (checkpoint.CheckpointWriter, "_write"),
    "piece": (checkpoints, "write_piece"),
    "weights": (train, "keep_weights"),
}

# What ends before a part begins, in the same way.
ENDS: dict[str, tuple[Any, str]] = {"naming": (ledger, "check_newest")}


class Fault(NamedTuple):
    """The worker of a slot is killed in a step, as a part of it begins; or stopped, for these seconds."""

    slot: int
    step: int
    part: str = "forward"
    seconds: float = 0.0


class Size(NamedTuple):
    """What a process takes: bytes of memory, threads and open files."""

    memory: int
    threads: int
    files: int


@dataclass
class Told:
    """What happened: the views, each with its slots; when workers died; and the steps of each row that was logged."""

    views: list[list[int]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ran: list[tuple[int, int]] = field(default_factory=list)  # slot and step, as each one began
    died: list[int] = field(default_factory=list)  # the slots of workers that were lost
    sizes: list[tuple[int, Size]] = field(default_factory=list)  # slot and size of its process, at each gate

    @property
    def groups(self) -> list[list[int]]:
        """The views but for one of the same workers as before it: rank 0 has died with the best weights so far.

        That is so where the machine is so busy that the checkpoint of an earlier step was not written yet.
        """
        return [view for before, view in zip([[], *self.views], self.views, strict=False) if view != before]


class Control(StepControl):
    """Kills its worker where a fault is due, and leaves together with others."""

    def __init__(self, slot: int, faults: Sequence[Fault], plans: Path, pipe: Connection, gates: int) -> None:
        self._slot, self._faults, self._plans, self._pipe, self._gates = slot, faults, plans, pipe, gates
        self._armed: Fault | None = None
        self._has_evaluated = False
        self.view = 0
        self.step = -1

    def _is_asked(self) -> bool:
        return (self._plans / str(self.view)).exists()

    wants_stop = property(_is_asked)
    is_to_rejoin = property(_is_asked)

    def before(self, step: int) -> None:
        self.step = step
        if self._gates and step % self._gates == 0:
            self._wait_for_all()
        self._pipe.send(("begins", step))
        for fault in self._faults:
            if (fault.slot, fault.step) == (self._slot, step):
                self._armed = fault
                self.meet("forward")

    def _wait_for_all(self) -> None:
        """Wait until all take part, or some are to join, or are lost, or the view is to be left at once."""
        view = self.view
        while not any(
            (self._plans / name).exists() for name in (f"all-{view}", f"{view}", f"lost-{view}", f"now-{view}")
        ):
            time.sleep(0.005)
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is freed goes back to the system, so that what is held is seen
        process = psutil.Process()
        size = Size(process.memory_info().rss, process.num_threads(), process.num_fds())
        self._pipe.send(("size", size))

    def meet(self, part: str) -> None:
        if self._armed is None or self._armed.part != part:
            return
        if part == "second evaluation" and not self._has_evaluated:
            self._has_evaluated = True
            return
        armed, self._armed = self._armed, None
        if armed.seconds:
            self._pipe.send(("stops", armed.seconds))
        os.kill(os.getpid(), signal.SIGSTOP if armed.seconds else signal.SIGKILL)

    def is_out(self) -> bool:
        """Whether the others go on without this worker."""
        return (self._plans / f"now-{self.view}").exists()

    def look(self) -> None:
        """Cut the connections if the view is to be left at once, as a beat does."""
        if self.is_out():
            cut_groups()
        if (self._plans / f"end-{os.getpid()}").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        self._pipe.send(("leaves", self.view))
        self._pipe.recv()
        super().leave()


def run_surviving(
    job: Job,
    folder: Path,
    faults: Sequence[Fault] = (),
    replaces: bool = False,
    gates: int = 0,
) -> Told:
    """Run a job's workers to the end, through the faults; raises AssertionError with what a worker raised.

    With `gates`, all wait before each so many steps for others in the places of dead ones, which meet later faults.
    """
    return _Parent(job, folder, faults, replaces, gates).run()


class _Parent:
    def __init__(self, job: Job, folder: Path, faults: Sequence[Fault], replaces: bool, gates: int) -> None:
        self.job, self.folder, self.faults, self.replaces, self.gates = job, folder, faults, replaces, gates
        self.membership = Membership(job.max_workers)
        self.plans = folder.parent / f"plans-{folder.name}"
        self.plans.mkdir()
        Storage(str(folder)).child(PARTS).create()
        self.told = Told()
        self.pipes: dict[Connection, tuple[Any, Member]] = {}
        self.asking: dict[str, Connection] = {}
        self.at_end: dict[int, dict[str, Connection]] = {}
        self.store: Any = None
        self.num = 0
        self.is_over = False  # all have come to the end
        self.through: set[int] = set()  # views of which a worker has
        self.stopped: dict[Connection, tuple[float, float]] = {}  # when to go on without them, and when they wake up

    def start(self, slot: int) -> None:
        self.num += 1
        here, there = new_pipe()
        faults = [] if self.num > self.job.max_workers and not self.gates else list(self.faults)
        faults = [fault for fault in faults if fault.step > max((step for _, step in self.told.ran), default=-1)]
        given = there, slot, self.job, str(self.folder), str(self.plans), faults, self.gates
        process = new_process(_work, *given)
        process.start()
        there.close()
        self.pipes[here] = process, Member(f"w{self.num}", slot)

    def run(self) -> Told:
        for slot in range(self.job.max_workers):
            self.start(slot)
        try:
            heard = time.monotonic()
            while self.pipes:
                assert time.monotonic() < heard + SECONDS, f"nothing more happens: {self.told.views}\n{self.stacks()}"
                assert len(self.told.views) < 9 * (2 + len(self.faults)), f"no end of views: {self.told.views}"
                for pipe in wait(list(self.pipes), 0.1 if self.stopped else 1.0):
                    assert isinstance(pipe, Connection)
                    heard = time.monotonic()
                    try:
                        self.hear(pipe, *pipe.recv())
                    except (EOFError, ConnectionResetError):
                        self.lose(pipe)
                self.look_at_stopped()
                self.settle()
        finally:
            for process, _ in self.pipes.values():
                process.kill()
            for pipe, (process, _) in self.pipes.items():
                pipe.close()
                process.join(60)
        return self.told

    def stacks(self) -> str:
        """Where the workers that are left stand."""
        for process, _ in self.pipes.values():
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(2)
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(self.plans.glob("stacks-*")))

    def hear(self, pipe: Any, kind: str, what: Any) -> None:
        member = self.pipes[pipe][1]
        if kind == "ask":
            progress, has_lost_peer = what
            if not self.is_over and self.membership.ask(member, progress, has_lost_peer):
                self.asking[member.name] = pipe
                if self.membership.asks(self.membership.view.number) is Leave.AFTER_A_STEP:
                    (self.plans / str(self.membership.view.number)).touch()
            else:
                pipe.send(None)
        elif kind in ("leaves", "through"):
            self.at_end.setdefault(what, {})[member.name] = pipe
            self.through |= {what} if kind == "through" else set()
        elif kind == "stops":
            now = time.monotonic()
            self.stopped[pipe] = now + SILENT, now + what
        elif kind == "raised":
            raise AssertionError(what)
        elif kind == "rows":
            self.told.rows += what
        elif kind == "size":
            self.told.sizes.append((member.slot, what))
        elif kind == "begins":
            self.told.ran.append((member.slot, what))
        elif kind == "done":
            process, _ = self.pipes.pop(pipe)
            self.stopped.pop(pipe, None)
            process.join(60)
            pipe.close()
            if self.replaces and self.membership.is_gone(member.name) and not self.is_over:
                self.start(member.slot)

    def lose(self, pipe: Any) -> None:
        process, member = self.pipes.pop(pipe)
        self.stopped.pop(pipe, None)
        process.join(60)
        pipe.close()
        self.asking.pop(member.name, None)
        self.told.died.append(member.slot)
        if self.membership.lose([member.slot]):
            (self.plans / f"lost-{self.membership.view.number}").touch()
        if self.replaces and not self.is_over:
            self.start(member.slot)

    def look_at_stopped(self) -> None:
        """Go on without workers that are silent, and wake them up later."""
        now = time.monotonic()
        silent = {self.pipes[pipe][1].name for pipe, (since, _) in self.stopped.items() if now >= since}
        for pipe, (_, wakes) in list(self.stopped.items()):
            process, member = self.pipes[pipe]
            if member.name in silent and not self.membership.is_gone(member.name):
                self.membership.break_up()
                (self.plans / f"now-{self.membership.view.number}").touch()
                awaited = {one.name for one in self.membership.awaited()}
                if awaited <= silent:  # all others have left
                    self.membership.exclude(awaited)
            if now >= wakes and self.membership.is_gone(member.name):
                with suppress(ProcessLookupError):  # it has woken up before, and ended
                    os.kill(process.pid, signal.SIGCONT)
            if now >= wakes + SILENT and self.membership.is_gone(member.name):
                del self.stopped[pipe]
                (self.plans / f"end-{process.pid}").touch()

    def settle(self) -> None:
        view = self.membership.settle()
        if view is not None:
            self.told.views.append([member.slot for member in view.members])
            if len(view.members) == self.job.max_workers or not self.replaces:
                (self.plans / f"all-{view.number}").touch()
            self.store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
            for rank, member in enumerate(view.members):
                with suppress(OSError):
                    self.asking.pop(member.name).send((view.number, rank, len(view.members), self.store.port))
        for number, ended in self.at_end.items():
            names = {member.name for member in self.membership.view.members}
            is_whole = number == self.membership.view.number and names <= ended.keys()
            if is_whole or self.membership.asks(number) is Leave.NOW:
                if is_whole and number in self.through:  # newcomers hear that the job has ended
                    self.is_over, answers = True, {**self.asking, **ended}
                    self.asking.clear()
                else:
                    answers = ended
                for name, pipe in answers.items():
                    with suppress(OSError):
                        pipe.send(is_whole if name in ended else None)
                self.at_end = {one: pipes for one, pipes in self.at_end.items() if one != number}
                break


def new_pipe() -> tuple[Any, Any]:
    from tests.support.forked_python import FORKED

    return FORKED.Pipe()


def _work(pipe: Any, slot: int, job: Job, folder: str, plans: str, faults: list[Fault], gates: int) -> None:
    torch.set_num_threads(1)
    stacks = open(f"{plans}/stacks-{slot}-{os.getpid()}", "w")  # noqa: SIM115  (it is open as long as this process)
    faulthandler.register(signal.SIGUSR1, stacks)
    held, control = Held(), Control(slot, faults, Path(plans), pipe, gates)
    one_at_a_time = threading.Lock()

    def send(what: Any) -> None:
        if isinstance(what, Logged):
            with one_at_a_time:
                pipe.send(("rows", what.rows))

    for part, (owner, name) in PARTS_OF_A_STEP.items():
        patch.object(owner, name, _met(control, part, getattr(owner, name))).start()
    for part, (owner, name) in ENDS.items():
        patch.object(owner, name, _met(control, part, getattr(owner, name), at_end=True)).start()
    try:
        with repeated("beats", 0.05, control.look):
            _run_views(pipe, job, folder, control, held, send)
        pipe.send(("done", None))
    except BaseException:
        import traceback

        pipe.send(("raised", traceback.format_exc()))


def _run_views(
    pipe: Any, packed: Job, folder: str, control: Control, held: Held, send: Callable[[Any], None]
) -> None:
    has_lost_peer, job = False, None
    while True:
        pipe.send(("ask", (held.finished, has_lost_peer)))
        given = pipe.recv()
        if given is None:
            break
        control.view, rank, size, port = given
        is_whole, has_lost_peer = False, True
        try:
            form_group("gloo", TCPStore(LOCALHOST, port, wait_for_workers=False), World(rank, size), within=SOON)
            job = job or pickled_copy(packed)
            run_task(job, World(rank, size), Storage(folder), send, control, held=held)
            pipe.send(("through", control.view))
            is_whole = pipe.recv()
            if not is_whole:
                raise WorkerError("another worker was lost before all were through")
        except StopRequested:
            has_lost_peer = False
        except (WorkerError, StorageError, torch.distributed.DistError) as lost:
            if isinstance(lost, StorageError) and not control.is_out():
                raise
            without_frames(lost)
            cut_groups()
        if held.lets_go():
            job = None
        held_open = dict(engine_world._sockets)
        free_memory()
        leave_group()
        assert_closed(held_open)
        if is_whole:
            break


def assert_closed(sockets: dict[int, int]) -> None:
    """Raise AssertionError unless the sockets of the groups of a view are closed, some moments after it was left."""
    until = time.monotonic() + SECONDS / 6
    while left := sockets.items() & open_sockets().items():
        assert time.monotonic() < until, f"{len(left)} of {len(sockets)} sockets of the groups are open"
        time.sleep(0.02)


def _met(control: Control, part: str, function: Callable[..., Any], at_end: bool = False) -> Callable[..., Any]:
    def met(*args: Any, **keys: Any) -> Any:
        if not at_end:
            control.meet(part)
        given = function(*args, **keys)
        if at_end:
            control.meet(part)
        return given

    return met

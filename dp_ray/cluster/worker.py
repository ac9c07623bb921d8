"""A job on a worker: begin at `run_job`, which the loop of `cluster/loop.py` calls.

Three things stand around a job's task. The process group is formed
anew for each job. A heartbeat reports that the worker lives, and brings requests. A stream sends to the driver what
user code prints. The heartbeat also injects faults: real signals to real processes at given steps.
"""

import io
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TextIO

import psutil
import ray
import torch
from torch.distributed import distributed_c10d

from dp_ray.cluster.channel import GROUP, Ask, Terms, WorkerConfig, encoded, send
from dp_ray.cluster.group import place, process_group, report, with_devices
from dp_ray.cluster.internals.context import place_of_this_worker
from dp_ray.cluster.internals.core import drain_this_node, raylet_of_this_worker
from dp_ray.engine.clock import StepClock
from dp_ray.engine.model import free_memory, is_out_of_memory
from dp_ray.engine.votes import NotFinite, StepControl, StopRequested
from dp_ray.engine.world import (
    TIMEOUT,
    Collective,
    Trouble,
    World,
    leave_group,
    recorded_collectives,
    trouble_of,
)
from dp_ray.errors import ClusterError, JobError, StorageError, WorkerError
from dp_ray.job.job import Job
from dp_ray.messages import (
    Beat,
    Ending,
    FaultInjected,
    Finished,
    Logged,
    Note,
    Printed,
    Started,
    WorkerExit,
    WorkerReady,
    beat_interval,
)
from dp_ray.monitor.faults import Fault
from dp_ray.rundir.claim import check_shared
from dp_ray.rundir.files import FLIGHT_RECORDER, NCCL_RECORD
from dp_ray.rundir.quarantine import QuarantineFull
from dp_ray.storage import Storage
from dp_ray.system.imports import imported_files
from dp_ray.system.process import environment
from dp_ray.system.threads import waits_for
from dp_ray.tasks.isolation import isolated
from dp_ray.tasks.numerics import OtherKind
from dp_ray.tasks.task import run_task


@dataclass(frozen=True)
class Assignment:
    """A job as the driver hands it to each of its workers; `backend` is that of the process group."""

    job: Job
    run_dir: str = field(repr=False)  # a URL may hold a secret
    token: str
    backend: str
    faults: tuple[Fault, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)


def run_job(worker: WorkerConfig, terms: Terms, packed: Any, env: dict[str, str]) -> None:
    """Run the job's task on this worker, with `env` set, and report to the driver what happens.

    `packed` refers to the job's Assignment, packed.
    """
    node_id, here = ray.get_runtime_context().get_node_id(), place(terms.workers)
    worker = replace(worker, number=terms.number, kind=terms.kind, node_id=node_id)
    attempt = f"{os.environ[GROUP]}-{terms.number}"
    prints = forwarded_prints(worker.channel, worker.number, worker.keep_prints, here)
    with isolated() as remains, environment(env), prints:
        is_stopped = run_packed(worker, packed, attempt, here)
    imported = imported_files() if here.rank == 0 and not terms.is_last else ()
    send(worker.channel, Finished(attempt, here.rank, is_stopped, tuple(remains), imported), worker.number)


def run_packed(worker: WorkerConfig, packed: Any, attempt: str, here: World) -> bool:
    """Run the job; return whether it stopped as the user asked. When this returns, nobody holds the job's objects."""
    with reported_errors(worker, attempt, here, lambda: False):
        assigned: Assignment = ray.get(packed).load()
        world = with_devices(here, assigned.job, assigned.job.num_devices)
        run = Storage(assigned.run_dir)
    limit, faults = assigned.job.timeouts.step, assigned.faults
    heartbeat = Heartbeat(worker, attempt, world, run, limit, faults)
    with reported_errors(worker, attempt, world, lambda: heartbeat.has_progressed):
        try:
            run_assigned(worker, assigned, run, attempt, world, heartbeat)
        except StopRequested:
            if ray.get(worker.channel.state.remote())[0].ask is not Ask.STOP:
                raise  # so that the workers are started anew, more or fewer of them
            return True
        except OtherKind as other:
            ray.get(worker.channel.avoid.remote(worker.number, other.node_ids))
            raise
        except Exception as error:
            if trouble_of(error) is Trouble.BROKEN_GPU:
                ray.get(worker.channel.tell_broken.remote(worker.number, worker.node_id))
            raise
    return False


def run_assigned(
    worker: WorkerConfig, assigned: Assignment, run: Storage, attempt: str, world: World, heartbeat: "Heartbeat"
) -> None:
    """Run the task within the process group of the job's workers.

    Raises StopRequested if it stopped as it was asked.
    """
    job, channel = assigned.job, worker.channel
    # Ray Train numbers the workers node by node; the job may take only the first of those on this node.
    first = world.rank - world.local_rank
    on_node = min(world.world_size - first, place_of_this_worker().get_local_world_size())
    flight = run.child(FLIGHT_RECORDER)
    recorder = recorder_variables(assigned.backend, flight, attempt)
    step_seconds = job.timeouts.step
    with (
        environment(recorder),
        process_group(channel, attempt, world, assigned.backend, step_seconds, on_node),
        left_together(channel, attempt, world),
    ):
        check_shared(run, assigned.token, str(world))
        if DUMP_FILE in recorder:
            with suppress(StorageError):
                flight.create()  # NCCL makes no folder
        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", []))
        send(worker.channel, WorkerReady(attempt, world, os.getpid(), gpus, worker.node_id), worker.number)
        with heartbeat:
            run_task(
                job,
                world,
                run,
                # The loop waits for no row of the history: messages of a worker arrive in order.
                lambda message: send(channel, message, worker.number, wait=not isinstance(message, Logged)),
                heartbeat,
                assigned.rows,
            )
    if DUMP_FILE in recorder and world.rank == 0:
        with suppress(StorageError):
            if flight.is_empty():
                flight.remove()


DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch appends the rank


def recorder_variables(backend: str, folder: Storage, attempt: str) -> dict[str, str]:
    """Return the variables with which NCCL writes its flight recorder before it ends a process, but for the user's.

    It does so if a collective fails, or takes longer than the group's time-out. The files go to `folder` if that is
    one of a file system, since NCCL writes to no other storage. torch's `torchfrtrace` reads them.
    """
    size = "TORCH_FR_BUFFER_SIZE"
    older = {size: "TORCH_NCCL_TRACE_BUFFER_SIZE", DUMP_FILE: "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}  # torch reads both
    values = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", size: "2000"} if "nccl" in backend else {}
    if values and folder.is_local:
        values[DUMP_FILE] = folder.file(NCCL_RECORD.format(attempt, ""))
    takes_older = torch.__version__ < "2.12"
    return {
        older[name] if name == size and takes_older else name: value
        for name, value in values.items()
        if not {name, older.get(name, name)} & os.environ.keys()
    }


@contextmanager
def reported_errors(
    worker: WorkerConfig, attempt: str, world: World, has_progressed: Callable[[], bool]
) -> Iterator[None]:
    """Report an error to the driver at once, before the errors that it causes on other ranks.

    For Ray Train's controller it becomes a WorkerExit, which says how the loop ended.
    """
    try:
        yield
    except StopRequested as stopped:
        raise WorkerExit(Ending.STOPPED, str(stopped), True) from None
    except BaseException as error:
        text = report(worker.channel, worker.number, attempt, world, error)
        raise WorkerExit(_ending_of(error), text, has_progressed()) from None


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, WorkerError):
        return Ending.LOST_PEER
    if isinstance(error, OtherKind):
        return Ending.OTHER_KIND
    if not isinstance(error, Exception) or isinstance(error, QuarantineFull | NotFinite):
        return Ending.MISTAKEN
    trouble = trouble_of(error)
    if trouble is Trouble.BROKEN_GPU:
        return Ending.BROKEN_GPU
    if trouble is Trouble.BUSY_GPU or is_out_of_memory(error):  # a JobError too, if the model finds no room at first
        return Ending.OUT_OF_MEMORY
    is_final = trouble is not None and trouble.is_final
    return Ending.MISTAKEN if is_final or isinstance(error, JobError) else Ending.RAISED


@contextmanager
def left_together(channel: Any, attempt: str, world: World) -> Iterator[None]:
    """Leave the process group at the block's end, once no peer reads from it any more: that would end the process.

    If the block raises, but for StopRequested, the group stays: peers may wait in it, and the process is about to
    end.
    """

    def leave() -> None:
        ray.get(channel.end.remote(f"{attempt} group", world.rank, world.world_size, True))
        leave_group()

    try:
        yield
    except StopRequested:
        leave()
        raise
    # DDP's part in C++ must not be the last to hold the group: if the collector frees that, it waits for the
    # group's threads, and they may wait for the interpreter, which the collector holds.
    free_memory()
    leave()


def bring_about(fault: Fault, driver_node: str) -> None:
    """Inject a fault into this worker or its node; a fault of the driver does nothing here, the driver ends itself.

    Raises JobError if the driver runs on the node, and ClusterError if Ray refuses to drain it.
    """
    pid = os.getpid()
    if fault.what == "worker" and fault.action == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault.what == "worker":
        if fault.seconds is not None:  # another process wakes this one, which stops itself
            line = ["sh", "-c", f"sleep {fault.seconds}; kill -CONT {pid}"]
            subprocess.Popen(line, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.kill(pid, signal.SIGSTOP)
    elif fault.what == "node":
        if ray.get_runtime_context().get_node_id() == driver_node:
            raise JobError(f"--inject '{fault}': the driver runs on that node; name another node")
        if fault.action == "kill":
            raylet, this_process = raylet_of_this_worker(), psutil.Process()
            family = [*raylet.children(recursive=True), raylet]
            for process in sorted(family, key=lambda one: one == this_process):  # this one last
                process.kill()
        elif refusal := drain_this_node(fault.seconds):
            raise ClusterError(f"--inject: Ray does not drain the node: {refusal}")


SHOWN_FRAMES = 12


class Heartbeat(StepControl):
    """Step control of a worker on Ray: a thread sends beats, and the answers carry the driver's requests.

    Once the loop has been in one step for `limit` seconds, each beat carries its stack, how far its GPU has come, and
    the collectives in which it stands; the flight recorder is written to `run`, the run's directory. Without a limit
    a beat carries the last two after 30 minutes, for whoever ends the run.
    """

    def __init__(
        self,
        worker: WorkerConfig,
        attempt: str,
        world: World,
        run: Storage,
        limit: float | None,
        faults: Sequence[Fault] = (),
    ) -> None:
        self._channel = worker.channel
        self._number = worker.number
        self.attempt = attempt
        self.node_id = worker.node_id
        self.kind = worker.kind
        self._world = world
        self._run = run
        self._limit = limit
        self._faults = list(faults)
        self.slows = any(fault.action == "slow" for fault in faults)
        self._delay = self._due_delay = 0.0
        self._driver_node = worker.driver_node
        self._loop = threading.get_ident()
        self._step: int | None = None
        self._first: int | None = None
        self._since = time.monotonic()
        self._clock = StepClock()
        self._recorded_since: float | None = None  # the `_since` for which the flight recorder was read
        self._collectives: tuple[Collective, ...] = ()
        self._save = False
        self._has_saved = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def has_progressed(self) -> bool:
        """Whether the worker has finished a step since it began."""
        return self._step != self._first

    def settle(self, kind: str) -> None:
        """Have the channel tell the job's next workers what these compute on."""
        ray.get(self._channel.settle.remote(self._number, kind))

    def runs_on(self, clock: StepClock) -> None:
        """Note the clock whose GPU each late beat asks how far it has come."""
        self._clock = clock

    def before(self, step: int) -> None:
        """Note the step that begins, report the first one, and inject the faults that are due."""
        self._step = step
        self._since = time.monotonic()
        if self._first is None:
            self._first = step
            send(self._channel, Started(self.attempt, self._world.rank, step), self._number)
        for fault in [one for one in self._faults if one.is_due(self._world, step)]:
            self._faults.remove(fault)
            # An earlier attempt may have injected it; a worker is slow in each attempt.
            if fault.action != "slow" and not ray.get(self._channel.fire.remote(fault.number)):
                continue
            injected = FaultInjected(self.attempt, self._world, str(fault), fault.what == "driver")
            send(self._channel, injected, self._number)
            if fault.action == "slow":
                self._delay += fault.seconds or 0.0
            else:
                bring_about(fault, self._driver_node)
        self._due_delay = self._delay

    def take_delay(self, rank: int) -> float:
        """Return the seconds by which faults make the current step slower, once a step."""
        delay, self._due_delay = self._due_delay, 0.0
        return delay

    def touch(self) -> None:
        """Restart the time in the current step, for instance during an evaluation."""
        self._since = time.monotonic()

    def through(self) -> None:
        """Note that the last step is done, so that no time limit applies any more."""
        self._step = None

    def take_save(self) -> bool:
        """Return whether the driver has asked to keep the work so far; true once."""
        taken, self._save = self._save, False
        return taken

    def leave(self) -> None:
        """Wait until the attempt's other workers have kept their work, then raise StopRequested."""
        self._end(wait=True)
        super().leave()

    def end(self) -> None:
        """Report that this worker has nothing left to run."""
        self._end(wait=False)

    def _end(self, wait: bool) -> None:
        self.through()
        ray.get(self._channel.end.remote(self.attempt, self._world.rank, self._world.world_size, wait))

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        interval = beat_interval(self._world.world_size)
        while not self._stopped.wait(interval):
            try:
                request: Ask = ray.get(self._channel.put.remote(encoded(self._state()), self._number))
            except ray.exceptions.RayError:
                return  # the driver is gone, and Ray will end this worker soon
            self.wants_stop = request in (Ask.RESTART, Ask.STOP)
            if request is Ask.SAVE and not self._has_saved:
                self._save = self._has_saved = True

    def _state(self) -> Beat:
        since, step = self._since, self._step
        seconds = time.monotonic() - since
        beat = Beat(self.attempt, self._world.rank, step, seconds, "")
        if step is None or seconds <= (self._limit or TIMEOUT.total_seconds()):
            return beat
        if self._recorded_since != since:
            self._recorded_since, self._collectives = since, ()
            # In a thread: a storage that hangs too must not silence the worker.
            threading.Thread(target=self._record, name="flight recorder", daemon=True).start()
        # The GPU is asked only here: the driver may hold the asking thread, and Python's lock with it, while another
        # call waits for the GPU. A worker that falls silent so is told as one that does not answer.
        beat = replace(beat, device=self._clock.place(), collectives=self._collectives)
        frame = sys._current_frames().get(self._loop)
        if self._limit is None or frame is None:
            return beat
        waits = waits_for() or ("a collective of the user's code" if is_in_collective(frame) else "")
        stack = "".join(traceback.format_stack(frame)[-SHOWN_FRAMES:])  # innermost frame last
        return replace(beat, stack=stack, waits_for=waits)

    def _record(self) -> None:
        """Write torch's flight recorder into the run's directory, and have the next beats carry its collectives."""
        try:
            text, self._collectives = recorded_collectives()
            if text:
                folder = self._run.child(FLIGHT_RECORDER)
                folder.create()
                folder.write_text(f"{self.attempt}-rank-{self._world.rank}.json", text)
        except Exception as error:  # of another version of torch, or of the storage
            told = f"{self._world}: its flight recorder cannot be kept: {type(error).__name__}: {error}"
            send(self._channel, Note(told), self._number, wait=False)


def is_in_collective(frame: FrameType | None) -> bool:
    """Return whether a function of torch.distributed is on the stack, for instance called by user code."""
    while frame is not None and frame.f_globals is not vars(distributed_c10d):
        frame = frame.f_back
    return frame is not None


@contextmanager
def forwarded_prints(channel: Any, number: int, keep_prints: bool, world: World) -> Iterator[None]:
    """Send the lines that user code prints to the driver while the block runs."""
    before = sys.stdout, sys.stderr
    lines: Any = Lines(channel, number, keep_prints, world, before[0])
    sys.stdout = sys.stderr = lines
    try:
        yield
    finally:
        lines.close()
        sys.stdout, sys.stderr = before


class Lines(io.TextIOBase):
    """A text stream whose lines go to the driver and, with `keep_prints`, to the worker's own log too.

    The lines pass through a pipe, so that the forked processes of a data loader reach the driver too.
    """

    _END = "\0"

    def __init__(self, channel: Any, number: int, keep_prints: bool, world: World, log: TextIO) -> None:
        self._channel = channel
        self._number = number
        self._keep_prints = keep_prints
        self._world = world
        self._log = log
        self._pid = os.getpid()
        self._rest = ""
        self.buffer = Bytes(self)
        reading, self._pipe = os.pipe()
        self._thread = threading.Thread(target=self._forward, args=(reading,), name="prints", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Send the complete lines of the text; hold the rest until its line ends.

        After the job, which a handler of a library's log may outlive, the text goes to the next job or to the log.
        """
        if self.closed:
            return (sys.stderr if sys.stderr is not self else self._log).write(text)
        if self._keep_prints:
            self._log.write(text)
        if self._pid != os.getpid():
            self._pid, self._rest = os.getpid(), ""
        *lines, rest = (self._rest + text).replace("\r\n", "\n").split("\n")
        self._rest = rest[rest.rfind("\r", 0, -1) + 1 :]  # keep only the last update of a progress bar
        for line in lines:
            os.write(self._pipe, f"{line[line.rfind(chr(13)) + 1 :]}\n".encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        self._log.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._log.fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Send the rest and end the thread; an end mark is sent because a forked process may hold the pipe open."""
        if self.closed:
            return
        self.write(f"\n{self._END}\n" if self._rest else f"{self._END}\n")
        self._thread.join()
        os.close(self._pipe)
        super().close()

    def _forward(self, reading: int) -> None:
        """Send the lines to the driver, all that have arrived since the last message in one."""
        rest = b""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while True:
                *lines, rest = (rest + pipe.read(1 << 16)).split(b"\n")
                ended = self._END.encode() in lines
                said = tuple(line.decode(errors="replace") for line in lines if line != self._END.encode())
                if said:
                    send(self._channel, Printed(self._world, said), self._number, wait=ended)
                if ended:
                    return


class Bytes(io.RawIOBase):
    """The `buffer` of Lines, for code that writes bytes."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._lines.write(bytes(data).decode(errors="replace"))
        return len(data)

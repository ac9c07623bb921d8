"""A worker's heartbeat: it reports that the worker lives and where it stands, brings requests, and injects faults."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import ray
from torch.distributed import distributed_c10d

from dp_ray.cluster.channel import Ask, WorkerConfig, encoded, send
from dp_ray.cluster.group import STUCK_SECONDS
from dp_ray.cluster.internals.core import drain_this_node, raylet_of_this_worker
from dp_ray.cluster.internals.train_worker import Answer, messages
from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.world import TIMEOUT, World, cut_groups, is_gpu
from dp_ray.errors import ClusterError, JobError
from dp_ray.messages import (
    STATES,
    Beat,
    Collective,
    FaultInjected,
    MayLeave,
    Message,
    Note,
    Started,
    StepControl,
    beat_interval,
)
from dp_ray.rundir.files import FLIGHT_RECORDER
from dp_ray.storage import Storage
from dp_ray.system.threads import last_call, waits_for
from dp_ray.telemetry.flight_recorder import recorded_collectives

if TYPE_CHECKING:  # what jobs need: modules are served without it
    from dp_ray.monitor.faults import Fault


def bring_about(fault: "Fault", driver_node: str) -> None:
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
            for process in sorted(family, key=lambda each: each == this_process):  # this one last
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
        faults: "Sequence[Fault]" = (),
    ) -> None:
        self._worker = worker
        self._stuck_since: float | None = None  # in a collective, since it was asked to leave its view at once
        self.attempt = attempt
        self.node_id = worker.node_id
        self.kind = worker.kind
        self._world = world
        self._run = run
        self._limit = limit
        self._faults = list(faults)
        self.slows = any(fault.action == "slow" for fault in faults)
        self._delay = self._due_delay = 0.0
        self._loop = threading.get_ident()
        self._step: int | None = None
        self._first: int | None = None
        self._reads = ""
        self._since = time.monotonic()
        self._clock = StepClock()
        self._recorded_since: float | None = None  # the `_since` for which the flight recorder was read
        self._collectives: tuple[Collective, ...] = ()
        self._save = False
        self._has_saved = False
        self._takes_calls = self._leaves_now = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def has_progressed(self) -> bool:
        """Whether the worker has finished a step since it began."""
        return self._step != self._first

    def settle(self, kind: str) -> None:
        """Have the channel tell the job's next workers what these compute on."""
        ray.get(self._worker.channel.learn.remote(self._worker.number, kind=kind))

    def runs_on(self, clock: StepClock) -> None:
        """Note the clock whose GPU each late beat asks how far it has come."""
        self._clock = clock

    def before(self, step: int) -> None:
        """Note the step that begins, report the first one, and inject the faults that are due."""
        self._step = step
        self._since = time.monotonic()
        if self._first is None:
            self._first = step
            self._send(Started(self.attempt, self._world.rank, step, self._reads))
        for fault in [fault for fault in self._faults if fault.is_due(self._world, step)]:
            self._faults.remove(fault)
            if fault.part:
                self._clock.when(Part[fault.part.upper()], partial(self._inject, fault))
            else:
                self._inject(fault)
        self._due_delay = self._delay

    def _inject(self, fault: "Fault") -> None:
        # An earlier attempt may have injected it; a worker is slow in each attempt.
        if fault.action != "slow" and not ray.get(self._worker.channel.fire.remote(fault.number)):
            return
        self._send(FaultInjected(self.attempt, self._world, str(fault), fault.what == "driver"))
        if fault.action == "slow":
            self._delay += fault.seconds or 0.0
        else:
            bring_about(fault, self._worker.driver_node)

    def take_delay(self, rank: int) -> float:
        """Return the seconds by which faults make the current step slower, once a step."""
        delay, self._due_delay = self._due_delay, 0.0
        return delay

    def touch(self) -> None:
        """Restart the time in the current step, for instance during an evaluation."""
        self._since = time.monotonic()

    def reads(self, why: str) -> None:
        """Have the first step tell why the worker goes on from the newest checkpoint, and not from memory."""
        self._reads = why

    def through(self) -> None:
        """Note that the last step is done, so that no time limit applies any more."""
        self._step = None

    def take_save(self) -> bool:
        """Return whether the driver has asked to keep the work so far; true once."""
        taken, self._save = self._save, False
        return taken

    def leave(self) -> None:
        """Wait until the view's other workers have come to its end, then raise StopRequested."""
        self.through()
        place = self._worker.view, self._world.rank, self._world.world_size
        self.is_to_rejoin = ray.get(self._worker.channel.end.remote(*place, False, not self.is_to_rejoin))
        super().leave()

    def take_calls(self) -> Iterator[tuple[Any, Answer]]:
        """Yield each call, until the view is to be left."""
        self._takes_calls = True
        if self.is_to_rejoin:  # a beat has heard so while the group formed
            self._send(MayLeave(self.attempt))
        while not self._leaves_now:
            if (taken := messages.get()) is not None:
                yield taken

    def _send(self, message: Message, wait: bool = True) -> None:
        send(self._worker.channel, message, self._worker.number, wait=wait)

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
                beat, worker = encoded(self._state()), self._worker
                given = beat, worker.number, worker.view, worker.name, self._step or 0
                request: Ask = ray.get(self._worker.channel.put.remote(*given))
            except ray.exceptions.RayError:
                return  # the driver is gone, and Ray will end this worker soon
            if request is Ask.LEAVE and self._takes_calls and not self.is_to_rejoin:
                self._send(MayLeave(self.attempt))  # the caller knows between which calls
            self.is_to_rejoin = self.is_to_rejoin or request in (Ask.LEAVE, Ask.LEAVE_NOW)
            self.wants_stop = self.is_to_rejoin or request in (Ask.RESTART, Ask.STOP)
            if request is Ask.END:  # before it writes anything that another one writes by now
                os.kill(os.getpid(), signal.SIGKILL)
            if request is Ask.LEAVE_NOW:
                cut_groups()  # a peer may be silent, and close nothing
                self._leaves_now = True
                if self._takes_calls:
                    messages.put(None)  # who waits for a call looks
            self._end_if_stuck(request is Ask.LEAVE_NOW)
            if request is Ask.SAVE and not self._has_saved:
                self._save = self._has_saved = True

    def _end_if_stuck(self, is_to_leave: bool) -> None:
        """End this process if it waits for a peer even so, as where the connections are not known."""
        now = time.monotonic()
        self._stuck_since = (self._stuck_since or now) if is_to_leave and self._is_stuck() else None
        if self._stuck_since is not None and now - self._stuck_since > STUCK_SECONDS:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_stuck(self) -> bool:
        """Return whether this worker waits in a collective, or its GPU does.

        The host does not wait in one of NCCL, but later, for the GPU, anywhere.
        """
        if not is_gpu(self._world.device):
            return bool(waits_for())
        return bool(waits_for()) or any(each.state != STATES[-1] for each in recorded_collectives()[1])

    def _state(self) -> Beat:
        since, step = self._since, self._step
        seconds = time.monotonic() - since
        beat = Beat(self.attempt, self._world.rank, step, seconds, "", call=last_call())
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
            self._send(Note(told), wait=False)


def is_in_collective(frame: FrameType | None) -> bool:
    """Return whether a function of torch.distributed is on the stack, for instance called by user code."""
    while frame is not None and frame.f_globals is not vars(distributed_c10d):
        frame = frame.f_back
    return frame is not None

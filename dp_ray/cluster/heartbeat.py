"""A worker's heartbeat: it reports that the worker is alive, whatever its loop does, and receives requests."""

import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import ray
from torch.distributed import distributed_c10d

from dp_ray.cluster.channel import encoded, send
from dp_ray.cluster.fault_injection import bring_about
from dp_ray.cluster.requests import Ask
from dp_ray.monitor.faults import Fault
from dp_ray.monitor.messages import Beat, FaultInjected, Started, beat_interval
from dp_ray.replica.world import World
from dp_ray.system.waiting import waits_for
from dp_ray.task.step_control import StepControl

SHOWN_FRAMES = 12


class Heartbeat(StepControl):
    """Step control of a worker on Ray: a thread sends beats, and the answers carry the driver's requests.

    Once the loop has been in one step for `limit` seconds, each beat carries its stack.
    """

    def __init__(
        self,
        channel: Any,
        number: int,
        attempt: str,
        world: World,
        limit: float | None,
        faults: Sequence[Fault] = (),
        driver_node: str = "",
    ) -> None:
        self._channel = channel
        self._number = number
        self._attempt = attempt
        self._world = world
        self._limit = limit
        self._faults = list(faults)
        self.slows = any(fault.action == "slow" for fault in faults)
        self._delay = self._due_delay = 0.0
        self._driver_node = driver_node
        self._loop = threading.get_ident()
        self._step: int | None = None
        self._first: int | None = None
        self._since = time.monotonic()
        self._save = False
        self._has_saved = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def has_progressed(self) -> bool:
        """Whether the worker has finished a step since it began."""
        return self._step != self._first

    def before(self, step: int) -> None:
        """Note the step that begins, report the first one, and inject the faults that are due."""
        self._step, self._since = step, time.monotonic()
        if self._first is None:
            self._first = step
            send(self._channel, Started(self._attempt, self._world.rank, step), self._number)
        for fault in [one for one in self._faults if one.is_due(self._world, step)]:
            self._faults.remove(fault)
            self._inject(fault)
        self._due_delay = self._delay

    def _inject(self, fault: Fault) -> None:
        """Inject a fault, unless an earlier attempt did; a worker is slow in each attempt."""
        if fault.action != "slow" and not ray.get(self._channel.fire.remote(fault.number)):
            return
        injected = FaultInjected(self._attempt, self._world, str(fault), fault.what == "driver")
        send(self._channel, injected, self._number)
        if fault.action == "slow":
            self._delay += fault.seconds or 0.0
        else:
            bring_about(fault, self._driver_node)

    def take_delay(self, rank: int) -> float:
        """The seconds by which faults make the current step slower, once a step."""
        delay, self._due_delay = self._due_delay, 0.0
        return delay

    def touch(self) -> None:
        """Restart the time in the current step, for instance during an evaluation."""
        self._since = time.monotonic()

    def through(self) -> None:
        """Note that the last step is done, so that no time limit applies any more."""
        self._step = None

    def take_save(self) -> bool:
        """Whether the driver has asked to keep the work so far; true once."""
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
        ray.get(self._channel.end.remote(self._attempt, self._world.rank, self._world.world_size, wait))

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        interval = beat_interval(self._world.world_size)
        while not self._stopped.wait(interval):
            seconds = time.monotonic() - self._since
            is_late = self._limit is not None and seconds > self._limit
            stack, waits = self._stack() if is_late else ("", "")
            beat = Beat(self._attempt, self._world.rank, self._step, seconds, stack, waits)
            try:
                request: Ask = ray.get(self._channel.put.remote(encoded(beat), self._number))
            except ray.exceptions.RayError:
                return  # the driver is gone, and Ray will end this worker soon
            self.wants_stop = request in (Ask.RESTART, Ask.STOP)
            if request is Ask.SAVE and not self._has_saved:
                self._save = self._has_saved = True

    def _stack(self) -> tuple[str, str]:
        """The stack of the worker's loop, innermost frame last; and the collective in which it waits, if any."""
        frame = sys._current_frames().get(self._loop)
        if frame is None:
            return "", ""
        waits = waits_for() or "a collective of the user's code" * is_in_collective(frame)
        return "".join(traceback.format_stack(frame)[-SHOWN_FRAMES:]), waits


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether a function of torch.distributed is on the stack, for instance called by user code."""
    while frame is not None and frame.f_globals is not vars(distributed_c10d):
        frame = frame.f_back
    return frame is not None

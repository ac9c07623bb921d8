"""Split the time of a worker's steps into parts: each moment belongs to the part that was entered last.

The second half counts the floating-point operations of a row.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from dp_ray.system.process import patched

if TYPE_CHECKING:
    from dp_ray.job.job import Job


class Part(IntEnum):
    """The parts of a step, in the order of their columns."""

    DATA_WAIT = 0  # the loop waits for its next batch
    HOST_TO_DEVICE = 1  # copies of the batch to the device
    FORWARD = 2  # the model and the loss
    BACKWARD = 3
    EXCHANGE = 4  # from the worker's last gradient to the sum over all workers, with the wait for late workers
    UPDATE = 5  # the optimizer
    OUTPUTS = 6  # a prediction's outputs: moved to the host, converted, written
    EVALUATION = 7
    CHECKPOINT = 8  # what of a checkpoint the loop waits for
    OTHER = 9


PARTS = tuple(part.name.lower() for part in Part)
NUM_PARTS = len(PARTS)


class TimedStep(NamedTuple):
    """A step of one worker: the rows that it ran, and the seconds of each Part."""

    step: int
    rows: int
    seconds: list[float]


class DevicePlace(NamedTuple):
    """How far a GPU has come: the last step that it has passed, None if none, and the part that it is in.

    `error` is the error that it raises when it is queried, as after a device-side assert: then it runs nothing any
    more.
    """

    step: int | None
    part: Part
    error: str = ""

    def __str__(self) -> str:
        passed = "no step" if self.step is None else f"step {self.step}"
        return f"raises {self.error}" if self.error else f"has passed {passed} and is in {self.part.name.lower()}"


class StepClock:
    """Splits the steps of a worker whose model runs on the host: each `enter` costs a fraction of a microsecond."""

    def __init__(self) -> None:
        self._seconds = [0.0] * NUM_PARTS
        self._part = Part.OTHER
        self._at = time.perf_counter()

    def when(self, part: Part, do: Callable[[], object]) -> None:
        """Call `do` before the part is entered next; a clock that is never asked to does not look for it."""
        enter, due = self.enter, [do]

        def look(entered: Part) -> Part:
            if entered is part and due:
                due.pop()()
            return enter(entered)

        vars(self)["enter"] = look

    def restart(self) -> None:
        """Begin the first step now."""
        self._seconds = [0.0] * NUM_PARTS
        self._at = time.perf_counter()

    def enter(self, part: Part) -> Part:
        """Begin a part, and return the one that ends."""
        now = time.perf_counter()
        self._seconds[self._part] += now - self._at
        self._at = now
        ended = self._part
        self._part = part
        return ended

    def end_step(self, step: int, rows: int) -> list[TimedStep]:
        """End a step; return the steps that are measured by now and have not been returned."""
        self.enter(Part.OTHER)
        seconds = self._seconds
        self._seconds = [0.0] * NUM_PARTS
        return [TimedStep(step, rows, seconds)]

    def rest(self) -> list[TimedStep]:
        """Return the steps that `end_step` has not returned; called after the last one."""
        return []

    def place(self) -> DevicePlace | None:
        """Return how far the device has come; None if that is where the loop is. Another thread may call this."""
        return None


@dataclass(slots=True)
class _Mark:
    """An event in the stream, and the part that ends there."""

    event: Any
    ended: Part = Part.OTHER


class DeviceClock(StepClock):
    """Splits the steps on the time line of a device's stream, which no mark makes wait.

    A mark is an event in the stream. Its time is read some steps later, when the device has passed it. While the
    device has work queued, the host's time counts nothing; once it runs dry, the host's part counts.
    `new_event` makes an event; `current_stream` gives the stream, once a step.
    """

    def __init__(self, new_event: Callable[[], Any], current_stream: Callable[[], Any]) -> None:
        self._new_event, self._current_stream = new_event, current_stream
        self._part = Part.OTHER
        self._unread: deque[tuple[int, int, list[_Mark]]] = deque()
        self._passed: int | None = None  # the last step that was read
        self.restart()

    def restart(self) -> None:
        """Begin the first step now."""
        self._stream = self._current_stream()
        # The step's marks, behind them those to be used next, and how many are set: one tuple, as threads read it.
        self._marks: tuple[list[_Mark], int] = [], 0
        self.enter(self._part)

    def enter(self, part: Part) -> Part:
        """Begin a part, and return the one that ends."""
        ended, self._part = self._part, part
        marks, num = self._marks
        try:
            mark = marks[num]
        except IndexError:
            mark = _Mark(self._new_event())
            marks.append(mark)
        mark.ended = ended
        mark.event.record(self._stream)
        self._marks = marks, num + 1
        return ended

    def end_step(self, step: int, rows: int) -> list[TimedStep]:
        """End a step; return the earlier steps that the device has passed since."""
        self.enter(Part.OTHER)
        marks, num = self._marks
        self._unread.append((step, rows, marks[:num]))
        self._stream = self._current_stream()
        self._marks = marks[num - 1 :], 1  # the last mark begins the next step
        return self.rest()

    def rest(self) -> list[TimedStep]:
        """Return the steps that the device has passed and that were not returned; wait for none."""
        passed = []
        while self._unread and self._unread[0][-1][-1].event.query():
            step, rows, marks = self._unread.popleft()
            seconds = [0.0] * NUM_PARTS
            for begin, end in pairwise(marks):
                seconds[end.ended] += begin.event.elapsed_time(end.event) / 1000
            passed.append(TimedStep(step, rows, seconds))
            self._passed = step  # before its marks are used again
            self._marks[0].extend(marks[:-1])
        return passed

    def place(self) -> DevicePlace:
        """Return how far the device has come, by the marks of the steps; it waits for none.

        A mark raises, like all that asks the device, once a kernel has failed there.
        """
        while True:
            passed = self._passed
            place = self._place(passed)
            if passed == self._passed:  # else a mark may be one of a later step by now
                return place

    def _place(self, passed: int | None) -> DevicePlace:
        now, num = self._marks  # before those of earlier steps: then none is left out
        try:
            for step, _, marks in [*self._unread.copy(), (None, 0, now[:num])]:
                for mark in marks[1:]:
                    if not mark.event.query():
                        return DevicePlace(passed, mark.ended)
                passed = passed if step is None else step
        except RuntimeError as error:
            return DevicePlace(passed, self._part, str(error).partition("\n")[0])
        return DevicePlace(passed, self._part)


def clock_on(device: torch.device) -> StepClock:
    """Return a clock for the steps of a worker whose model is on `device`."""
    if device.type != "cuda":
        return StepClock()
    # A torch.Event is recorded in C; torch.cuda's Event would do so in Python.
    return DeviceClock(
        partial(torch.Event, device, enable_timing=True), partial(torch.accelerator.current_stream, device.index)
    )


class Flops(NamedTuple):
    """The operations of a row, and the device on which it ran with its arithmetic: a key of the peaks."""

    per_row: float
    device_name: str
    arithmetic: str


class _OfNoModule(ModuleTracker):
    """Tells no module's operations apart: for that, torch hooks autograd, and a forward that uses it would fail."""

    def __enter__(self) -> "_OfNoModule":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _OperationCounter(FlopCounterMode):
    """Counts operations; `repeated` are those in blocks of `uncounted`."""

    running: "_OperationCounter | None" = None
    repeated = 0

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _OfNoModule()

    def of_row(self, rows: int, job: "Job", device: torch.device) -> Flops:
        """Return the operations of one of the `rows` rows that have run on the device."""
        per_row = (self.get_total_flops() - self.repeated) / rows
        if device.type != "cuda":
            return Flops(per_row, device.type, job.precision)
        takes_tf32 = job.precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
        return Flops(per_row, torch.cuda.get_device_name(device), "tf32" if takes_tf32 else job.precision)


@contextmanager
def uncounted() -> Iterator[None]:
    """Count no operations of the block: they run a second time, to save memory."""
    counter = _OperationCounter.running
    before = counter.get_total_flops() if counter is not None else 0
    try:
        yield
    finally:
        if counter is not None:
            counter.repeated += counter.get_total_flops() - before


@contextmanager
def counting_flops(job: "Job") -> Iterator[_OperationCounter]:
    """Count the operations of the matrix products and convolutions of the block."""
    # A compiled model's kernels cannot be counted; setting the stance imports the compiler, which takes seconds.
    eager = torch.compiler.set_stance("force_eager") if job.compile else nullcontext()
    counter = _OperationCounter()
    with patched(_OperationCounter, running=counter), eager, counter:
        yield counter

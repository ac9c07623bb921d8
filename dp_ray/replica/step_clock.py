"""Split the time of a worker's steps into parts: each moment belongs to the part that was entered last."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch


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


class TimedStep(NamedTuple):
    """A step of one worker: the rows that it ran, and the seconds of each Part."""

    step: int
    rows: int
    seconds: list[float]


class StepClock:
    """Splits the steps of a worker whose model runs on the host: each `enter` costs a fraction of a microsecond."""

    def __init__(self) -> None:
        self._seconds = [0.0] * len(Part)
        self._part = Part.OTHER
        self._at = time.perf_counter()

    def restart(self) -> None:
        """Begin the first step now."""
        self._seconds = [0.0] * len(Part)
        self._at = time.perf_counter()

    def enter(self, part: Part) -> Part:
        """Begin a part, and return the one that ends."""
        now = time.perf_counter()
        self._seconds[self._part] += now - self._at
        self._at = now
        before, self._part = self._part, part
        return before

    def end_step(self, step: int, rows: int) -> list[TimedStep]:
        """End a step; return the steps that are measured by now and were not returned before."""
        self.enter(Part.OTHER)
        seconds, self._seconds = self._seconds, [0.0] * len(Part)
        return [TimedStep(step, rows, seconds)]

    def rest(self) -> list[TimedStep]:
        """The steps that `end_step` has not returned; called after the last one."""
        return []


class SilentClock(StepClock):
    """Measures nothing."""

    def restart(self) -> None:
        pass

    def enter(self, part: Part) -> Part:
        """Nothing."""
        return part

    def end_step(self, step: int, rows: int) -> list[TimedStep]:
        """No steps."""
        return []


class DeviceClock(StepClock):
    """Splits the steps on the time line of a device's stream, which no mark makes wait.

    A mark is an event in the stream. Its time is read some steps later, when the device has passed it. While the
    device has work queued, what the host does counts nothing; once it runs dry, the host's part does.
    `record` puts an event into the stream.
    """

    def __init__(self, record: Callable[[], Any]) -> None:
        self._record = record
        self._part = Part.OTHER
        self._parts: list[Part] = []
        self._events = [record()]
        self._unread: deque[tuple[int, int, list[Part], list[Any]]] = deque()

    def restart(self) -> None:
        """Begin the first step now."""
        self._parts, self._events = [], [self._record()]

    def enter(self, part: Part) -> Part:
        """Begin a part, and return the one that ends."""
        self._parts.append(self._part)
        self._events.append(self._record())
        before, self._part = self._part, part
        return before

    def end_step(self, step: int, rows: int) -> list[TimedStep]:
        """End a step; return the earlier steps that the device has passed since."""
        self.enter(Part.OTHER)
        self._unread.append((step, rows, self._parts, self._events))
        self._parts, self._events = [], self._events[-1:]
        return self.rest()

    def rest(self) -> list[TimedStep]:
        """The steps that the device has passed and that were not returned; it waits for none."""
        passed = []
        while self._unread and self._unread[0][-1][-1].query():
            step, rows, parts, events = self._unread.popleft()
            passed.append(TimedStep(step, rows, seconds_between(parts, events)))
        return passed


def seconds_between(parts: Sequence[Part], events: Sequence[Any]) -> list[float]:
    """The seconds of each Part, if part i lasted from event i to event i + 1."""
    seconds = [0.0] * len(Part)
    for part, begin, end in zip(parts, events, events[1:], strict=False):
        seconds[part] += begin.elapsed_time(end) / 1000
    return seconds


def clock_on(device: torch.device) -> StepClock:
    """A clock for the steps of a worker whose model is on `device`."""
    if device.type != "cuda":
        return StepClock()

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceClock(record)

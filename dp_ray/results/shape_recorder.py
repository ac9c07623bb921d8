"""The worker's side of the shape reports: recording takes microseconds; a thread sends spans of equal steps."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dp_ray.plan.split import Shard
from dp_ray.replica.step_clock import TimedStep
from dp_ray.replica.world import World
from dp_ray.results.shapes import Seen
from dp_ray.results.step_time_files import TimedSteps, packed

REPORTS_A_SECOND = 1000  # of all workers together: each costs the driver's node the same, however many steps it has


class ShardSpan(NamedTuple):
    """Consecutive steps in which one shard had the same sizes; one time for each step, or one mean if folded."""

    first_step: int
    num_steps: int
    shard: int
    seen: int
    milliseconds: np.ndarray[Any, np.dtype[np.float32]]


class Report(NamedTuple):
    """One worker's message: spans ordered by first step, the new sizes by their numbers, and the last step done.

    `times` are those of the steps measured since the last message, None if there are none.
    """

    world: World
    through: int
    seen: dict[int, Seen]
    spans: list[ShardSpan]
    times: TimedSteps | None = None


class Keep(NamedTuple):
    """Asks the driver to write the reports of steps that are about to be committed."""


def report_interval(world_size: int) -> float:
    """Seconds between two reports of a worker; it grows with the workers, who share one driver."""
    return max(0.1, world_size / REPORTS_A_SECOND)


class Recorder:
    """Collects one worker's shape reports and sends them every `interval` seconds."""

    def __init__(self, world: World, send: Callable[[Any], None], interval: float | None = None) -> None:
        self._world = world
        self._send: Callable[[Report], None] = send
        self._tell: Callable[[Keep], None] = send
        self._interval = interval if interval is not None else report_interval(world.world_size)
        self._numbers: dict[Seen, int] = {}
        self._unsent: dict[int, Seen] = {}
        self._open: dict[int, tuple[int, int, list[float]]] = {}
        self._spans: list[ShardSpan] = []
        self._rows = 0
        self._times: list[TimedStep] = []
        self._through = -1
        self._sent_through = -1
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send_regularly, name="shape-reports", daemon=True)
        self._thread.start()

    def on_shard(self, shard: Shard, seen: Seen, milliseconds: float) -> None:
        """Record a shard's sizes and the milliseconds of its forward."""
        self._rows += shard.rows
        with self._lock:
            number = self._numbers.get(seen)
            if number is None:
                number = self._numbers[seen] = len(self._numbers)
                self._unsent[number] = seen
            span = self._open.get(shard.shard)
            if span and span[1] == number and span[0] + len(span[2]) == shard.step:
                span[2].append(milliseconds)
                return
            self._close_run(shard.shard)
            self._open[shard.shard] = (shard.step, number, [milliseconds])

    def on_step(self, step: int) -> None:
        """Record that this worker has finished `step`, with or without rows in it."""
        self._through = step

    def take_rows(self) -> int:
        """The rows of the shards recorded since the last call."""
        rows, self._rows = self._rows, 0
        return rows

    def on_times(self, timed: list[TimedStep]) -> None:
        """Record how long the parts of steps took."""
        with self._lock:
            self._times += timed

    def flush(self) -> None:
        """Send all that is recorded; it has arrived when this returns."""
        with self._sending:
            report = self._take()
            if report:
                self._send(report)

    def keep(self) -> None:
        """Send all that is recorded and have the driver write it, so that a committed step keeps its reports."""
        self.flush()
        self._tell(Keep())

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.flush()

    def _send_regularly(self) -> None:
        while not self._stopped.wait(self._interval):
            self.flush()

    def _take(self) -> Report | None:
        with self._lock:
            for shard in list(self._open):
                self._close_run(shard)
            through = self._through  # read once: `on_step` does not take the lock
            timed, self._times = self._times, []
            if not self._spans and not timed and through == self._sent_through:
                return None
            spans = sorted(self._spans, key=lambda span: span.first_step)
            report = Report(self._world, through, self._unsent, spans, packed(timed) if timed else None)
            self._sent_through, self._unsent, self._spans = through, {}, []
            return report

    def _close_run(self, shard: int) -> None:
        if span := self._open.pop(shard, None):
            first_step, seen, times = span
            self._spans.append(ShardSpan(first_step, len(times), shard, seen, np.array(times, np.float32)))

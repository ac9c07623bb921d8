"""Where the time of a worker's steps goes: how long they wait for data, and how long reading the data takes."""

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

from dp_ray.replica.loader_processes import end, started
from dp_ray.replica.step_clock import Part, StepClock

T = TypeVar("T")


class StepTimes:
    """The seconds of one worker's loop, in parts.

    `data_wait` is how long the loop waited for its next batch. `load` is how long reading and collating took: in the
    worker itself, or in its loader processes, all of them together. `clock` splits the steps into parts.
    """

    def __init__(self, clock: StepClock | None = None) -> None:
        self.clock = clock or StepClock()
        self.data_wait = 0.0
        self.load = 0.0
        self._began = time.perf_counter()
        self._told = 0.0

    def begin(self) -> None:
        """Begin the loop and its first step now: what was set up before counts nowhere."""
        self._began = time.perf_counter()
        self.clock.restart()

    def waiting(self, batches: Iterator[T]) -> Generator[T, None, None]:
        """The same batches; the time until each is there counts as `data_wait`. Closing it ends `batches` too."""
        end: Any = object()
        while True:
            began, before = time.perf_counter(), self.clock.enter(Part.DATA_WAIT)
            batch = next(batches, end)
            self.clock.enter(before)
            self.data_wait += time.perf_counter() - began
            if batch is end:
                return
            yield batch

    def new_data_wait(self) -> float:
        """The `data_wait` since the last call."""
        new, self._told = self.data_wait - self._told, self.data_wait
        return new

    def to_json(self) -> dict[str, float]:
        """All of it as a result shows it; `loop_seconds` is the whole time since the loop began."""
        seconds = {"loop": time.perf_counter() - self._began, "data_wait": self.data_wait, "load": self.load}
        return {f"{name}_seconds": round(value, 6) for name, value in seconds.items()}


class TimedReads(Dataset[Any]):
    """A dataset that says with what it reads how many seconds that took; `beside` tells those in the background."""

    def __init__(self, dataset: Any, beside: Callable[[], float] | None = None) -> None:
        self.dataset = dataset
        self.beside = beside

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, wanted: Any) -> tuple[float, Any]:
        """What the dataset gives, after the seconds."""
        began = time.perf_counter()
        read = self.dataset.__getitems__(wanted)
        return time.perf_counter() - began + (self.beside() if self.beside else 0.0), read


class TimedCollate:
    """A collate for what TimedReads gives; its batch follows the seconds of both."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, read: Any) -> tuple[float, Any]:
        """The seconds, and the batch."""
        began = time.perf_counter()
        batch = self.collate(read[1])
        return read[0] + time.perf_counter() - began, batch


class TimedLoader(Iterator[Any]):
    """The batches of a DataLoader of TimedReads and a TimedCollate; their seconds are added to `load`.

    It is no generator: after an error of the DataLoader, the next batch can be asked for. Use it in a `with` block,
    whose end calls `at_end` and ends the DataLoader's processes.
    """

    def __init__(self, loader: DataLoader[Any], times: StepTimes, at_end: Callable[[], None] = lambda: None) -> None:
        self._batches = started(loader)
        self._times = times
        self._at_end = at_end

    def __enter__(self) -> "TimedLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self._at_end()
        end(self._batches)

    def __next__(self) -> Any:
        seconds, batch = next(self._batches)
        self._times.load += seconds
        return batch


def share_of_wait(times: list[dict[str, float]]) -> float | None:
    """The share of the workers' loops in which they waited for data; None if no worker told its times."""
    whole = sum(one["loop_seconds"] for one in times)
    return round(sum(one["data_wait_seconds"] for one in times) / whole, 4) if whole else None

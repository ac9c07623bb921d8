"""What a step pays for what is told of it: its time split, TensorBoard's files, a tracker in a process, the gauges.

Each is on on one side and off on the other, with `workers: 0`, where the driver's threads work in the loop's process.
Both sides take turns in one process. CPU time is that of all threads of the process. A turn is long enough for a
tracker's requests, and ends when what it has caused is done.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ray

from benchmarks import training
from benchmarks.cluster import local_ray
from benchmarks.compare import at_most, compared, in_rounds
from benchmarks.measure import in_processes
from benchmarks.table import Row, time_text
from benchmarks.turns import Cost, take_turns
from dp_ray.cluster.gauges import exports_metrics, gauged
from dp_ray.monitor.console import Progressed
from dp_ray.monitor.tensorboard import TensorBoardWriter
from dp_ray.replica.step_clock import PARTS, TimedStep
from dp_ray.replica.world import World
from dp_ray.results.history import Logged
from dp_ray.results.shape_recorder import Report
from dp_ray.results.step_time_files import packed
from dp_ray.storage import Storage
from dp_ray.task.step_control import StepControl
from dp_ray.trackers.feed import Feed
from dp_ray.trackers.process import TrackerProcess
from dp_ray.trackers.run_trackers import about_run, end_all

MODEL = "linear"  # a step is little more than reading 1,024 samples
CHEAP = at_most(1.01)
SHORT, LONG = (5, 21, 51), (101, 11, 3)  # steps of a turn, rounds, and turns of a round
WARM = 2  # turns
IDLE_SECONDS, IDLE_PAIRS = 10.0, 5
Size = tuple[int, int, int]


def measure() -> Iterator[Row]:
    yield from _rows("its time split into parts", "split", SHORT)
    yield from _rows("TensorBoard's files", "tensorboard", LONG)
    if find_spec("wandb"):
        yield from _rows("a tracker in a process (wandb, offline)", "tracker", LONG)
    yield _gauges()


def _rows(what: str, name: str, size: Size) -> Iterator[Row]:
    """The CPU time of a step, and its wall time, with a part on and off."""
    (costs,) = in_processes(get_context("spawn"), _taking_turns, [(name, size)])
    for clock, of_step in (("cpu", "the CPU time of a step"), ("wall", "a step")):
        pairs = [(getattr(one, clock), getattr(other, clock)) for one, other in costs]
        where = f"metrics: {of_step}, 1 worker, a Linear of 8 thousand, {what}"
        yield compared(where, in_rounds(pairs, size[2]), time_text, "without", CHEAP)


def _taking_turns(name: str, size: Size, told: Any) -> None:
    """The process of both sides; puts what each pair of turns took into `told`."""
    block, rounds, in_round = size
    training.as_a_worker()
    training.STEPS = block * (WARM + rounds * in_round) + 1
    training.EPOCHS = -(-training.STEPS * training.BATCH // training.ROWS)
    with tempfile.TemporaryDirectory() as folder:
        told.put(SIDES[name](block, Path(folder))[WARM:])


def _split(block: int, folder: Path) -> list[tuple[Cost, Cost]]:
    world = World()
    split, unsplit = (partial(loop, MODEL, {}, world) for loop in (training.ours, training.unsplit))
    return take_turns(split, unsplit, block)


def _tensorboard(block: int, folder: Path) -> list[tuple[Cost, Cost]]:
    writer = TensorBoardWriter(Storage(str(folder)))
    costs = _logging(writer.add, lambda: None, block)
    writer.close()
    return costs


def _tracker(block: int, folder: Path) -> list[tuple[Cost, Cost]]:
    """A feed with the real package, whose process writes to a local folder."""
    run, sent = Storage(str(folder)), _Sent()
    about = about_run(training.job_of(MODEL, {}, World()).describe(), str(run))
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    feed = Feed("wandb", partial(_Watched, sent, "wandb", about, env), run, lambda line: print(line, file=sys.stderr))
    costs = _logging(partial(sent.add, feed), sent.wait, block)
    end_all([feed], "done", {}, 60.0)
    assert feed.is_done, "the tracker did not answer"
    return costs


class _Sent:
    """Which steps a feed was given, and which its tracker has."""

    def __init__(self) -> None:
        self.given = self.there = -1

    def add(self, feed: Feed, rows: Sequence[dict[str, Any]]) -> None:
        self.given = rows[-1]["step"]
        feed.add(rows)

    def wait(self) -> None:
        """Wait until the tracker has all steps."""
        until = time.monotonic() + 120
        while self.there < self.given:
            assert time.monotonic() < until, "the tracker does not answer"
            time.sleep(0.02)


class _Watched(TrackerProcess):
    """Notes which steps the tracker has."""

    def __init__(self, sent: _Sent, name: str, about: Mapping[str, Any], env: Mapping[str, str]) -> None:
        super().__init__(name, about, env)
        self._sent = sent

    def log(self, rows: Sequence[dict[str, Any]], at: float) -> None:
        super().log(rows, at)
        self._sent.there = rows[-1]["step"]


def _logging(
    add: Callable[[Sequence[dict[str, Any]]], None], drain: Callable[[], None], block: int
) -> list[tuple[Cost, Cost]]:
    """A loop whose rows of the history go to `add`, in turns with one whose rows go nowhere."""

    def send(what: Any) -> None:
        if isinstance(what, Logged):
            add(what.rows)

    def loop(control: StepControl, **keys: Any) -> None:
        training.ours(MODEL, {}, World(), control, **keys)

    return take_turns(partial(loop, send=send), loop, block, drain=drain)


SIDES: dict[str, Callable[[int, Path], list[tuple[Cost, Cost]]]] = {
    "split": _split,
    "tensorboard": _tensorboard,
    "tracker": _tracker,
}


def _gauges() -> Row:
    """The CPU time of a second in a driver that only waits, as a share of the CPU time that a busy core has."""
    with local_ray():
        assert exports_metrics(), f"Ray's nodes export no metrics: {ray.nodes()}"
        pairs = [(1 + _idle(is_gauged=True), 1 + _idle(is_gauged=False)) for _ in range(IDLE_PAIRS)]
    what = "metrics: the CPU time of a second, of a loop and of its driver with gauges"
    return compared(what, pairs, time_text, "without", CHEAP)


def _idle(is_gauged: bool) -> float:
    """The CPU seconds a second of this process, which waits, with or without gauges."""
    progress = _progress()
    began, cpu = time.perf_counter(), time.process_time()
    if is_gauged:
        with gauged("benchmark", progress, lambda: 0):
            time.sleep(IDLE_SECONDS)
    else:
        time.sleep(IDLE_SECONDS)
    return (time.process_time() - cpu) / (time.perf_counter() - began)


def _progress() -> Progressed:
    """The progress of a run with two workers and all gauges."""
    progress = Progressed("benchmark", steps=40, rows=400)
    progress.start([World(0), World(1)])
    progress.run(0)
    progress.advance(10, 100)
    progress.last = {"step": 9, "loss": 0.5, "accuracy": 0.5, "eval_loss": 0.5, "eval_accuracy": 0.5}
    for rank in range(2):
        times = packed([TimedStep(9, 5, [0.1] * len(PARTS))])
        progress.take(Report(World(rank), 9, {}, [], times), 5)
    return progress

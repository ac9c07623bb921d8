"""What a step pays for what is told of it: its time split, TensorBoard's files, a tracker in a process, the gauges.

All of it works in the loop's process here, as with `workers: 0`. The sharp rows add the CPU time that a part takes
for a step, measured alone over thousands of steps, to the CPU time of a step: on a busy machine a step itself varies
by more than a hundredth. The others are wall time: a loop with the part and one without take turns in one process,
in turns long enough for a tracker's requests.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import ray

from benchmarks import training
from benchmarks.cluster import local_ray
from benchmarks.compare import at_most, compared, in_rounds
from benchmarks.measure import in_processes
from benchmarks.table import Row, time_text
from benchmarks.turns import Cost, take_turns
from dp_ray.cluster.workers import exports_metrics, gauged
from dp_ray.engine.clock import PARTS, Part, StepClock, TimedStep
from dp_ray.engine.world import World
from dp_ray.messages import Logged, Report, StepControl
from dp_ray.monitor.console import Progress
from dp_ray.rundir.files import RESULT_JSON, RUN_JSON
from dp_ray.rundir.history import RECENT_SECONDS, RecentHistory
from dp_ray.storage import Storage
from dp_ray.system.threads import repeated
from dp_ray.telemetry.times import packed_steps
from dp_ray.trackers.feed import TRACKED_JSON, TRACKERS
from dp_ray.trackers.process import RunTrackers
from dp_ray.trackers.tensorboard import TensorBoardWriter

MODEL = "linear"  # a step is little more than reading 1,024 samples
CHEAP = at_most(1.01)
SHORT, LONG = (5, 21, 51), (101, 11, 3)  # steps of a turn, rounds, and turns of a round
WARM = 2  # turns
ALONE_STEPS, AT_ONCE, REPEATS = 2_000, 50, 7  # measured alone: steps, of which so many are told at once
IDLE_SECONDS, IDLE_PAIRS = 10.0, 5
Size = tuple[int, int, int]


def measure() -> Iterator[Row]:
    names = [name for name in SIDES if name != "tracker" or find_spec("wandb")]
    (step,) = in_processes(get_context("spawn"), _taking_turns, [("split", SHORT)])
    of_step = median(without.cpu for _, without in step)
    for name in names:
        (added,) = in_processes(get_context("spawn"), _alone, [(name,)])
        pairs = [(of_step + seconds, of_step) for seconds in added]
        where = f"metrics: the CPU time of a step, a Linear of 8 thousand, with that of {WHAT[name]}"
        yield compared(where, pairs, time_text, f"without, {time_text(median(added))} less", CHEAP)
    yield _gauges()
    for name in names:
        size = SHORT if name == "split" else LONG
        costs = step if name == "split" else in_processes(get_context("spawn"), _taking_turns, [(name, size)])[0]
        pairs = [(ours.wall, theirs.wall) for ours, theirs in costs]
        where = f"metrics: a step, 1 worker, a Linear of 8 thousand, with {WHAT[name]}"
        yield compared(where, in_rounds(pairs, size[2]), time_text, "without", CHEAP)


def _alone(name: str, told: Any) -> None:
    """The process that measures a part without a loop; puts the CPU seconds of a step, several times, into `told`."""
    training.as_a_worker()
    with tempfile.TemporaryDirectory() as folder:
        told.put(ALONE[name](Path(folder)))


def _split_alone(folder: Path) -> list[float]:
    """The marks of a step with one shard, and packing the steps of a report."""
    marks = (Part.DATA_WAIT, Part.OTHER, Part.HOST_TO_DEVICE, Part.FORWARD, Part.BACKWARD, Part.UPDATE, Part.OTHER)
    clock = StepClock()

    def run(first: int) -> None:
        timed = []
        for step in range(first, first + AT_ONCE):
            for part in (*marks, Part.EVALUATION, Part.OTHER, Part.CHECKPOINT, Part.OTHER):
                clock.enter(part)
            timed += clock.end_step(step, 1024)
        packed_steps(timed)

    return _spent(run)


def _tensorboard_alone(folder: Path) -> list[float]:
    writer = TensorBoardWriter(Storage(str(folder)))
    return _spent(lambda first: writer.add(_history(first)))


def _tracker_alone(folder: Path) -> list[float]:
    fed = _Fed(folder)
    spent = _spent(lambda first: fed.add(_history(first)), fed.wait)
    fed.end()
    return spent


def _spent(run: Callable[[int], object], drain: Callable[[], None] = lambda: None) -> list[float]:
    """The CPU seconds of a step, over ALONE_STEPS, REPEATS times after one that is not counted."""
    found = []
    for number in range(REPEATS + 1):
        began = time.process_time()
        for first in range(number * ALONE_STEPS, (number + 1) * ALONE_STEPS, AT_ONCE):
            run(first)
        drain()
        found.append((time.process_time() - began) / ALONE_STEPS)
    return found[1:]


def _history(first: int) -> list[dict[str, Any]]:
    """Rows of the history, as a training sends them twice a second."""
    names = ("loss", "learning_rate", "gradient_norm", "rows_per_second", "data_wait_seconds")
    values = dict.fromkeys(names, 0.123456789)
    return [{"step": step, "epoch": 0, "rows": 1024, **values} for step in range(first, first + AT_ONCE)]


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
    fed = _Fed(folder)
    costs = _logging(fed.add, fed.wait, block)
    fed.end()
    return costs


class _Fed:
    """A run whose rows the driver writes, for a tracker's process with the real package, which writes to a folder."""

    def __init__(self, folder: Path) -> None:
        self._run = Storage(str(folder))
        RUN_JSON.write(self._run, {"job": training.job_of(MODEL, {}, World()).describe()})
        env = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
        self._trackers = RunTrackers(["wandb"], self._run, env, lambda line: print(line, file=sys.stderr))
        self._recent = RecentHistory(self._run, is_followed=True)
        self._given = -1
        self._saved = ExitStack()
        self._saved.enter_context(repeated("recent history", RECENT_SECONDS, self._recent.save_if_due))

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        self._given = rows[-1]["step"]
        self._recent.add(rows)

    def wait(self) -> None:
        """Wait until the tracker has all steps."""
        until = time.monotonic() + 120
        while TRACKED_JSON.read(self._run.child(TRACKERS), "wandb.json").next_step <= self._given:
            assert time.monotonic() < until, "the tracker does not answer"
            time.sleep(0.1)

    def end(self) -> None:
        self._saved.close()
        RESULT_JSON.write(self._run, {"status": "done", "metrics": {}})
        assert not self._trackers.end(60.0), "the tracker did not answer"


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


ALONE: dict[str, Callable[[Path], list[float]]] = {
    "split": _split_alone,
    "tensorboard": _tensorboard_alone,
    "tracker": _tracker_alone,
}
WHAT = {
    "split": "its time split into parts",
    "tensorboard": "TensorBoard's files",
    "tracker": "a tracker in a process (wandb, offline)",
}


def _gauges() -> Row:
    """The CPU time of a second in a driver that only waits, as a share of the CPU time that a busy core has."""
    with local_ray():
        assert exports_metrics(), f"Ray's nodes export no metrics: {ray.nodes()}"
        pairs = [(1 + _idle(is_gauged=True), 1 + _idle(is_gauged=False)) for _ in range(IDLE_PAIRS)]
    what = "metrics: the CPU time of a second of work, with that of the driver's gauges"
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


def _progress() -> Progress:
    """The progress of a run with two workers and all gauges."""
    progress = Progress("benchmark", steps=40, rows=400)
    progress.start([World(0), World(1)])
    progress.run(0)
    progress.advance(10, 100)
    progress.last = {"step": 9, "loss": 0.5, "accuracy": 0.5, "eval_loss": 0.5, "eval_accuracy": 0.5}
    for rank in range(2):
        times = packed_steps([TimedStep(9, 5, [0.1] * len(PARTS))])
        progress.take(Report(World(rank), 9, times=times), 5)
    return progress

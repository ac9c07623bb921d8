"""What grows with the workers, and what does not: 4,096 of them against 8.

The plan of 10**9 rows, the steps of one worker, and the shape reports that the driver takes in a second: three
processes replay what the workers would send, through a real Channel, into the driver's own Monitor.
"""

import json
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import ray

from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import Goal, at_most, compared
from benchmarks.measure import alternate, seconds
from benchmarks.replay import MANY, STEPS_IN_A_REPORT, Replay
from benchmarks.table import Row, time_text
from dp_ray.cluster.channel import open_channel, receive
from dp_ray.job.job import Job
from dp_ray.monitor.console import Console
from dp_ray.monitor.monitor import Monitor, listening
from dp_ray.plan.costs import Plan
from dp_ray.plan.split import Split, Work
from dp_ray.rundir.claim import RunDir
from dp_ray.rundir.files import SHAPES
from dp_ray.storage import Storage
from dp_ray.tables import reading
from dp_ray.trackers.tensorboard import TensorBoardWriter

ROWS = 10**9
ROWS_IN_A_SHARD = 32
FEW = 8
STEPS = 20  # in a turn
TURNS = 500
REPLAYS = 3
SHARD_REPORTS = MANY * STEPS_IN_A_REPORT * 2
REPEATS = 5
QUICK_REPEATS = 25  # of what takes milliseconds
UNDER_A_TENTH = Goal("under 100 ms", 0.1, is_least=False, absolute=True)
FLAT = at_most(1.5, "flat: at most 1.5")
FAST = Goal("at least 200,000/s", 200_000, is_least=True, absolute=True)


def measure() -> Iterator[Row]:
    few = f"{FEW} workers"
    what = f"growth: plan of {ROWS:,} rows and its JSON, {MANY:,} workers"
    plans = alternate(partial(_plan_seconds, MANY), partial(_plan_seconds, FEW), QUICK_REPEATS)
    yield compared(what, plans, time_text, few, UNDER_A_TENTH)
    what = f"growth: shards of one worker's step, {MANY:,} workers"
    yield compared(what, _step_seconds(), time_text, few, FLAT)
    what = f"growth: shard reports that the driver takes, {MANY:,} workers"
    with local_ray(), scratch() as folder:
        rates = alternate(partial(_reports_a_second, folder, MANY), partial(_reports_a_second, folder, FEW), REPEATS)
    yield compared(what, rates, "{:,.0f}/s".format, few, FAST)


def _plan_seconds(workers: int) -> float:
    return seconds(lambda: json.dumps(Plan(_split(workers), workers, workers).to_json()))


def _step_seconds() -> list[tuple[float, float]]:
    """Seconds in which one of MANY and one of FEW workers find their shards of a step, in turns of STEPS steps."""
    many, few = (iter(Work(_split(workers), workers, workers // 2)) for workers in (MANY, FEW))
    return alternate(lambda: seconds(lambda: _walk(many)) / STEPS, lambda: seconds(lambda: _walk(few)) / STEPS, TURNS)


def _walk(steps: Iterator[object]) -> None:
    for _ in islice(steps, STEPS):
        pass


def _split(workers: int) -> Split:
    return Split(ROWS, workers * ROWS_IN_A_SHARD, workers)


def _reports_a_second(folder: Path, workers: int) -> float:
    """Shard reports a second, from the first message to the last row in the file."""
    steps = SHARD_REPORTS // workers
    job = Job.make({"model": "m:m", "dataset": "d:d", "batch_size": workers, "workers": workers}, "replay")
    channel = open_channel()
    replays = [
        ray.remote(Replay).options(num_cpus=0).remote(workers, range(first, workers, REPLAYS), steps)
        for first in range(REPLAYS)
    ]
    ray.get([replay.ready.remote(channel) for replay in replays])
    run = RunDir(Storage(str(folder)).child(f"{time.time_ns()}"), "", is_resumed=False)
    run.storage.create()
    split, tensorboard = Split(workers * steps, workers, workers), TensorBoardWriter(run.storage)
    monitor = Monitor(job, split, [tensorboard], Console("growth", quiet=True), False, run)
    started = time.perf_counter()
    with listening(monitor, lambda wait: receive(channel, wait)):
        ray.get([replay.send.remote(channel) for replay in replays])
    monitor.close()
    taken = time.perf_counter() - started
    with reading(run.storage, SHAPES) as file:
        assert file.metadata.num_rows == workers * steps, "not every shard report has arrived"
    for actor in (*replays, channel):
        ray.kill(actor)
    return workers * steps / taken

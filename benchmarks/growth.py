"""What grows with the workers, and what does not: 4,096 of them against 8.

The plan of 10**9 rows, the steps of one worker, and the shape reports that the driver takes in a second: three
processes replay what the workers would send, through a real Channel, into the driver's own Monitor.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import ray

from benchmarks.cluster import local_ray, scratch
from benchmarks.measure import alternate, medians, seconds
from benchmarks.replay import STEPS_IN_A_REPORT, Replay
from benchmarks.table import Row, share, time_text
from dp_ray.cluster.channel import open_channel, receive
from dp_ray.job import Job
from dp_ray.monitor.console import Console
from dp_ray.monitor.listening import listening
from dp_ray.monitor.monitor import Monitor
from dp_ray.monitor.tensorboard import TensorBoardWriter
from dp_ray.plan.plan import Plan
from dp_ray.plan.split import Split
from dp_ray.plan.work import Work
from dp_ray.results.shape_reports import ReportFile
from dp_ray.storage import Storage

ROWS = 10**9
ROWS_IN_A_SHARD = 32
MANY, FEW = 4_096, 8
STEPS = 1_000
REPLAYS = 3
SHARD_REPORTS = MANY * STEPS_IN_A_REPORT * 4
REPEATS = 3
QUICK_REPEATS = 25  # of what takes milliseconds
AT_MOST_PLAN_SECONDS = 0.1
FLAT = 1.5
AT_LEAST_A_SECOND = 200_000


def measure() -> list[Row]:
    with local_ray(), scratch() as folder:
        many_rate, few_rate = _medians(partial(_reports_a_second, folder), REPEATS)
    many_plan, few_plan = _medians(_plan_seconds, QUICK_REPEATS)
    many_steps, few_steps = _medians(_worker_seconds, QUICK_REPEATS)
    return [
        Row(
            f"growth: plan of {ROWS:,} rows and its JSON, {MANY:,} workers",
            time_text(many_plan),
            f"{time_text(few_plan)} {FEW} workers",
            share(many_plan, few_plan),
            f"under {time_text(AT_MOST_PLAN_SECONDS)}",
            many_plan < AT_MOST_PLAN_SECONDS,
        ),
        Row(
            f"growth: shards of one worker's {STEPS:,} steps, {MANY:,} workers",
            time_text(many_steps),
            f"{time_text(few_steps)} {FEW} workers",
            share(many_steps, few_steps),
            f"flat: at most {FLAT}",
            many_steps <= FLAT * few_steps,
        ),
        Row(
            f"growth: shard reports that the driver takes, {MANY:,} workers",
            f"{many_rate:,.0f}/s",
            f"{few_rate:,.0f}/s {FEW} workers",
            share(many_rate, few_rate),
            f"at least {AT_LEAST_A_SECOND:,}/s",
            many_rate >= AT_LEAST_A_SECOND,
        ),
    ]


def _medians(measured: Callable[[int], float], repeats: int) -> tuple[float, float]:
    """The medians for MANY and for FEW workers."""
    return medians(alternate(partial(measured, MANY), partial(measured, FEW), repeats))


def _plan_seconds(workers: int) -> float:
    return seconds(lambda: json.dumps(Plan(_split(workers), workers, workers).to_json()))


def _worker_seconds(workers: int) -> float:
    """Time of STEPS steps of one worker's shards."""
    work = iter(Work(_split(workers), workers, workers // 2))
    return seconds(lambda: [next(work) for _ in range(STEPS)])


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
    path = folder / "shapes.parquet"
    split, tensorboard = Split(workers * steps, workers, workers), TensorBoardWriter(Storage(str(folder)))
    monitor = Monitor(job, split, ReportFile(path), tensorboard, Console("growth", quiet=True), False)
    started = time.perf_counter()
    with listening(monitor, lambda: receive(channel)):
        ray.get([replay.send.remote(channel) for replay in replays])
    monitor.close()
    taken = time.perf_counter() - started
    assert pq.read_metadata(path).num_rows == workers * steps, "not every shard report has arrived"
    for actor in (*replays, channel):
        ray.kill(actor)
    return workers * steps / taken

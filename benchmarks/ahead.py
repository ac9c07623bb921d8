"""Parquet whose row groups are read ahead, against the same without: a worker whose model is busy on a device.

The model takes the same time for each batch and leaves the cores free. The store is a local disk, also one that
takes as long for each row group as an object store.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from benchmarks import feeds
from benchmarks.cluster import scratch
from benchmarks.compare import AHEAD, Goal, at_least, compared
from benchmarks.measure import alternate, seconds
from benchmarks.table import Row, rate_text
from dp_ray.data import Parquet
from dp_ray.data.blocks import CACHE_BYTES, Block
from dp_ray.engine.loads.loading import Source, load_steps
from dp_ray.job.job import Job
from dp_ray.job.plan import split_of
from dp_ray.plan.split import Work

STORE_SECONDS = 0.1  # for a row group
MODEL_SECONDS = 0.02  # for a batch
REPEATS = 7
STORES: list[tuple[str, float, Goal]] = [
    (f"a store of {STORE_SECONDS * 1000:.0f} ms", STORE_SECONDS, AHEAD),
    ("a local disk", 0.0, at_least(0.99)),
]
SHUFFLED: dict[str, Any] = {"shuffle": {"window_blocks": 4}}


class Slow(Parquet):
    """Waits before each row group."""

    wait = 0.0

    def _table(self, block: Block[int]) -> pa.Table:
        time.sleep(self.wait)
        return super()._table(block)


def measure() -> Iterator[Row]:
    torch.set_num_threads(1)
    with scratch() as folder:
        feeds.write_tables(folder / "tables", feeds.ROWS // 4)
        for store, wait, goal in STORES:
            yield _row(folder / "tables", f"in order, {store}", wait, goal, {})
            yield _row(folder / "tables", f"windows of 4 shuffled blocks, {store}", wait, goal, SHUFFLED)


def _row(folder: Path, what: str, wait: float, goal: Goal, keys: dict[str, Any]) -> Row:
    pairs = alternate(lambda: _rate(folder, wait, True, keys), lambda: _rate(folder, wait, False, keys), REPEATS)
    batch = f"{MODEL_SECONDS * 1000:.0f} ms a batch of {feeds.BATCH_SIZE:,}"
    return compared(f"data: Parquet, {what}, {batch}, read ahead", pairs, rate_text, "without", goal)


def _rate(folder: Path, wait: float, reads_ahead: bool, keys: dict[str, Any]) -> float:
    """Rows a second of an epoch."""
    dataset = Slow(folder, cache_bytes=CACHE_BYTES if reads_ahead else 0)
    dataset.wait = wait
    picks = {"inputs": ["x"], "target": "y", "batch_size": feeds.BATCH_SIZE, "workers": 1}
    job = Job.make({**feeds.KEYS, **picks, **keys}, "job")
    steps = load_steps(Source(job, dataset), Work(split_of(job, len(dataset)), 1, 0), feeds.CPU)

    def epoch() -> None:
        for _ in (shard for step in steps for shard in step.loaded):
            time.sleep(MODEL_SECONDS)

    return len(dataset) / seconds(epoch)

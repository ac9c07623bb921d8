"""The first batch in the middle of an epoch of a mixture, and what a position costs.

Of 10**8 rows of 16 sources, against accelerate's `skip_first_batches`, which skips a shuffled epoch of one dataset.

`python -m benchmarks.mixture SIDE` measures one side in a process of its own and prints JSON.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.compare import Goal, compared
from benchmarks.measure import alternate, in_process, seconds
from benchmarks.table import Row, time_text
from dp_ray.data import Mix
from dp_ray.engine.loading import Source, load_steps
from dp_ray.job.job import Job
from dp_ray.plan.mixture import MixtureOrder
from dp_ray.plan.order import EpochOrder, Order
from dp_ray.plan.split import Split, Work

ROWS, SOURCES, BATCH = 10**8, 16, 1024
REPEATS, TIMES = 3, 100
UNDER_100_MS = Goal("at most 100 ms", 0.1, is_least=False, absolute=True)
UNDER_5_US = Goal("at most 5 µs", 5e-6, is_least=False, absolute=True)


class Numbers(Dataset[Any]):
    """Rows that are their numbers."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return many rows at once."""
        return list(torch.tensor(indices).unbind())


def measure() -> list[Row]:
    first, second = (partial(in_process, "benchmarks.mixture", side) for side in ("dp_ray", "accelerate"))
    times = [(ours["seconds"], theirs["seconds"]) for ours, theirs in alternate(first, second, REPEATS)]
    what = f"mixture: first batch at 50 % of an epoch of {ROWS:,} shuffled rows of {SOURCES} sources"
    rows = [compared(what, times, time_text, "skip_first_batches, one dataset", UNDER_100_MS)]
    first, second = (partial(in_process, "benchmarks.mixture", side) for side in ("row", "row of one dataset"))
    each = [(ours["seconds"], theirs["seconds"]) for ours, theirs in alternate(first, second, REPEATS)]
    what = f"mixture: position to row, {SOURCES} sources of {10 * ROWS:,} rows, {BATCH:,} at once: a row"
    return [*rows, compared(what, each, time_text, "one dataset", UNDER_5_US)]


def _mixed(rows: int) -> Mix:
    total = SOURCES * (SOURCES + 1) // 2
    sources = {f"source-{number:02}": Numbers(rows // SOURCES) for number in range(SOURCES)}
    weights = {name: f"{number}/{total}" for number, name in enumerate(sources, 1)}
    return Mix(sources, weights, {"rows": rows})


def _ours() -> Callable[[], Any]:
    keys = {"task": "train", "model": "a:b", "loss": "a:b", "optimizer": "a:b", "shuffle": True, "workers": 0}

    def first_batch() -> Any:
        mix = _mixed(ROWS)
        job = Job.make({**keys, "dataset": mix, "batch_size": BATCH, "collate": torch.stack}, "mixture")
        split = Split(ROWS, BATCH, 1)
        work = Work(split, 1, 0, start=split.steps // 2)
        with closing(load_steps(Source(job, mix), work, torch.device("cpu"))) as steps:
            (shard,) = next(steps).loaded
        return shard.batch

    return first_batch


def _theirs() -> Callable[[], Any]:
    from accelerate import skip_first_batches

    def first_batch() -> Any:
        loader: DataLoader[Any] = DataLoader(Numbers(ROWS), BATCH, shuffle=True, collate_fn=torch.stack)
        return next(iter(skip_first_batches(loader, len(loader) // 2)))

    return first_batch


def _row(order: EpochOrder) -> float:
    taken = [seconds(lambda: order.indices(5 * ROWS, 5 * ROWS + BATCH)) for _ in range(TIMES)]
    return median(taken) / BATCH


SIDES: dict[str, Callable[[], float]] = {
    "dp_ray": lambda: seconds(_ours()),
    "accelerate": lambda: seconds(_theirs()),
    "row": lambda: _row(MixtureOrder(_mixed(10 * ROWS).mixture, seed=1)),
    "row of one dataset": lambda: _row(Order(10 * ROWS, seed=1)),
}

if __name__ == "__main__":
    print(json.dumps({"seconds": SIDES[sys.argv[1]]()}))

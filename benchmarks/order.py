"""The first sample of a shuffled epoch: time and memory.

Of 10**8 rows, against torch's DistributedSampler; of 10**10 rows in 10**5 blocks, against the full shuffle.

`python -m benchmarks.order SIDE` measures one side in a process of its own and prints JSON.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from benchmarks.compare import Goal, at_most, compared
from benchmarks.measure import alternate, grown, in_process, seconds
from benchmarks.table import Row, bytes_text, time_text
from dp_ray.job.job import Job
from dp_ray.job.plan import plan_of
from dp_ray.job.samples import order_of
from dp_ray.plan.order import Order

SAMPLES = 10**8
REPEATS = 3
TIMES_FASTER = 1_000
TIMES_SMALLER = 100
PAGE = 4096
ROWS, BLOCKS = 10**10, 10**5
UNDER_A_SECOND = Goal("under 1 s", 1.0, is_least=False, absolute=True)
UNDER_200_MB = Goal("under 200 MB", 200e6, is_least=False, absolute=True)


def measure() -> list[Row]:
    return [*_against_torch(), *_of_blocks()]


def _against_torch() -> list[Row]:
    times, sizes = _measured_in_turn("dp_ray", "torch")
    what = f"order: first sample of a shuffled epoch of {SAMPLES:,}: time"
    return [
        compared(what, times, time_text, "DistributedSampler", at_most(1 / TIMES_FASTER, f"1/{TIMES_FASTER:,}")),
        compared(
            "order: the same: memory",
            sizes,
            bytes_text,
            "DistributedSampler",
            at_most(1 / TIMES_SMALLER, f"1/{TIMES_SMALLER:,}"),
        ),
    ]


def _of_blocks() -> list[Row]:
    times, sizes = _measured_in_turn("blocks", "rows")
    what = f"order: plan and first sample of {ROWS:,} rows in {BLOCKS:,} shuffled blocks"
    against = "shuffle: true"
    return [
        compared(f"{what}: time", times, time_text, against, UNDER_A_SECOND),
        compared("order: the same: memory", sizes, bytes_text, against, UNDER_200_MB),
    ]


Pairs = list[tuple[float, float]]


def _measured_in_turn(ours: str, theirs: str) -> tuple[Pairs, Pairs]:
    """Seconds and bytes of two sides."""
    first, second = (partial(in_process, "benchmarks.order", side) for side in (ours, theirs))
    pairs = alternate(first, second, REPEATS)
    times = [(ours["seconds"], theirs["seconds"]) for ours, theirs in pairs]
    return times, [(ours["bytes"], theirs["bytes"]) for ours, theirs in pairs]


def _ours() -> Callable[[], int]:
    return lambda: Order(SAMPLES, seed=1)[0]


def _theirs() -> Callable[[], int]:
    samples = range(SAMPLES)
    sampler: DistributedSampler[int] = DistributedSampler(samples, num_replicas=2, rank=0, seed=1)  # type: ignore[arg-type]
    return lambda: next(iter(sampler))


class InBlocks:
    """A dataset of ROWS samples in BLOCKS blocks."""

    @property
    def block_rows(self) -> Any:
        """The size of each block."""
        return np.full(BLOCKS, ROWS // BLOCKS)

    def __len__(self) -> int:
        return ROWS


def _planned(shuffle: str | bool) -> Callable[[], int]:
    keys = {"task": "train", "model": "a:b", "dataset": "a:b", "loss": "a:b", "optimizer": "a:b"}

    def plan() -> int:
        job = Job.make({**keys, "batch_size": 4096, "shards": 64, "workers": 64, "shuffle": shuffle}, "order")
        plan_of(job, {"dataset": ROWS}).to_json()
        return order_of(job, InBlocks())[0]

    return plan


SIDES: dict[str, Callable[[], Callable[[], int]]] = {
    "dp_ray": _ours,
    "torch": _theirs,
    "blocks": partial(_planned, "blocks"),
    "rows": partial(_planned, True),
}


def _measured(first: Callable[[], int]) -> dict[str, float]:
    taken: list[float] = []
    size = grown(lambda: taken.append(seconds(first)))
    return {"seconds": taken[0], "bytes": max(PAGE, size)}


if __name__ == "__main__":
    print(json.dumps(_measured(SIDES[sys.argv[1]]())))

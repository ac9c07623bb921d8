"""The first sample of a shuffled epoch of 10**8: time and memory, against torch's DistributedSampler.

`python -m benchmarks.order SIDE` measures one side in a process of its own and prints JSON.
"""

import json
import sys
from collections.abc import Callable
from functools import partial

from torch.utils.data import DistributedSampler

from benchmarks.measure import alternate, grown, in_process, medians, seconds
from benchmarks.table import Row, bytes_text, share, time_text
from dp_ray.plan.order import Order

SAMPLES = 10**8
REPEATS = 3
TIMES_FASTER = 1_000
TIMES_SMALLER = 100
PAGE = 4096


def measure() -> list[Row]:
    ours, theirs = (partial(in_process, "benchmarks.order", side) for side in SIDES)
    pairs = alternate(ours, theirs, REPEATS)
    ours_seconds, theirs_seconds = medians([(one["seconds"], other["seconds"]) for one, other in pairs])
    ours_bytes, theirs_bytes = medians([(one["bytes"], other["bytes"]) for one, other in pairs])
    return [
        Row(
            f"order: first sample of a shuffled epoch of {SAMPLES:,}: time",
            time_text(ours_seconds),
            f"{time_text(theirs_seconds)} DistributedSampler",
            share(ours_seconds, theirs_seconds),
            f"1/{TIMES_FASTER:,}",
            ours_seconds * TIMES_FASTER <= theirs_seconds,
        ),
        Row(
            "order: the same: memory",
            bytes_text(ours_bytes),
            f"{bytes_text(theirs_bytes)} DistributedSampler",
            share(ours_bytes, theirs_bytes),
            f"1/{TIMES_SMALLER:,}",
            ours_bytes * TIMES_SMALLER <= theirs_bytes,
        ),
    ]


def _ours() -> Callable[[], int]:
    return lambda: Order(SAMPLES, seed=1)[0]


def _theirs() -> Callable[[], int]:
    samples = range(SAMPLES)
    sampler: DistributedSampler[int] = DistributedSampler(samples, num_replicas=2, rank=0, seed=1)  # type: ignore[arg-type]
    return lambda: next(iter(sampler))


SIDES = {"dp_ray": _ours, "torch": _theirs}


def _measured(first: Callable[[], int]) -> dict[str, float]:
    taken: list[float] = []
    size = grown(lambda: taken.append(seconds(first)))
    return {"seconds": taken[0], "bytes": max(PAGE, size)}


if __name__ == "__main__":
    print(json.dumps(_measured(SIDES[sys.argv[1]]())))

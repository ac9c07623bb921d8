"""The first sample of a shuffled epoch of 10**8: time and memory, against torch's DistributedSampler.

`python -m benchmarks.order SIDE` measures one side in a process of its own and prints JSON.
"""

import json
import sys
from collections.abc import Callable
from functools import partial

from torch.utils.data import DistributedSampler

from benchmarks.compare import at_most, compared
from benchmarks.measure import alternate, grown, in_process, seconds
from benchmarks.table import Row, bytes_text, time_text
from dp_ray.plan.order import Order

SAMPLES = 10**8
REPEATS = 3
TIMES_FASTER = 1_000
TIMES_SMALLER = 100
PAGE = 4096


def measure() -> list[Row]:
    ours, theirs = (partial(in_process, "benchmarks.order", side) for side in SIDES)
    pairs = alternate(ours, theirs, REPEATS)
    times = [(one["seconds"], other["seconds"]) for one, other in pairs]
    sizes = [(one["bytes"], other["bytes"]) for one, other in pairs]
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

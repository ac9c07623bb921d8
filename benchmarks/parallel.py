"""Calls of a `dp_ray.DataParallel` against bare calls of Ray that carry the same bytes.

A call with little data is compared with a call of as many bare actors, each with its rows and an answer. Inputs of
100 MB are compared with `ray.put` and `get` of them. Where there is a GPU, a warm call on it is compared with
`nn.DataParallel`'s.
"""

from typing import Any

import numpy as np
import ray
import torch
from torch import nn

import dp_ray
from benchmarks.cluster import local_ray
from benchmarks.compare import Goal, at_most, compared
from benchmarks.measure import alternate, seconds
from benchmarks.table import Row, time_text

WORKERS = 2
CALLS = 100  # of a side in turn
ROUNDS = 7
LARGE_ROUNDS = 9
AT_MOST_OF_ACTORS = 2.0
SOON = Goal("5 ms", 0.005, is_least=False, absolute=True)
AT_MOST_OF_PUT = 1.5
LARGE_ROWS, LARGE_COLUMNS = 25_000, 1_000  # float32: 100 MB


class FirstColumn(nn.Module):
    """Computes nothing, of which the time would count."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, 0]


class Echo:
    """A bare actor."""

    def call(self, rows: Any) -> Any:
        return rows


def measure() -> list[Row]:
    with local_ray(), torch.no_grad():
        rows = [_little(), _large()]
    return [*rows, *([_on_gpu()] if torch.cuda.is_available() else [])]


def _little() -> Row:
    inputs = torch.randn(30, 5)
    pieces = np.array_split(inputs.numpy(), WORKERS)
    actors = [ray.remote(Echo).options(num_cpus=0).remote() for _ in range(WORKERS)]
    with dp_ray.DataParallel(nn.Linear(5, 2), WORKERS, quiet=True) as model:

        def ours() -> float:
            return seconds(lambda: [model(inputs) for _ in range(CALLS)]) / CALLS

        def theirs() -> float:
            def calls() -> None:
                for _ in range(CALLS):
                    ray.get([actor.call.remote(rows) for actor, rows in zip(actors, pieces, strict=True)])

            return seconds(calls) / CALLS

        pairs = alternate(ours, theirs, ROUNDS + 1)[1:]
    what, who = f"parallel: a call of 30 rows on {WORKERS} workers", f"a call of {WORKERS} bare actors"
    return compared(what, pairs, time_text, who, at_most(AT_MOST_OF_ACTORS), SOON)


def _large() -> Row:
    inputs = torch.randn(LARGE_ROWS, LARGE_COLUMNS)
    with dp_ray.DataParallel(FirstColumn(), WORKERS, quiet=True) as model:
        pairs = alternate(
            lambda: seconds(lambda: model(inputs)),
            lambda: seconds(lambda: ray.get(ray.put(inputs.numpy()))),
            LARGE_ROUNDS + 2,
        )[2:]
    what = f"parallel: a call with 100 MB of inputs on {WORKERS} workers"
    return compared(what, pairs, time_text, "ray.put and get of them", at_most(AT_MOST_OF_PUT))


def _on_gpu() -> Row:
    inputs, bare = torch.randn(256, 1024, device="cuda"), nn.Linear(1024, 1024).cuda()
    theirs = nn.DataParallel(bare, [0])
    with local_ray(), torch.no_grad(), dp_ray.DataParallel(bare, 1, quiet=True) as model:

        def timed(called: nn.Module) -> float:
            def calls() -> None:
                for _ in range(CALLS):
                    called(inputs)
                torch.cuda.synchronize()

            return seconds(calls) / CALLS

        pairs = alternate(lambda: timed(model), lambda: timed(theirs), ROUNDS + 1)[1:]
    return compared("parallel: a warm call of 256 rows on one GPU", pairs, time_text, "nn.DataParallel", SOON)

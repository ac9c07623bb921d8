"""The shares of a run's time that go into each part of a step, of each worker and in all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dp_ray.results.arrow_numbers import Numbers, array_of, numbers
from dp_ray.results.step_times_table import STEP_PARTS
from dp_ray.text import percent

RARE = ("checkpoint", "evaluation")  # parts that few steps have
MUCH, LEAST = 10, 1e-4  # times the median, and seconds, from which on a step has such a part


@dataclass(frozen=True)
class WorkerSplit:
    """The steps of one worker: how many, their rows, and the seconds of each part."""

    rank: int
    node: str
    steps: int
    rows: int
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """The seconds of all parts."""
        return sum(self.seconds.values())


def worker_splits(table: pa.Table) -> list[WorkerSplit]:
    """Each worker's steps in a table of `read_step_times`, by rank; a rank that changed its node is there twice."""
    if not len(table):
        return []
    names = table["node"].combine_chunks().dictionary.to_pylist()
    rank, place = numbers(table["rank"]), numbers(table["node"])
    _, first, worker = np.unique(rank.astype(np.int64) * len(names) + place, return_index=True, return_inverse=True)
    steps, rows, *seconds = (
        np.bincount(worker, weights).tolist()
        for weights in (None, numbers(table["rows"]), *(numbers(table[part]) for part in STEP_PARTS))
    )
    found = [
        WorkerSplit(
            int(rank[row]),
            names[place[row]],
            steps[number],
            int(rows[number]),
            {part: each[number] for part, each in zip(STEP_PARTS, seconds, strict=True)},
        )
        for number, row in enumerate(first.tolist())
    ]
    return sorted(found, key=lambda one: (one.rank, one.node))


def shares_of(workers: Sequence[WorkerSplit]) -> dict[str, float]:
    """The share of each part in the workers' time; they add up to 1, up to rounding."""
    whole = sum(one.total for one in workers)
    return {
        part: round(sum(one.seconds[part] for one in workers) / whole, 4) if whole else 0.0 for part in STEP_PARTS
    }


def time_split(table: pa.Table) -> dict[str, Any] | None:
    """The shares of all workers together and of each, as `result.json` holds them; None without a step."""
    workers = worker_splits(table)
    if not workers:
        return None
    each = [{"rank": one.rank, "node": one.node, "shares": shares_of([one])} for one in workers]
    return {"all": shares_of(workers), "workers": each}


def split_line(split: Mapping[str, Any]) -> str:
    """The shares in one line, the largest first: `62 % data wait, 20 % forward, 18 % backward`."""
    shares = sorted(split["all"].items(), key=lambda item: -item[1])
    return ", ".join(f"{percent(share)} {part.replace('_', ' ')}" for part, share in shares if share >= 0.005)


def steady(table: pa.Table) -> pa.Table:
    """The steps that show where the time goes: those of the longest attempt, without what is done or imported once.

    That is in its first step and, if there are more of the kind, in those of its first checkpoint and evaluation.
    """
    if not len(table):
        return table
    attempt, step = numbers(table["attempt"]), numbers(table["step"])
    attempts, lengths = np.unique(attempt, return_counts=True)
    longest = attempt == attempts[lengths.argmax()]
    later = longest & (step > step[longest].min())
    once = [found for part in RARE for found in _first_of(step[later], numbers(table[part])[later])]
    later &= ~np.isin(step, once)
    return table.filter(array_of(later if later.any() else longest))


def _first_of(steps: Numbers, seconds: Numbers) -> list[int]:
    """The first of those few steps that have a part, of these seconds; none if they are not few, or but one."""
    known, which = np.unique(steps, return_inverse=True)
    most = np.zeros(len(known))
    np.maximum.at(most, which, seconds)
    usual = float(np.median(most)) if len(most) else 0.0
    having = np.flatnonzero(most > max(MUCH * usual, LEAST))
    return [int(known[having[0]])] if len(having) > 1 else []


def rows_per_second(table: pa.Table) -> float:
    """The rows that all workers of the table together ran in a second, without evaluations and checkpoints."""
    workers = worker_splits(table)
    seconds = [one.total - one.seconds["evaluation"] - one.seconds["checkpoint"] for one in workers]
    return sum(one.rows for one in workers) / max(seconds) if any(seconds) else 0.0

"""Say in words what limits a run, from the parts of its workers' steps: rules as pure functions.

Each rule gives a Verdict with the share of the time that it would save, or nothing. What is outside of the steps
comes first, then the rule with the largest share. Only keys of a job are advised.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyarrow as pa

from dp_ray.results.time_split import WorkerSplit, shares_of, steady, worker_splits
from dp_ray.text import listed, percent

SLOWER = 1.3  # times as long as the others' median
LOST = 0.15  # of a step, by one worker that is slower
EQUAL = 1.05  # rows of two workers count as equal up to this ratio
DATA, WAITING, OUTSIDE = 0.25, 0.25, 0.5
MOST_PROCESSES = 16
AT_THE_END = {
    "train": ", for the weights and the last checkpoint",
    "predict": ", for merging the outputs and proving that they are whole",
    "evaluate": "",
}
COMPARED = ("data_wait", "host_to_device", "forward", "backward", "update", "outputs")


@dataclass(frozen=True)
class Verdict:
    """What limits a run: a word for it, the share of the time that it costs, and a sentence."""

    kind: str
    share: float
    text: str


@dataclass(frozen=True)
class Outside:
    """The seconds of a whole run, and how many of them are before its first step and after its last."""

    seconds: float
    before: float
    after: float


@dataclass(frozen=True)
class Facts:
    """What the rules know of a run beside its steps.

    `starts_workers` is false within a session and without Ray. `outside` is None of a run that has not finished, or
    that several drivers ran.
    """

    task: str = "train"
    processes: int = 0
    starts_workers: bool = True
    outside: Outside | None = None


@dataclass(frozen=True)
class Limit:
    """A rule of one part of the step: from which share on it limits a run, and what is said with the share.

    If `is_of_one`, the worker with the largest share counts, for which the others wait; else all workers together.
    """

    kind: str
    part: str
    share: float
    says: str
    is_of_one: bool = False

    def verdict(self, workers: Sequence[WorkerSplit]) -> Verdict | None:
        """The verdict on the workers' steps; None below the limit."""
        groups = [[one] for one in workers] if self.is_of_one else [workers]
        share = max(shares_of(group)[self.part] for group in groups)
        return Verdict(self.kind, share, self.says.format(percent(share))) if share >= self.share else None


LIMITS = (
    Limit(
        "exchange",
        "exchange",
        0.25,
        "the exchange is the limit: {} of the step is summing gradients over the workers; "
        "a larger batch_size needs fewer exchanges, fewer workers make each cheaper",
    ),
    Limit(
        "checkpoint",
        "checkpoint",
        0.15,
        "the storage is the limit: {} of the time is waiting for checkpoints; "
        "raise checkpoint.every_steps or checkpoint.every_seconds, or use a faster storage",
        is_of_one=True,  # rank 0 alone writes checkpoints
    ),
    Limit(
        "evaluation",
        "evaluation",
        0.3,
        "evaluations are the limit: {} of the time; raise eval.every_steps or eval.every_epochs, or eval.batch_size",
    ),
    Limit(
        "outputs",
        "outputs",
        0.3,
        "writing is the limit: {} of the step is moving and writing outputs; "
        "keep less with outputs.keep, outputs.dtype or outputs.after, or use a faster storage",
    ),
)


def facts_of(job: Mapping[str, Any], outside: Outside | None = None, is_in_session: bool = False) -> Facts:
    """What a described job, as in `run.json`, tells the rules."""
    processes = (job.get("loader") or {}).get("processes", 0)
    return Facts(job.get("task", "train"), processes, job.get("workers") != 0 and not is_in_session, outside)


def verdict_of(table: pa.Table, facts: Facts) -> Verdict | None:
    """The verdict on a table of `read_step_times`; None without a step."""
    return decide(worker_splits(steady(table)), facts) if len(table) else None


def decide(workers: Sequence[WorkerSplit], facts: Facts) -> Verdict:
    """The verdict on the workers' steps."""
    found = [_slow_worker(workers), _data(workers, facts.processes), *(limit.verdict(workers) for limit in LIMITS)]
    largest = max(filter(None, found), key=lambda one: one.share, default=None)
    return _outside(facts) or largest or _waiting(workers) or _balanced(workers)


def _outside(facts: Facts) -> Verdict | None:
    """Most of the run's seconds are not in its steps."""
    if facts.outside is None or facts.outside.seconds <= 0:
        return None
    whole, before, after = facts.outside.seconds, facts.outside.before, facts.outside.after
    if facts.starts_workers and before >= OUTSIDE * whole:
        return Verdict(
            "start-up",
            before / whole,
            f"start-up is the limit: {percent(before / whole)} of {whole:.0f} s are before the first step; "
            "run several such jobs in one session (dp_ray.session), or a small one with workers: 0",
        )
    if after < OUTSIDE * whole:
        return None
    text = f"the end is the limit: {percent(after / whole)} of {whole:.0f} s are after the last step"
    return Verdict("end", after / whole, f"{text}{AT_THE_END[facts.task]}; use a faster storage")


def _slow_worker(workers: Sequence[WorkerSplit]) -> Verdict | None:
    """One worker that is slower than the others in one part, a row."""
    found = [verdict for part in COMPARED for one in workers if (verdict := _slower(one, part, workers)) is not None]
    return max(found, key=lambda one: one.share, default=None)


def _slower(one: WorkerSplit, part: str, workers: Sequence[WorkerSplit]) -> Verdict | None:
    others = [other for other in workers if other is not one and other.rows]
    if not others or not one.rows:
        return None
    mine, theirs = one.seconds[part] / one.rows, median(other.seconds[part] / other.rows for other in others)
    share = (mine - theirs) * one.rows / one.total if one.total else 0.0
    if share < LOST or mine < SLOWER * theirs:
        return None
    times = f"{mine / theirs:.1f} times" if theirs > 0.01 * mine else "much"
    alone = all(other.node != one.node for other in others)
    who, rows = f"worker {one.rank} on {one.node}", _rows_of([one, *others])
    if part == "data_wait":
        cause = "what its node reads from" if alone else "its processes, or its samples"
        text = f"{who} waits {times} longer for data than the others {rows}: {cause}, not the model"
        return Verdict("slow data of a worker", share, text)
    cause = "the node" if alone else "its device, or what else runs there"
    text = f"{who} is {times} slower in {part.replace('_', ' ')} than the others {rows}: {cause}, not the data"
    return Verdict("slow worker", share, text)


def _rows_of(workers: Sequence[WorkerSplit]) -> str:
    """With which rows workers are compared."""
    return "with equal rows" if _are_equal([one.rows / one.steps for one in workers]) else "for each row"


def _data(workers: Sequence[WorkerSplit], processes: int) -> Verdict | None:
    share = shares_of(workers)["data_wait"]
    if share < DATA:
        return None
    more = min(_processes_for(share, processes), MOST_PROCESSES)
    advice = f"try loader.processes: {more}"
    if processes >= more:
        advice = "store the samples so that they are read faster, or closer to the workers"
    text = f"loaders are the limit: {percent(share)} of the step is waiting for data, {advice}"
    return Verdict("loaders", share, text)


def _processes_for(wait: float, processes: int) -> int:
    """How many loader processes keep up with the rest of the step, if waiting for `processes` is this share of it."""
    rest = max(1e-6, 1 - wait)
    return max(processes + 1, math.ceil(round((processes or wait) / rest, 6)))


def _waiting(workers: Sequence[WorkerSplit]) -> Verdict | None:
    """The workers wait for each other, and no single one of them is slow a row."""
    share = shares_of(workers)["waiting"]
    if share < WAITING:
        return None
    most, least = max(workers, key=lambda one: one.rows), min(workers, key=lambda one: one.rows)
    why = "none of them is always the slowest: their steps differ, as with samples of different lengths"
    if not _are_equal([most.rows, least.rows]):
        why = (
            f"worker {most.rank} runs {most.rows} rows and worker {least.rank} {least.rows}: "
            "choose shards and batch_size as multiples of workers"
        )
    return Verdict("waiting", share, f"the workers wait for each other in {percent(share)} of the step; {why}")


def _balanced(workers: Sequence[WorkerSplit]) -> Verdict:
    shares = shares_of(workers)
    compute = round(shares["forward"] + shares["backward"], 4)
    if compute >= 0.5 or not any(shares.values()):
        both = "forward and backward" if shares["backward"] else "forward"
        return Verdict("balanced", 0.0, f"no part stands out: {percent(compute)} is {both}")
    largest = sorted(shares, key=lambda part: -shares[part])[:3]
    told = listed([f"{part.replace('_', ' ')} {percent(shares[part])}" for part in largest])
    return Verdict("balanced", 0.0, f"no part stands out: {told}")


def _are_equal(rows: Sequence[float]) -> bool:
    return max(rows) <= EQUAL * min(rows)

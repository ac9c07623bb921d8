"""Say in words what limits a run, from the parts of its workers' steps: rules as pure functions.

Each rule gives a Verdict with the share of the time that it would save, or nothing. The one with the largest share is
told. Only keys of a job are advised.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyarrow as pa

from dp_ray.results.time_split import WorkerSplit, shares_of, steady, worker_splits
from dp_ray.text import listed, percent

SLOWER = 1.3  # times as long as the others' median
LOST = 0.15  # of a step, by one worker that is slower
EQUAL = 1.05  # rows of two workers count as equal up to this ratio
DATA, EXCHANGE, CHECKPOINT, EVALUATION, OUTPUTS, WAITING, START = 0.25, 0.25, 0.15, 0.3, 0.3, 0.25, 0.5
MOST_PROCESSES = 16
COMPARED = ("data_wait", "host_to_device", "forward", "backward", "update", "outputs")


@dataclass(frozen=True)
class Verdict:
    """What limits a run: a word for it, the share of the time that it costs, and a sentence."""

    kind: str
    share: float
    text: str


@dataclass(frozen=True)
class Facts:
    """What the rules know of a run beside its steps.

    `seconds` are those of the whole run, None if its steps are of several drivers or it has not finished.
    """

    task: str = "train"
    processes: int = 0
    on_ray: bool = True
    seconds: float | None = None


def facts_of(job: Mapping[str, Any], seconds: float | None = None) -> Facts:
    """What a described job, as in `run.json`, tells the rules."""
    processes = (job.get("loader") or {}).get("processes", 0)
    return Facts(job.get("task", "train"), processes, job.get("workers") != 0, seconds)


def verdict_of(table: pa.Table, facts: Facts) -> Verdict | None:
    """The verdict on a table of `read_step_times`; None without a step."""
    if not len(table):
        return None
    loops = max(one.total for one in worker_splits(table))
    return decide(worker_splits(steady(table)), facts, loops)


def decide(workers: Sequence[WorkerSplit], facts: Facts, loops: float = 0.0) -> Verdict:
    """The verdict on the workers' steps; `loops` are the seconds of all steps of the run."""
    start = _start(facts, loops)
    found = [verdict for rule in RULES if (verdict := rule(workers, facts)) is not None]
    if start is not None:
        return start
    return max(found, key=lambda one: one.share) if found else _waiting(workers) or _balanced(workers)


def _start(facts: Facts, loops: float) -> Verdict | None:
    if facts.seconds is None or not facts.on_ray or not 0 < loops <= facts.seconds:
        return None
    share = 1 - loops / facts.seconds
    if share < START:
        return None
    text = (
        f"start-up is the limit: {percent(share)} of {facts.seconds:.0f} s are before the first step and after the "
        "last; run several such jobs in one session (dp_ray.session), or a small one with workers: 0"
    )
    return Verdict("start-up", share, text)


def _slow_worker(workers: Sequence[WorkerSplit], facts: Facts) -> Verdict | None:
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


def _data(workers: Sequence[WorkerSplit], facts: Facts) -> Verdict | None:
    share = shares_of(workers)["data_wait"]
    if share < DATA:
        return None
    more = min(_processes_for(share, facts.processes), MOST_PROCESSES)
    advice = f"try loader.processes: {more}"
    if facts.processes >= more:
        advice = "store the samples so that they are read faster, or closer to the workers"
    text = f"loaders are the limit: {percent(share)} of the step is waiting for data, {advice}"
    return Verdict("loaders", share, text)


def _processes_for(wait: float, processes: int) -> int:
    """How many loader processes keep up with the rest of the step, if waiting for `processes` is this share of it."""
    rest = max(1e-6, 1 - wait)
    return max(processes + 1, math.ceil(round((processes or wait) / rest, 6)))


def _exchange(workers: Sequence[WorkerSplit], facts: Facts) -> Verdict | None:
    share = shares_of(workers)["exchange"]
    if share < EXCHANGE:
        return None
    advice = "a larger batch_size needs fewer exchanges, fewer workers make each cheaper"
    text = f"the exchange is the limit: {percent(share)} of the step is summing gradients over the workers; {advice}"
    return Verdict("exchange", share, text)


def _checkpoint(workers: Sequence[WorkerSplit], facts: Facts) -> Verdict | None:
    """Rank 0 alone writes checkpoints, and the others wait for it."""
    share = max(shares_of([one])["checkpoint"] for one in workers)
    if share < CHECKPOINT:
        return None
    advice = "raise checkpoint.every_steps or checkpoint.every_seconds, or use a faster storage"
    text = f"the storage is the limit: {percent(share)} of the time is waiting for checkpoints; {advice}"
    return Verdict("checkpoint", share, text)


def _evaluation(workers: Sequence[WorkerSplit], facts: Facts) -> Verdict | None:
    share = shares_of(workers)["evaluation"]
    if share < EVALUATION:
        return None
    advice = "raise eval.every_steps or eval.every_epochs, or eval.batch_size"
    return Verdict("evaluation", share, f"evaluations are the limit: {percent(share)} of the time; {advice}")


def _outputs(workers: Sequence[WorkerSplit], facts: Facts) -> Verdict | None:
    share = shares_of(workers)["outputs"]
    if share < OUTPUTS:
        return None
    advice = "keep less with outputs.keep, outputs.dtype or outputs.after, or use a faster storage"
    text = f"writing is the limit: {percent(share)} of the step is moving and writing outputs; {advice}"
    return Verdict("outputs", share, text)


RULES: tuple[Callable[[Sequence[WorkerSplit], Facts], Verdict | None], ...] = (
    *(_slow_worker, _data, _exchange, _checkpoint, _evaluation, _outputs),
)


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

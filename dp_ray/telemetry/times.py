"""The time of each worker's steps: written while a run goes on, read, split into parts, and judged in words.

`times/part-N.parquet` has a row for each step of each worker: COLUMNS, and the seconds of each part of PARTS.
`reports.ReportTables` writes them on the driver. `read_step_times` leaves out what ran twice and tells waiting from
exchanging. `time_split` gives each part's share of the time. `judge` says what limits the run: four rules as pure
functions, each of which gives a Verdict with the share of the time that it would save, or nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from dp_ray.engine.clock import PARTS, TimedStep
from dp_ray.engine.world import World
from dp_ray.messages import TimedSteps
from dp_ray.storage import Storage
from dp_ray.tables import PartTable, array_of, array_of_named, numbers, read_table
from dp_ray.text import listed, percent

TIMES = "times"
PART = "part-{}.parquet"
ROWS_IN_A_PART = 1 << 16
COLUMNS = {
    "step": pa.int64(),
    "attempt": pa.int32(),  # the place in `world_sizes` of result.json
    "rank": pa.int32(),
    "node": pa.dictionary(pa.int32(), pa.string()),
    "rows": pa.int32(),  # that the worker ran in the step
}
SCHEMA = pa.schema([*COLUMNS.items(), *((name, pa.float32()) for name in PARTS)])
# All parts of a step: those that are written, and `waiting`, which is told from `exchange` here.
STEP_PARTS = (*PARTS[: PARTS.index("exchange") + 1], "waiting", *PARTS[PARTS.index("exchange") + 1 :])
RARE = ("checkpoint", "evaluation")  # parts that few steps have
MUCH, LEAST = 10, 1e-4  # times the median, and seconds, from which on a step has such a part
SLOWER = 1.3  # times as long as the others' median
LOST = 0.15  # of a step, by one worker that is slower
DATA, EXCHANGE, CHECKPOINT = 0.25, 0.25, 0.15  # shares from which on these limit a run
STANDS_OUT = 0.25  # from which on a part is named, though there is no rule for it
MOST_PROCESSES = 16
# A verdict is on so many seconds of steps. In less, the machine's pauses of some tenths of a second weigh as much as
# a limit, and what the advice costs cannot be saved.
JUDGED_FROM = 5.0
COMPARED = ("data_wait", "host_to_device", "forward", "backward", "update", "outputs")


def packed_steps(timed: Sequence[TimedStep]) -> TimedSteps:
    """Pack steps into arrays, to be sent."""
    steps = np.array([step.step for step in timed], np.int64)
    rows = np.array([step.rows for step in timed], np.int32)
    return TimedSteps(steps, rows, np.array([step.seconds for step in timed], np.float32))


def step_time_parts(run: Storage) -> PartTable:
    """Return the table of a run's step times, to which rows can be added."""
    return PartTable(run.child(TIMES), PART, ROWS_IN_A_PART, compression="zstd", use_dictionary=["node"])


def times_table(attempt: int, world: World, timed: TimedSteps) -> pa.Table:
    """Return the steps of a worker as rows of the table; attempts of the run count from 0."""
    here = np.zeros(len(timed.steps), np.int32)
    before = [array_of(column) for column in (timed.steps, here + np.int32(attempt), here + np.int32(world.rank))]
    after = [array_of(column) for column in (timed.rows, *timed.seconds.T)]
    return pa.Table.from_arrays([*before, array_of_named(here, [world.node]), *after], schema=SCHEMA)


def read_step_times(run: Storage, newest: int | None = None) -> pa.Table:
    """Read the seconds of each part of each step of each worker: COLUMNS and STEP_PARTS, ordered by step and rank.

    A step that ran twice is there as it ran last. A row's parts add up to its worker's whole step. The table has no
    rows if the run has no such files. `newest` reads only so many files, those of the last steps. Raises StorageError
    if a file is damaged.
    """
    folder = run.child(TIMES)
    names = list(folder.numbered(PART))
    tables = [read_table(folder, name, SCHEMA) for name in names[-(newest or len(names)) :]]
    whole = pa.concat_tables([pa.Table.from_batches([], SCHEMA), *tables]).unify_dictionaries()
    kept = _last_runs(*(numbers(whole.column(name)) for name in ("step", "attempt", "rank")))
    return _with_waiting(whole.take(array_of(kept)))


def _last_runs(
    step: np.ndarray[Any, Any], attempt: np.ndarray[Any, Any], rank: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return the places of the rows to keep: of each step those of its newest attempt, ordered by step and rank."""
    numbers = (step * (attempt.max(initial=0) + 1) + attempt) * (rank.max(initial=0) + 1) + rank
    order = np.argsort(numbers, kind="stable")  # fast for what is nearly ordered
    numbers, step, attempt = numbers[order], step[order], attempt[order]
    ends = np.flatnonzero(np.diff(step, append=-1))
    newest = np.repeat(attempt[ends], np.diff(ends, prepend=-1))
    kept: np.ndarray[Any, Any] = order[(attempt == newest) & (np.diff(numbers, append=-1) != 0)]
    return kept


def _with_waiting(table: pa.Table) -> pa.Table:
    """Tell waiting for late workers from exchanging.

    An exchange ends at about the same moment on all workers. So the worker that arrives last has the shortest one, in
    which it waits for nobody; what the others have beyond that is waiting. No two workers' clocks are compared.
    """
    exchange, step = numbers(table.column("exchange")), numbers(table.column("step"))
    begins = np.flatnonzero(np.diff(step, prepend=-1))
    shortest = np.minimum.reduceat(exchange, begins) if len(begins) else exchange
    own = np.repeat(shortest, np.diff(np.append(begins, len(step))))
    named = {name: table.column(name) for name in table.column_names}
    named |= {"exchange": array_of(own.astype(np.float32)), "waiting": array_of((exchange - own).astype(np.float32))}
    names = [*COLUMNS, *STEP_PARTS]
    return pa.Table.from_arrays([named[name] for name in names], names=names)


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
    """Sum up each worker's steps in a table of `read_step_times`, by rank; twice for a rank that changed its node."""
    if not len(table):
        return []
    # Not by `group_by`, which imports pandas.
    names = table["node"].combine_chunks().dictionary.to_pylist()
    rank, place = numbers(table["rank"]), numbers(table["node"])
    _, first, worker = np.unique(rank.astype(np.int64) * len(names) + place, return_index=True, return_inverse=True)
    summed = [None, *(numbers(table[name]) for name in ("rows", *STEP_PARTS))]
    steps, rows, *seconds = (np.bincount(worker, weights).tolist() for weights in summed)
    splits = [
        WorkerSplit(
            int(rank[row]),
            names[place[row]],
            steps[number],
            int(rows[number]),
            {part: each[number] for part, each in zip(STEP_PARTS, seconds, strict=True)},
        )
        for number, row in enumerate(first.tolist())
    ]
    return sorted(splits, key=lambda worker: (worker.rank, worker.node))


def shares_of(workers: Sequence[WorkerSplit]) -> dict[str, float]:
    """Return the share of each part in the workers' time; they add up to 1, up to rounding."""
    whole = sum(worker.total for worker in workers)
    return {
        part: round(sum(worker.seconds[part] for worker in workers) / whole, 4) if whole else 0.0
        for part in STEP_PARTS
    }


def time_split(table: pa.Table) -> dict[str, Any] | None:
    """Return the shares of all workers together and of each in a table of `read_step_times`; None without a step.

    `result.json` holds those of its `steady` steps.
    """
    workers = worker_splits(table)
    if not workers:
        return None
    each = [{"rank": worker.rank, "node": worker.node, "shares": shares_of([worker])} for worker in workers]
    return {"all": shares_of(workers), "workers": each}


def split_line(split: Mapping[str, Any]) -> str:
    """Format the shares in one line, the largest first: `62 % data wait, 20 % forward, 18 % backward`."""
    shares = sorted(split["all"].items(), key=lambda item: -item[1])
    return ", ".join(f"{percent(share)} {part.replace('_', ' ')}" for part, share in shares if share >= 0.005)


def steady(table: pa.Table) -> pa.Table:
    """Return the steps that show where the time goes: of the longest attempt, without what is done or imported once.

    That is in its first step and, if there are more of the kind, in those of its first checkpoint and evaluation.
    """
    if not len(table):
        return table
    attempt, step = numbers(table["attempt"]), numbers(table["step"])
    attempts, lengths = np.unique(attempt, return_counts=True)
    longest = attempt == attempts[lengths.argmax()]
    later = longest & (step > step[longest].min())
    once: list[int] = []
    for part in RARE:
        # The first of those few steps that have the part; none if they are many, or but one.
        known, which = np.unique(step[later], return_inverse=True)
        most = np.zeros(len(known))
        np.maximum.at(most, which, numbers(table[part])[later])
        usual = float(np.median(most)) if len(most) else 0.0
        having = np.flatnonzero(most > max(MUCH * usual, LEAST))
        if len(having) > 1:
            once.append(int(known[having[0]]))
    later &= ~np.isin(step, once)
    return table.filter(array_of(later if later.any() else longest))


def rows_per_second(table: pa.Table) -> float:
    """Return the rows that all workers together ran in a second, without evaluations and checkpoints."""
    workers = worker_splits(table)
    seconds = [worker.total - worker.seconds["evaluation"] - worker.seconds["checkpoint"] for worker in workers]
    return sum(worker.rows for worker in workers) / max(seconds) if any(seconds) else 0.0


@dataclass(frozen=True)
class Verdict:
    """A limit of a run: a word for it, the share of the time that it costs, and a sentence."""

    kind: str
    share: float
    text: str


def verdict_of(table: pa.Table, job: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict on a table of `read_step_times`, of a described job; None without a step."""
    processes = (job.get("loader") or {}).get("processes", 0)
    return judge(worker_splits(steady(table)), processes) if len(table) else None


def judge(workers: Sequence[WorkerSplit], processes: int = 0) -> Verdict:
    """Return the verdict on the workers' steps, whose data came from so many processes of each.

    Of the four rules, the one with the largest share counts. Only keys of a job are advised. Steps of less than
    `JUDGED_FROM` seconds are too few to judge.
    """
    shares = shares_of(workers)
    seconds = max(worker.total for worker in workers)
    if seconds < JUDGED_FROM:
        took = f"the steps behind these shares took {seconds:.2g} s, a verdict takes {JUDGED_FROM:g} s"
        return Verdict("short", 0.0, f"too short to judge: {took}")
    verdicts = [_slow_worker(workers), _data(shares["data_wait"], processes)]
    verdicts += [_exchange(shares["exchange"]), _storage(workers)]
    largest = max(filter(None, verdicts), key=lambda verdict: verdict.share, default=None)
    return largest or _no_limit(shares)


def _slow_worker(workers: Sequence[WorkerSplit]) -> Verdict | None:
    """Return the verdict on the worker that costs the others most by being slower than they in a part, a row."""
    found = []
    for worker in (worker for worker in workers if worker.rows and worker.total):
        others = [other for other in workers if other is not worker and other.rows]
        for part in COMPARED if others else ():
            mine = worker.seconds[part] / worker.rows
            theirs = median(other.seconds[part] / other.rows for other in others)
            share = (mine - theirs) * worker.rows / worker.total
            if share >= LOST and mine >= SLOWER * theirs:
                times = f"{mine / theirs:.1f} times" if theirs > 0.01 * mine else "much"
                look = "what its node reads from" if part == "data_wait" else "its node, and what else runs there"
                text = f"worker {worker.rank} on {worker.node} is {times} slower in {part.replace('_', ' ')}"
                text += f" than the others for each row: look at {look}"
                found.append(Verdict("slow worker", share, text))
    return max(found, key=lambda verdict: verdict.share, default=None)


def _data(share: float, processes: int) -> Verdict | None:
    if share < DATA:
        return None
    # So many keep up with the rest of the step, if `processes` of them leave this share of it waiting.
    needed = math.ceil(round((processes or share) / max(1e-6, 1 - share), 6))
    more = min(max(processes + 1, needed), MOST_PROCESSES)
    advice = f"try loader.processes: {more}"
    if processes >= more:
        advice = "store the samples so that they are read faster, or closer to the workers"
    text = f"loaders are the limit: {percent(share)} of the step is waiting for data, {advice}"
    return Verdict("loaders", share, text)


def _exchange(share: float) -> Verdict | None:
    if share < EXCHANGE:
        return None
    text = f"the exchange is the limit: {percent(share)} of the step is summing gradients over the workers; "
    text += "a larger batch_size needs fewer exchanges, fewer workers make each cheaper"
    return Verdict("exchange", share, text)


def _storage(workers: Sequence[WorkerSplit]) -> Verdict | None:
    # Rank 0 alone writes checkpoints, so that its share counts, and not that of all workers.
    share = max(shares_of([worker])["checkpoint"] for worker in workers)
    if share < CHECKPOINT:
        return None
    text = f"the storage is the limit: {percent(share)} of the time is waiting for checkpoints; "
    text += "raise checkpoint.every_steps or checkpoint.every_seconds, or use a faster storage"
    return Verdict("checkpoint", share, text)


def _no_limit(shares: Mapping[str, float]) -> Verdict:
    """Return what the time goes to, where no rule has an advice: the model's work, or the largest parts."""
    if max(share for part, share in shares.items() if part not in ("forward", "backward")) < STANDS_OUT:
        both = "forward and backward" if shares["backward"] else "forward"
        compute = round(shares["forward"] + shares["backward"], 4)
        return Verdict("balanced", 0.0, f"no part stands out: {percent(compute)} is {both}")
    largest = sorted(shares, key=lambda part: -shares[part])[:3]
    parts = listed([f"{part.replace('_', ' ')} {percent(shares[part])}" for part in largest])
    return Verdict("parts", 0.0, f"the largest parts: {parts}")

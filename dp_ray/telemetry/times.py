"""The time of each worker's steps: written while a run goes on, read, split into parts, and judged in words.

`times/part-N.parquet` has a row for each step of each worker: COLUMNS, and the seconds of each part of PARTS.
`reports.ReportTables` writes them on the driver. `read_step_times` leaves out what ran twice and tells waiting from
exchanging. `time_split` gives each part's share of the time. `decide` says what limits the run: rules as pure
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
EQUAL = 1.05  # rows of two workers count as equal up to this ratio
DATA, WAITING, OUTSIDE = 0.25, 0.25, 0.5  # shares from which on these limit a run
MOST_PROCESSES = 16
# A verdict is on so many seconds: of the run on its start and end, of its steps on all else. In less, the machine's
# pauses of some tenths of a second weigh as much as a limit, and what the advice costs cannot be saved.
JUDGED_FROM = 5.0
AT_THE_END = {
    "train": ", for the weights and the last checkpoint",
    "predict": ", for merging the outputs and proving that they are whole",
    "evaluate": "",
}
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


@dataclass(frozen=True)
class Outside:
    """The seconds of a whole run, and how many of them are before its first step and after its last."""

    seconds: float
    before: float
    after: float


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that the rules need beside its steps.

    `starts_workers` is false within a session and without Ray. `outside` is None of a run that has not finished, or
    that several drivers ran.
    """

    task: str = "train"
    processes: int = 0
    starts_workers: bool = True
    outside: Outside | None = None


# Of a part of the step: the share from which on it limits a run, and a sentence for that share.
LIMITS = {
    "exchange": (
        0.25,
        "the exchange is the limit: {} of the step is summing gradients over the workers; "
        "a larger batch_size needs fewer exchanges, fewer workers make each cheaper",
    ),
    "checkpoint": (
        0.15,
        "the storage is the limit: {} of the time is waiting for checkpoints; "
        "raise checkpoint.every_steps or checkpoint.every_seconds, or use a faster storage",
    ),
    "evaluation": (
        0.3,
        "evaluations are the limit: {} of the time; raise eval.every_steps or eval.every_epochs, or eval.batch_size",
    ),
    "outputs": (
        0.3,
        "writing is the limit: {} of the step is moving and writing outputs; "
        "keep less with outputs.keep, outputs.dtype or outputs.after, or use a faster storage",
    ),
}
OF_RANK_0 = "checkpoint"  # it alone writes checkpoints, so that its share counts, and not that of all workers


def facts_of(job: Mapping[str, Any], outside: Outside | None = None, starts_workers: bool = True) -> RunFacts:
    """Return the facts of a described job, as in `run.json`."""
    processes = (job.get("loader") or {}).get("processes", 0)
    return RunFacts(job.get("task", "train"), processes, job.get("workers") != 0 and starts_workers, outside)


def verdict_of(table: pa.Table, facts: RunFacts) -> Verdict | None:
    """Return the verdict on a table of `read_step_times`; None without a step."""
    return judge(worker_splits(steady(table)), facts) if len(table) else None


def judge(workers: Sequence[WorkerSplit], facts: RunFacts) -> Verdict:
    """Return the verdict on the workers' steps.

    What is outside of the steps comes first, then the rule with the largest share. Only keys of a job are advised.
    Steps of less than `JUDGED_FROM` seconds are too few to judge.
    """
    verdicts = [_slower(worker, part, workers) for part in COMPARED for worker in workers]
    verdicts += [_data(workers, facts.processes), *(_limited(part, workers) for part in LIMITS)]
    largest = max(filter(None, verdicts), key=lambda verdict: verdict.share, default=None)
    return _outside(facts) or _short(workers) or largest or _waiting(workers) or _balanced(workers)


def _outside(facts: RunFacts) -> Verdict | None:
    """Return the verdict on a run most of whose seconds are not in its steps."""
    if facts.outside is None or facts.outside.seconds < JUDGED_FROM:
        return None
    whole = facts.outside.seconds
    before, after = facts.outside.before, facts.outside.after
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


def _short(workers: Sequence[WorkerSplit]) -> Verdict | None:
    """Return the verdict on steps that are too few to judge."""
    seconds = max(worker.total for worker in workers)
    if seconds >= JUDGED_FROM:
        return None
    text = (
        f"too short to judge: the steps behind these shares took {seconds:.2g} s, a verdict takes {JUDGED_FROM:g} s"
    )
    return Verdict("short", 0.0, text)


def _limited(part: str, workers: Sequence[WorkerSplit]) -> Verdict | None:
    """Return the verdict on a part of the step; None below its limit."""
    limit, says = LIMITS[part]
    groups = [[worker] for worker in workers] if part == OF_RANK_0 else [workers]
    share = max(shares_of(group)[part] for group in groups)
    return Verdict(part, share, says.format(percent(share))) if share >= limit else None


def _slower(worker: WorkerSplit, part: str, workers: Sequence[WorkerSplit]) -> Verdict | None:
    """Return the verdict on a worker that is slower than the others in a part, a row; None if it is not."""
    others = [other for other in workers if other is not worker and other.rows]
    if not others or not worker.rows:
        return None
    mine, theirs = worker.seconds[part] / worker.rows, median(other.seconds[part] / other.rows for other in others)
    share = (mine - theirs) * worker.rows / worker.total if worker.total else 0.0
    if share < LOST or mine < SLOWER * theirs:
        return None
    times = f"{mine / theirs:.1f} times" if theirs > 0.01 * mine else "much"
    alone = all(other.node != worker.node for other in others)
    who = f"worker {worker.rank} on {worker.node}"
    rows = "with equal rows" if _are_equal([each.rows / each.steps for each in [worker, *others]]) else "for each row"
    if part == "data_wait":
        cause = "what its node reads from" if alone else "its processes, or its samples"
        text = f"{who} waits {times} longer for data than the others {rows}: {cause}, not the model"
        return Verdict("slow data of a worker", share, text)
    cause = "the node" if alone else "its device, or what else runs there"
    text = f"{who} is {times} slower in {part.replace('_', ' ')} than the others {rows}: {cause}, not the data"
    return Verdict("slow worker", share, text)


def _data(workers: Sequence[WorkerSplit], processes: int) -> Verdict | None:
    share = shares_of(workers)["data_wait"]
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


def _waiting(workers: Sequence[WorkerSplit]) -> Verdict | None:
    """Return the verdict on workers that wait for each other, though no single one of them is slow a row."""
    share = shares_of(workers)["waiting"]
    if share < WAITING:
        return None
    most, least = max(workers, key=lambda worker: worker.rows), min(workers, key=lambda worker: worker.rows)
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
    parts = listed([f"{part.replace('_', ' ')} {percent(shares[part])}" for part in largest])
    return Verdict("balanced", 0.0, f"no part stands out: {parts}")


def _are_equal(rows: Sequence[float]) -> bool:
    return max(rows) <= EQUAL * min(rows)

"""Put the workers' shape reports in order, on the driver, and write them as Parquet.

`Collector` orders them and passes a step on as soon as all workers have finished it, so memory does not grow with the
number of steps. `ReportFile` is the table of a whole run. It also keeps the reports of committed steps while the run
goes on, so that they survive a killed driver.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dp_ray.engine.world import World
from dp_ray.errors import StorageError
from dp_ray.messages import Report, ShardSpan, Sizes
from dp_ray.plan.split import Done, Shard
from dp_ray.storage import Storage
from dp_ray.tables import PartTable, array_of, array_of_texts, reading, write_table
from dp_ray.telemetry.shapes import ShardReport, decode_sizes

ROWS_IN_A_GROUP = 1 << 16
PENDING_SPANS = 1 << 12  # of one worker; beyond that, times are averaged
REPORTS = "reports"
PIECE = "piece-{}.parquet"
ROWS_IN_A_PIECE = 1 << 12  # it is written again with each commit, until it is full
PENDING = "pending.parquet"


class ReportColumns(NamedTuple):
    """Shard reports in columns, ordered by step and shard; `seen` and `world` index the Collector's lists."""

    step: np.ndarray[Any, np.dtype[np.int64]]
    shard: np.ndarray[Any, np.dtype[np.int32]]
    world: np.ndarray[Any, np.dtype[np.int32]]
    seen: np.ndarray[Any, np.dtype[np.int32]]
    milliseconds: np.ndarray[Any, np.dtype[np.float32]]

    def __len__(self) -> int:
        return len(self.step)

    def where(self, keep: np.ndarray[Any, np.dtype[Any]]) -> "ReportColumns":
        """Return the rows that a boolean mask or an array of indices selects."""
        return ReportColumns(*(column[keep] for column in self))


@dataclass(eq=False)
class Collector:
    """The reports of all workers, in order: a step is passed on as soon as every worker has finished it.

    A step that a later attempt repeats is passed on once. `on_rows` gets each ordered block; its `seen` and `world`
    columns index `Collector.seen` and `Collector.worlds`.
    """

    on_rows: Callable[["Collector", ReportColumns], None]
    seen: list[Sizes] = field(default_factory=list, init=False)
    worlds: list[World] = field(default_factory=list, init=False)
    _emitted: int = field(default=-1, init=False)  # the last step that was passed on
    _through: dict[int, int] = field(default_factory=dict, init=False)  # by rank, the last step that it has finished
    _workers: dict[int, int] = field(default_factory=dict, init=False)  # by rank: an index of `worlds`
    _pending: dict[int, deque[ShardSpan]] = field(default_factory=dict, init=False)  # by worker
    # By worker, how many spans may be pending before they are folded.
    _limit: dict[int, int] = field(default_factory=dict, init=False)
    # By worker and its own number, an index of `seen`.
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _known: dict[Sizes, int] = field(default_factory=dict, init=False)

    def begin(self, worlds: Sequence[World]) -> None:
        """Start an attempt with these workers; the reports of earlier attempts stay."""
        self._through = {world.rank: -1 for world in worlds}
        for world in worlds:
            self._workers[world.rank] = self._join(world)

    def restore(self, spans: Sequence[tuple[World, Sizes, ShardSpan]]) -> None:
        """Take in the reports of earlier attempts, whose workers are gone, ordered by first step."""
        workers: dict[World, int] = {}
        for world, seen, span in spans:
            if world not in workers:
                workers[world] = self._join(world)
            self._pending[workers[world]].append(span._replace(seen=self._number(seen)))

    def _join(self, world: World) -> int:
        """Add a worker of an attempt; return its index."""
        worker = len(self.worlds)
        self.worlds.append(world)
        self._pending[worker] = deque()
        self._limit[worker] = PENDING_SPANS
        return worker

    def _number(self, seen: Sizes) -> int:
        """Return the index of these sizes, which are added if they are new."""
        if seen not in self._known:
            self._known[seen] = len(self.seen)
            self.seen.append(seen)
        return self._known[seen]

    def take(self, report: Report) -> None:
        """Take in a report of a worker of the current attempt."""
        rank = report.world.rank
        worker = self._workers[rank]
        for number, seen in report.seen.items():
            self._numbers[worker, number] = self._number(seen)
        pending = self._pending[worker]
        pending.extend(span._replace(seen=self._numbers[worker, span.seen]) for span in report.spans)
        if len(pending) > self._limit[worker]:  # the worker is far ahead of the others
            self._pending[worker] = _fold(pending)
            self._limit[worker] = max(PENDING_SPANS, 2 * len(self._pending[worker]))
        self._through[rank] = report.through

    def rows_of(self, rank: int, span: ShardSpan) -> int:
        """Return the number of rows in a span that `rank` of the current attempt reported."""
        return span.num_steps * self.seen[self._numbers[self._workers[rank], span.seen]].rows

    def emit(self) -> None:
        """Pass on all steps that every worker has finished."""
        ready = min(self._through.values(), default=-1)
        if ready > self._emitted:
            self._emit(ready)
            self._emitted = ready

    def pending(self) -> ReportColumns | None:
        """Return the reports that are not passed on yet, None if there are none; they stay pending."""
        return self._unpassed([(worker, span) for worker, pending in self._pending.items() for span in pending])

    def close(self) -> None:
        """Pass on everything, also steps that some workers have not finished."""
        self._emit(1 << 62)

    def _emit(self, through: int) -> None:
        of_workers = self._pending.items()
        taken = [(worker, span) for worker, pending in of_workers for span in _take_through(pending, through)]
        if rows := self._unpassed(taken):
            self.on_rows(self, rows)

    def _unpassed(self, spans: Sequence[tuple[int, ShardSpan]]) -> ReportColumns | None:
        """Return the reports of workers that are not passed on yet: a later attempt repeats steps that were."""
        rows = _expand(spans) if spans else None
        return rows and rows.where(rows.step > self._emitted)


def _take_through(pending: deque[ShardSpan], through: int) -> list[ShardSpan]:
    """Remove and return the spans' steps up to `through`; spans are ordered by their first step."""
    taken: list[ShardSpan] = []
    later: list[ShardSpan] = []
    while pending and pending[0].first_step <= through:
        early, rest = _split_span(pending.popleft(), through + 1)
        taken.append(early)
        if rest:
            later.append(rest)
    pending.extendleft(reversed(later))
    return taken


def _split_span(span: ShardSpan, step: int) -> tuple[ShardSpan, ShardSpan | None]:
    """Split a span at `step`: the steps before it, and the rest, None if there is none."""
    count = step - span.first_step
    if count >= span.num_steps:
        return span, None
    early = late = span.milliseconds
    if len(early) > 1:  # else it is the mean of all steps, which both parts keep
        early, late = early[:count], late[count:]
    rest = span._replace(first_step=step, num_steps=span.num_steps - count, milliseconds=late)
    return span._replace(num_steps=count, milliseconds=early), rest


def _fold(pending: deque[ShardSpan]) -> deque[ShardSpan]:
    """Reduce each span's times to their mean, and join consecutive spans of a shard with the same sizes."""
    last: dict[int, ShardSpan] = {}
    folded: list[ShardSpan] = []
    for span in pending:
        before = last.get(span.shard)
        mean = span.milliseconds.mean(keepdims=True)
        if before and before.seen == span.seen and before.first_step + before.num_steps == span.first_step:
            steps = before.num_steps + span.num_steps
            mean = (before.milliseconds * before.num_steps + mean * span.num_steps) / np.float32(steps)
            span = before._replace(num_steps=steps)
        elif before:
            folded.append(before)
        last[span.shard] = span._replace(milliseconds=mean)
    return deque(sorted([*folded, *last.values()], key=lambda span: span.first_step))


def _expand(taken: Sequence[tuple[int, ShardSpan]]) -> ReportColumns:
    """Return one row for each step of each span, ordered; of a step that was run twice, the newest worker's row."""
    workers, spans = zip(*taken, strict=True)
    counts = np.array([span.num_steps for span in spans], np.int64)
    starts = np.array([span.first_step for span in spans], np.int64) - (np.cumsum(counts) - counts)
    step = np.arange(counts.sum()) + np.repeat(starts, counts)
    places = [span.shard for span in spans], workers, [span.seen for span in spans]
    shard, world, seen = (np.repeat(np.array(each, np.int32), counts) for each in places)
    times = [np.broadcast_to(span.milliseconds, span.num_steps) for span in spans]  # one may be the mean of all
    order = np.lexsort((shard, step))  # stable: of the rows of a step and shard, the newest worker's is last
    rows = ReportColumns(step, shard, world, seen, np.concatenate(times)).where(order)
    repeated = (rows.step[1:] == rows.step[:-1]) & (rows.shard[1:] == rows.shard[:-1])
    if repeated.any():
        rows = rows.where(np.append(~repeated, True))
    return rows


class ReportFile:
    """A Parquet file with one row for each shard report, written block by block.

    With a folder as `journal`, the reports of committed steps are kept there while the run goes on. Workers may be
    ahead of others: their reports cannot be ordered yet, and go to a file that is replaced each time.
    """

    SCHEMA = pa.schema(
        [
            ("step", pa.int64()),
            ("shard", pa.int32()),
            ("rank", pa.int32()),
            ("node", pa.dictionary(pa.int32(), pa.string())),
            ("device", pa.dictionary(pa.int32(), pa.string())),
            ("rows", pa.int32()),
            ("input_size", pa.dictionary(pa.int32(), pa.string())),
            ("output_size", pa.dictionary(pa.int32(), pa.string())),
            ("milliseconds", pa.float32()),
        ]
    )

    def __init__(self, sink: Any, journal: Storage | None = None) -> None:
        self._writer = pq.ParquetWriter(sink, self.SCHEMA)
        self._blocks: list[pa.Table] = []
        self._rows = 0
        self._journal = journal
        self._pieces = PartTable(journal, PIECE, ROWS_IN_A_PIECE) if journal else None

    def write(self, collector: Collector, rows: ReportColumns) -> None:
        """Write a collector's rows."""
        block = table_of(collector, rows)
        self._blocks.append(block)
        self._rows += len(rows)
        if self._rows >= ROWS_IN_A_GROUP:
            self._write_group()
        if self._pieces:
            self._pieces.add(block)
            if self._pieces.num_new >= ROWS_IN_A_GROUP:
                self._pieces.write()

    def save(self, collector: Collector) -> None:
        """Write the journal: the ordered reports in pieces, the collector's pending ones to their own file."""
        if not self._journal or not self._pieces:
            return
        self._pieces.write()
        pending = collector.pending()
        if pending is not None:
            with suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
                self._journal.create()
                write_table(self._journal, PENDING, table_of(collector, pending))

    def close(self) -> None:
        """Write the remaining reports and finish the file."""
        if self._blocks:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        self._writer.write_table(pa.concat_tables(self._blocks).unify_dictionaries().combine_chunks())
        self._blocks, self._rows = [], 0


def table_of(collector: Collector, rows: ReportColumns) -> pa.Table:
    """Return shard reports as a table with ReportFile's columns."""
    world_numbers, world = np.unique(rows.world, return_inverse=True)
    seen_numbers, seen = np.unique(rows.seen, return_inverse=True)
    worlds = [collector.worlds[number] for number in world_numbers.tolist()]
    sizes = [collector.seen[number] for number in seen_numbers.tolist()]

    def named(numbers: Any, names: list[str]) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(array_of(numbers.astype(np.int32)), array_of_texts(names))

    columns = [
        rows.step,
        rows.shard,
        np.array([one.rank for one in worlds], np.int32)[world],
        named(world, [one.node for one in worlds]),
        named(world, [str(one.device) for one in worlds]),
        np.array([one.rows for one in sizes], np.int32)[seen],
        named(seen, [one.input_size for one in sizes]),
        named(seen, [one.output_size for one in sizes]),
        rows.milliseconds,
    ]
    arrays = [one if isinstance(one, pa.Array) else array_of(one) for one in columns]
    return pa.Table.from_arrays(arrays, schema=ReportFile.SCHEMA)


def read_reports(file: pq.ParquetFile) -> Iterator[ShardReport]:
    """Read the shard reports of a ReportFile, ordered by step and shard."""
    decode = cache(decode_sizes)
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            yield ShardReport(**{**row, **{key: decode(row[key]) for key in ("input_size", "output_size")}})


def read_spans(file: pq.ParquetFile, done: Done) -> list[tuple[World, Sizes, ShardSpan]]:
    """Read a file's reports of the steps and shards in `done`, as spans ordered by first step."""
    spans: list[tuple[World, Sizes, int, int, list[float]]] = []
    last: dict[tuple[World, int], int] = {}
    for row in (row for batch in file.iter_batches() for row in batch.to_pylist()):
        step, shard = row["step"], row["shard"]
        if Shard(step, shard, 0, 0) not in done:
            continue
        world = World(rank=row["rank"], node=row["node"], device=torch.device(row["device"]))
        seen = Sizes(row["input_size"], row["output_size"], row["rows"])
        at = last.get((world, shard), -1)
        if at >= 0 and spans[at][1] == seen and spans[at][2] + len(spans[at][4]) == step:
            spans[at][4].append(row["milliseconds"])
            continue
        last[world, shard] = len(spans)
        spans.append((world, seen, step, shard, [row["milliseconds"]]))
    return [
        (world, seen, ShardSpan(first, len(times), shard, -1, np.array(times, np.float32)))
        for world, seen, first, shard, times in spans
    ]


def journal_files(folder: Storage) -> list[str]:
    """Return the names of a journal's files, the pending reports last."""
    return [*folder.numbered(PIECE), *([PENDING] if folder.exists(PENDING) else [])]


def read_journal(folder: Storage, done: Done) -> list[tuple[World, Sizes, ShardSpan]]:
    """Read the journal's reports of the steps and shards in `done`, as spans."""
    spans: list[tuple[World, Sizes, ShardSpan]] = []
    for name in journal_files(folder):
        with reading(folder, name) as file:
            spans += read_spans(file, done)
    return spans

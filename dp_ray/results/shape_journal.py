"""Shape reports written while a run goes on, in complete pieces, so that they survive a killed driver."""

import re
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.errors import StorageError
from dp_ray.plan.work import Done
from dp_ray.replica.world import World
from dp_ray.results.output_parts import reading
from dp_ray.results.shape_recorder import ShardSpan
from dp_ray.results.shape_reports import ROWS_IN_A_GROUP, Collector, read_spans, table_of
from dp_ray.results.shapes import Seen
from dp_ray.storage import Storage

REPORTS = "reports"
PIECE = re.compile(r"piece-(\d+)\.parquet")
PENDING = "pending.parquet"


class Journal:
    """Writes the reports since the last piece whenever steps are about to be committed.

    Workers may be ahead of others: their reports cannot be ordered yet, and go to a file that is replaced each time.
    """

    def __init__(self, folder: Storage) -> None:
        self._folder = folder
        self._next = max(_piece_numbers(folder), default=-1) + 1
        self._blocks: list[pa.Table] = []

    def add(self, block: pa.Table) -> None:
        """Take a block of ordered reports; write a piece once there are enough."""
        self._blocks.append(block)
        if sum(map(len, self._blocks)) >= ROWS_IN_A_GROUP:
            self._write_piece()

    def save(self, collector: Collector) -> None:
        """Write all reports: the ordered ones as a piece, the collector's pending ones to their own file."""
        self._write_piece()
        pending = collector.pending()
        if pending is not None:
            self._write(PENDING, table_of(collector, pending))

    def _write_piece(self) -> None:
        blocks, self._blocks = self._blocks, []
        if blocks:
            self._write(f"piece-{self._next}.parquet", pa.concat_tables(blocks).unify_dictionaries())
            self._next += 1

    def _write(self, name: str, table: pa.Table) -> None:
        with suppress(StorageError):  # on a full disk, the outputs or the checkpoints raise the error
            self._folder.create()
            with self._folder.writing(name) as stream:
                pq.write_table(table, stream)


def read_journal(folder: Storage, done: Done) -> list[tuple[World, Seen, ShardSpan]]:
    """Read the journal's reports of the steps and shards in `done`, as spans."""
    names = [f"piece-{number}.parquet" for number in _piece_numbers(folder)]
    spans: list[tuple[World, Seen, ShardSpan]] = []
    for name in [*names, *([PENDING] if folder.exists(PENDING) else [])]:
        with reading(folder, name) as file:
            spans += read_spans(file, done)
    return spans


def _piece_numbers(folder: Storage) -> list[int]:
    return sorted(int(match[1]) for match in map(PIECE.fullmatch, folder.names()) if match)

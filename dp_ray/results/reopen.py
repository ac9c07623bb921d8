"""Turns a finished prediction into one that lacks the shards in which samples were set aside: they run again.

The rows of a file of the outputs that lacks some become parts again, as workers write them. The other files stay.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.plan.split import Shard, Split
from dp_ray.plan.work import Range
from dp_ray.results.columns import Layout
from dp_ray.results.manifest import FileRecord, read_records
from dp_ray.results.output_parts import POSITION, part_schema, reading
from dp_ray.rundir import ledger
from dp_ray.rundir.files import BEFORE_RETRY, RESULT
from dp_ray.rundir.ledger import PARTS, Ledger
from dp_ray.storage import Storage


class Piece(NamedTuple):
    """Steps and shards that become a part, and their positions `start .. stop - 1`."""

    done: Range
    start: int
    stop: int


def reopen(run: Storage, split: Split, missing: Iterable[int]) -> None:
    """Have the shards with the `missing` positions run again, when the job is resumed.

    The new ledger is what counts; until it is written, the run is as it was.
    """
    absent = sorted(missing)
    names = ledger.committed(run)
    run.child(PARTS).create()
    for record in read_records(run, names):
        here = [position for position in absent if record.first <= position < record.end]
        if here:
            names.remove(ledger.records_in(names)[_number(record)])
            names += _explode(run, split, record, here)
    run.write_text(BEFORE_RETRY, run.read_text(RESULT))
    run.write_text(ledger.LEDGER, Ledger("", names).to_json())
    run.delete(RESULT)


def _number(record: FileRecord) -> int:
    return int(record.name.partition("-")[0])


def _explode(run: Storage, split: Split, record: FileRecord, missing: list[int]) -> Iterator[str]:
    """Write the rows of a file as parts, without the shards that have missing positions; gives the parts' names."""
    steps = range(record.first // split.batch_size, -(-record.end // split.batch_size))
    pieces = list(pieces_of(split, steps, missing))
    if not record.rows:
        return
    with reading(run, record.path) as file:
        layout = Layout.from_metadata(file.schema_arrow.metadata)
        rows = _positioned(_batches(file), layout, np.setdiff1d(np.arange(record.first, record.end), missing))
        held: pa.Table | None = next(rows)
        for piece in pieces:
            name = ledger.part_name(piece.done, "")
            with run.child(PARTS).writing(name) as stream, pa.ipc.new_file(stream, part_schema(layout)) as writer:
                while held is not None:
                    positions = held.column(POSITION).to_numpy()
                    first, end = np.searchsorted(positions, [piece.start, piece.stop])
                    if first < end:
                        writer.write_table(held.slice(first, end - first))
                    if end < len(positions):
                        break
                    held = next(rows, None)
            yield name


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """The rows of a file, a row group at a time: `iter_batches` joins them to one of any size."""
    for number in range(file.num_row_groups):
        yield from file.read_row_group(number).to_batches()


def _positioned(batches: Iterable[pa.RecordBatch], layout: Layout, positions: np.ndarray) -> Iterator[pa.Table]:
    """The rows of a file with their positions, as parts have them."""
    at = 0
    for batch in batches:
        here = pa.array(positions[at : at + len(batch)])
        yield pa.table([here, *batch.columns], schema=part_schema(layout))
        at += len(batch)


def pieces_of(split: Split, steps: range, missing: list[int]) -> Iterator[Piece]:
    """The steps without missing positions, in stretches, and of the others the shards without them, in runs."""
    bad = {position // split.batch_size for position in missing}
    begun = steps.start
    for step in [*sorted(bad), steps.stop]:
        if begun < step:
            yield _stretch(split, begun, step)
        if step in bad:
            yield from _runs(split, step, missing)
        begun = step + 1


def _stretch(split: Split, first: int, end: int) -> Piece:
    return Piece(Range(first, end, 0, split.shards), split.batch(first)[0], split.batch(end - 1)[1])


def _runs(split: Split, step: int, missing: list[int]) -> Iterator[Piece]:
    """The shards of a step without missing positions, those beside each other together."""
    run: list[Shard] = []
    for shard in [*split.worker(1, 0, step), None]:
        if shard is not None and not any(shard.start <= position < shard.stop for position in missing):
            run.append(shard)
        elif run:
            yield Piece(Range(step, step + 1, run[0].shard, run[-1].shard + 1), run[0].start, run[-1].stop)
            run = []

"""Turn a finished prediction into one that lacks the shards in which samples were set aside, so that they run again.

The rows of a file that lacks some become parts again, as workers write them. The other files stay.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.outputs.columns import Layout
from dp_ray.outputs.files import FileRecord, read_records
from dp_ray.outputs.parts import POSITION, part_schema
from dp_ray.plan.split import Range, Split
from dp_ray.rundir import ledger
from dp_ray.rundir.files import BEFORE_RETRY, RESULT
from dp_ray.rundir.ledger import LEDGER_JSON, PARTS, Ledger
from dp_ray.storage import Storage
from dp_ray.tables import reading


class PartPlan(NamedTuple):
    """A part to write: its steps and shards, and their positions `start .. stop - 1`."""

    done: Range
    start: int
    stop: int


def reopen(run: Storage, split: Split, missing: Iterable[int]) -> None:
    """Have the shards with the `missing` positions run again, when the job is resumed."""
    absent = sorted(missing)
    names = ledger.committed(run)
    run.child(PARTS).create()
    for record in read_records(run, names):
        here = [position for position in absent if record.first <= position < record.end]
        if here:
            number = int(record.name.partition("-")[0])
            names.remove(ledger.records_in(names)[number])
            names += _write_parts(run, split, record, here)
    run.write_text(BEFORE_RETRY, run.read_text(RESULT))
    # Killed before the ledger is written, the new parts do not count: the run is as it was.
    LEDGER_JSON.write(run, Ledger("", names))
    run.delete(RESULT)


def _write_parts(run: Storage, split: Split, record: FileRecord, missing: list[int]) -> Iterator[str]:
    """Write the rows of a file as parts, without the shards that have missing positions; yield the parts' names."""
    steps = range(record.first // split.batch_size, -(-record.end // split.batch_size))
    parts = list(part_plans(split, steps, missing))
    if not record.rows:
        return
    with reading(run, record.path) as file:
        layout = Layout.from_metadata(file.schema_arrow.metadata)
        rows = _positioned(file, layout, np.setdiff1d(np.arange(record.first, record.end), missing))
        held: pa.Table | None = next(rows)
        for part in parts:
            name = ledger.part_name(part.done, "")
            with run.child(PARTS).writing(name) as stream, pa.ipc.new_file(stream, part_schema(layout)) as writer:
                while held is not None:
                    positions = held.column(POSITION).to_numpy()
                    first, end = np.searchsorted(positions, [part.start, part.stop])
                    if first < end:
                        writer.write_table(held.slice(first, end - first))
                    if end < len(positions):
                        break
                    held = next(rows, None)
            yield name


def _positioned(file: pq.ParquetFile, layout: Layout, positions: np.ndarray) -> Iterator[pa.Table]:
    """Yield the rows of a file with their positions, as parts have them."""
    at = 0
    for number in range(file.num_row_groups):  # a group at a time: `iter_batches` would join them to one of any size
        for batch in file.read_row_group(number).to_batches():
            here = pa.array(positions[at : at + len(batch)])
            yield pa.table([here, *batch.columns], schema=part_schema(layout))
            at += len(batch)


def part_plans(split: Split, steps: range, missing: list[int]) -> Iterator[PartPlan]:
    """Yield the steps without missing positions, in ranges, and of each other one the shards without them."""
    bad = {position // split.batch_size for position in missing}
    begun = steps.start
    for step in [*sorted(bad), steps.stop]:
        if begun < step:
            start, stop = split.batch(begun)[0], split.batch(step - 1)[1]
            yield PartPlan(Range(begun, step, 0, split.shards), start, stop)
        for shard in split.worker(1, 0, step) if step in bad else ():
            if not any(shard.start <= position < shard.stop for position in missing):
                yield PartPlan(Range(step, step + 1, shard.shard, shard.shard + 1), shard.start, shard.stop)
        begun = step + 1

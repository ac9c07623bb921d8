"""The samples that a run has set aside: files of the workers, and `quarantine.parquet` at the run's end.

A worker writes a file for each shard with bad samples before the shard runs. Its name holds the step and the shard,
so that a step that is run again replaces what its first run wrote. Attempts forget the files of steps that they run
again.
"""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.engine.loads.bad_samples import BadSample
from dp_ray.errors import DataError
from dp_ray.plan.mixture import Mixture
from dp_ray.plan.split import Done, Shard, Split
from dp_ray.records import Record
from dp_ray.rundir.ledger import check_newest, committed, done_ranges
from dp_ray.storage import Storage
from dp_ray.tables import read_table
from dp_ray.text import counted, encodable, hide

QUARANTINE = "quarantine"
QUARANTINED = "quarantine.parquet"
FILE = re.compile(r"(.+)-(\d+)-([\d.]+|again)\.json")
SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("sample_index", "epoch", "step", "position")),
        *((name, pa.string()) for name in ("type", "message", "traceback", "dataset")),
    ]
)
OF_SOURCE = pa.schema([("source", pa.string()), ("source_epoch", pa.int64()), ("source_index", pa.int64())])
CARRIED = "carried."  # before a key that the job carries, in the name of its column
SHOWN = 20  # bad samples that an error lists

BadRecord = dict[str, Any]
SampleKey = tuple[str, str | None, int]
RECORDS_JSON = Record[list[BadRecord]](list[BadRecord], hides=False, end="")


class QuarantineFull(DataError):
    """More samples are bad than the job sets aside; it ends the job, whose next attempt would find them again."""

    comes_back = True


@dataclass(eq=False)
class QuarantineFiles:
    """The bad samples that this worker finds in a dataset, which it writes; it counts those of all workers.

    `after` is the step of a training after which the dataset is evaluated. `say` gets a line for each sample, once.
    Of a `mixture`, a record also has the row's source, and its epoch and index there.
    """

    run: Storage
    dataset: str
    limit: int
    attempt: str | None
    say: Callable[[str], None]
    after: int | None = None
    mixture: Mixture | None = None

    def __post_init__(self) -> None:
        self._files = RecordFiles(self.run.child(QUARANTINE))

    def keep(self, shard: Shard, bad: Mapping[int, BadSample]) -> None:
        """Write a shard's bad samples, by position; raises QuarantineFull if the run has more than the limit."""
        if self.attempt is not None:  # a superseded worker must not count a sample that the newer attempt can read
            check_newest(self.run, self.attempt)
        place = f"{shard.step}-{shard.shard}" if self.after is None else f"{self.after}-{shard.step}.{shard.shard}"
        name = f"{self.dataset}-{place}.json"
        records = [self._record(shard, position, sample) for position, sample in sorted(bad.items())]
        RECORDS_JSON.write(self._files.folder, records, name)
        # Counted after the write, so that of workers that pass the limit together the last one sees it.
        files = self._files.look()
        known = distinct(others for other, others in files.items() if other != name)
        for record in records:
            if _sample_of(record) not in known:
                self.say(f"set aside: {_line(record)}")
        firsts = {_sample_of(record): record for records in files.values() for record in records}
        if len(firsts) > self.limit:
            lines = [f"\n  {_line(record)}" for record in list(firsts.values())[:SHOWN]]
            lines += [f"\n  and {len(firsts) - SHOWN} more"] if len(firsts) > SHOWN else []
            limit = f"{counted(len(firsts), 'sample')} cannot be used, and on_error.quarantine is {self.limit}"
            advice = "mend them, or set on_error.quarantine higher and run the job again"
            raise QuarantineFull(f"{limit}; {advice}:{''.join(lines)}")

    def _record(self, shard: Shard, position: int, bad: BadSample) -> BadRecord:
        step = shard.step if self.after is None else self.after
        return {
            "sample_index": bad.sample,
            "epoch": shard.epoch,
            "step": step,
            "position": position,
            **({} if self.mixture is None else dict(zip(OF_SOURCE.names, self.mixture.row(bad.sample), strict=True))),
            **({} if bad.carried is None else {"carried": bad.carried}),
            "type": encodable(bad.kind),
            "message": hide(encodable(bad.message)),
            "traceback": hide(encodable(bad.traceback)),
            "dataset": self.dataset,
        }


def _line(record: BadRecord) -> str:
    """Return a bad sample in a line: `sample 17 of dataset, step 3: ValueError: no such image`."""
    text = " ".join(record["message"].split())[:200]
    row = f"sample {record['sample_index']}"
    if "source" in record:
        row = f"row {record['source_index']} of source {record['source']!r}"
    return f"{row} of {record['dataset']}, step {record['step']}: {record['type']}: {text}"


def distinct(files: Any) -> set[SampleKey]:
    """Return the samples in the records of some files: each once, with its dataset."""
    return {_sample_of(record) for records in files for record in records}


def _sample_of(record: BadRecord) -> SampleKey:
    """Return what tells a sample from others; a row of a mixture's source is the same one in each epoch."""
    of = record["sample_index"] if "source" not in record else record["source_index"]
    return record["dataset"], record.get("source"), of


def record_files(folder: Storage) -> list[str]:
    """Return the names of the files of records, in the order of steps and shards."""
    placed = []
    for name in folder.names():
        if match := FILE.fullmatch(name):
            numbers = () if match[3] == "again" else tuple(float(number) for number in match[3].split("."))
            placed.append(((int(match[2]), match[1], numbers), name))
    return [name for _, name in sorted(placed)]


def forget_unkept(run: Storage, is_kept: Callable[[int, str], bool]) -> None:
    """Remove the files of the steps that are run again: `is_kept` gets the step and, after it, the shard's place."""
    folder = run.child(QUARANTINE)
    folder.create()
    folder.remove_unfinished()
    for match in filter(None, map(FILE.fullmatch, folder.names())):
        if not is_kept(int(match[2]), match[3]):
            folder.delete(match[0])


def has_set_aside(run: Storage) -> bool:
    """Return whether the run has set samples aside, or had before it was resumed."""
    return run.exists(QUARANTINED) or bool(record_files(run.child(QUARANTINE)))


def count_quarantined(run: Storage) -> int:
    """Return how many samples the run has set aside: each once, in however many epochs."""
    files = RecordFiles(run.child(QUARANTINE)).look()
    return len(distinct(files.values() if files else [_merged(run)]))


@dataclass(eq=False)
class RecordFiles:
    """The files of records in a folder, each of which is read once."""

    folder: Storage
    _read: dict[str, list[BadRecord]] = field(default_factory=dict, init=False)

    def look(self) -> dict[str, list[BadRecord]]:
        """Return the records of each file that is there by now, in the order of steps and shards."""
        names = record_files(self.folder)
        self._read = {name: self._read.get(name) or RECORDS_JSON.read(self.folder, name) for name in names}
        return self._read

    def positions(self) -> list[int]:
        """Return the positions in these records, in order: those of a prediction have no outputs."""
        return sorted(record["position"] for records in self.look().values() for record in records)


def positions_set_aside(run: Storage) -> list[int]:
    """Return the positions of a prediction that have no outputs, in order."""
    return RecordFiles(run.child(QUARANTINE)).positions()


def merge_quarantine(run: Storage, carry: Sequence[str] = (), more: Sequence[BadRecord] = ()) -> None:
    """Merge the files of records into `quarantine.parquet`, one after another, with a column for each carried key.

    `more` are records that are in no file any more.
    """
    files = [*RecordFiles(run.child(QUARANTINE)).look().values(), *([more] if more else [])]
    kinds = {key: _kind([_carried(record, key) for records in files for record in records]) for key in carry}
    is_mixed = any("source" in record for records in files for record in records)
    own = [*SCHEMA, *(OF_SOURCE if is_mixed else ())]
    schema = pa.schema([*own, *((CARRIED + key, kind) for key, kind in kinds.items())])
    with run.writing(QUARANTINED) as stream, pq.ParquetWriter(stream, schema) as writer:
        for records in files:
            columns = [pa.array([record.get(field.name) for record in records], field.type) for field in own]
            for key, kind in kinds.items():
                carried = [_carried(record, key) for record in records]
                if pa.types.is_string(kind):
                    carried = [value if value is None else str(value) for value in carried]
                columns.append(pa.array(carried, kind))
            writer.write_table(pa.table(columns, schema=schema))


def _carried(record: BadRecord, key: str) -> Any:
    return (record.get("carried") or {}).get(key)


def _kind(values: list[Any]) -> pa.DataType:
    """Return the type that holds all values of a key; text if they are of several kinds."""
    try:
        return pa.array(values).type
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.string()


def merged_positions(run: Storage) -> list[int]:
    """Return the positions of a finished prediction that have no outputs."""
    return [record["position"] for record in _merged(run)]


def still_missing(run: Storage, split: Split) -> list[BadRecord]:
    """Return the records in `quarantine.parquet` of the shards of a retried prediction that still have to run."""
    done, shards = Done(done_ranges(committed(run))), functools.cache(lambda step: split.worker(1, 0, step))
    known = set(positions_set_aside(run))  # not the samples: a mixture may have a row several times
    records = []
    for record in _merged(run):
        shard = next(shard for shard in shards(record["step"]) if shard.start <= record["position"] < shard.stop)
        if shard not in done and record["position"] not in known:
            records.append(record)
    return records


def _merged(run: Storage) -> list[BadRecord]:
    """Return the records in `quarantine.parquet`, as they were before `merge_quarantine`; none if it is not there."""
    if not run.exists(QUARANTINED):
        return []
    records = []
    for row in read_table(run, QUARANTINED).to_pylist():
        carried = {name.removeprefix(CARRIED): value for name, value in row.items() if name.startswith(CARRIED)}
        lacking = [name for name in OF_SOURCE.names if row.get(name) is None]  # of a dataset that is no mixture
        record = {name: row[name] for name in row if not name.startswith(CARRIED) and name not in lacking}
        records.append({**record, "carried": carried} if carried else record)
    return records


def unmerge_quarantine(run: Storage) -> None:
    """Write files of what `quarantine.parquet` holds, so that a training can forget its last steps."""
    records = _merged(run)
    if not records:
        return
    folder = run.child(QUARANTINE)
    folder.create()
    step_of = operator.itemgetter("dataset", "step")
    for (dataset, step), together in itertools.groupby(sorted(records, key=step_of), key=step_of):
        RECORDS_JSON.write(folder, list(together), f"{dataset}-{step}-again.json")

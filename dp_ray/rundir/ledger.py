"""The ledger: which parts count. These are the newest attempt's own, and those committed before it began.

Rank 0 writes the ledger when an attempt begins. A worker of a superseded attempt may still be alive: cut off from the
cluster, but not from the storage. The parts that it commits from then on are in no ledger and are never merged.
"""

import json
import re
import uuid
from typing import NamedTuple

from dp_ray.errors import StorageError
from dp_ray.plan.work import Range
from dp_ray.replica.world import broadcast, is_rank_0
from dp_ray.rundir.contents import replacing
from dp_ray.storage import Storage

LEDGER = "attempt.json"
PARTS = "parts"
PART_NAME = re.compile(r"steps-(\d+)-(\d+)-shards-(\d+)-(\d+)(?:-([0-9a-f]{32}))?\.parquet")


class Ledger(NamedTuple):
    """The newest attempt, and the parts of earlier ones that count."""

    attempt: str
    parts: list[str]


def part_name(done: Range, attempt: str) -> str:
    """The file name of an attempt's part with these steps and shards."""
    first, end, first_shard, end_shard = done
    name = f"steps-{first}-{end}-shards-{first_shard}-{end_shard}"
    return f"{name}-{attempt}.parquet" if attempt else f"{name}.parquet"


def begin(run: Storage, attempt: str) -> Ledger:
    """Write the ledger of a new attempt, with the parts that count so far."""
    ledger = Ledger(attempt, committed(run))
    run.write_text(LEDGER, json.dumps(ledger._asdict()) + "\n")
    return ledger


def read(run: Storage) -> Ledger:
    """Read the newest attempt's ledger, empty if there is none; raises StorageError if it is damaged."""
    if not run.exists(LEDGER):
        return Ledger("", [])
    try:
        values = json.loads(run.read_text(LEDGER))
        return Ledger(str(values["attempt"]), [str(name) for name in values["parts"]])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{run}/{LEDGER}: is damaged: {error!r}; start anew {replacing(run)}") from None


def committed(run: Storage) -> list[str]:
    """The names of the parts that count and are in the run directory now."""
    ledger = read(run)
    found = (PART_NAME.fullmatch(name) for name in run.child(PARTS).names())
    return [match[0] for match in found if match and ((match[5] or "") == ledger.attempt or match[0] in ledger.parts)]


def done_ranges(names: list[str]) -> list[Range]:
    """The steps and shards that the parts with these names hold."""
    found = (PART_NAME.fullmatch(name) for name in names)
    return [Range(*map(int, match.groups()[:4])) for match in found if match]


def check_newest(run: Storage, attempt: str) -> None:
    """Raise StorageError if a newer attempt has begun, since this one's files would mix with its files."""
    newest = read(run).attempt
    if newest != attempt:
        raise StorageError(f"{run}: a newer attempt of the job has begun, and this worker's is superseded")


def begin_attempt(run: Storage) -> Ledger:
    """Begin an attempt on rank 0; return its ledger on every rank."""
    attempt = uuid.uuid4().hex
    begun = begin(run, attempt) if is_rank_0() else None
    return Ledger(*json.loads(broadcast(json.dumps(begun))))

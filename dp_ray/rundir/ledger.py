"""The ledger: which files of an attempt count. These are the newest attempt's own, and those there before it began.

Rank 0 writes the ledger when an attempt begins. A worker of a superseded attempt may still be alive: cut off from the
cluster, but not from the storage. What it commits from then on is in no ledger and never counts.

Of a prediction, these files count or not: the parts of the outputs in `parts/`; and in `files/` how many files the
outputs are cut into, a record of each of these that is whole, and which workers have run their last step. The name of
each holds its attempt, and all that the ledger needs to know of it.
"""

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from dp_ray.engine.world import broadcast, is_rank_0
from dp_ray.errors import StorageError
from dp_ray.plan.split import Range
from dp_ray.records import Record
from dp_ray.rundir.checkpoint import PIECES
from dp_ray.rundir.files import CHECKPOINTS, read_or_advise
from dp_ray.rundir.history import HISTORY
from dp_ray.storage import Storage

LEDGER = "attempt.json"
PARTS = "parts"
FILES = "files"
OUTPUTS = "outputs"  # the folder of the files
WRITTEN = (PARTS, FILES, OUTPUTS, HISTORY, CHECKPOINTS, f"{CHECKPOINTS}/{PIECES}")  # by workers
_OF = r"(?:-(?P<attempt>[0-9a-f]{32}))?"
_RANGE = r"steps-(?P<step>\d+)-(?P<end>\d+)-shards-(?P<shard>\d+)-(?P<end_shard>\d+)"
PART_NAME = re.compile(rf"{_RANGE}{_OF}\.arrow")
RECORD_NAME = re.compile(rf"file-(?P<number>\d+)-{_RANGE}{_OF}\.json")
CUT_NAME = re.compile(rf"cut-(?P<files>\d+){_OF}")
ENDED_NAME = re.compile(rf"ended-(?P<rank>\d+){_OF}")
COUNTED = (PART_NAME, RECORD_NAME, CUT_NAME, ENDED_NAME)


@dataclass(frozen=True)
class Ledger:
    """The newest attempt, and the files of earlier ones that count."""

    attempt: str
    parts: list[str]

    def found(self, folder: Storage) -> list[str]:
        """Return the names of the files in a folder that count."""
        return self.counting(folder.names())

    def counting(self, names: Iterable[str]) -> list[str]:
        """Return those of these names of files that count."""
        attempts = [(name, _attempt_of(name)) for name in names]
        # A set of the earlier names costs more than the look through new ones: most calls need none.
        earlier = frozenset(self.parts) if any(of not in (None, self.attempt) for _, of in attempts) else ()
        return [name for name, of in attempts if of == self.attempt or (of is not None and name in earlier)]


LEDGER_JSON = Record[Ledger](Ledger, LEDGER, missing=Ledger("", []), hides=False)


def _attempt_of(name: str) -> str | None:
    """Return the attempt that wrote a file, empty if its name holds none; None if this is no file that can count."""
    match = next(filter(None, (pattern.fullmatch(name) for pattern in COUNTED)), None)
    return None if match is None else match["attempt"] or ""


def part_name(done: Range, attempt: str) -> str:
    """Return the file name of an attempt's part with these steps and shards."""
    return f"{_of(_range(done), attempt)}.arrow"


def record_name(number: int, done: Range, attempt: str) -> str:
    """Return the file name of an attempt's record of a file of the outputs with these steps and shards."""
    return f"{_of(f'file-{number}-{_range(done)}', attempt)}.json"


def _range(done: Range) -> str:
    return f"steps-{done.first_step}-{done.end_step}-shards-{done.first_shard}-{done.end_shard}"


def _of(name: str, attempt: str) -> str:
    return f"{name}-{attempt}" if attempt else name


def begin(run: Storage, attempt: str) -> Ledger:
    """Write the ledger of a new attempt, with the files that count so far.

    Parts without a cut are none of this version's; their steps run again. What an earlier attempt is still writing
    gets no name any more: its worker finds this ledger before it names a file, or finds the unfinished file removed.
    """
    names = [name for name in committed(run) if not ENDED_NAME.fullmatch(name)]
    ledger = Ledger(attempt, names if files_in(names) else [])
    LEDGER_JSON.write(run, ledger)
    for folder in WRITTEN:
        run.child(folder).remove_unfinished()
    return ledger


def read(run: Storage) -> Ledger:
    """Read the newest attempt's ledger, empty if there is none; raises StorageError if it is damaged."""
    return read_or_advise(LEDGER_JSON, run)


def committed(run: Storage) -> list[str]:
    """Return the names of the files that count and are in the run directory now."""
    ledger = read(run)
    # Parts first: a cut is noted before the first of them, and a record before any of them is removed.
    return [name for folder in (PARTS, FILES) for name in ledger.found(run.child(folder))]


def done_ranges(names: Iterable[str]) -> list[Range]:
    """Return the steps and shards that the parts, and the files with a record, of these names hold."""
    matches = (PART_NAME.fullmatch(name) or RECORD_NAME.fullmatch(name) for name in names)
    return [range_of(match) for match in matches if match]


def range_of(match: re.Match[str]) -> Range:
    """Return the steps and shards that a name tells."""
    return Range(*(int(match[group]) for group in ("step", "end", "shard", "end_shard")))


def records_in(names: Iterable[str]) -> dict[int, str]:
    """Return the records among these names, by the number of their file."""
    matches = (RECORD_NAME.fullmatch(name) for name in names)
    return {int(match["number"]): match[0] for match in matches if match}


def files_in(names: Iterable[str]) -> int | None:
    """Return into how many files the outputs are cut, as one of these names tells; None if none does."""
    matches = (CUT_NAME.fullmatch(name) for name in names)
    return next((int(match["files"]) for match in matches if match), None)


def note_files(run: Storage, attempt: str, files: int) -> None:
    """Note into how many files the outputs are cut, before the first part is committed."""
    run.child(FILES).write_text(_of(f"cut-{files}", attempt), "")


def note_ended(run: Storage, attempt: str, rank: int) -> None:
    """Note that a worker commits no more parts."""
    run.child(FILES).write_text(_of(f"ended-{rank}", attempt), "")


def num_ended(names: Iterable[str]) -> int:
    """Return how many workers commit no more parts."""
    return sum(ENDED_NAME.fullmatch(name) is not None for name in names)


def check_newest(run: Storage, attempt: str) -> None:
    """Raise StorageError if a newer attempt has begun, since this one's files would mix with its files."""
    newest = read(run).attempt
    if newest != attempt:
        raise StorageError(f"{run}: a newer attempt of the job has begun, and this worker's is superseded")


def fenced(run: Storage, attempt: str) -> Storage:
    """Return the run directory, in whose `WRITTEN` folders no file gets its name once a newer attempt has begun.

    In an object store a file that is being named at that moment may still get it.
    """
    before = run.before_commit

    def check() -> None:
        before()
        check_newest(run, attempt)

    return run.guarded(check)


def begin_attempt(run: Storage) -> Ledger:
    """Begin an attempt on rank 0; return its ledger on every rank."""
    return LEDGER_JSON.parse(broadcast(LEDGER_JSON.text(begin(run, uuid.uuid4().hex)) if is_rank_0() else ""))

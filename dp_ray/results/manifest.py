"""The manifest: which files hold the outputs of a run, in order, with their rows, bytes and hashes."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dp_ray.errors import StorageError
from dp_ray.rundir import ledger
from dp_ray.rundir.files import read_json, write_json
from dp_ray.rundir.ledger import FILES
from dp_ray.storage import Storage

OUTPUTS = "outputs"  # the folder of the files
MANIFEST = "outputs_manifest.json"  # beside the folder, which polars cannot read if it holds any other file
EARLIER_MANIFEST = "outputs/manifest.json"
MERGED = "outputs.parquet"  # what earlier versions wrote in place of the folder


@dataclass(frozen=True)
class FileRecord:
    """A file of the outputs: its name, and the positions `first .. end - 1` that it holds.

    `sha256` is that of the file's bytes. `steps` are the digests of its steps, in order. `layout` is its columns, as
    the file's metadata has them; earlier versions did not keep it. Where all samples were set aside, there is a
    record without rows and no file.
    """

    name: str
    rows: int
    first: int
    end: int
    bytes: int
    sha256: str
    steps: tuple[str, ...]
    layout: str = ""

    @property
    def path(self) -> str:
        """The file's path in the run directory."""
        return f"{OUTPUTS}/{self.name}"

    def described(self) -> dict[str, Any]:
        """The file as the manifest tells it: a hash in place of the digests of its steps."""
        values = asdict(self)
        del values["steps"], values["end"], values["layout"]
        return {**values, "steps_sha256": hash_of_steps([self])}


def hash_of_steps(records: Iterable[FileRecord]) -> str:
    """The SHA-256 of the digests of the files' steps, in order: what `outputs_sha256` is of all files."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(bytes.fromhex("".join(record.steps)))
    return digest.hexdigest()


def write_record(run: Storage, name: str, record: FileRecord) -> None:
    """Write the record of a file that is whole: from now on the file counts."""
    run.child(FILES).write_text(name, json.dumps(asdict(record)) + "\n")


def forget_lost(run: Storage) -> None:
    """Remove the records of files that are gone or have another size: their steps run again."""
    folder = run.child(FILES)
    for name in ledger.records_in(ledger.committed(run)).values():
        record = _read_record(folder, name)
        if record.rows and run.size(record.path) != record.bytes:
            folder.delete(name)


def read_records(run: Storage, names: Iterable[str]) -> list[FileRecord]:
    """The records among these names, in the order of their files; raises StorageError if one is damaged."""
    return [_read_record(run.child(FILES), name) for _, name in sorted(ledger.records_in(names).items())]


def _read_record(folder: Storage, name: str) -> FileRecord:
    values = read_json(folder, name)
    try:
        return FileRecord(**{**values, "steps": tuple(values["steps"])})
    except (KeyError, TypeError) as error:
        raise StorageError(f"{folder}/{name}: is damaged: {error!r}") from None


def write_manifest(run: Storage, records: Sequence[FileRecord]) -> str:
    """Write the manifest of all files; return the hash of the outputs."""
    outputs_sha256 = hash_of_steps(records)
    told = {"rows": sum(one.rows for one in records), "outputs_sha256": outputs_sha256}
    write_json(run, MANIFEST, {**told, "files": [one.described() for one in records if one.rows]})
    run.delete(EARLIER_MANIFEST)
    return outputs_sha256


def _manifest_of(run: Storage) -> str | None:
    """The name of a run's manifest, which earlier versions wrote into the folder; None if there is none."""
    return next(filter(run.exists, (MANIFEST, EARLIER_MANIFEST)), None)


def file_names(run: Storage) -> list[str]:
    """The files of a finished run's outputs, in order, by their paths in the run directory.

    Raises StorageError if the manifest is damaged.
    """
    if (manifest := _manifest_of(run)) is None:
        return [MERGED]
    try:
        return [f"{OUTPUTS}/{one['name']}" for one in read_json(run, manifest)["files"]]
    except (KeyError, TypeError) as error:
        raise StorageError(f"{run}/{manifest}: is damaged: {error!r}") from None


def outputs_sha256(run: Storage) -> str:
    """The hash of a finished run's outputs, as the manifest tells it."""
    return str(read_json(run, _manifest_of(run) or MANIFEST)["outputs_sha256"])


def names_so_far(run: Storage) -> list[str]:
    """The files of the outputs that are whole, from the first on without a gap, while a run goes on."""
    if _manifest_of(run) or run.exists(MERGED):
        return file_names(run)
    records = ledger.records_in(ledger.committed(run))
    whole = [number for number in range(len(records)) if all(before in records for before in range(number + 1))]
    return [one.path for one in read_records(run, [records[number] for number in whole]) if one.rows]


def outputs_path(run: Storage) -> str:
    """The folder of the outputs, or the one file that an earlier version wrote."""
    return str(run.child(OUTPUTS if _manifest_of(run) or not run.exists(MERGED) else MERGED))

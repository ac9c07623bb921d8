"""Files that must be read once to know where their samples lie; what was found is kept beside the file."""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import pyarrow as pa

from dp_ray.data.files import File, retried
from dp_ray.errors import StorageError

STRETCH_BYTES = 4 << 20
VERSION = 2  # of the index's form, and of how it is found


class Stretch(NamedTuple):
    """The bytes `start` .. `stop` - 1 of a file, which hold whole samples: `rows` of them."""

    start: int
    stop: int
    rows: int

    def __str__(self) -> str:
        return f"bytes {self.start} to {self.stop}"


@dataclass(frozen=True)
class Index:
    """Where the samples of a file lie, and the types of its columns, as a serialized Arrow schema in base64."""

    size: int
    version: str
    stretches: list[Stretch] = field(default_factory=list)
    schema: str = ""
    form: int = VERSION

    @property
    def arrow_schema(self) -> pa.Schema:
        """The types of the columns."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))


def serialized(schema: pa.Schema) -> str:
    """An Arrow schema as text."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def index_of(file: File, kind: str, build: Callable[[], tuple[list[Stretch], str]]) -> Index:
    """The file's index: the one that is kept beside it, if the file has not changed since, else what `build` gives.

    A new index is kept if the folder may be written. `kind` is part of its name: what builds it, and how.
    """
    folder, _, base = file.name.rpartition("/")
    name = f"{folder}/.{base}.{kind}.json".lstrip("/")
    kept = _kept(file, name)
    if kept is not None:
        return kept
    built = Index(file.size, file.version, *retried(build, str(file), file.is_local))
    with suppress(StorageError, OSError):
        file.folder.write_text(name, json.dumps(asdict(built)))
    return built


def _kept(file: File, name: str) -> Index | None:
    with suppress(StorageError, OSError, ValueError, TypeError):
        found = json.loads(file.folder.read_text(name))
        index = Index(**{**found, "stretches": [Stretch(*one) for one in found["stretches"]]})
        if (index.size, index.version, index.form) == (file.size, file.version, VERSION):
            return index
    return None


def read_stretch(file: File, stretch: Stretch) -> bytes:
    """The bytes of a stretch. Raises what the storage raises, and OSError if the file has become shorter."""
    with file.open() as stream:
        found: bytes = stream.read_at(stretch.stop - stretch.start, stretch.start)
    if len(found) != stretch.stop - stretch.start:
        raise OSError(f"got {len(found)} bytes at {stretch.start}, wanted {stretch.stop - stretch.start}")
    return found


def read_in_pieces(file: File) -> Iterator[bytes]:
    """The file's bytes in order, about STRETCH_BYTES at a time."""
    with file.open() as stream:
        while piece := stream.read(STRETCH_BYTES):
            yield piece

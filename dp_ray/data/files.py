"""The files of a data source: found in a folder, by a glob, in a list or at a URL, and pinned by size and version.

A file that must be read once to know where its samples lie gets an index, which is kept beside it.
"""

import errno
import fnmatch
import glob
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
from pyarrow import fs as pafs

from dp_ray.errors import DataError, StorageError
from dp_ray.storage import Storage, is_text
from dp_ray.tables import Numbers, array_of, numbers
from dp_ray.text import hide, listed

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
S = TypeVar("S")
T = TypeVar("T")

ATTEMPTS = 5
WAIT_SECONDS = 0.5  # before the second attempt; it doubles with each
FILES_AT_ONCE = 32
STRETCH_BYTES = 4 << 20
VERSION = 4  # of the form of what is kept beside a file, and of how it is found
COLUMNS = b"columns"  # beside the stretches of an index: the types of the file's columns
# Errors of a local or mounted disk after which another attempt may succeed.
PASSING = {
    *(errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
}
NO_TEXT = "the name is no UTF-8; rename the file"
WILDCARD = re.compile(r"[*?\[]")
_NOT_IN_URLS = re.compile(r"""[^!-~]|["<>\\^`{|}\[\]]|%(?![0-9A-Fa-f]{2})""")
_ENCODED = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


@dataclass(frozen=True)
class File:
    """A file of a data source; `folder` is the source's, `version` changes when the contents do."""

    folder: Storage
    name: str
    size: int
    version: str

    def __str__(self) -> str:
        return self.folder.shown(self.name)

    def open(self) -> pa.NativeFile:
        """Return the file, opened for reading at any position; it reports errors as OSErrors."""
        return self.folder.fs.open_input_file(self.folder.file(self.name))

    def read(self, look: Callable[[pa.NativeFile], T], where: str = "") -> T:
        """Return what `look` gives for the opened file; `where` says in words what it reads. See `with_retries`."""

        def opened() -> T:
            with self.open() as stream:
                return look(stream)

        return with_retries(opened, where or str(self), self.is_local)

    @property
    def is_local(self) -> bool:
        """Whether the file is on a disk of this machine, or on one that is mounted there."""
        return isinstance(self.folder.fs, pafs.LocalFileSystem)


def find_files(paths: Paths | File, suffixes: Sequence[str]) -> list[File]:
    """Return the files in a folder, of a glob, of a list of these, or at a URL of pyarrow's file systems, by name.

    In a folder, files that end with one of `suffixes` count, in any case of letters and at any depth. Wildcards match
    any suffix. Names that begin with a dot or an underscore are hidden: they are left out, unless the path or that
    part of the pattern begins so too. A list keeps its order.

    A file that was found already is taken as it is. Raises DataError, which names the path, if there are none.
    """
    if isinstance(paths, File):
        return [paths]
    texts = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not texts:
        raise DataError("no files were given: an empty list")
    files: list[File] = []
    try:
        for text, named in zip(texts, _named_files(texts), strict=True):
            files += [named] if named else _files_at(text, suffixes)
    except (StorageError, OSError) as error:
        raise DataError(f"cannot look for files: {error}") from error
    if all(file.is_local for file in files):
        return files
    # The times of an object store are in whole seconds, so its ETag is the version.
    return in_threads(with_etag, files)


def in_threads(look: Callable[[S], T], files: Sequence[S]) -> list[T]:
    """Return `look(file)` for each file, several at a time, since each waits for its storage."""
    with ThreadPoolExecutor(min(FILES_AT_ONCE, max(1, len(files)))) as pool:
        return list(pool.map(look, files))


@dataclass(frozen=True)
class _Path:
    """A path as it was given: what pyarrow takes for it, and a URL's options, which are no part of it."""

    text: str
    options: str

    @classmethod
    def of(cls, given: str) -> "_Path":
        """Return the parts of a path. Raises DataError for a name that is no UTF-8, which pyarrow cannot pass on."""
        if not is_text(given):
            raise DataError(f"{given!r}: {NO_TEXT}")
        text, mark, query = given.partition("?") if "://" in given else (given, "", "")
        return cls(text, mark + query)

    @property
    def is_url(self) -> bool:
        return "://" in self.text

    @property
    def parent(self) -> "_Path":
        base = self.text.rpartition("/")[0]
        return _Path(base or ("/" if self.text.startswith("/") else "."), self.options)

    @property
    def storage(self) -> Storage:
        """The folder, with what a URL may not hold percent-encoded: spaces, for example."""
        scheme, mark, rest = self.text.rpartition("://")
        host, slash, path = rest.partition("/") if mark else ("", "", rest)
        if mark:
            path = _NOT_IN_URLS.sub(lambda found: quote(found[0], safe=""), path)
        return Storage(f"{scheme}{mark}{host}{slash}{path}{self.options}")

    def __str__(self) -> str:
        return hide(self.text + self.options)


def _named_files(given: Sequence[str]) -> list[File | None]:
    """For each path the file of this name, or None if it is none: a folder, a glob, or nothing.

    Files of one folder share its connection, and are looked up several at a time.
    """
    paths = [_Path.of(path) for path in given]
    parents = {path.parent: None for path in paths if "/" in path.text.rpartition("://")[2] or not path.is_url}
    folders = {parent: parent.storage for parent in parents}

    def look(path: _Path) -> File | None:
        folder = folders.get(path.parent)
        name = path.text.rpartition("/")[2]
        name = unquote(name) if path.is_url else name
        if folder is None or name in ("", ".", "..") or path.text == "~":
            return None
        info = folder.fs.get_file_info(folder.file(name))
        return File(folder, name, info.size, str(info.mtime_ns or "")) if info.is_file else None

    return in_threads(look, paths)


def _files_at(given: str, suffixes: Sequence[str]) -> list[File]:
    """Return the files of a folder or a glob."""
    path = _Path.of(given)
    there = path.storage
    kind = there.fs.get_file_info(there.path).type
    if kind == pafs.FileType.NotFound and WILDCARD.search(path.text):  # else its name looks like a pattern
        return _globbed(path)
    if kind == pafs.FileType.NotFound and not path.is_url:
        raise DataError(f"{path}: there is no such file or folder")
    ends = tuple(suffix.lower() for suffix in suffixes)
    files = _listed(there, lambda name: name.lower().endswith(ends) and not _is_hidden(name), recursive=True)
    if not files:
        raise DataError(f"{path}: has no files that end with {listed(list(suffixes))}")
    return files


def _globbed(path: _Path) -> list[File]:
    """Return the files of a glob; `**` stands for any number of folders, at the end for all that is in them."""
    parts = path.text.split("/")
    first = next(number for number, part in enumerate(parts) if WILDCARD.search(part))
    pattern = parts[first:]
    if path.is_url:
        pattern = [_ENCODED.sub(lambda found: glob.escape(unquote(found[0])), part) for part in pattern]
    folder = _Path("/".join([*parts[:first], ""]), path.options).parent.storage
    is_deep = len(pattern) > 1 or "**" in pattern
    files = _listed(folder, lambda name: _fits(name.split("/"), pattern), recursive=is_deep)
    if not files:
        raise DataError(f"{path}: no file matches")
    return files


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match a name with a pattern, part by part. Wildcards match no hidden part unless they begin like it."""
    if not parts or not pattern:
        return not parts and not pattern
    is_taken = not _is_hidden(parts[0]) or parts[0][0] == pattern[0][:1]
    if pattern[0] == "**":
        is_end = len(pattern) == len(parts) == 1
        return _fits(parts, pattern[1:]) or (is_taken and (is_end or _fits(parts[1:], pattern)))
    return is_taken and fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _listed(folder: Storage, wanted: Callable[[str], bool], recursive: bool = False) -> list[File]:
    """Return the files of a folder whose names, within it, are wanted."""
    if isinstance(folder.fs, pafs.LocalFileSystem):
        files = []
        for name in filter(wanted, _names_on_disk(folder.path, recursive)):
            if not is_text(name):
                raise DataError(f"{folder.shown(name)!r}: {NO_TEXT}")
            try:
                status = os.stat(folder.file(name))
            except FileNotFoundError:
                raise DataError(f"{folder.shown(name)}: is a link to a file that is not there") from None
            if stat.S_ISREG(status.st_mode):
                files.append(File(folder, name, status.st_size, str(status.st_mtime_ns or "")))
    else:
        selector = pafs.FileSelector(folder.path, allow_not_found=True, recursive=recursive)
        length = len(folder.path.rstrip("/")) + 1
        infos = [info for info in folder.fs.get_file_info(selector) if info.is_file and wanted(info.path[length:])]
        files = [File(folder, info.path[length:], info.size, str(info.mtime_ns or "")) for info in infos]
    return sorted(files, key=lambda file: file.name)


def _names_on_disk(folder: str, recursive: bool, inside: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of a folder's files. A link to a folder above it is passed over.

    pyarrow cannot list a folder in which any name is no UTF-8; Python gives such a name with surrogates.
    """
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    here = os.path.realpath(folder)
    for entry in entries:
        if not entry.is_dir():
            yield inside + entry.name
        elif recursive and os.path.realpath(entry.path) not in (*above, here):
            yield from _names_on_disk(entry.path, recursive, f"{inside}{entry.name}/", (*above, here))


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def with_etag(file: File) -> File:
    """Return a file of an object store with its ETag as its version, if it has one; a local file as it is."""
    tag = b"" if file.is_local else file.read(lambda stream: (stream.metadata() or {}).get("ETag", b""))
    return replace(file, version=tag.decode().strip('"') or file.version)


def with_retries(read: Callable[[], T], what: str, is_local: bool = False) -> T:
    """Return what `read` returns; after an error of the storage that may pass, call it again.

    For a local file, only some errors of the system may pass, as of a network disk that does not answer; others are
    damage.

    Raises DataError, which names `what`, after the last attempt, or at once for a file that is not there or damaged.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return read()
        except FileNotFoundError as error:
            raise DataError(f"{what}: there is no such file any more: {error}") from error
        except (pa.ArrowException, UnicodeDecodeError) as error:  # an OSError of pyarrow is another class
            raise DataError(f"{what}: is damaged: {error}") from error
        except OSError as error:
            if is_local and error.errno not in PASSING:
                raise DataError(f"{what}: {'cannot be read' if error.errno else 'is damaged'}: {error}") from error
            if attempt == ATTEMPTS:
                raise DataError(f"{what}: cannot be read, after {ATTEMPTS} attempts: {error}") from error
            time.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
    raise AssertionError


class Stretch(NamedTuple):
    """The bytes `start` .. `stop` - 1 of a file, which hold whole samples: `rows` of them."""

    start: int
    stop: int
    rows: int

    def __str__(self) -> str:
        return f"bytes {self.start} to {self.stop}"


def index_of(
    file: File, kind: str, build: Callable[[], tuple[list[Stretch], pa.Schema]]
) -> tuple[list[Stretch], pa.Schema]:
    """Return where the samples of a file lie, and the types of its columns, by what is kept beside it.

    `kind` is a part of the name there: what `build` looks for, and how. Raises what `with_retries` raises.
    """

    def look() -> pa.RecordBatch:
        stretches, schema = with_retries(build, str(file), file.is_local)
        columns = np.array(stretches, np.int64).reshape(-1, len(Stretch._fields)).T
        metadata = {COLUMNS: schema.serialize().to_pybytes()}
        return pa.RecordBatch.from_arrays(
            list(map(array_of, columns)), names=list(Stretch._fields), metadata=metadata
        )

    batch = _kept(file, kind, f"{file.size}, {file.version}", look)
    stretches = [Stretch(*each) for each in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
    return stretches, pa.ipc.read_schema(pa.py_buffer(batch.schema.metadata[COLUMNS]))


def kept_numbers(file: File, kind: str, of: str, build: Callable[[], Numbers]) -> Numbers:
    """Return the numbers kept beside a file, if they were made `of` the same, else what `build` gives.

    `kind` is a part of the name there. Raises what `build` raises.
    """
    batch = _kept(file, kind, of, lambda: pa.RecordBatch.from_arrays([array_of(build())], names=["numbers"]))
    return numbers(batch.column(0))


def _kept(file: File, kind: str, of: str, build: Callable[[], pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows kept beside a file, if they were made `of` the same, else what `build` gives.

    New ones are kept if the folder may be written: as an Arrow file, which is mapped into memory on a local disk.
    """
    folder, _, base = file.name.rpartition("/")
    name = f"{folder}/.{base}.{quote(kind, safe=' =+,')}.arrow".lstrip("/")
    of = f"{of}, form {VERSION}"
    with suppress(StorageError, OSError, pa.ArrowException, ValueError, TypeError):  # they are made anew
        path = file.folder.file(name)
        # From a store all at once: pyarrow would ask several times, and there may be thousands of files.
        with pa.memory_map(path) if file.is_local else pa.BufferReader(file.folder.read_bytes(name)) as stream:
            batch = pa.ipc.open_file(stream).get_batch(0)
        if (batch.schema.metadata or {}).get(b"of") == of.encode():
            return batch
    made = build()
    made = made.replace_schema_metadata({**(made.schema.metadata or {}), "of": of})
    with (
        suppress(StorageError, OSError),
        file.folder.writing(name) as out,
        pa.ipc.new_file(out, made.schema) as writer,
    ):
        writer.write_batch(made)
    return made


def read_stretch(file: File, stretch: Stretch) -> bytes:
    """Return the bytes of a stretch. Raises the storage's errors, and OSError if the file has become shorter."""
    with file.open() as stream:
        data: bytes = stream.read_at(stretch.stop - stretch.start, stretch.start)
    if len(data) != stretch.stop - stretch.start:
        raise OSError(f"got {len(data)} bytes at {stretch.start}, wanted {stretch.stop - stretch.start}")
    return data


def read_in_pieces(file: File) -> Iterator[bytes]:
    """Yield the file's bytes in order, about STRETCH_BYTES at a time."""
    with file.open() as stream:
        while piece := stream.read(STRETCH_BYTES):
            yield piece

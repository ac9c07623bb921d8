"""The files of a data source: found in a folder, by a glob, in a list or at a URL, and pinned by size and version."""

import errno
import fnmatch
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import pyarrow as pa
from pyarrow import fs as pafs

from dp_ray.errors import DataError, StorageError
from dp_ray.secrets import hide
from dp_ray.storage import Storage
from dp_ray.text import listed

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
T = TypeVar("T")

ATTEMPTS = 5
WAIT_SECONDS = 0.5  # before the second attempt; it doubles with each
FILES_AT_ONCE = 32
# What the system says of a local disk, or of one that is mounted, when the next attempt may succeed.
PASSING = {
    *(errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE),
    *(errno.ENOMEM, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
}
_WILDCARD = re.compile(r"[*?\[]")


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
        """The file, opened for reading at any position; it reports errors as OSErrors."""
        return self.folder.fs.open_input_file(self.folder.file(self.name))

    @property
    def is_local(self) -> bool:
        """Whether the file is on a disk of this machine, or on one that is mounted there."""
        return isinstance(self.folder.fs, pafs.LocalFileSystem)


def find_files(paths: Paths, suffixes: Sequence[str]) -> list[File]:
    """The files in a folder, of a glob, of a list of files, or at a URL of pyarrow's file systems, by name.

    In a folder, files that end with one of `suffixes` count, at any depth, but for hidden ones. A list keeps its
    order.

    Raises DataError, which names the path, if there are none.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise DataError("no files were given: an empty list")
    try:
        found = [file for path in given for file in _found(os.fspath(path), suffixes)]
    except (StorageError, OSError) as error:
        raise DataError(f"cannot look for files: {error}") from error
    return _versioned(found)


def pins_of(files: Iterable[File]) -> dict[str, str]:
    """The size and the version of each file, by what it is called; they change if the file does."""
    return {str(file): f"{file.size} bytes, {file.version}" for file in files}


def in_threads(look: Callable[[File], T], files: Sequence[File]) -> list[T]:
    """What `look` gives for each file, several at a time, since each waits for its storage."""
    with ThreadPoolExecutor(min(FILES_AT_ONCE, len(files))) as pool:
        return list(pool.map(look, files))


def _found(path: str, suffixes: Sequence[str]) -> list[File]:
    head, mark, query = path.partition("?") if "://" in path else (path, "", "")
    is_pattern = _WILDCARD.search(head) is not None
    if is_pattern and "://" in path:
        return _globbed(head, mark + query)
    there = Storage(path)
    kind = there.fs.get_file_info(there.path).type
    if is_pattern and kind == pafs.FileType.NotFound:  # else it is a name that looks like a pattern
        return _globbed(head, mark + query)
    if kind == pafs.FileType.File:
        base, _, name = head.rpartition("/")
        return _listed(
            Storage((base or ("/" if head.startswith("/") else ".")) + mark + query), lambda one: one == name
        )
    if kind == pafs.FileType.NotFound and "://" not in path:
        raise DataError(f"{hide(path)}: there is no such file or folder")
    if found := _listed(there, lambda name: name.endswith(tuple(suffixes)) and not _is_hidden(name), recursive=True):
        return found
    raise DataError(f"{hide(path)}: has no files that end with {listed(list(suffixes))}")


def _globbed(path: str, query: str) -> list[File]:
    """The files of a glob; `**` stands for any number of folders."""
    parts = path.split("/")
    first = next(number for number, part in enumerate(parts) if _WILDCARD.search(part))
    base, pattern = "/".join(parts[:first]), parts[first:]
    matches = re.compile("/".join(map(_segment, pattern)).replace("(?:.*)/", "(?:.*/)?")).fullmatch
    folder = Storage((base or ("/" if path.startswith("/") else ".")) + query)
    if found := _listed(folder, lambda name: matches(name) is not None, recursive=len(pattern) > 1):
        return found
    raise DataError(f"{hide(path + query)}: no file matches")


def _segment(part: str) -> str:
    if part == "**":
        return "(?:.*)"
    return (
        fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z").replace(".*", "[^/]*")
    )


def _listed(folder: Storage, wanted: Callable[[str], bool], recursive: bool = False) -> list[File]:
    selector = pafs.FileSelector(folder.path, allow_not_found=True, recursive=recursive)
    length = len(folder.path.rstrip("/")) + 1
    infos = [info for info in folder.fs.get_file_info(selector) if info.is_file and wanted(info.path[length:])]
    found = [File(folder, info.path[length:], info.size, str(info.mtime_ns or "")) for info in infos]
    return sorted(found, key=lambda file: file.name)


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _versioned(files: list[File]) -> list[File]:
    """The same files; those of an object store have its ETag for a version, since its times are in whole seconds."""
    if all(file.is_local for file in files):
        return files
    return in_threads(_with_etag, files)


def _with_etag(file: File) -> File:
    def look() -> str:
        with file.open() as stream:
            found = stream.metadata() or {}
        return str(found.get(b"ETag", b"").decode().strip('"') or file.version)

    return File(file.folder, file.name, file.size, retried(look, str(file), file.is_local))


def retried(read: Callable[[], T], what: str, is_local: bool = False) -> T:
    """What `read` gives; it is called again after an error of the storage that may pass.

    Of a local file these are the system's, like a network disk that does not answer. Other errors are damage.

    Raises DataError, which names `what`, after the last attempt, or at once for a file that is not there or damaged.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return read()
        except FileNotFoundError as error:
            raise DataError(f"{what}: there is no such file any more: {error}") from error
        except pa.ArrowInvalid as error:  # an OSError of pyarrow is another class
            raise DataError(f"{what}: is damaged: {error}") from error
        except OSError as error:
            if is_local and error.errno not in PASSING:
                raise DataError(f"{what}: {'cannot be read' if error.errno else 'is damaged'}: {error}") from error
            if attempt == ATTEMPTS:
                raise DataError(f"{what}: cannot be read, after {ATTEMPTS} attempts: {error}") from error
            time.sleep(WAIT_SECONDS * 2 ** (attempt - 1))
    raise AssertionError

"""A folder on a local disk, a shared disk or an object store, through pyarrow's file systems.

A file appears whole or not at all. Most stores need a temporary name and a rename for that. S3 and GCS are atomic by
themselves: an object appears when its upload is complete, so it is written under its final name.

Begin at `Storage`. The unfinished uploads of S3 are aborted with boto3 if it is installed: pyarrow cannot abort them.
"""

import copy
import ctypes
import errno
import hashlib
import importlib
import importlib.util
import os
import posixpath
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs as pafs

from dp_ray.errors import StorageError
from dp_ray.text import hide

T = TypeVar("T")

TEMPORARY = ".tmp-"
PIECE = 1 << 24
ATOMIC = {"s3", "gcs"}  # pyarrow's names of the stores where a file appears only when its stream is closed
COPY_BYTES = 1 << 24
# What a bucket's name may be. New ones of S3 have 3 to 63 small letters, digits, '.' and '-'; old ones have more.
_GCS = re.compile(r"[a-z0-9](?!.*\.\.)[a-z0-9._-]{1,220}[a-z0-9]"), "3 to 222 small letters, digits, '-', '_' and '.'"
BUCKETS = {
    "s3": (
        re.compile(r"[A-Za-z0-9](?!.*\.\.)[A-Za-z0-9._-]{1,253}[A-Za-z0-9_]"),
        "3 to 63 letters, digits, '-' and '.', without a port: that belongs into endpoint_override",
    ),
    "gs": _GCS,
    "gcs": _GCS,
}


class Storage:
    """A folder; every file in it appears under its final name only when it is whole.

    The methods raise StorageError, naming the folder and the file, if the store fails.
    """

    def __init__(self, location: str) -> None:
        _check_bucket(location)
        try:
            url = location if "://" in location else _absolute(location).as_posix()
            self.fs, self.path = pafs.FileSystem.from_uri(url)
        except (ValueError, NotImplementedError) as error:
            raise StorageError(f"storage {location!r} is no folder, and no URL of a store: {error}") from None
        except OSError as error:
            raise StorageError(f"storage {location!r} cannot be reached: {error}") from None

        base, mark, query = (self.path, "", "") if self.is_local else location.partition("?")
        self._base, self._query = base, mark + query  # apart, so that `child` can extend the path before the options
        self.before_commit: Callable[[], None] = _nothing

    @property
    def is_local(self) -> bool:
        """Whether this is a folder of a file system, be it mounted by many machines."""
        return isinstance(self.fs, pafs.LocalFileSystem)

    @property
    def location(self) -> str:
        """The folder's absolute path or URL. A URL may hold a secret: never show or keep it, use str() for that."""
        return self._base + self._query

    def __str__(self) -> str:
        return hide(self.location)

    def shown(self, name: str) -> str:
        """Return a file's path or URL for people: without secrets and options."""
        return hide(f"{self._base.rstrip('/')}/{name}")

    def child(self, name: str) -> "Storage":
        """Return the folder `name` in this one, with the same connection."""
        child = copy.copy(self)
        child.path = self.file(name)
        child._base = f"{self._base.rstrip('/')}/{name}"
        return child

    def holds(self, location: str) -> bool:
        """Return whether a path or URL is this folder or leads into it, by links or with `..` too."""
        scheme, mark, rest = location.partition("://")
        if not self.is_local:
            return bool(mark) and (_bare(location) + "/").startswith(_bare(self._base) + "/")
        if mark and scheme != "file":
            return False
        path = _absolute(rest if mark else location)
        for folder in {folder for place in (path, path.resolve()) for folder in (place, *place.parents)}:
            with suppress(OSError):  # there is no such folder, or it cannot be looked at
                if os.path.samefile(folder, self.path):
                    return True
        return False

    @property
    def name(self) -> str:
        """The name of this folder in the one that holds it."""
        return str(self.path).rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "Storage":
        """The folder that holds this one, with the same connection."""
        parent = copy.copy(self)
        parent.path, parent._base = (
            path.rstrip("/").rpartition("/")[0] or "/" * path.startswith("/") for path in (self.path, self._base)
        )
        return parent

    def guarded(self, before_commit: Callable[[], None]) -> "Storage":
        """Return the same folder, which calls `before_commit` before a file gets its name; if it raises, none does.

        Children of the folder do the same.
        """
        guarded = copy.copy(self)
        guarded.before_commit = before_commit
        return guarded

    def create(self) -> None:
        """Create the folder and its parents, if they do not exist."""
        with self._named("cannot be made", is_writing=True):
            self.fs.create_dir(self.path, recursive=True)

    def remove(self) -> None:
        """Remove the folder and all its contents, if it exists."""
        with self._named("cannot be removed"):
            if self.fs.get_file_info(self.path).type == pafs.FileType.Directory:
                self.fs.delete_dir(self.path)

    def is_empty(self) -> bool:
        """Return whether the folder does not exist, or holds neither file nor folder."""
        with self._named("cannot be listed"):
            return not self.fs.get_file_info(pafs.FileSelector(self.path, allow_not_found=True))

    def is_file(self) -> bool:
        """Return whether there is a file in place of the folder."""
        with self._named("cannot be looked at"):
            return bool(self.fs.get_file_info(self.path).is_file)

    def names(self) -> list[str]:
        """Return the names of the files in the folder, sorted, without unfinished ones."""
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        with self._named("cannot be listed"):
            files = [info for info in with_names(self.fs.get_file_info(selector)) if info.is_file]
        return sorted(info.base_name for info in files if not info.base_name.startswith(TEMPORARY))

    def numbered(self, template: str) -> dict[str, tuple[int, ...]]:
        """Return the files whose names are `template` with a number for each {}: these numbers by name, in order."""
        pattern = re.compile(r"(\d+)".join(map(re.escape, template.split("{}"))))
        matches = [match for match in map(pattern.fullmatch, self.names()) if match]
        numbers = {match[0]: tuple(map(int, match.groups())) for match in matches}
        return dict(sorted(numbers.items(), key=lambda pair: pair[1]))

    def entries(self) -> set[str]:
        """Return the names of the files in the folder, and of the folders in it that hold files at any depth.

        For files with names that are not UTF-8 it has "".
        """
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=True)
        with self._named("cannot be listed"):
            infos = [info for info in self.fs.get_file_info(selector) if info.type != pafs.FileType.Directory]
        paths = [info.path for info in with_names(infos)]
        names = {path.removeprefix(f"{self.path.rstrip('/')}/").partition("/")[0] for path in paths}
        return names if len(paths) == len(infos) else {*names, ""}

    def exists(self, name: str) -> bool:
        """Return whether the folder has a file of this name."""
        with self._named(f"cannot look for {name}"):
            return bool(self.fs.get_file_info(self.file(name)).is_file)

    def modified(self, name: str) -> datetime | None:
        """Return when a file was written; None if it does not exist or the store does not say."""
        with self._named(f"cannot look for {name}"):
            return self.fs.get_file_info(self.file(name)).mtime  # type: ignore[no-any-return]

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if it does not exist."""
        with self._named(f"cannot look for {name}"):
            info = self.fs.get_file_info(self.file(name))
            return int(info.size) if info.is_file else None

    @property
    def is_atomic(self) -> bool:
        """Return whether a file of this store appears whole or not at all, without a rename."""
        return self.fs.type_name in ATOMIC

    def remove_unfinished(self, recursive: bool = False) -> None:
        """Remove the unfinished files and uploads of killed writers; only for the folder's single writer."""
        if self.fs.type_name == "s3":
            abort_uploads(self.location, self.path, recursive)
        if self.is_atomic:
            return
        selector = pafs.FileSelector(self.path, allow_not_found=True, recursive=recursive)
        with self._named("cannot be cleared"):
            for info in with_names(self.fs.get_file_info(selector)):
                if info.is_file and info.base_name.startswith(TEMPORARY):
                    # The lease's thread may write meanwhile: then its file has its name by now.
                    with suppress(FileNotFoundError):
                        self.fs.delete_file(info.path)

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        with self._named(f"cannot remove {name}"), suppress(FileNotFoundError):
            self.fs.delete_file(self.file(name))

    def file(self, name: str) -> str:
        """Return the file's path on `fs`."""
        return f"{self.path.rstrip('/')}/{name}"

    def read_text(self, name: str) -> str:
        """Return a file's contents, decoded as UTF-8."""
        return self.read_bytes(name).decode()

    def write_text(self, name: str, text: str) -> None:
        """Write a file as UTF-8, in place of one of that name."""
        with self.writing(name) as stream:
            stream.write(text.encode())

    def open(self, name: str) -> pa.NativeFile:
        """Open a file for reading at any position; the caller closes it. Errors while reading are OSErrors."""
        with self._named(f"cannot read {name}"):
            return self.fs.open_input_file(self.file(name))

    def read_bytes(self, name: str) -> bytes:
        """Return a file's contents."""
        with self._named(f"cannot read {name}"):
            with self.fs.open_input_file(self.file(name)) as stream, suppress(*([] if self.is_local else [OSError])):
                # Without a size pyarrow asks for 256 KB at a time: on S3, a request each, perhaps of two versions.
                return stream.read(stream.size())  # type: ignore[no-any-return]
            # An object that is removed between the requests for its size and its bytes gives any error: missing.
            with self.fs.open_input_file(self.file(name)) as stream:
                return stream.read(stream.size())  # type: ignore[no-any-return]

    def read(self, name: str, parse: Callable[[bytes], T]) -> T:
        """Return what `parse` makes of a file's contents; it raises whatever it likes of others.

        An object store is asked for the size of an object, then for so many bytes: if a longer one takes its place in
        between, the first part of that. So what `parse` cannot take is read once more there.
        """
        try:
            return parse(self.read_bytes(name))
        except StorageError:
            raise
        except Exception:
            if self.is_local:
                raise
            return parse(self.read_bytes(name))

    def sha256(self, name: str) -> str:
        """Return the SHA-256 of a file's bytes, in hexadecimal; the file is read in pieces."""
        digest = hashlib.sha256()
        with self._named(f"cannot read {name}"), self.fs.open_input_file(self.file(name)) as stream:
            while piece := stream.read(PIECE):
                digest.update(piece)
        return digest.hexdigest()

    def link(self, name: str, source: "Storage") -> bool:
        """Hard-link a file of another folder here, under the same name; return False if the storage cannot.

        The file stays under this name if it is removed under the other.
        """
        if not (self.is_local and source.is_local):
            return False
        self.delete(name)
        with suppress(OSError):
            os.link(os.path.realpath(source.file(name)), self.file(name))
            return True
        return False

    @contextmanager
    def writing(self, name: str) -> Iterator["UnfinishedFile"]:
        """Open a stream whose bytes become the file `name` if the block ends without an error."""
        unfinished = UnfinishedFile(self, name)
        try:
            yield unfinished
            unfinished.commit()
        except BaseException:
            unfinished.discard()
            raise

    def unnamed(self) -> "UnfinishedFile | LocalFile":
        """Open a stream for a file that gets its name only when it is committed."""
        return LocalFile(self) if self.is_atomic else UnfinishedFile(self, "part")

    @contextmanager
    def _named(self, what: str, is_writing: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            may_not = is_writing and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            advice = "; set storage to a folder that you may read and write" if may_not else ""
            raise StorageError(f"{self}: {what}: {error}{advice}") from error


def with_names(infos: Iterable[pafs.FileInfo]) -> Iterator[pafs.FileInfo]:
    """Yield the entries whose names are UTF-8, as dp_ray's are; pyarrow cannot read other names."""
    for info in infos:
        with suppress(UnicodeDecodeError):
            _ = info.path
            yield info


def is_text(name: str) -> bool:
    """Return whether a name that the system gave is UTF-8: Python gives others with surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def located(location: str) -> Storage:
    """Return a folder of runs, or a path in one, where all workers find it.

    In a submitted Ray job, a relative path is below the home directory: Ray removes the copied working directory.
    """
    is_shipped = "runtime_resources" in Path(os.getcwd()).parts
    if is_shipped and "://" not in location and not Path(location).is_absolute():
        return Storage(str(Path.home() / location))
    return Storage(location)


def _absolute(path: str) -> Path:
    """Return the absolute path; `~` and `~NAME` at its beginning are the home of a user, if there is one."""
    return Path(os.path.expanduser(path)).absolute()  # Path.expanduser takes ./~NAME for a user too


def _bare(url: str) -> str:
    """Return a URL without its secrets and options, and with each of its folders spelled once.

    >>> _bare("s3://KEY:SECRET@bucket/runs//a/../b/?region=x")
    's3://bucket/runs/b'
    """
    scheme, _, rest = url.partition("?")[0].partition("://")
    scheme = {"gcs": "gs"}.get(scheme, scheme)
    host, slash, path = rest.partition("/")
    return f"{scheme}://{posixpath.normpath(host.rpartition('@')[2] + slash + path)}"


def _check_bucket(location: str) -> None:
    """Raise StorageError if a URL's bucket has a name that its store refuses; it would be looked for in vain."""
    scheme, mark, rest = location.partition("://")
    if mark and (rule := BUCKETS.get(scheme)) is not None:
        bucket = re.split("[/?]", rest, maxsplit=1)[0].rpartition("@")[2]
        if not rule[0].fullmatch(bucket):
            raise StorageError(f"storage {location!r}: {bucket!r} is no name of a bucket, which has {rule[1]}")


def _nothing() -> None:
    """Do nothing before a commit, as a Storage that is not guarded; no lambda, so that a Storage can be pickled."""


class _OpenFile:
    """A file being written, as pyarrow takes it: a stream whose StorageErrors name the file."""

    storage: Storage
    _stream: Any
    _problem: str  # of a StorageError
    _is_in_storage = True

    def _named(self) -> AbstractContextManager[None]:
        return self.storage._named(self._problem, is_writing=self._is_in_storage)

    def write(self, data: Any) -> None:
        """Write bytes."""
        with self._named():
            self._stream.write(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return int(self._stream.tell())

    def flush(self) -> None:
        """Flush the stream."""
        with self._named():
            self._stream.flush()

    def close(self) -> None:
        """Do nothing: pyarrow may close a stream early, but only `commit` and `discard` close the file."""


class UnfinishedFile(_OpenFile):
    """A file being written to its folder. It joins the folder only by `commit`.

    A name may lead into a folder below: until the commit, nothing of the file is there.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name
        self._problem = f"cannot write {name}"
        temporary = f"{TEMPORARY}{uuid.uuid4().hex}-{name.rpartition('/')[2]}"
        self._path = storage.file(name if storage.is_atomic else temporary)
        with self._named():
            self._stream = storage.fs.open_output_stream(self._path, compression=None)
        if storage.is_atomic:
            # pyarrow cannot abort a stream: it would complete the upload when it destroys the stream, even when
            # Python ends. With one more reference the stream is never destroyed, and no file appears.
            # boto3 and s3fs can abort, and sent 512 MB in 0.6 and 0.7 of the time: 25 lines more, and for S3 alone.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._stream))

    @property
    def closed(self) -> bool:
        """Whether the stream is closed, for pyarrow."""
        return bool(self._stream.closed)

    def commit(self, name: str | None = None) -> None:
        """Close the file and give it its name, in place of any file that has it; `name` is for `unnamed` ones."""
        self.name = name or self.name
        self._problem = f"cannot write {self.name}"
        self.storage.before_commit()  # before the close, which by itself names the file on an atomic store
        with self._named():
            self._stream.close()
            if not self.storage.is_atomic:
                self.storage.fs.move(self._path, self.storage.file(self.name))
        if self.storage.is_atomic:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._stream))

    def discard(self) -> None:
        """Remove the file. On an object store the upload stays unfinished until `remove_unfinished`."""
        if self.storage.is_atomic:
            return
        with suppress(OSError):
            self._stream.close()
        with suppress(OSError):
            self.storage.fs.delete_file(self._path)


class LocalFile(_OpenFile):
    """A file without a name yet, on the local disk: an object store has no rename, so it is sent when named."""

    closed = False
    _is_in_storage = False

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._problem = f"cannot hold a part in {tempfile.gettempdir()}"
        with self._named():
            self._stream = tempfile.TemporaryFile(prefix="dp_ray-")  # noqa: SIM115

    def commit(self, name: str) -> None:
        """Send the file to the store, where it appears under its name when it is complete."""
        with self.storage.writing(name) as stream, self._named():
            self._stream.seek(0)
            while piece := self._stream.read(COPY_BYTES):
                stream.write(piece)
        self._stream.close()

    def discard(self) -> None:
        """Remove the local file; no file appears on the store."""
        with suppress(OSError):
            self._stream.close()


def abort_uploads(location: str, path: str, recursive: bool) -> None:
    """Abort the unfinished uploads directly in the folder `path` (BUCKET/KEYS), or with `recursive` also below it.

    Without boto3, or without the right to list uploads, they stay. They are not objects, but S3 charges for them.
    `location` is the folder's URL, with its secrets.
    """
    if importlib.util.find_spec("boto3") is None:
        return
    failures = importlib.import_module("botocore.exceptions")
    bucket, _, folder = path.partition("/")
    try:
        client = _client(location)
        prefix = f"{folder.rstrip('/')}/"
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
            if recursive or "/" not in upload["Key"][len(prefix) :]:
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except (failures.BotoCoreError, failures.ClientError):
        return


def _client(location: str) -> Any:
    """Return an S3 client with the options that pyarrow reads from the same URL, else with boto3's defaults."""
    url = urlsplit(location)
    options = {name: values[-1] for name, values in parse_qs(url.query).items()}
    endpoint = options.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    return importlib.import_module("boto3").client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.get("region"),
        aws_access_key_id=unquote(url.username) if url.username else None,
        aws_secret_access_key=unquote(url.password) if url.password else None,
    )

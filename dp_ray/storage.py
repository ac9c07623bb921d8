"""A folder on a local disk, a shared one, or an object store, through pyarrow's file systems."""

import copy
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from dp_ray.errors import StorageError

TEMPORARY = ".tmp-"
PIECE = 1 << 24


class Storage:
    """A folder; every file in it appears under its final name only when it is whole."""

    def __init__(self, location: str) -> None:
        try:
            url = location if "://" in location else Path(location).expanduser().absolute().as_posix()
            self.fs, self.path = pafs.FileSystem.from_uri(url)
        except (OSError, ValueError, NotImplementedError) as error:
            raise StorageError(f"storage {location!r}: is no folder and no URL like s3://...: {error}") from None

        is_local = isinstance(self.fs, pafs.LocalFileSystem)
        base, mark, query = (self.path, "", "") if is_local else location.partition("?")
        self._base, self._query = base, mark + query  # a URL's options stand behind its path

    @property
    def location(self) -> str:
        """The folder's absolute path, or its URL."""
        return self._base + self._query

    def __str__(self) -> str:
        return self.location

    def child(self, name: str) -> "Storage":
        """A folder in this one, on the same connection."""
        child = copy.copy(self)
        child.path = self.file(name)
        child._base = f"{self._base.rstrip('/')}/{name}"
        return child

    def create(self) -> None:
        with self._named("cannot be made"):
            self.fs.create_dir(self.path, recursive=True)

    def remove(self) -> None:
        """Remove the folder and all that is in it, if it is there."""
        with self._named("cannot be removed"):
            if self.fs.get_file_info(self.path).type == pafs.FileType.Directory:
                self.fs.delete_dir(self.path)

    def is_empty(self) -> bool:
        """Whether the folder is not there, or holds neither file nor folder."""
        with self._named("cannot be listed"):
            return not self.fs.get_file_info(pafs.FileSelector(self.path, allow_not_found=True))

    def names(self) -> list[str]:
        """The names of the files in the folder, sorted; unfinished ones are left out."""
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        with self._named("cannot be listed"):
            files = [info for info in self.fs.get_file_info(selector) if info.is_file]
        return sorted(info.base_name for info in files if not info.base_name.startswith(TEMPORARY))

    def exists(self, name: str) -> bool:
        with self._named(f"cannot look for {name}"):
            return bool(self.fs.get_file_info(self.file(name)).is_file)

    def remove_unfinished(self) -> None:
        """Remove what writers that were killed left in the folder; for whoever alone writes there."""
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        with self._named("cannot be cleared"):
            for info in self.fs.get_file_info(selector):
                if info.is_file and info.base_name.startswith(TEMPORARY):
                    self.fs.delete_file(info.path)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._named(f"cannot remove {name}"), suppress(FileNotFoundError):
            self.fs.delete_file(self.file(name))

    def file(self, name: str) -> str:
        """The file's path on `fs`."""
        return f"{self.path.rstrip('/')}/{name}"

    def read_text(self, name: str) -> str:
        with self._named(f"cannot read {name}"), self.fs.open_input_stream(self.file(name)) as stream:
            return stream.read().decode()  # type: ignore[no-any-return]

    def write_text(self, name: str, text: str) -> None:
        with self.writing(name) as stream:
            stream.write(text.encode())

    def open(self, name: str) -> pa.NativeFile:
        with self._named(f"cannot read {name}"):
            return self.fs.open_input_file(self.file(name))

    def read_bytes(self, name: str) -> bytes:
        with self._named(f"cannot read {name}"), self.fs.open_input_stream(self.file(name)) as stream:
            return stream.read()  # type: ignore[no-any-return]

    def sha256(self, name: str) -> str:
        """The hash of a file's bytes, read a piece at a time."""
        digest = hashlib.sha256()
        with self._named(f"cannot read {name}"), self.fs.open_input_stream(self.file(name)) as stream:
            while piece := stream.read(PIECE):
                digest.update(piece)
        return digest.hexdigest()

    def link(self, name: str, source: "Storage") -> bool:
        """Give a file of another folder its name here too, without a copy; False where the storage cannot.

        The file stays under this name when it is removed under the other.
        """
        if not all(isinstance(one.fs, pafs.LocalFileSystem) for one in (self, source)):
            return False
        self.delete(name)
        with suppress(OSError):
            os.link(os.path.realpath(source.file(name)), self.file(name))
            return True
        return False

    @contextmanager
    def writing(self, name: str) -> Iterator["Unfinished"]:
        """A stream whose bytes become the file `name` when the block ends without an error."""
        unfinished = Unfinished(self, name)
        try:
            yield unfinished
            unfinished.commit()
        except BaseException:
            unfinished.discard()
            raise

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self}: {what}: {error}") from error


class Unfinished:
    """A file being written under a temporary name: a stream whose errors name the file."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name
        self._temporary = storage.file(f"{TEMPORARY}{uuid.uuid4().hex}-{name}")
        with self._named():
            self._stream = storage.fs.open_output_stream(self._temporary)

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def write(self, data: Any) -> None:
        with self._named():
            self._stream.write(data)

    def tell(self) -> int:
        return int(self._stream.tell())

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    def close(self) -> None:
        with self._named():
            self._stream.close()

    def commit(self) -> None:
        """Close the file and give it its name, in place of one that had it."""
        self.close()
        with self._named():
            self.storage.fs.move(self._temporary, self.storage.file(self.name))

    def discard(self) -> None:
        """Close it and remove it if that can be done: an unfinished file is never read."""
        with suppress(StorageError):
            self.close()
        with suppress(OSError):
            self.storage.fs.delete_file(self._temporary)

    def _named(self) -> AbstractContextManager[None]:
        return self.storage._named(f"cannot write {self.name}")

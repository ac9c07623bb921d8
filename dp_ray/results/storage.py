"""A folder on a local disk, a shared one, or an object store, through pyarrow's file systems."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs as pafs

from dp_ray.errors import StorageError


class Storage:
    """A folder; every file in it appears under its final name only when it is whole."""

    def __init__(self, location: str) -> None:
        try:
            url = location if "://" in location else Path(location).absolute().as_posix()
            self.fs, self.path = pafs.FileSystem.from_uri(url)
        except (OSError, ValueError, NotImplementedError) as error:
            raise StorageError(f"storage {location!r}: is no folder and no URL like s3://...: {error}") from None

        self.location = self.path if isinstance(self.fs, pafs.LocalFileSystem) else location.rstrip("/")

    def __str__(self) -> str:
        return self.location

    def child(self, name: str) -> "Storage":
        return Storage(f"{self.location}/{name}")

    def create(self) -> None:
        with self._named("cannot be made"):
            self.fs.create_dir(self.path, recursive=True)

    def remove(self) -> None:
        """Remove the folder and all that is in it, if it is there."""
        if self.fs.get_file_info(self.path).type == pafs.FileType.Directory:
            self.fs.delete_dir(self.path)

    def names(self) -> list[str]:
        """The names of the files in the folder, sorted; unfinished ones are left out."""
        selector = pafs.FileSelector(self.path, allow_not_found=True)
        files = [info for info in self.fs.get_file_info(selector) if info.is_file]
        return sorted(info.base_name for info in files if not info.base_name.startswith(".tmp-"))

    def exists(self, name: str) -> bool:
        return bool(self.fs.get_file_info(f"{self.path}/{name}").is_file)

    def file(self, name: str) -> str:
        """The file's path on `fs`."""
        return f"{self.path}/{name}"

    def read_text(self, name: str) -> str:
        with self._named(f"cannot read {name}"), self.fs.open_input_stream(self.file(name)) as stream:
            return stream.read().decode()  # type: ignore[no-any-return]

    def write_text(self, name: str, text: str) -> None:
        with self.writing(name) as stream:
            stream.write(text.encode())

    def open(self, name: str) -> pa.NativeFile:
        with self._named(f"cannot read {name}"):
            return self.fs.open_input_file(self.file(name))

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A stream whose bytes become the file `name` when the block ends without an error."""
        unfinished = Unfinished(self, name)
        try:
            with unfinished.stream:
                yield unfinished.stream
        except BaseException:
            unfinished.discard()
            raise
        unfinished.commit()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self}: {what}: {error}") from error


class Unfinished:
    """A file being written under a temporary name."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name
        self._temporary = f".tmp-{uuid.uuid4().hex}-{name}"
        with storage._named(f"cannot write {name}"):
            self.stream = storage.fs.open_output_stream(storage.file(self._temporary))

    def commit(self) -> None:
        """Give the closed file its name, in place of one that had it."""
        with self.storage._named(f"cannot write {self.name}"):
            self.storage.fs.move(self.storage.file(self._temporary), self.storage.file(self.name))

    def discard(self) -> None:
        """Remove it if that can be done: an unfinished file is never read."""
        with suppress(OSError):
            self.storage.fs.delete_file(self.storage.file(self._temporary))

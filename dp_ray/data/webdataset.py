"""Tar shards in the form of WebDataset as a map-style dataset: files of one name are a sample."""

import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from dp_ray.data.blocks import CACHE_BYTES, Block, Blocks, Item, Rows
from dp_ray.data.decode import BY_EXTENSION, Decode, decode_of, decoded
from dp_ray.data.files import File, Paths, find_files, in_threads, retried
from dp_ray.data.stretches import STRETCH_BYTES, Stretch, index_of, read_stretch
from dp_ray.errors import DataError
from dp_ray.text import did_you_mean, listed

T = TypeVar("T")

KEY = "__key__"
READ_BYTES = 4 << 20


class WebDataset(Blocks[Stretch]):
    """The samples of tar shards, in the order of the shards' names and of their members.

    Members whose paths are alike up to the first dot of the file's name are one sample. An item is a dict of their
    contents by extension (`jpg`, `cls`, `seg.png`), and of the sample's name under `__key__`. `columns` are the
    extensions to read, by default all.

    Contents are decoded by the last part of the extension: images are uint8 [3, height, width], cls is a number, txt
    text, json its value, npy and pt tensors, others bytes. `decode` gives functions in place of these, by extension.

    The first time, each shard is read once to find its samples; what was found is kept beside it.

    Raises DataError for shards that are missing or damaged, and for a sample that lacks an extension, by name.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        decode: Decode | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        files = find_files(paths, [".tar"])
        indices = in_threads(lambda file: index_of(file, "samples", lambda: (_stretches(file), "")), files)
        pairs = zip(files, indices, strict=True)
        blocks = [Block(file, one.rows, one, str(one)) for file, index in pairs for one in index.stretches]
        self._columns = None if columns is None else list(columns)
        self._decode = decode_of(decode, columns)
        super().__init__(files, blocks, cache_bytes)

    def _read(self, block: Block[Stretch]) -> tuple[list[tuple[str, Item]], int]:
        encoded = retried(lambda: read_stretch(block.file, block.source), str(block), block.file.is_local)
        try:
            with tarfile.open(fileobj=io.BytesIO(encoded), mode="r:") as tar:
                samples = list(_grouped(tar, lambda member: _contents(tar, member)))
        except tarfile.TarError as error:
            raise DataError(f"{block}: is damaged: {error}") from error
        if len(samples) != block.rows:
            raise DataError(f"{block}: has {len(samples)} samples where it had {block.rows}")
        return [(f"{block.file}, sample {item[KEY]}", item) for item in samples], len(encoded)

    def _items(self, read: list[tuple[str, Item]], rows: Rows) -> list[Item]:
        return [self._item(*read[row]) for row in rows.tolist()]

    def _item(self, shown: str, encoded: Item) -> Item:
        wanted = [name for name in encoded if name != KEY] if self._columns is None else self._columns
        for name in wanted:
            if name not in encoded:
                there = [one for one in encoded if one != KEY]
                raise DataError(f"{shown}: has no {name!r}{did_you_mean(name, there)}; it has {listed(there)}")
        by_extension = {one: BY_EXTENSION[last] for one in wanted if (last := one.rpartition(".")[2]) in BY_EXTENSION}
        item = {KEY: encoded[KEY], **{name: encoded[name] for name in wanted}}
        try:
            return decoded(item, {**by_extension, **{k: v for k, v in self._decode.items() if k in wanted}})
        except DataError as error:
            raise DataError(f"{shown}: {error}") from error


def _stretches(file: File) -> list[Stretch]:
    """The stretches of whole samples of a shard."""
    found: list[Stretch] = []
    start = stop = rows = 0
    for first, end in _samples(file):
        if rows and first - start >= STRETCH_BYTES:
            found.append(Stretch(start, first, rows))
            rows = 0
        start, stop, rows = start if rows else first, end, rows + 1
    if stop > file.size:
        raise DataError(f"{file}: is damaged: its last sample ends at byte {stop}, the file at {file.size}")
    return [*found, Stretch(start, stop, rows)] if rows else found


def _samples(file: File) -> Iterator[tuple[int, int]]:
    """Where each sample of a shard begins and ends; reads only what stands before the members' contents."""
    try:
        with _tar(file) as tar:
            for sample in _grouped(tar, lambda member: member):
                members = [one for one in sample.values() if isinstance(one, tarfile.TarInfo)]
                yield min(one.offset for one in members), max(_end_of(one) for one in members)
    except tarfile.TarError as error:
        raise DataError(f"{file}: is damaged, or is no tar file: {error}") from error


def _contents(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Any:
    found = tar.extractfile(member)
    assert found is not None, "it is a file"
    contents = found.read()
    if len(contents) != member.size:
        raise tarfile.ReadError(f"{member.name} has {len(contents)} bytes of {member.size}")
    return contents


def _end_of(member: tarfile.TarInfo) -> int:
    """The byte after a member's contents, which fill whole blocks."""
    return member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


@contextmanager
def _tar(file: File) -> Iterator[tarfile.TarFile]:
    with (
        file.open() as stream,
        io.BufferedReader(stream, READ_BYTES) as buffered,
        tarfile.open(fileobj=buffered, mode="r:") as tar,
    ):
        yield tar


def _grouped(tar: tarfile.TarFile, take: Callable[[tarfile.TarInfo], T]) -> Iterator[dict[str, T | str]]:
    """What `take` gives for the members of each sample, by extension, with the sample's name under `__key__`."""
    sample: dict[str, T | str] = {}
    for member in tar:
        folder, slash, base = member.name.rpartition("/")
        stem, dot, extension = base.partition(".")
        if not member.isfile() or not dot:
            continue
        key = folder + slash + stem
        if sample and sample[KEY] != key:
            yield sample
            sample = {}
        sample.setdefault(KEY, key)
        sample[extension.lower()] = take(member)
    if sample:
        yield sample

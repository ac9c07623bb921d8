"""Tar shards in the form of WebDataset, and folders of images, as map-style datasets.

In a tar shard, files of one name are a sample. In a folder of images each folder may be a class.
"""

import io
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import pyarrow as pa

from dp_ray.data.blocks import CACHE_BYTES, Block, Blocks, Item
from dp_ray.data.files import (
    STRETCH_BYTES,
    File,
    Paths,
    Stretch,
    find_files,
    in_threads,
    index_of,
    read_stretch,
    with_retries,
)
from dp_ray.data.values import BY_EXTENSION, Decode, RowNumbers, decode_of, decoded, image
from dp_ray.errors import DataError, JobError
from dp_ray.text import did_you_mean, listed, printable

KEY = "__key__"
READ_BYTES = 4 << 20
RECORD = re.compile(rb"([1-9][0-9]{0,8}) ([^=\n]+)=")
# The errors of Python's reader of headers for a block of zeros, and for the end of the file.
ENDS: tuple[type[Exception], ...] = (tarfile.EOFHeaderError, tarfile.EmptyHeaderError)  # type: ignore[attr-defined]


class WebDataset(Blocks[Stretch]):
    """The samples of tar shards, in the order of the shards' names and of their members.

    Members whose paths are alike up to the first dot of the file's name are one sample; they lie together, and no
    other sample of the shard has that name. Hidden files are left out. An item is a dict of the contents by extension
    (`jpg`, `cls`, `seg.png`), and of the sample's name under `__key__`. `columns` are the extensions to read, by
    default all.

    Contents are decoded by the last part of the extension: images are uint8 [3, height, width], cls is a number, txt
    text, json its value, npy and pt tensors, others bytes. `decode` gives functions in place of these, by extension.

    The first time, each shard is read once to find its samples; what was found is kept beside it.

    Raises DataError for shards that are missing or damaged, and for a sample that lacks an extension, by name.

    >>> import dp_ray, io, tarfile
    >>> with tarfile.open("shard-000.tar", "w") as shard:
    ...     for name, content in {"a.txt": b"a cat", "a.cls": b"3"}.items():
    ...         member = tarfile.TarInfo(name)
    ...         member.size = len(content)
    ...         shard.addfile(member, io.BytesIO(content))
    >>> dp_ray.data.WebDataset("shard-000.tar")[0]
    {'__key__': 'a', 'txt': 'a cat', 'cls': 3}
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        decode: Decode | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        files = find_files(paths, [".tar"])
        indices = in_threads(lambda file: index_of(file, "samples", lambda: (_stretches(file), pa.schema([]))), files)
        pairs = zip(files, indices, strict=True)
        blocks = [Block(file, part.rows, part, str(part)) for file, (parts, _) in pairs for part in parts]
        self._columns = None if columns is None else list(columns)
        self._decode = decode_of(decode, columns)
        super().__init__(files, blocks, cache_bytes)

    def _read(self, block: Block[Stretch]) -> tuple[list[tuple[str, Item]], int]:
        encoded = with_retries(lambda: read_stretch(block.file, block.source), str(block), block.file.is_local)
        with _tar(str(block), io.BytesIO(encoded)) as tar:
            samples = [sample for sample, _ in _grouped(str(block), tar, lambda member: _contents(tar, member))]
            if tar.offset != len(encoded):
                raise tarfile.ReadError(f"it ends after {tar.offset} bytes of {len(encoded)}")
        if len(samples) != block.rows:
            raise DataError(f"{block}: has {len(samples)} samples where it had {block.rows}")
        return [(f"{block.file}, sample {printable(item[KEY])}", item) for item in samples], len(encoded)

    def _items(self, read: list[tuple[str, Item]], rows: RowNumbers) -> list[Item]:
        return [self._item(*read[row]) for row in rows.tolist()]

    def _item(self, shown: str, encoded: Item) -> Item:
        wanted = [name for name in encoded if name != KEY] if self._columns is None else self._columns
        for name in wanted:
            if name not in encoded:
                there = [name for name in encoded if name != KEY]
                raise DataError(f"{shown}: has no {name!r}{did_you_mean(name, there)}; it has {listed(there)}")
        by_extension = {key: BY_EXTENSION[last] for key in wanted if (last := key.rpartition(".")[2]) in BY_EXTENSION}
        item = {KEY: encoded[KEY], **{name: encoded[name] for name in wanted}}
        try:
            return decoded(item, {**by_extension, **{k: v for k, v in self._decode.items() if k in wanted}})
        except DataError as error:
            raise DataError(f"{shown}: {error}") from error


class _Member(tarfile.TarInfo):
    """A member of an archive.

    Python's own class reads a damaged header as the end of the archive, and a damaged long name as far as it can.
    """

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(tar)
        except ENDS:  # the end: `_check_end` looks behind it
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"the header at byte {tar.offset}: {error}") from None

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if check := LONG_NAMES.get(self.type):
            at = tar.fileobj.tell()
            text = tar.fileobj.read(self.size)
            tar.fileobj.seek(at)
            if len(text) < self.size or not check(text):
                raise tarfile.HeaderError("the long name or the attributes behind it are damaged")
        member: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]  # which Python has for subclasses
        return member


def _are_records(text: bytes) -> bool:
    """Return whether attributes of the pax form are records, `LENGTH KEY=VALUE` and a newline, each of its length."""
    at = 0
    while match := RECORD.match(text, at):
        at += int(match[1])
        value = text[match.end() : at]
        if not value.endswith(b"\n") or (match[2] == b"path" and b"\0" in value):
            return False
    return at == len(text)


LONG_NAMES: dict[bytes, Callable[[bytes], bool]] = {
    # A long name of GNU's form is one text, with nothing behind the zero that ends it.
    **dict.fromkeys(
        (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
        lambda text: len(text) > 1 and text.find(b"\0") in (-1, len(text) - 1),
    ),
    **dict.fromkeys((tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE), _are_records),
}


def _stretches(file: File) -> list[Stretch]:
    """Return the stretches of whole samples of a shard; reads only what stands before the members' contents."""
    stretches: list[Stretch] = []
    start = stop = rows = 0
    with file.open() as stream, io.BufferedReader(stream, READ_BYTES) as buffered, _tar(str(file), buffered) as tar:
        for _, (first, end) in _grouped(str(file), tar, lambda member: None):
            if rows and first - start >= STRETCH_BYTES:
                stretches.append(Stretch(start, first, rows))
                rows = 0
            start, stop, rows = start if rows else first, end, rows + 1
        _check_end(buffered, tar.offset)
    return [*stretches, Stretch(start, stop, rows)] if rows else stretches


def _check_end(stream: io.BufferedReader, at: int) -> None:
    """Raise ReadError unless the archive ends there: with two blocks of zeros, and nothing but zeros behind."""
    stream.seek(at)
    zeros = 0
    while piece := stream.read(READ_BYTES):
        zeros += len(piece)
        if piece.strip(b"\0"):
            raise tarfile.ReadError(
                f"there is more behind its end at byte {at}: a header was lost, or it is several archives in one file"
            )
    if zeros < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it is cut off: no two blocks of zeros end it at byte {at}")


def _contents(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None, "it is a file"
    contents = stream.read()
    if len(contents) != member.size:
        raise tarfile.ReadError(f"{member.name!r} has {len(contents)} bytes of {member.size}")
    return contents


@contextmanager
def _tar(shown: str, stream: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """Open the archive in a stream; in the block, an error of it is a DataError."""
    try:
        with tarfile.open(fileobj=stream, mode="r:", tarinfo=_Member) as tar:
            yield tar
    except tarfile.TarError as error:
        raise DataError(f"{shown}: is damaged, or is no tar file: {error}") from error


def _grouped(
    shown: str, tar: tarfile.TarFile, take: Callable[[tarfile.TarInfo], Any]
) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    """Yield what `take` gives for the members of each sample, by extension, with the sample's name under `__key__`.

    Beside each is where it begins, and where the next header begins.
    """
    sample: dict[str, Any] = {}
    begin = end = 0
    known: set[str] = set()
    for member in tar:
        folder, slash, base = member.name.rpartition("/")
        stem, dot, extension = base.partition(".")
        if member.isdir() or not (stem and dot):
            continue
        if not member.isfile():
            raise DataError(f"{shown}: {member.name!r} is no file; pack the file that a link points to, not the link")
        key, extension = folder + slash + stem, extension.lower()
        if sample and sample[KEY] != key:
            yield sample, (begin, end)
            sample = {}
        if extension in sample or (not sample and key in known):
            advice = "give each sample a name of its own, and pack the files of a sample one after another"
            raise DataError(f"{shown}: has the sample {key!r} twice; {advice}")
        known.add(key)
        begin, end = begin if sample else member.offset, tar.offset
        sample.setdefault(KEY, key)
        sample[extension] = take(member)
    if sample:
        yield sample, (begin, end)


SUFFIXES = [f".{extension}" for extension, decoder in BY_EXTENSION.items() if decoder is image]


class Images(Blocks[int]):
    """Images in the order of their names: items are dicts of `image`, `path` and, with classes, `label`.

    `image` is uint8 [3, height, width] in RGB; `path` is the path within the folder. With `classes`, the first folder
    of the path names the class and `label` is its number in the order of the names, which `class_names` gives. Give
    `class_names` where files of some classes may be missing, as in a split: then labels are numbers in that list.
    `height` and `width` resize each image, with Pillow's bilinear filter; one of them alone makes it square.

    Raises DataError if there are no images, if one is damaged, or if one is in no folder, or that of no class, though
    there are classes.

    >>> import dp_ray, pathlib
    >>> from PIL import Image
    >>> pathlib.Path("pets/cat").mkdir(parents=True)
    >>> Image.new("RGB", (6, 4)).save("pets/cat/1.png")
    >>> item = dp_ray.data.Images("pets", classes=True)[0]
    >>> item["image"].shape, item["path"], item["label"]
    (torch.Size([3, 4, 6]), 'cat/1.png', np.int64(0))
    """

    def __init__(
        self,
        paths: Paths,
        classes: bool = False,
        height: int | None = None,
        width: int | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        files = find_files(paths, SUFFIXES)
        side = height or width  # one alone makes the image square
        self._size = None if side is None else (height or side, width or side)
        there: dict[str, File] = {}
        if classes or class_names is not None:
            there = {_class_of(str(file), file.name): file for file in reversed(files)}
        self.class_names = sorted(there) if class_names is None else _once(class_names)
        if other := sorted(there.keys() - {*self.class_names}):
            advice = f"{did_you_mean(other[0], self.class_names)}; those are {listed(self.class_names)}"
            raise DataError(f"{there[other[0]]}: {other[0]!r} is none of class_names{advice}")
        self._labels = {name: label for label, name in enumerate(self.class_names)}
        super().__init__(files, [Block(file, 1, 0) for file in files], 0)

    def _read(self, block: Block[int]) -> tuple[Item, int]:
        encoded = block.file.read(lambda stream: stream.read())
        try:
            pixels = image(encoded, self._size)
        except DataError as error:
            raise DataError(f"{block.file}: {error}") from error
        except Exception as error:
            raise DataError(f"{block.file}: is no image, or is damaged: {error}") from error
        # Its size is above the cache's limit of 0: the next image replaces it.
        return {"image": pixels, **self._known(block)}, len(encoded)

    def read_values(self, index: int, columns: Sequence[str]) -> Item:
        """Return the values of an image that are known without reading it."""
        known = self._known(self._blocks[index])
        return {name: known[name] for name in columns if name in known}

    def _known(self, block: Block[int]) -> Item:
        """Return the values of an image but its pixels."""
        if not self.class_names:
            return {"path": block.file.name}
        label = self._labels[_class_of(str(block.file), block.file.name)]
        return {"path": block.file.name, "label": np.int64(label)}

    def _items(self, read: Item, rows: RowNumbers) -> list[Item]:
        return [{**read, "image": read["image"].clone()} for _ in rows]


def _once(class_names: Sequence[str]) -> list[str]:
    """Return the names. Raises JobError if they are no list of names, each once."""
    names = [] if isinstance(class_names, str) else [*class_names]
    if not names or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise JobError(
            f"class_names: must be a list of folders' names, each once, like [cat, dog]; got {class_names!r:.80}"
        )
    return names


def _class_of(shown: str, name: str) -> str:
    folder, slash, _ = name.partition("/")
    if not slash:
        raise DataError(f"{shown}: is in no folder that names its class; set classes to false for a flat folder")
    return folder

"""Text that is tokenised already, as it lies: windows of one length, or documents, without a copy of the data.

Begin at `Tokens`. All tokens of all files are one stream, which lies in blocks: stretches of a file of bare numbers,
record batches, row groups. On a local disk they are mapped into memory.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from dp_ray.data.blocks import CACHE_BYTES, Block, Blocks, Item
from dp_ray.data.files import File, Paths, find_files, in_threads, with_etag, with_retries
from dp_ray.data.tables import Arrow, ColumnFiles, Parquet
from dp_ray.data.values import RowNumbers
from dp_ray.errors import DataError, JobError
from dp_ray.plan.packing import IGNORED, Lengths, Sums, above_int64
from dp_ray.tables import Numbers, numbers
from dp_ray.text import listed

INPUTS, LABELS = "input_ids", "labels"
BLOCK_BYTES = 4 << 20  # of a file of bare numbers
KINDS = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64")
INDEX_MAGIC, INDEX_HEAD = b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")  # of Megatron's .idx
INDEX_KINDS = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
HEADS = {20240520: "uint16", 20240801: "uint32"}  # the first number of llm.c's files, and the type of their tokens
HEAD_BYTES = 1024  # of these


class Bare(NamedTuple):
    """Where the bare numbers of a block lie in its file."""

    offset: int
    kind: str


@dataclass(frozen=True)
class TokenFile:
    """What was found in a file: the blocks of its tokens, and the tokens of each document in it.

    `more` are files that belong to it.
    """

    blocks: list[Block[Any]]
    lengths: Lengths
    more: tuple[File, ...] = ()


class Tokens(Blocks[Any]):
    """Windows of `length` tokens of tokenised files, or without a length their documents.

    A window is a dict of two int64 tensors: `input_ids` has the tokens from `i * length` on, and `labels` the token
    that follows each of these. The windows go through all files as one text, over the borders of documents and files.
    The last window may have fewer tokens: then it is filled up, with 0, and with labels of -100, which losses ignore.
    Each token but the last is an input once, and each but the first a label. A document is a dict of `input_ids`.

    `paths` are as those of `Parquet`: `.bin` of bare numbers, with Megatron's `.idx` beside it or without, `.npy`,
    and `.arrow` or `.parquet` with a list of tokens in each row of `column`. `dtype` is that of a `.bin` that does
    not tell it, by default uint16.

    Raises DataError for files that are missing or damaged, by name.

    >>> import dp_ray, numpy
    >>> numpy.array([5, 6, 7, 8, 9], numpy.uint16).tofile("text.bin")
    >>> dp_ray.data.Tokens("text.bin", length=2)[0]
    {'input_ids': tensor([5, 6]), 'labels': tensor([6, 7])}
    """

    SUFFIXES = (".bin", ".npy", *Arrow.SUFFIXES, *Parquet.SUFFIXES)

    def __init__(
        self,
        paths: Paths,
        length: int | None = None,
        column: str = INPUTS,
        dtype: str | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise JobError(
                f"Tokens: length: must be a number of tokens from 1 on, or null for documents; got {length!r}"
            )
        if dtype is not None and dtype not in KINDS:
            raise JobError(f"Tokens: dtype: must be one of {listed(KINDS)}; got {dtype!r}")
        files = find_files(paths, self.SUFFIXES)
        self._tables: dict[str, ColumnFiles] = {}
        found = in_threads(lambda file: self._look(file, column, dtype), files)
        super().__init__(
            [*files, *(file for each in found for file in each.more)],
            [block for each in found for block in each.blocks],
            cache_bytes,
        )
        self.length = length
        self._first_documents = np.cumsum([0, *(len(each.lengths) for each in found)])
        self._token_files = files
        of_files = [each.lengths for each in found]
        self._documents = Sums(of_files[0] if len(of_files) == 1 else np.concatenate(of_files))
        self._maps: dict[str, Numbers] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    @property
    def num_tokens(self) -> int:
        """The tokens of all files."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        if self.length is None:
            return len(self._documents)
        return max(0, -(-(self.num_tokens - 1) // self.length))

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the samples at these indices, in order. Raises IndexError, and DataError if a file is damaged."""
        wanted = self._wanted(indices)
        if self.length is None:
            documents = [self.read(*self._documents.bounds(row)) for row in wanted.tolist()]
            return [{INPUTS: torch.from_numpy(tokens.astype(np.int64))} for tokens in documents]
        both = self._windows(wanted)
        return [{INPUTS: inputs, LABELS: labels} for inputs, labels in zip(*both, strict=True)]

    def read_columns(self, indices: Sequence[int], names: Sequence[str] | None) -> dict[str, torch.Tensor] | None:
        """Return windows as torch's default collate makes them, without items; None of documents."""
        if self.length is None or not set(names or ()) <= {INPUTS, LABELS}:
            return None
        both = dict(zip((INPUTS, LABELS), self._windows(np.asarray(indices, np.int64)), strict=True))
        return both if names is None else {name: both[name] for name in names}

    def read(self, first: int, stop: int) -> Numbers:
        """Return the tokens at places first .. stop - 1 of all files."""
        if first >= stop:
            return np.empty(0, np.int64)
        blocks = super().blocks_at(first, stop)
        read = self._cache.get_all(blocks, self._load) if len(blocks) <= self._cache.least else None
        pieces = []
        for place, number in enumerate(blocks):
            tokens = self._cache.get(number, self._load) if read is None else read[place]
            start = int(self._starts[number])
            pieces.append(tokens[max(0, first - start) : stop - start])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_parts(self, parts: Sequence[tuple[int, int, int]], fields: Sequence[str]) -> list[list[Numbers]]:
        """Return the tokens `start` .. `stop` - 1 of some documents, each alone in a list, for whoever packs them."""
        if others := [field for field in fields if field != INPUTS]:
            raise DataError(f"{self.files[0]}: Tokens have no {others[0]!r}, but {INPUTS!r} alone")
        found = []
        for row, start, stop in parts:
            begin, _ = self._documents.bounds(row)
            found.append([self.read(begin + start, begin + stop).astype(np.int64)])
        return found

    def lengths(self, field: str) -> Lengths:
        """Return the tokens of each document. Raises DataError for windows, which have one length."""
        if self.length is not None:
            raise DataError(
                f"{self.files[0]}: windows of {self.length} tokens need no packing; leave length out of Tokens"
            )
        if field != INPUTS:
            raise DataError(f"{self.files[0]}: Tokens have no {field!r}, but {INPUTS!r} alone")
        return self._documents.lengths

    def where(self, index: int) -> str:
        """Name the file of a sample, and its document there; of a window, those of its first token."""
        at = index
        if self.length is not None:
            at = self._documents.row_at(index * self.length)
        number = int(np.searchsorted(self._first_documents, at, side="right")) - 1
        return f"document {at - int(self._first_documents[number])} of {self._token_files[number]}, counted from 0"

    def blocks_at(self, first: int, stop: int) -> range:
        """Return the numbers of the blocks that hold the samples first .. stop - 1; `stop` is above `first`."""
        if self.length is None:
            begin, end = self._documents.bounds(first)[0], self._documents.bounds(stop - 1)[1]
        else:
            begin, end = first * self.length, min(stop * self.length + 1, self.num_tokens)
        return super().blocks_at(begin, end) if begin < end else range(0)  # documents may have no tokens

    @property
    def block_rows(self) -> RowNumbers:
        """How many samples begin in each block: int64 [blocks]."""
        if self.length is None:
            begun = self._documents.rows_before(self._starts)
        else:
            begun = np.minimum(-(-self._starts // self.length), len(self))
        begun[-1] = len(self)  # a document of no tokens may stand at the end
        return np.diff(begun)

    def _windows(self, windows: RowNumbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the labels of some windows: int64 [windows, length]."""
        assert self.length is not None
        inputs = np.zeros((len(windows), self.length), np.int64)
        labels = np.full((len(windows), self.length), IGNORED, np.int64)
        for place, window in enumerate(windows.tolist()):
            begin = window * self.length
            tokens = self.read(begin, min(begin + self.length + 1, self.num_tokens))
            inputs[place, : len(tokens) - 1], labels[place, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def _look(self, file: File, column: str, dtype: str | None) -> TokenFile:
        """Find out where the tokens of a file lie, and those of its documents. Raises DataError."""
        name = file.name.lower()
        if not name.endswith(self.SUFFIXES):  # as a wildcard finds them: else they would be taken for bare numbers
            if name.endswith(".idx"):
                raise DataError(f"{file}: is an index, without tokens: name the .bin beside it")
            endings = listed(self.SUFFIXES)
            raise DataError(
                f"{file}: Tokens reads a file by its ending, which must be one of {endings}; rename it, or leave it "
                "out"
            )
        if name.endswith((*Arrow.SUFFIXES, *Parquet.SUFFIXES)):
            return self._look_at_table(file, column)
        index = _beside(file, ".idx") if name.endswith(".bin") else None
        if name.endswith(".npy"):
            return file.read(lambda stream: _look_at_npy(file, stream))
        if index is not None:
            return with_retries(lambda: _look_at_index(file, index, dtype), str(index), file.is_local)
        return file.read(lambda stream: _look_at_bin(file, stream, dtype))

    def _look_at_table(self, file: File, column: str) -> TokenFile:
        kind = _Mapped if file.name.lower().endswith(Arrow.SUFFIXES) else Parquet
        table: ColumnFiles = kind(file, [column])
        lengths = table.lengths(column)
        self._tables[str(file)] = table
        firsts = np.cumsum([0, *table.block_rows.tolist()])
        blocks = [
            Block(file, int(lengths[first:stop].sum(dtype=np.int64)), block, block.where)
            for block, first, stop in zip(table._blocks, firsts[:-1].tolist(), firsts[1:].tolist(), strict=True)
        ]
        return TokenFile(blocks, lengths)

    def _read(self, block: Block[Any]) -> tuple[Numbers, int]:
        """Return the tokens of a block, and the bytes of memory that they take: none if they are mapped."""
        tokens, size = self._read_bare(block) if isinstance(block.source, Bare) else self._read_lists(block)
        if (at := above_int64(tokens)) is not None:
            raise DataError(f"{block}: number {at} in it is {tokens[at]}; tokens are below 2**63")
        return tokens, size

    def _read_lists(self, block: Block[Any]) -> tuple[Numbers, int]:
        table = self._tables[str(block.file)]
        read = with_retries(lambda: table._table(block.source), str(block), block.file.is_local)
        chunks = read.column(0).chunks
        flat = (chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)).flatten()
        if flat.null_count or not pa.types.is_integer(flat.type):
            says = f"holds {read.schema.field(0).type} with {flat.null_count} values missing in it"
            raise DataError(f"{block}: must hold lists of whole numbers, none of them missing; {says}")
        if len(flat) != block.rows:
            raise DataError(f"{block}: is damaged: has {len(flat)} tokens where it had {block.rows}")
        return numbers(flat) if len(flat) else np.empty(0, np.int64), read.nbytes

    def _read_bare(self, block: Block[Any]) -> tuple[Numbers, int]:
        file, (offset, kind), count = block.file, block.source, block.rows
        dtype = np.dtype(kind)
        if not count:
            return np.empty(0, dtype), 0
        if file.is_local:
            whole = self._maps.get(str(file))
            if whole is None:
                whole = with_retries(lambda: np.memmap(file.folder.file(file.name), np.uint8, "r"), str(file), True)
                self._maps[str(file)] = whole
            data = whole[offset : offset + count * dtype.itemsize]
        else:
            found = file.read(lambda stream: stream.read_at(count * dtype.itemsize, offset), str(block))
            data = np.frombuffer(found, np.uint8)
        if len(data) != count * dtype.itemsize:
            raise DataError(f"{block}: is damaged: has {len(data)} bytes where it had {count * dtype.itemsize}")
        return data.view(dtype), 0 if file.is_local else len(data)


class _Mapped(Arrow):
    """An Arrow file that is mapped into memory, if it lies on a local disk."""

    def _open(self, file: File) -> pa.NativeFile:
        return pa.memory_map(file.folder.file(file.name)) if file.is_local else file.open()


def _beside(file: File, suffix: str) -> File | None:
    """Return the file of the same name with another ending; None if it is not there."""
    name = file.name.rpartition(".")[0] + suffix
    info = file.folder.fs.get_file_info(file.folder.file(name))
    there = replace(file, name=name, size=info.size, version=str(info.mtime_ns or ""))
    return with_etag(there) if info.is_file else None


def _bare(file: File, offset: int, kind: np.dtype[Any], count: int) -> list[Block[Any]]:
    """Return the blocks of a file of bare numbers."""
    each = BLOCK_BYTES // kind.itemsize
    return [
        Block(file, min(each, count - at), Bare(offset + at * kind.itemsize, kind.str), f"tokens from {at} on")
        for at in range(0, max(1, count), each)
    ]


def _count(file: File, size: int, kind: np.dtype[Any], what: str) -> int:
    count, rest = divmod(size, kind.itemsize)
    if rest:
        raise DataError(
            f"{file}: {size} bytes {what}are no whole number of {kind.name} tokens, of {kind.itemsize} bytes each; "
            "it is cut, or its tokens have another dtype"
        )
    return count


def _look_at_bin(file: File, stream: pa.NativeFile, dtype: str | None) -> TokenFile:
    """Look at a file of bare numbers; llm.c's begin with a head that tells their type."""
    head = stream.read_at(12, 0)
    if len(head) == 12 and file.size >= HEAD_BYTES:
        magic, _, told = struct.unpack("<iii", head)
        kind = np.dtype(HEADS.get(magic, "uint8"))
        if magic in HEADS:
            count = _count(file, file.size - HEAD_BYTES, kind, "behind its head ")
            if count != told:
                raise DataError(f"{file}: is damaged: its head tells {told} tokens, and it has {count}")
            return TokenFile(_bare(file, HEAD_BYTES, kind, count), np.array([count], np.int64))
    kind = np.dtype(dtype or "uint16")
    count = _count(file, file.size, kind, "")
    return TokenFile(_bare(file, 0, kind, count), np.array([count], np.int64))


def _look_at_npy(file: File, stream: pa.NativeFile) -> TokenFile:
    """Look at an array of numpy: one dimension is a document, of two each row is one."""
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, in_fortran, kind = read(stream)
    except (ValueError, SyntaxError, TokenError) as error:  # numpy reads the head as Python does
        raise DataError(f"{file}: is damaged, or no array of numpy: {error}") from None
    offset = stream.tell()
    if kind.kind not in "iu" or len(shape) not in (1, 2) or (in_fortran and len(shape) == 2):
        must = "whole numbers in one dimension, or in rows of two"
        raise DataError(f"{file}: must hold {must}; has {kind.name} of shape {list(shape)}")
    count = int(np.prod(shape, dtype=np.int64))
    if file.size != offset + count * kind.itemsize:
        has, tells = file.size - offset, count * kind.itemsize
        raise DataError(f"{file}: is damaged: has {has} bytes of numbers, and its head tells {tells}")
    rows = 1 if len(shape) == 1 else shape[0]
    return TokenFile(_bare(file, offset, kind, count), np.full(rows, count // max(1, rows), np.int64))


def _look_at_index(file: File, index: File, dtype: str | None) -> TokenFile:
    """Look at Megatron's index of a file: its type of tokens, and the sequences of each document."""
    data = _whole(index)
    if len(data) < INDEX_HEAD.size or data[:9].tobytes() != INDEX_MAGIC:
        raise DataError(f"{index}: is damaged, or no index of Megatron: it does not begin with MMIDIDX")
    _, version, code, sequences, ends = INDEX_HEAD.unpack(data[: INDEX_HEAD.size].tobytes())
    if version != 1 or code not in INDEX_KINDS:
        raise DataError(
            f"{index}: version {version} with tokens of type {code} is not known; known is version 1, with the types "
            f"{INDEX_KINDS}"
        )
    kind = np.dtype(INDEX_KINDS[code])
    if dtype is not None and np.dtype(dtype) != kind:
        raise DataError(f"{index}: its tokens are {kind.name}, and dtype is {dtype}; leave dtype out")
    parts, at = [], INDEX_HEAD.size
    for count, of in ((sequences, np.dtype("<i4")), (sequences, np.dtype("<i8")), (ends, np.dtype("<i8"))):
        if at + count * of.itemsize > len(data):
            needs = f"{sequences} sequences and {ends} ends of documents"
            raise DataError(f"{index}: is damaged: has {len(data)} bytes, too few for {needs}")
        parts.append(data[at : at + count * of.itemsize].view(of))
        at += count * of.itemsize
    sizes, pointers, borders = parts
    lengths = _of_documents(index, sizes, borders)
    total = _count(file, file.size, kind, "")
    _check_sequences(index, file, sizes, pointers, kind.itemsize, total)
    return TokenFile(_bare(file, 0, kind, total), lengths, (index,))


def _whole(file: File) -> Numbers:
    """Return the bytes of a file; those of a local one are mapped."""
    if file.is_local:
        return np.memmap(file.folder.file(file.name), np.uint8, "r") if file.size else np.empty(0, np.uint8)
    return np.frombuffer(file.folder.read_bytes(file.name), np.uint8)


def _check_sequences(index: File, file: File, sizes: Numbers, pointers: Numbers, itemsize: int, total: int) -> None:
    """Raise DataError, which names the document, unless sequences lie one behind another and fill the file."""
    at = 0
    for first in range(0, len(sizes), 1 << 20):
        some = sizes[first : first + (1 << 20)].astype(np.int64)
        ends = at + np.cumsum(some)
        is_wrong = (some < 0) | (pointers[first : first + (1 << 20)] != (ends - some) * itemsize) | (ends > total)
        if is_wrong.any():
            which = int(np.argmax(is_wrong))
            begins = int(pointers[first + which]) // itemsize
            says = f"sequence {first + which}, of {int(some[which])} tokens, is said to begin at token {begins}"
            raise DataError(f"{index}: is damaged: {says}, and {file} has {total}")
        at = int(ends[-1])
    if at != total:
        raise DataError(f"{index}: is damaged, or of another file: it has {at} tokens, and {file} {total}")


def _of_documents(index: File, sizes: Numbers, borders: Numbers) -> Lengths:
    """Return the tokens of each document; `borders` are the sequences at which they begin, and the end."""
    steps = np.diff(borders)
    says = ""
    if not len(borders):
        says = "it has no borders of documents"
    elif borders[0]:
        says = f"its first document begins at sequence {int(borders[0])}, not 0"
    elif (steps < 0).any():
        which = int(np.argmax(steps < 0))
        says = f"document {which} begins at sequence {int(borders[which])} and ends at {int(borders[which + 1])}"
    elif borders[-1] != len(sizes):
        says = f"its last document ends at sequence {int(borders[-1])}, and there are {len(sizes)}"
    if says:
        raise DataError(f"{index}: is damaged: {says}")
    if (steps == 1).all():
        return sizes
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    return np.diff(sums[borders])


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return which token may see which in packed windows: itself, and those before it of the same document.

    `document_ids` [rows, length] gives a truth value [rows, 1, length, length], as
    `torch.nn.functional.scaled_dot_product_attention` takes it: one for all heads.

    >>> import dp_ray, torch
    >>> dp_ray.data.document_mask(torch.tensor([[0, 0, 1]]))[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    length = document_ids.shape[-1]
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()


def cu_seqlens(document_ids: torch.Tensor) -> torch.Tensor:
    """Return where documents begin in packed windows that are laid one behind another, and the end: int32 [n + 1].

    It is what attention of variable lengths takes (`cu_seqlens`) for tokens [rows * length]. What is not filled in a
    window counts as a document.

    >>> import dp_ray, torch
    >>> dp_ray.data.cu_seqlens(torch.tensor([[0, 0, 1, 1, 1]]))
    tensor([0, 2, 5], dtype=torch.int32)
    """
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    places = begins.flatten().nonzero().flatten()
    return torch.cat([places, places.new_tensor([document_ids.numel()])]).to(torch.int32)

"""Parquet and Arrow files as map-style datasets: an item is a dict of the row's columns.

The rows of a block are given one by one as items, or many at once as columns.
"""

import copy
import fnmatch
import functools
import itertools
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, TypeAlias
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import compute as pc

from dp_ray.data.blocks import CACHE_BYTES, Block, Blocks, BlockSource, Cache, Item
from dp_ray.data.files import WILDCARD, File, Paths, find_files, in_threads, kept_numbers, with_retries
from dp_ray.data.values import (
    Decode,
    Decoder,
    RowGetter,
    RowNumbers,
    decode_of,
    decoded,
    dicts,
    is_number,
    row_getter,
    stacked,
)
from dp_ray.errors import DataError, JobError
from dp_ray.tables import Numbers, numbers
from dp_ray.text import did_you_mean, listed

ColumnValues = np.ndarray[Any, Any]
# The columns to read; or, by the keys of an item, one column, or several that become a tensor.
Columns: TypeAlias = Sequence[str] | Mapping[str, str | Sequence[str]]
Keys: TypeAlias = Mapping[str, str | list[str]]  # the same, without patterns

FOOTER_BYTES = 64 << 20  # of footers kept in each process
FIRST_MESSAGE = 8  # where it lies in an Arrow file
NO_VALUE, _WHOLE = "__HIVE_DEFAULT_PARTITION__", re.compile("-?[0-9]{1,18}")  # of a folder that names a column
STREAM_BEGINS = b"\xff\xff\xff\xff"  # a message; Arrow's other format begins with its name
END_OF_STREAM = STREAM_BEGINS + bytes(4)
END, SCHEMA, RECORD_BATCH = 0, 1, 3  # the types of their messages in Arrow's format


class InStream(int):
    """The byte at which a record batch begins, in a file of Arrow's stream format."""


class TableBlock:
    """The rows of a block that was read. Raises DataError for a value that is missing, when it is asked for.

    `keys` are those of an item, with their columns; by default the columns' names. Of a key with several columns,
    `dtypes` has the dtype.
    """

    def __init__(self, table: pa.Table, keys: Keys | None, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        keys = {name: name for name in table.column_names} if keys is None else keys
        self.names = list(keys)
        plain = {key: columns for key, columns in keys.items() if isinstance(columns, str)}
        self._table = table.select(list(plain.values())).rename_columns(list(plain))
        self._values = {key: row_getter(name, table.column(name)) for key, name in plain.items()}
        self._columns: dict[str, ColumnValues | None] = {
            key: np.empty((len(table), len(keys[key])), dtype) for key, dtype in dtypes.items()
        }
        self.size: int = self._table.nbytes + sum(each.nbytes for each in self._columns.values() if each is not None)
        for key, joined in self._columns.items():
            assert joined is not None
            for at, name in enumerate(keys[key]):
                column = table.column(name)
                if column.null_count:
                    column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
                joined[:, at] = column.to_numpy()
            lacking = [row_getter(name, table.column(name)) for name in keys[key] if table.column(name).null_count]
            self._values[key] = functools.partial(_rows_of, joined, lacking)
        self._values = {key: self._values[key] for key in keys}  # an item has them in this order
        self._has_all = all(column.null_count == 0 for column in table.columns)

    def items(self, rows: RowNumbers) -> list[dict[str, Any]]:
        """Return the values of some rows, by column."""
        return dicts({name: give(rows) for name, give in self._values.items()}, len(rows))

    def some(self, rows: RowNumbers, names: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return the values of some rows, of some columns alone; None if one of these is not there."""
        if not self._values.keys() >= set(names):
            return None
        return dicts({name: self._values[name](rows) for name in names}, len(rows))

    def column(self, name: str) -> ColumnValues | None:
        """Return a column's values of all rows; None if a batch cannot be cut from them, or a value is missing."""
        if name not in self._values or not self._has_all:
            return None
        if name not in self._columns:
            self._columns[name] = stacked(self._table.column(name))
        return self._columns[name]


def _rows_of(joined: ColumnValues, lacking: Sequence[RowGetter], rows: RowNumbers) -> list[Any]:
    """Return rows of joined columns as tensors; `lacking` gives those columns in which values are missing."""
    for give in lacking:
        give(rows)  # raises for a missing value, and names its column
    return list(torch.from_numpy(joined[rows]))


class Tabular(Blocks[BlockSource]):
    """A dataset of the rows of files of columns, and of those that their folders name: see `folder_columns`."""

    _keys: Keys
    _columns: list[str]  # those of all keys, each once
    _dtypes: dict[str, np.dtype[Any]]  # of the keys with several columns
    _decode: dict[str, Decoder]
    _folders: dict[str, dict[str, pa.Scalar]]

    def _choose(self, keys: Keys, schemas: Sequence[pa.Schema]) -> Iterator[str]:
        """Set what is read: the columns, and of each key with several their common dtype, which a line tells.

        It is that which torch.stack gives. Raises DataError for a column that holds no numbers.
        """
        self._keys, self._dtypes, first = keys, {}, next(iter(self._folders))
        several = {key: names for key, names in keys.items() if not isinstance(names, str)}
        plain = [names for names in keys.values() if isinstance(names, str)]
        self._columns = list(dict.fromkeys(itertools.chain(plain, *several.values())))
        of_files = [dict(zip(schema.names, schema.types, strict=True)) for schema in schemas]
        of_folders = [{name: value.type for name, value in own.items()} for own in self._folders.values()]
        for key, names in several.items():
            kinds = [(name, own[name]) for own in (*of_files, *of_folders) for name in names if name in own]
            for name, kind in kinds:
                if not is_number(kind):
                    raise DataError(
                        f"{first}: columns.{key}: column {name!r} holds {kind}, and a tensor is made of numbers; "
                        f"leave it out, or read it by itself: {{{name}: {name}}}"
                    )
            found = [np.dtype(kind.to_pandas_dtype()) for _, kind in dict.fromkeys(kinds)]
            self._dtypes[key] = np.result_type(
                *([each for each in found if each.kind == "f"] or found or [np.float32])
            )
            yield f"{first}: {key!r} is a tensor of {self._dtypes[key]} [{len(names)}]: {listed(names)}"

    def _table(self, block: Block[BlockSource]) -> pa.Table:
        """Return the rows of a block, with the columns that are read."""
        raise NotImplementedError

    def read_columns(self, indices: Sequence[int], names: Sequence[str] | None) -> dict[str, torch.Tensor] | None:
        """Return what torch's default collate makes of the samples, without items; None if that would differ.

        `names` are the columns that are wanted, by default all. Raises what `__getitems__` raises.
        """
        both = self.read_columns_beside(indices, names, ())
        return None if both is None else both[0]

    def read_columns_beside(
        self, indices: Sequence[int], names: Sequence[str] | None, beside: Sequence[str]
    ) -> tuple[dict[str, torch.Tensor], list[Item]] | None:
        """Return `read_columns`, and items of the columns `beside`; None too if a block lacks one of these."""
        if self._decode:
            return None
        columns: dict[str, ColumnValues] = {}
        items: list[Item] = [{}] * len(indices)
        for places, block, rows in self._by_block(indices):
            with self._placed(indices[places[0]]):
                some = block.some(rows, beside)
            if some is None:
                return None
            for place, item in zip(places, some, strict=True):
                items[place] = item
            for name in block.names if names is None else names:
                if (column := block.column(name)) is None:
                    return None
                whole = columns.setdefault(name, np.empty((len(indices), *column.shape[1:]), column.dtype))
                if (whole.shape[1:], whole.dtype) != (column.shape[1:], column.dtype):
                    return None
                whole[places] = column[rows]
        return {name: torch.from_numpy(whole) for name, whole in columns.items()}, items

    def read_values(self, index: int, names: Sequence[str]) -> Item:
        """Return a sample's values of these columns alone, even if the sample cannot be decoded.

        Columns that are decoded, missing, or null in this row are left out.
        """
        values: Item = {}
        for _, block, rows in self._by_block([index]):
            for name in names:
                with suppress(DataError):
                    some = None if self._decode and name in self._decode else block.some(rows, [name])
                    values |= some[0] if some else {}
        return values

    def lengths(self, column: str) -> Numbers:
        """Return how many numbers the list in a column has, for each row; what was found is kept beside each file.

        Raises DataError for a column that is not read or holds no lists, and for a missing list.
        """
        name = self._keys.get(column)
        if not isinstance(name, str):
            plain = [key for key, names in self._keys.items() if isinstance(names, str)]
            raise DataError(
                f"{self.files[0]}: no column {column!r} is read{did_you_mean(column, plain)}; those that "
                f"are: {listed(plain)}"
            )
        if column in (self._decode or {}):  # what a decoder makes of it, no file can tell
            return np.array([len(item[column]) for item in self], np.int64)
        alone = copy.copy(self)
        alone._keys, alone._columns = {column: name}, [name]
        of_files: dict[str, list[Block[BlockSource]]] = {}
        for block in self._blocks:
            of_files.setdefault(str(block.file), []).append(block)

        def look(blocks: list[Block[BlockSource]]) -> Numbers:
            file = blocks[0].file
            return kept_numbers(
                file, f"lengths-{name}", f"{file.size}, {file.version}", lambda: alone._list_lengths(blocks)
            )

        found = in_threads(look, list(of_files.values()))
        return found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty(0, np.uint32)

    def _list_lengths(self, blocks: Sequence[Block[BlockSource]]) -> Numbers:
        """Return the lengths of the lists in the only column that is read."""
        (name,), sizes = self._columns, []
        for block in blocks:
            table = with_retries(functools.partial(self._table, block), str(block), block.file.is_local)
            column = table.column(name) if name in table.column_names else None
            is_list = column is not None and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type))
            if column is None or not (is_list or pa.types.is_fixed_size_list(column.type)):
                kind = "nothing" if column is None else str(column.type)
                raise DataError(f"{block}: column {name!r} holds {kind}, where lists of numbers are needed")
            if column.null_count:
                row = column.is_null().to_pylist().index(True)
                raise DataError(f"{block}: row {row} of it has no list in column {name!r}; fill it, or leave it out")
            _check_rows(block, table)
            sizes.append(numbers(pc.list_value_length(column)).astype(np.uint32))
        return np.concatenate(sizes) if sizes else np.empty(0, np.uint32)

    def _read(self, block: Block[BlockSource]) -> tuple[TableBlock, int]:
        table = with_retries(lambda: self._table(block), str(block), block.file.is_local)
        for name, value in self._folders[str(block.file)].items():
            if name in self._columns and name not in table.column_names:
                table = table.append_column(name, pa.repeat(value, len(table)))
        check_columns(block.file, table.column_names, self._columns)
        _check_rows(block, table)
        try:
            has_own_names = any(key != names for key, names in self._keys.items())
            read = TableBlock(table, self._keys if has_own_names else None, self._dtypes)
        except DataError as error:
            raise DataError(f"{block}: {error}") from None
        return read, read.size

    def _items(self, read: TableBlock, rows: RowNumbers) -> list[Item]:
        items = read.items(rows)
        return [decoded(item, self._decode) for item in items] if self._decode else items


class ColumnFiles(Tabular[int]):
    """A dataset of the rows of files that list their own blocks; the base class of Parquet and Arrow.

    The parameters are those of `Parquet`.

    Raises DataError for files that are missing, damaged or lack a column, by name.
    """

    SUFFIXES: ClassVar[tuple[str, ...]]
    BLOCK: ClassVar[str]  # what a block is called

    def __init__(
        self,
        paths: Paths | File,
        columns: Columns | None = None,
        decode: Decode | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        check_choice(columns)
        files = find_files(paths, self.SUFFIXES)
        self._folders = folder_columns(files)
        looks = in_threads(lambda file: self._blocks_of(file, columns), files)
        there = [[*schema.names, *self._folders[str(file)]] for file, (schema, _) in zip(files, looks, strict=True)]
        self.reads_as = tuple(self._choose(keys_of(files, there, columns), [schema for schema, _ in looks]))
        self._decode = decode_of(decode, None if columns is None else list(columns))
        super().__init__(files, [index for _, several in looks for index in several], cache_bytes)

    def _blocks_of(self, file: File, columns: Columns | None) -> tuple[pa.Schema, list[Block[int]]]:
        schema, sizes = with_retries(lambda: self._look(file), str(file), file.is_local)
        check_once(file, schema.names)
        check_columns(file, [*schema.names, *self._folders[str(file)]], columns)
        if (least := min(sizes.values(), default=0)) < 0:
            raise DataError(f"{file}: is damaged: a {self.BLOCK} has {least} rows")
        return schema, [
            Block(file, rows, source, f"{self.BLOCK} {number}") for number, (source, rows) in enumerate(sizes.items())
        ]

    def _look(self, file: File) -> tuple[pa.Schema, dict[int, int]]:
        """Return a file's columns, and the rows of each block by where it lies."""
        raise NotImplementedError


class Parquet(ColumnFiles):
    """The rows of Parquet files; a row group is read at once.

    `paths` is a file, a folder, a glob, a list of these, or a URL (`s3://...`, `gs://...`). `columns` are those to
    read, by default all; a mapping, as `{"x": ["a", "b"], "y": "price"}`, joins columns of numbers to a tensor, by
    their names or by patterns like `pixel_*`. `decode` maps a column to a function of its value, as
    `{"image": "dp_ray.data:image"}`. At most `cache_bytes` of blocks stay in memory, in each process that reads. An
    item is a dict of the row's values.

    Raises DataError for files that are missing, damaged or lack a column, by name.

    >>> import dp_ray
    >>> from pyarrow import parquet
    >>> import pyarrow
    >>> table = pyarrow.table({"x": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
    >>> parquet.write_table(table, "rows.parquet")
    >>> dp_ray.data.Parquet("rows.parquet", columns=["x"])[1]
    {'x': tensor([3., 4.], dtype=torch.float64)}
    """

    SUFFIXES = (".parquet", ".pq")
    BLOCK = "row group"

    def _look(self, file: File) -> tuple[pa.Schema, dict[int, int]]:
        with file.open() as stream:
            found = pq.ParquetFile(stream)
            sizes = [found.metadata.row_group(number).num_rows for number in range(found.num_row_groups)]
            if sum(sizes) != found.metadata.num_rows:
                raise pa.ArrowInvalid(f"it has {found.metadata.num_rows} rows, its row groups {sum(sizes)}")
            return found.schema_arrow, dict(enumerate(sizes))

    def _table(self, block: Block[int]) -> pa.Table:
        with block.file.open() as stream:
            footer = self._footers.get(str(block.file), lambda _: _footer(stream))
            found = pq.ParquetFile(stream, metadata=footer, page_checksum_verification=True)
            table, wanted = found.read_row_group(block.source, columns=self._columns), {*self._columns}
            return table.select([name for name in table.column_names if name in wanted])  # "a" gave "a.b" too

    @cached_property
    def _footers(self) -> Cache:
        return Cache(FOOTER_BYTES)


def _check_rows(block: Block[BlockSource], table: pa.Table) -> None:
    """Raise DataError unless a block has as many rows as its file told: pyarrow reads some damage in silence."""
    if len(table) != block.rows:
        raise DataError(f"{block}: is damaged: has {len(table)} rows where it had {block.rows}")


def _footer(stream: pa.NativeFile) -> tuple[pq.FileMetaData, int]:
    """Return where the row groups of a file lie, and its size in bytes."""
    footer = pq.ParquetFile(stream).metadata
    return footer, footer.serialized_size


class Arrow(ColumnFiles):
    """The rows of Arrow files (Feather); a record batch is read at once. The parameters are those of `Parquet`.

    Files in Arrow's stream format are read too: those of `datasets` are in it.

    >>> import dp_ray
    >>> from pyarrow import feather
    >>> import pyarrow
    >>> table = pyarrow.table({"x": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
    >>> feather.write_feather(table, "rows.arrow", compression="uncompressed")
    >>> dp_ray.data.Arrow("rows.arrow", columns=["x"])[1]
    {'x': tensor([3., 4.], dtype=torch.float64)}
    """

    SUFFIXES = (".arrow", ".feather")
    BLOCK = "record batch"

    def _open(self, file: File) -> pa.NativeFile:
        return file.open()

    def _look(self, file: File) -> tuple[pa.Schema, dict[int, int]]:
        with self._open(file) as stream:
            if stream.read_at(len(STREAM_BEGINS), 0) != STREAM_BEGINS:
                return self._look_at_file(stream)
            sizes: dict[int, int] = {InStream(at): rows for at, rows in _batches_of_stream(stream)}
            stream.seek(0)
            return pa.ipc.read_schema(stream), sizes

    def _look_at_file(self, stream: pa.NativeFile) -> tuple[pa.Schema, dict[int, int]]:
        with pa.ipc.open_file(stream) as reader:
            try:
                sizes = [rows for _, kind, rows in _messages(stream, FIRST_MESSAGE) if kind == RECORD_BATCH]
            except pa.ArrowInvalid:  # damaged, or of another layout: pyarrow tells, and reads it as a whole only
                sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
            if len(sizes) != reader.num_record_batches:
                raise pa.ArrowInvalid(
                    f"it holds {len(sizes)} record batches, its end tells {reader.num_record_batches}"
                )
            for number, rows in enumerate(sizes):
                if not rows and reader.get_batch(number).num_rows:  # nobody would read it
                    raise pa.ArrowInvalid(f"record batch {number} has no rows by its head alone")
            stream.seek(FIRST_MESSAGE)
            if not pa.ipc.read_schema(stream).equals(reader.schema):
                raise pa.ArrowInvalid("its columns at its beginning and at its end differ")
            return reader.schema, dict(enumerate(sizes))

    def _table(self, block: Block[int]) -> pa.Table:
        with self._open(block.file) as stream:
            if isinstance(block.source, InStream):
                schema = pa.ipc.read_schema(stream)
                stream.seek(block.source)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(stream), schema)
            else:
                batch = pa.ipc.open_file(stream).get_batch(block.source)
            table = pa.Table.from_batches([batch])
            table.validate(full=True)  # Arrow has no checksums: a wrong offset would point to other memory
            return table.select([name for name in self._columns if name in table.column_names])


def _batches_of_stream(stream: pa.NativeFile) -> Iterator[tuple[int, int]]:
    """Yield where each record batch of a file in the stream format begins, and its rows.

    Raises ArrowInvalid for a file that is damaged, or that has dictionaries.
    """
    for number, (at, kind, rows) in enumerate(_messages(stream, 0)):
        if kind == RECORD_BATCH:
            yield at, rows
        elif kind == END and at + len(END_OF_STREAM) != stream.size():
            raise pa.ArrowInvalid(f"its last message ends at byte {at}, and it has {stream.size()} bytes")
        elif kind != END and (kind != SCHEMA or number):
            raise pa.ArrowInvalid("it holds dictionaries, or no rows; write it anew without dictionaries")


def _messages(stream: pa.NativeFile, at: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each message from byte `at` on begins, its kind, and its rows if it has some; then the end.

    They are from the messages' heads, flatbuffers of Arrow's format: pyarrow reads a head only together with the
    body, so with all columns. Raises ArrowInvalid for a message that is damaged.
    """
    size = stream.size()
    while (begin := stream.read_at(8, at)) != END_OF_STREAM:
        mark, length = struct.unpack("<iI", begin.ljust(8, b"\0"))
        if mark != -1 or at + 8 + length > size:
            raise pa.ArrowInvalid(f"there is no whole message at byte {at}")
        try:
            head = stream.read_at(length, at + 8)
            message, rows = _number(head, 0, "<I"), 0
            kind, body = _field(head, message, 1, "<B"), _field(head, message, 3, "<Q")
            if kind == RECORD_BATCH:
                batch = _below(head, message, 2)
                rows, columns = _field(head, batch, 0, "<q"), _below(head, batch, 1)
                if _number(head, columns, "<I") and _number(head, columns + 4, "<q") != rows:
                    raise struct.error(f"the batch has {rows} rows, and its first column others")
        except struct.error as error:
            raise pa.ArrowInvalid(f"the head of the message at byte {at} is damaged: {error}") from None
        yield at, kind, rows
        at += 8 + length + body
    yield at, END, 0


def _below(buffer: bytes, table: int, field: int) -> int:
    """Return the position to which a field of a flatbuffer's table points."""
    if not (place := _place(buffer, table, field)):
        raise struct.error(f"field {field} is not there")
    return table + place + _number(buffer, table + place, "<I")


def _number(buffer: bytes, at: int, form: str) -> int:
    if at < 0:
        raise struct.error(f"it points to byte {at}")
    number: int = struct.unpack_from(form, buffer, at)[0]
    return number


def _place(buffer: bytes, table: int, field: int) -> int:
    """Return where a field of a flatbuffer's table lies, counted from the table; 0 if it is not there."""
    fields = table - _number(buffer, table, "<i")
    return _number(buffer, fields + 4 + 2 * field, "<H") if 4 + 2 * field < _number(buffer, fields, "<H") else 0


def _field(buffer: bytes, table: int, field: int, form: str) -> int:
    """Return a number in a flatbuffer's table; it has no entry for a 0."""
    place = _place(buffer, table, field)
    return _number(buffer, table + place, form) if place else 0


def folder_columns(files: Sequence[File]) -> dict[str, dict[str, pa.Scalar]]:
    """Return the columns that the folders of each file name, as Spark, pandas and pyarrow write them: `kind=0/`.

    A column's values are int64 if all of them are whole numbers, else text; a column of the file itself goes before.
    """
    given = {
        str(file): {
            unquote(name): unquote(value)
            for folder in file.name.split("/")[:-1]
            for name, equals, value in [folder.partition("=")]
            if name and equals
        }
        for file in files
    }
    values: dict[str, set[str]] = {}
    for columns in given.values():
        for name, value in columns.items():
            values.setdefault(name, set()).add(value)
    whole = {name for name, all_of_it in values.items() if all(map(_WHOLE.fullmatch, all_of_it - {NO_VALUE}))}

    def scalar(name: str, value: str) -> pa.Scalar:
        kind = pa.int64() if name in whole else pa.string()
        return pa.scalar(None if value == NO_VALUE else int(value) if name in whole else value, kind)

    return {file: {name: scalar(name, value) for name, value in columns.items()} for file, columns in given.items()}


def keys_of(files: Sequence[File], there: Sequence[Sequence[str]], columns: Columns | None) -> Keys:
    """Return the keys of an item with their columns, by default those of the files, whose names are in `there`.

    A pattern stands for the columns that match, in the order of the first file, but for those that stand there by
    their names. Raises DataError if a file lacks one that another has, since its rows would have no value for it.
    """
    first = list(dict.fromkeys(there[0])) if there else []
    given = {key: _several(names) for key, names in columns.items()} if isinstance(columns, Mapping) else {}
    patterns = [name for names in given.values() for name in names if _is_pattern(name, first)]
    is_chosen = re.compile(
        "|".join(map(fnmatch.translate, ["*"] if columns is None else patterns)) or "(?!)"
    ).fullmatch
    of_files = [list(filter(is_chosen, names)) for names in there]
    for file, names in zip(files, of_files, strict=True):
        if set(names) != set(of_files[0]):
            more = [name for name in names if name not in first]
            lacking, other = (files[0], file) if more else (file, files[0])
            name = more[0] if more else next(name for name in of_files[0] if name not in names)
            common = [name for name in first if all(name in names for names in there)]
            advice = f"set columns to some of those that all files have: {listed(common)}"
            raise DataError(f"{lacking}: has no column {name!r}, which {other} has; {advice}")
    if not isinstance(columns, Mapping):
        return {name: name for name in (first if columns is None else columns)}
    named = {*itertools.chain.from_iterable(given.values())} - {*patterns}
    rest = [name for name in first if name not in named]
    keys: dict[str, str | list[str]] = {}
    for key, several in given.items():
        found = [each for name in several for each in (fnmatch.filter(rest, name) if name in patterns else [name])]
        if not found:
            raise DataError(f"{files[0]}: columns.{key}: {several[0]!r} fits no column that no other key names")
        if twice := [name for name, times in Counter(found).items() if times > 1]:
            raise DataError(f"{files[0]}: columns.{key} has {twice[0]!r} twice")
        keys[key] = found[0] if columns[key] == found[0] else found
    return keys


def _several(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _is_pattern(name: str, there: Sequence[str]) -> bool:
    """Return whether it is no name of a column, but a pattern like `pixel_*`."""
    return name not in there and WILDCARD.search(name) is not None


def check_choice(columns: Any) -> None:
    """Raise JobError unless `columns` has the form of `Columns`."""
    if not isinstance(columns, Mapping):
        if columns is not None and not _are_names(columns):
            must = "a list of columns, or map keys of an item to them, like {x: [a, b], y: price}"
            raise JobError(f"columns: must be {must}; got {columns!r:.80}")
        return
    for key, given in columns.items():
        if not isinstance(given, str) and not (_are_names(given) and given):
            must = "a column, or several: [a, b], or a pattern like 'pixel_*'"
            raise JobError(f"columns.{key}: must be {must}; got {given!r:.80}")


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(name, str) for name in value)


def check_columns(file: File, there: Sequence[str], wanted: Columns | None) -> None:
    """Raise DataError, which lists the file's columns, if it lacks a wanted one, or has none that fits a pattern."""
    for key, given in wanted.items() if isinstance(wanted, Mapping) else [("", list(wanted or ()))]:
        where = f"{file}: columns.{key}" if key else str(file)
        for name in _several(given):
            if key and _is_pattern(name, there):
                if not fnmatch.filter(there, name):
                    raise DataError(f"{where}: no column fits {name!r}; it has {listed(there)}")
            elif name not in there:
                raise DataError(f"{where}: has no column {name!r}{did_you_mean(name, there)}; it has {listed(there)}")


def check_once(file: File, names: Sequence[str]) -> None:
    """Raise DataError if several columns of a file have one name."""
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{file}: has several columns of the name {listed(twice)}; give each a name of its own")

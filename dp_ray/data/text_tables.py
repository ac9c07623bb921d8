"""Files of JSON lines and of CSV as map-style datasets: an item is a dict of the row's columns."""

import functools
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv as pacsv
from pyarrow import json as pajson

from dp_ray.data.blocks import CACHE_BYTES, Block
from dp_ray.data.decode import Decode
from dp_ray.data.files import File, Paths, find_files, in_threads
from dp_ray.data.stretches import Stretch, index_of, read_in_pieces, read_stretch, serialized
from dp_ray.data.tables import Table, check_columns, check_once
from dp_ray.errors import DataError, JobError

Rows = np.ndarray[Any, Any]
Types = Mapping[str, str]
Ends = Callable[[bytes], list[int]]

NEWLINE, RETURN, QUOTE = ord("\n"), ord("\r"), ord('"')
BOM = b"\xef\xbb\xbf"  # with which some programs begin a file


class TextTable(Table[Stretch]):
    """A dataset of the rows of text files; the base class of those in JSON lines and CSV.

    The first time, each file is read to the end: where its rows lie and what its columns hold is kept beside it.
    """

    def __init__(
        self,
        files: list[File],
        kind: str,
        ends: Ends,
        columns: Sequence[str] | None,
        types: Types | None,
        decode: Decode | None,
        cache_bytes: int,
    ) -> None:
        indices = in_threads(lambda file: index_of(file, kind, lambda: self._look(file, ends)), files)
        for file, index in zip(files, indices, strict=True):
            check_columns(file, index.arrow_schema.names, [*(columns or ()), *(types or ())])
        self._schema = _with_types(_joined([index.arrow_schema for index in indices]), types or {})
        pairs = zip(files, indices, strict=True)
        blocks = [Block(file, one.rows, one, str(one)) for file, index in pairs for one in index.stretches]
        super().__init__(files, blocks, columns, decode, cache_bytes)

    def _parse(self, text: bytes, schema: pa.Schema | None) -> pa.Table:
        """The rows of some lines; the columns have the types of the schema, or what their texts look like."""
        raise NotImplementedError

    def _head(self, file: File) -> bytes:
        """What stands before the first row and belongs to each stretch."""
        return b""

    def _look(self, file: File, ends: Ends) -> tuple[list[Stretch], str]:
        """Where the rows lie, and the types of the columns."""
        head = self._head(file)
        found, schemas = [], []
        for start, text in _whole_rows(file, ends, len(head)):
            table = self._parse(head + text, None)
            check_once(file, table.column_names)
            found.append(Stretch(start, start + len(text), len(table)))
            schemas.append(table.schema)
        return found, serialized(_joined(schemas))

    def _table(self, block: Block[Stretch]) -> pa.Table:
        text = self._head(block.file) + read_stretch(block.file, block.source)
        table = self._parse(text, self._schema)
        if len(table) != block.rows:
            raise pa.ArrowInvalid(f"has {len(table)} rows where it had {block.rows}")
        return table.select(self._columns or self._schema.names)


class JsonLines(TextTable):
    """The rows of files with a JSON object on each line.

    `paths`, `columns` and `decode` are as those of `Parquet`. Whole numbers are int64, others float32, and lists of
    numbers tensors of these; `types` gives another Arrow type for a column, as `{"price": "float64"}`.

    Raises DataError for files that are missing, damaged or lack a column, by name.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        types: Types | None = None,
        decode: Decode | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        files = find_files(paths, [".jsonl", ".ndjson", ".json"])
        super().__init__(files, "lines", _ends_of_lines, columns, types, decode, cache_bytes)

    def _parse(self, text: bytes, schema: pa.Schema | None) -> pa.Table:
        options = pajson.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore" if schema else "infer"
        )
        reads = pajson.ReadOptions(use_threads=False, block_size=max(1, len(text)))
        return pajson.read_json(io.BytesIO(text), reads, options)


class Csv(TextTable):
    """The rows of CSV files. The first line of each file names its columns, unless `names` does.

    `paths`, `columns` and `decode` are as those of `Parquet`. Whole numbers are int64, others float32; `types` gives
    another Arrow type for a column, as `{"zip": "string"}`. A quoted value may hold line breaks.

    Raises DataError for files that are missing, damaged or lack a column, by name.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        types: Types | None = None,
        decode: Decode | None = None,
        delimiter: str = ",",
        names: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._delimiter = delimiter
        self._names = None if names is None else list(names)
        files = find_files(paths, [".csv", ".tsv"])
        named = "" if names is None else f"-{hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16]}"
        self._heads: dict[str, bytes] = {}
        self._ends = functools.partial(ends_of_rows, delimiter=delimiter.encode())
        super().__init__(files, f"fields-{ord(delimiter)}{named}", self._ends, columns, types, decode, cache_bytes)

    def _head(self, file: File) -> bytes:
        if self._names is not None:
            return b""
        if file.name not in self._heads:
            self._heads[file.name] = _first_row(file, self._ends)
        return self._heads[file.name]

    def _parse(self, text: bytes, schema: pa.Schema | None) -> pa.Table:
        return pacsv.read_csv(
            io.BytesIO(text),
            pacsv.ReadOptions(use_threads=False, block_size=max(1, len(text)), column_names=self._names),
            pacsv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            pacsv.ConvertOptions(column_types=schema, strings_can_be_null=False),
        )


def _first_row(file: File, ends: Ends) -> bytes:
    first = next(_whole_rows(file, lambda text: ends(text)[:1], 0), (0, b""))[1]
    if not first:
        raise DataError(f"{file}: is empty, it has no line that names its columns")
    return first


def _ends_of_lines(text: bytes) -> list[int]:
    """Where lines end."""
    found: list[int] = (np.flatnonzero(np.frombuffer(text, np.uint8) == NEWLINE) + 1).tolist()
    return found


def ends_of_rows(text: bytes, delimiter: bytes = b",") -> list[int]:
    """Where rows of CSV end: at line breaks outside of quoted fields. The text begins with a row.

    A quote opens a quoted field only where a field begins. There a quote that is not doubled closes it, and what
    follows until the field ends is plain, as pyarrow reads it.
    """
    numbers = np.frombuffer(text, np.uint8)
    breaks, borders = np.flatnonzero(numbers == NEWLINE), np.flatnonzero(numbers == QUOTE)
    if not _open_and_close_in_turn(text, numbers, borders, delimiter):
        spans = [match.span() for match in _quoted_fields(text, delimiter)]
        borders = np.array(spans, np.int64).reshape(-1)
    found: list[int] = (breaks[np.searchsorted(borders, breaks, side="right") % 2 == 0] + 1).tolist()
    return found


def _open_and_close_in_turn(text: bytes, numbers: Rows, quotes: Rows, delimiter: bytes) -> bool:
    """Whether each second quote opens a field or comes right after a quote, as in most files: no quote is plain."""
    opens = quotes[::2]
    before = numbers[opens - 1]
    is_first = opens == (len(BOM) if text.startswith(BOM) else 0)
    return bool((is_first | np.isin(before, [NEWLINE, RETURN, QUOTE, ord(delimiter)])).all())


def _quoted_fields(text: bytes, delimiter: bytes) -> Iterator[re.Match[bytes]]:
    """The quoted parts of fields, one after another; the last one may lack its end."""
    begins = rb"(?:(?<=[\n\r%b])|\A(?:%b)?)" % (re.escape(delimiter), BOM)
    return re.finditer(begins + rb'"(?:[^"]++|"")*+(?:"|\Z)', text)


def _whole_rows(file: File, ends: Ends, skip: int) -> Iterator[tuple[int, bytes]]:
    """The file from byte `skip` on, in texts of whole rows, each with the byte at which it starts."""
    start, held = 0, b""
    for piece in read_in_pieces(file):
        held += piece
        if start < skip <= start + len(held):
            start, held = skip, held[skip - start :]
        if start >= skip and (found := ends(held)):
            yield start, held[: found[-1]]
            start, held = start + found[-1], held[found[-1] :]
    if held.strip():
        yield start, held


def _joined(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The columns of all schemas, each with a type that holds its values in all of them."""
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    return pa.schema(
        [pa.field(name, _common([one.field(name).type for one in schemas if name in one.names])) for name in names]
    )


def _common(kinds: Sequence[pa.DataType]) -> pa.DataType:
    fields = [pa.schema([pa.field("it", kind)]) for kind in kinds]
    try:
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return pa.string()


def _with_types(schema: pa.Schema, types: Types) -> pa.Schema:
    """The schema with the types that were asked for, else with float32 for float64."""
    return pa.schema(
        [
            pa.field(one.name, _type_of(one.name, types[one.name]) if one.name in types else _narrow(one.type))
            for one in schema
        ]
    )


def _type_of(name: str, text: str) -> pa.DataType:
    try:
        return pa.type_for_alias(text)
    except ValueError:
        raise JobError(f"types: {text!r} for {name!r} is no type of Arrow, like int64, float32 or string") from None


def _narrow(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_float64(kind):
        return pa.float32()
    if pa.types.is_list(kind):
        return pa.list_(_narrow(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _narrow(one.type)) for one in kind])
    return kind

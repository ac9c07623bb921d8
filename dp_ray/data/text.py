"""Files of JSON lines and of CSV as map-style datasets: an item is a dict of the row's columns."""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc
from pyarrow import csv as pacsv
from pyarrow import json as pajson

from dp_ray.data.blocks import CACHE_BYTES, Block
from dp_ray.data.files import File, Paths, Stretch, find_files, in_threads, index_of, read_in_pieces, read_stretch
from dp_ray.data.tables import Columns, Tabular, check_choice, check_columns, check_once, folder_columns, keys_of
from dp_ray.data.values import Decode, decode_of
from dp_ray.errors import DataError, JobError

Types = Mapping[str, str]

NEWLINE, RETURN, QUOTE = ord("\n"), ord("\r"), ord('"')
# In an index, the types of columns of whole numbers that are no int64: they are joined with others as decimals are.
UNSIGNED, BEYOND = pa.decimal128(20, 0), pa.decimal256(76, 0)
_WHOLE, _SOLID = re.compile(r"\s*[+-]?[0-9]+\s*"), re.compile(r"\S")
_PADDED = r"^\s*[+-]?0[0-9]+\s*$"
INT64, FLOATS = pa.int64(), (pa.float32(), pa.float64())
BOM = b"\xef\xbb\xbf"  # some programs begin a file with it

# What the numbers of a column are: bits that an index keeps in its schema, joined over stretches and files by `|`.
LOOKS, HEAD = b"looks", b"head"  # HEAD keeps the line of names
FRACTION, ROUNDED = 1, 2  # some are not whole; float32 would change a whole one
SMALL = 4  # some are below EXACT_FLOAT32
MISSING, LARGE, PADDED = 8, 16, 32  # some are missing; some are above what float64 keeps; some have leading zeros
HUGE = 64  # some are no int64
EXACT_FLOAT32, EXACT_FLOAT64 = 1 << 24, 1 << 53  # up to these, all whole numbers are kept


class TextTable(Tabular[Stretch]):
    """A dataset of the rows of text files; the base class of those in JSON lines and CSV.

    The first time, each file is read to the end: where its rows lie and what its columns hold is kept beside it.
    """

    SUFFIXES: ClassVar[tuple[str, ...]]
    _kind: str  # the part of an index's name that says how rows are found
    BLANK: ClassVar[bytes]  # what text without a row consists of
    MAY_LACK: ClassVar[bool] = False  # whether a file that lacks a column lacks its values only, as other rows may

    def __init__(
        self,
        paths: Paths,
        columns: Columns | None = None,
        types: Types | None = None,
        decode: Decode | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        check_choice(columns)
        files, types = find_files(paths, self.SUFFIXES), types or {}
        indices = in_threads(lambda file: index_of(file, self._kind, lambda: self._look(file)), files)
        pairs, self._folders = list(zip(files, indices, strict=True)), folder_columns(files)
        for file, (stretches, there) in pairs:
            if stretches or there.names:  # else it is empty, and lacks nothing
                own = dict.fromkeys((*there.names, *self._folders[str(file)]))
                check_columns(file, list(own), columns)
                check_columns(file, list(own), list(types))
        schemas = [schema for _, schema in indices]
        looks, found = _joined_looks(schemas), _joined(schemas)
        self._schema = _with_types(found, types, looks)
        self._read_as = _with_types(found, types, looks, whole=pa.float64())  # `1.0` is no int64 to pyarrow
        for name in [field.name for field in self._schema if str(BEYOND) in str(field.type)]:
            # The first one with such a number.
            file = next(file for file, (_, own) in pairs if name in own.names and str(BEYOND) in str(own.field(name)))
            says = f"column {name!r} has whole numbers that are neither all int64 nor all uint64"
            raise DataError(f"{file}: {says}; give it a type, as types: {{{name}: float64}} or string")
        filled = [(file, schema.names) for file, (stretches, schema) in pairs if stretches]
        of_files = [
            list(dict.fromkeys((*(self._schema.names if self.MAY_LACK else names), *self._folders[str(file)])))
            for file, names in filled
        ]
        joined = tuple(self._choose(keys_of([file for file, _ in filled], of_files, columns), [self._schema]))
        for file, (_, there) in pairs:
            # Bytes that are not UTF-8 pyarrow gives as bytes, in all of the column's rows.
            are_bytes = [each.name for each in there if pa.types.is_binary(each.type) and each.name not in types]
            if bad := [name for name in are_bytes if name in self._columns]:
                advice = "mend the file, or set the column's type to binary with types"
                raise DataError(f"{file}: column {bad[0]!r} holds bytes that are not UTF-8; {advice}")
        self._decode = decode_of(decode, None if columns is None else list(columns))
        read = [field for field in self._schema if field.name in self._columns and field.name not in types]
        self.reads_as = (*_reads_as(files[0], read, found), *joined)
        self._heads = {str(file): schema.metadata[HEAD] for file, (_, schema) in pairs}
        blocks = [Block(file, part.rows, part, str(part)) for file, (parts, _) in pairs for part in parts]
        super().__init__(files, blocks, cache_bytes)

    @property
    def column_types(self) -> dict[str, str]:
        """The types of numbers, truth values and texts by columns, as `types` names them; not of decoded ones."""
        is_left = (pa.types.is_null, pa.types.is_nested)
        types = {key: f"{dtype} [{len(self._keys[key])}]" for key, dtype in self._dtypes.items()}
        for field in self._schema:
            kind, keys = str(field.type), [key for key, name in self._keys.items() if name == field.name]
            if not any(test(field.type) for test in is_left):
                types |= dict.fromkeys(keys, {"float": "float32", "double": "float64"}.get(kind, kind))
        return {key: kind for key, kind in types.items() if key not in self._decode}

    def _ends(self, text: bytes) -> list[int]:
        """Return where rows end."""
        raise NotImplementedError

    def _parse(self, text: bytes, schema: pa.Schema | None) -> pa.Table:
        """Return the rows of some lines; the columns have the types of the schema, or what their texts look like."""
        raise NotImplementedError

    def _python_values(self, text: bytes, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return the values of some columns, with whole numbers of any size as ints."""
        raise NotImplementedError

    def _head(self, file: File) -> bytes:
        """Read what stands before the first row and belongs to each stretch."""
        return b""

    def _padded(self, text: bytes, names: Sequence[str]) -> list[str]:
        """Return which columns of numbers have whole ones with leading zeros."""
        return []

    def _look(self, file: File) -> tuple[list[Stretch], pa.Schema]:
        """Return where the rows lie, and the types and looks of the columns."""
        head = self._head(file)
        found, schemas = [], []
        if head:  # a file of its head alone has columns too
            schemas.append(self._parse(head + b"\n", None).schema)
            check_once(file, schemas[0].names)
        for start, text in _whole_rows(file, self._ends, len(head)):
            if not (text if start else text.removeprefix(BOM)).strip(self.BLANK):
                continue
            rows = _behind(head, start) + text
            table = self._parse(rows, None)
            check_once(file, table.column_names)
            found.append(Stretch(start, start + len(text), len(table)))
            schemas.append(self._with_looks(rows, table))
        return found, _joined(schemas).with_metadata({LOOKS: json.dumps(_joined_looks(schemas)), HEAD: head})

    def _with_looks(self, text: bytes, table: pa.Table) -> pa.Schema:
        """Return the schema of some rows, with the looks of their columns.

        It has types for whole numbers above int64, which pyarrow takes for floats.
        """
        of_columns = {name: dict(_looks(name, table.column(name))) for name in table.column_names}
        looks = {path: look for own in of_columns.values() for path, look in own.items()}
        for name in self._padded(text, list(looks.keys() & of_columns.keys())):
            looks[name] |= PADDED
        huge = [name for name, own in of_columns.items() if any(look & HUGE for look in own.values())]
        values = self._python_values(text, huge) if huge else {}
        fields = [
            pa.field(field.name, _with_whole(field.type, values[field.name])) if field.name in values else field
            for field in table.schema
        ]
        return pa.schema(fields, {LOOKS: json.dumps(looks)})

    def _table(self, block: Block[Stretch]) -> pa.Table:
        begin = _behind(self._heads[str(block.file)], block.source.start)
        table = self._parse(begin + read_stretch(block.file, block.source), self._read_as)
        fields = [self._schema.field(name) for name in self._columns if name in table.column_names]
        table = table.select([field.name for field in fields])
        return table.cast(pa.schema(fields)) if fields else table


class JsonLines(TextTable):
    """The rows of files with a JSON object on each line.

    `paths`, `columns` and `decode` are those of `Parquet`. Whole numbers are int64, or uint64 if a column needs it,
    others float32 unless that changes whole ones, and lists of numbers tensors of these; `types` gives another Arrow
    type for a column, as `{"price": "float64"}`.

    Raises DataError for files that are missing, damaged or lack a column, by name, and for whole numbers of more than
    64 bits in a column without a type.

    >>> import dp_ray, pathlib
    >>> size = pathlib.Path("texts.jsonl").write_text('{"text": "good", "label": 1}\\n{"text": "bad", "label": 0}\\n')
    >>> dp_ray.data.JsonLines("texts.jsonl")[1]
    {'text': 'bad', 'label': np.int64(0)}
    """

    SUFFIXES = (".jsonl", ".ndjson", ".json")
    BLANK = b" \t\r\n"
    MAY_LACK = True
    _kind = "lines"

    def _ends(self, text: bytes) -> list[int]:
        ends: list[int] = (np.flatnonzero(np.frombuffer(text, np.uint8) == NEWLINE) + 1).tolist()
        return ends

    def _parse(self, text: bytes, schema: pa.Schema | None) -> pa.Table:
        row = text.removeprefix(BOM).lstrip(self.BLANK)
        if row.startswith(b"null"):  # pyarrow would end the process
            raise pa.ArrowInvalid("the first row is null, and no object")
        if row.startswith(BOM[:1]):  # pyarrow passes over a part of the mark
            raise pa.ArrowInvalid("it begins with a byte that is not UTF-8")
        options = pajson.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore" if schema else "infer"
        )
        reads = pajson.ReadOptions(use_threads=False, block_size=max(1, len(text)))
        return pajson.read_json(io.BytesIO(text), reads, options)

    def _python_values(self, text: bytes, names: Sequence[str]) -> dict[str, list[Any]]:
        plain, decode = text.decode("utf-8-sig"), json.JSONDecoder().raw_decode
        rows, at = [], 0
        while begin := _SOLID.search(plain, at):
            row, at = decode(plain, begin.start())
            rows.append(row)
        return {name: [row.get(name) for row in rows] for name in names}


class Csv(TextTable):
    """The rows of CSV files. The first line of each file names its columns, unless `names` does.

    `paths`, `columns` and `decode` are as those of `Parquet`. Whole numbers are int64, or uint64 if a column needs
    it, others float32 unless that changes whole ones; with a leading zero they are text. `types` gives another Arrow
    type for a column, as `{"zip": "string"}`. A quoted value may hold line breaks.

    Raises DataError for files that are missing, damaged or lack a column, by name, and for whole numbers of more than
    64 bits in a column without a type.

    >>> import dp_ray, pathlib
    >>> size = pathlib.Path("flowers.csv").write_text("petal,kind\\n1.5,rose\\n2.5,lily\\n")
    >>> dp_ray.data.Csv("flowers.csv")[1]
    {'petal': np.float32(2.5), 'kind': 'lily'}
    """

    SUFFIXES = (".csv", ".tsv")
    BLANK = b"\r\n"

    def __init__(
        self,
        paths: Paths,
        columns: Columns | None = None,
        types: Types | None = None,
        decode: Decode | None = None,
        delimiter: str = ",",
        names: Sequence[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._delimiter = delimiter
        self._names = None if names is None else list(names)
        named = "" if names is None else f"-{hashlib.sha256(json.dumps(self._names).encode()).hexdigest()[:16]}"
        self._kind = f"fields-{ord(delimiter)}{named}"
        super().__init__(paths, columns, types, decode, cache_bytes)

    def _ends(self, text: bytes) -> list[int]:
        return ends_of_rows(text, self._delimiter.encode())

    def _head(self, file: File) -> bytes:
        """Read the first row, with the blank lines before it."""
        if self._names is not None:
            return b""

        def first(text: bytes) -> list[int]:
            blank = len(text) - len(text.removeprefix(BOM).lstrip(self.BLANK))
            return next(([stop] for stop in self._ends(text) if stop > blank), [])

        row = next(_whole_rows(file, first, 0), (0, b""))[1]
        if not row.removeprefix(BOM).strip(self.BLANK):
            raise DataError(f"{file}: is empty, it has no line that names its columns")
        return row

    def _python_values(self, text: bytes, names: Sequence[str]) -> dict[str, list[Any]]:
        texts = self._parse(text, pa.schema([pa.field(name, pa.string()) for name in names]))
        return {name: [_number(text) for text in texts.column(name).to_pylist()] for name in names}

    def _padded(self, text: bytes, names: Sequence[str]) -> list[str]:
        if not re.search(rb'[\s"%b][+-]?0[0-9]' % re.escape(self._delimiter.encode()), b"\n" + text):
            return []
        texts = self._parse(text, pa.schema([pa.field(name, pa.string()) for name in names]))
        return [name for name in names if pc.any(pc.match_substring_regex(texts.column(name), _PADDED)).as_py()]

    def _parse(self, text: bytes, schema: pa.Schema | None) -> pa.Table:
        return pacsv.read_csv(
            io.BytesIO(text),
            pacsv.ReadOptions(use_threads=False, block_size=max(1, len(text)), column_names=self._names),
            pacsv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            pacsv.ConvertOptions(column_types=schema, strings_can_be_null=False),
        )


def _behind(head: bytes, start: int) -> bytes:
    """Return what is read before the rows from byte `start` on: only where a file begins may it have a mark."""
    return head or (b"\n" if start else b"")


def ends_of_rows(text: bytes, delimiter: bytes = b",") -> list[int]:
    """Return where rows of CSV end: at line breaks outside of quoted fields. The text begins with a row.

    A line break is a newline or a carriage return, or both. A return at the end of the text counts as none: a newline
    may follow.

    A quote opens a quoted field only where a field begins. There a quote that is not doubled closes it, and what
    follows until the field ends is plain, as pyarrow reads it.
    """
    numbers = np.frombuffer(text, np.uint8)
    breaks, borders = np.flatnonzero(numbers == NEWLINE), np.flatnonzero(numbers == QUOTE)
    returns = np.flatnonzero(numbers[:-1] == RETURN)
    if len(alone := returns[numbers[returns + 1] != NEWLINE]):
        breaks = np.sort(np.concatenate([breaks, alone]))
    # In most files no quote is plain: each second one opens a field, or comes right after a quote.
    opens = borders[::2]
    is_first = opens == (len(BOM) if text.startswith(BOM) else 0)
    if not (is_first | np.isin(numbers[opens - 1], [NEWLINE, RETURN, QUOTE, ord(delimiter)])).all():
        # The quoted parts of fields, one after another; the last one may lack its end.
        begins = rb"(?:(?<=[\n\r%b])|\A(?:%b)?)" % (re.escape(delimiter), BOM)
        spans = [match.span() for match in re.finditer(begins + rb'"(?:[^"]++|"")*+(?:"|\Z)', text)]
        borders = np.array(spans, np.int64).reshape(-1)
    ends: list[int] = (breaks[np.searchsorted(borders, breaks, side="right") % 2 == 0] + 1).tolist()
    return ends


def _whole_rows(file: File, ends: Callable[[bytes], list[int]], skip: int) -> Iterator[tuple[int, bytes]]:
    """Yield the file from byte `skip` on, in texts of whole rows, each with the byte at which it starts.

    Raises DataError if the file ends within a quoted value: it was cut off, or a lost quote joins its rows.
    """
    start, held = 0, b""
    for piece in read_in_pieces(file):
        held += piece
        if start < skip <= start + len(held):
            start, held = skip, held[skip - start :]
        if start >= skip and (found := ends(held)):
            yield start, held[: found[-1]]
            start, held = start + found[-1], held[found[-1] :]
    if held:
        if held.strip() and not ends(held + b"\n"):
            raise DataError(f"{file}: is damaged: a quote is not closed in the row that begins at byte {start}")
        yield start, held


def _number(text: str) -> int | float | None:
    """Return the number that a value of CSV stands for; None for one that is missing, however that is written."""
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return None if number != number else number


def _with_whole(kind: pa.DataType, values: Sequence[Any]) -> pa.DataType:
    """Return the type, with UNSIGNED or BEYOND for float64 if all values are whole numbers and some no int64."""
    there = [value for value in values if value is not None]
    if pa.types.is_list(kind):
        return pa.list_(_with_whole(kind.value_type, [item for value in there for item in value]))
    if pa.types.is_struct(kind):
        return pa.struct(
            [pa.field(key.name, _with_whole(key.type, [value.get(key.name) for value in there])) for key in kind]
        )
    if not pa.types.is_float64(kind) or not there or not all(type(value) is int for value in there):
        return kind
    low, high = min(there), max(there)
    if low >= -(1 << 63) and high < 1 << 63:
        return kind
    return UNSIGNED if low >= 0 and high < 1 << 64 else BEYOND


def _looks(path: str, column: pa.ChunkedArray | pa.Array) -> Iterator[tuple[str, int]]:
    """Yield the looks of the numbers of a column, also in lists and structs, by their paths: `a`, `a[]`, `a.b`."""
    kind = column.type
    if pa.types.is_list(kind):
        yield from _looks(f"{path}[]", pc.list_flatten(column))
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _looks(f"{path}.{field.name}", pc.struct_field(column, field.name))
    elif kind in (pa.float64(), pa.int64(), pa.null()):
        numbers = column.drop_null().cast(pa.float64(), safe=False).to_numpy()
        sizes, is_whole = np.abs(numbers), np.isfinite(numbers) & (np.floor(numbers) == numbers)
        with np.errstate(over="ignore"):
            is_rounded = is_whole & (numbers.astype(np.float32) != numbers)
        is_large = sizes > EXACT_FLOAT64
        yield (
            path,
            FRACTION * bool(not is_whole.all())
            | ROUNDED * bool((is_rounded | is_large).any())
            | SMALL * bool((sizes < EXACT_FLOAT32).any())
            | MISSING * bool(column.null_count)
            | LARGE * bool(is_large.any())
            | HUGE * bool((sizes >= 1 << 63).any()),
        )


def _joined_looks(schemas: Sequence[pa.Schema]) -> dict[str, int]:
    """Return the looks of the columns of all schemas together; a schema without one of the columns has it missing."""
    names = {name for schema in schemas for name in schema.names}
    joined: dict[str, int] = {}
    for schema in schemas:
        if (looks := (schema.metadata or {}).get(LOOKS)) is None or not schema.names:
            continue  # without rows
        for path, look in (dict.fromkeys(names - {*schema.names}, MISSING) | json.loads(looks)).items():
            joined[path] = joined.get(path, 0) | look
    return joined


def _joined(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns of all schemas, each with a type that holds its values in all of them."""
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    kinds = {name: [schema.field(name).type for schema in schemas if name in schema.names] for name in names}
    return pa.schema([pa.field(name, _common(found)) for name, found in kinds.items()])


def _common(kinds: Sequence[pa.DataType]) -> pa.DataType:
    fields = [pa.schema([pa.field("it", kind)]) for kind in kinds]
    try:
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return pa.string()


def _with_types(schema: pa.Schema, types: Types, looks: Mapping[str, int], whole: pa.DataType = INT64) -> pa.Schema:
    """Return the schema with the types that were asked for, else with those that its numbers need (`_narrow`)."""
    fields = []
    for field in schema:
        try:
            own = types.get(field.name)
            kind = _narrow(field.type, field.name, looks, whole) if own is None else pa.type_for_alias(own)
        except ValueError:
            says = f"{types[field.name]!r} for {field.name!r} is no type of Arrow, like int64, float32 or string"
            raise JobError(f"types: {says}") from None
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def _narrow(kind: pa.DataType, path: str, looks: Mapping[str, int], whole: pa.DataType) -> pa.DataType:
    """Return the type in which numbers are read: of floats float32, unless that would make other numbers of them.

    Whole numbers become `whole` then, or float64 if one is missing or too large. Where float32 keeps no fraction at
    all, as of times, it is float64. Whole numbers with leading zeros are text. uint64 takes the place of UNSIGNED.
    """
    look = looks.get(path, 0)
    if look & PADDED and not look & FRACTION and (pa.types.is_integer(kind) or kind in (*FLOATS, UNSIGNED, BEYOND)):
        return pa.string()
    if pa.types.is_float64(kind):
        if look & FRACTION:
            return pa.float32() if look & SMALL else kind
        if not look & ROUNDED:
            return pa.float32()
        return kind if look & (MISSING | LARGE) else whole
    if kind == UNSIGNED:
        return pa.uint64()
    if pa.types.is_list(kind):
        return pa.list_(_narrow(kind.value_type, f"{path}[]", looks, whole))
    if pa.types.is_struct(kind):
        narrow = [pa.field(key.name, _narrow(key.type, f"{path}.{key.name}", looks, whole)) for key in kind]
        return pa.struct(narrow)
    return kind


def _reads_as(file: File, fields: Sequence[pa.Field], found: pa.Schema) -> Iterator[str]:
    """Yield a line for each column that has not the type that other columns of its kind get."""
    for field in fields:
        kind, there = field.type, found.field(field.name).type
        if pa.types.is_string(kind) and not pa.types.is_string(there):
            yield (
                f"{file}: column {field.name!r} is read as text, since numbers would lose its leading zeros; "
                f"types: {{{field.name}: int64}} reads numbers"
            )
        elif "double" in str(there) and kind != _narrow(there, "", {}, INT64):
            yield (
                f"{file}: column {field.name!r} is read as {kind}, since float32 would change its numbers; "
                f"types: {{{field.name}: float32}} reads it so"
            )

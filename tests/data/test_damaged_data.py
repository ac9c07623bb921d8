"""Damaged files of data: whatever byte is wrong, they give an error, or the rows that another reader finds.

`make fuzz` draws much more damage.
"""

import csv
import io
import json
import os
import tarfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dp_ray.data import Arrow, Csv, JsonLines, Parquet, WebDataset
from dp_ray.data.values import array, decoded, tensors
from dp_ray.errors import DataError
from tests.support.chance import examples
from tests.support.tables import shard

BLOCK = tarfile.BLOCKSIZE
SAMPLES = [(f"{number:04}", {"txt": f"caption {number}".encode(), "cls": b"%d" % number}) for number in range(4)]


def written(path: Path, encoded: bytes) -> Path:
    path.write_bytes(encoded)
    (path.parent / f".{path.name}.samples.arrow").unlink(missing_ok=True)  # what was found before
    return path


def archive(folder: Path, samples: Any = SAMPLES) -> bytes:
    """A tar file whose members each have a header and one block."""
    shard(folder / "whole", list(samples))
    return (folder / "whole").read_bytes()


def members(encoded: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(encoded)) as tar:
        return len(tar.getmembers())


@pytest.mark.parametrize("at", [0, 2 * BLOCK, 8 * BLOCK, 14 * BLOCK])
def test_a_shard_that_lost_a_header_is_damaged(tmp_path: Path, at: int) -> None:
    encoded = archive(tmp_path)
    end = 2 * BLOCK * members(encoded)
    for damaged in (
        encoded[: at + 5] + b"\xff" + encoded[at + 6 :],
        encoded[:at] + bytes(BLOCK) + encoded[at + BLOCK :],
        encoded[:at],
        encoded[: at + 100],
    ):
        with pytest.raises(DataError, match=r"0.tar: is damaged, or is no tar file"):
            WebDataset(written(tmp_path / "0.tar", damaged))
    for damaged in (encoded[:end], encoded[: end + BLOCK], encoded[:-1] + b"x"):
        with pytest.raises(DataError, match=r"0.tar: is damaged, or is no tar file"):
            WebDataset(written(tmp_path / "0.tar", damaged))
    assert [item["cls"] for item in WebDataset(written(tmp_path / "0.tar", encoded[: end + 2 * BLOCK]))] == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        (tarfile.GNU_FORMAT, lambda text: b"\0" + text[1:]),
        (tarfile.GNU_FORMAT, lambda text: text[:-5] + bytes(5)),
        (tarfile.PAX_FORMAT, lambda text: b"\0" + text[1:]),
        (tarfile.PAX_FORMAT, lambda text: b"1" + text[1:]),
        (tarfile.PAX_FORMAT, lambda text: text.replace(b"path=", b"path\n")),
        (tarfile.PAX_FORMAT, lambda text: text.replace(b"0.txt", b"0\0txt")),
        (tarfile.PAX_FORMAT, lambda text: text[:-1] + b" "),
    ],
)
def test_a_long_name_that_is_damaged_loses_no_file(tmp_path: Path, form: int, damage: Any) -> None:
    """Its text stands in a block of its own, of which there is no checksum."""
    whole = tar_form(form, "läng-" * 40).whole()
    size = int(whole[124:135], 8)
    damaged = whole[:BLOCK] + damage(whole[BLOCK : BLOCK + size]) + whole[BLOCK + size :]
    assert len(damaged) == len(whole) and len(WebDataset(written(tmp_path / "0.tar", whole))) == 4
    with pytest.raises(DataError, match=r"0.tar: is damaged, or is no tar file: the header at byte 0: .*name"):
        WebDataset(written(tmp_path / "0.tar", damaged))


def test_two_archives_in_one_file_are_told(tmp_path: Path) -> None:
    two = archive(tmp_path) + archive(tmp_path, [("more", {"cls": b"4"})])
    with pytest.raises(DataError, match=r"there is more behind its end at byte 8192: .*several archives in one file"):
        WebDataset(written(tmp_path / "0.tar", two))


def test_a_sample_name_belongs_to_one_sample_whose_files_lie_together(tmp_path: Path) -> None:
    alike = (
        [("a", {"cls": b"1"}), ("a", {"cls": b"2"})],
        [("a", {"cls": b"1"}), ("b", {"cls": b"1"}), ("a", {"txt": b""})],
    )
    for samples in alike:
        with pytest.raises(DataError, match=r"0.tar: has the sample 'a' twice; give each sample a name of its own"):
            WebDataset(written(tmp_path / "0.tar", archive(tmp_path, samples)))
    hidden = [
        ("._a", {"jpg": b"of another system"}),
        ("a", {"cls": b"1"}),
        ("._b", {"jpg": b""}),
        ("b", {"cls": b"2"}),
    ]
    dataset = WebDataset(written(tmp_path / "0.tar", archive(tmp_path, hidden)))
    assert list(dataset) == [{"__key__": "a", "cls": 1}, {"__key__": "b", "cls": 2}]


def test_a_link_in_a_shard_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    os.link(tmp_path / "a.txt", tmp_path / "b.txt")
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name in ("a.txt", "b.txt"):
            tar.add(tmp_path / name, name)
    with pytest.raises(DataError, match=r"0.tar: 'b.txt' is no file; pack the file that a link points to"):
        WebDataset(tmp_path / "0.tar")


def test_a_shard_that_is_damaged_behind_its_index_is_told(tmp_path: Path) -> None:
    """The header of the last file: without it, the last sample would lack a key."""
    encoded = archive(tmp_path)
    path = written(tmp_path / "0.tar", encoded)
    dataset = WebDataset(path)
    path.write_bytes(encoded[: 14 * BLOCK] + bytes(BLOCK) + encoded[15 * BLOCK :])
    with pytest.raises(DataError, match=r"0.tar, bytes 0 to 8192: is damaged"):
        dataset[0]


NAMES = ("id", "text", "vector")
ROWS: list[dict[str, Any]] = [{"id": n, "text": f'"{n}",\n', "vector": [n / 4, n + 0.5]} for n in range(6)]


def damages(path: Path, step: int = 1) -> Iterator[tuple[int, bytes]]:
    """The file with one byte of it wrong, for each place of the byte, or for one of `step` places."""
    encoded = path.read_bytes()
    for number, at in enumerate(range(0, len(encoded), step)):
        damaged = bytearray(encoded)
        damaged[at] ^= (0xFF, 0x01)[number % 2]
        yield at, bytes(written(path, bytes(damaged)).read_bytes())


def rows_or_none(make: Callable[[], Any]) -> list[dict[str, Any]] | None:
    """The rows of a dataset as plain values; None if it raises DataError, and nothing else."""
    try:
        return [{name: plain(value) for name, value in item.items()} for item in make()]
    except DataError:
        return None


def plain(value: Any) -> Any:
    if isinstance(value, bytes):  # text, whose type a Parquet file keeps without a checksum
        return value.decode(errors="surrogateescape")
    return value.tolist() if isinstance(value, torch.Tensor | np.generic) else value


def alike(found: Any, wanted: Any) -> bool:
    """Whether values are equal, as float32 if they are numbers; CSV tells numbers as text."""
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(alike(found[name], wanted[name]) for name in found)
    if isinstance(found, list):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return bool(found == wanted or (not isinstance(found, str) and np.float32(found) == np.float32(wanted)))


def lines(encoded: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in encoded.decode().split("\n") if line.strip()]


def fields(encoded: bytes) -> list[dict[str, Any]]:
    names, *rows = csv.reader(io.StringIO(encoded.decode(), newline=""), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows if row]


def write_lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_fields(path: Path) -> None:
    csv.writer(text := io.StringIO(), lineterminator="\n").writerows(
        [NAMES[:2], *([row["id"], row["text"]] for row in ROWS)]
    )
    path.write_text(text.getvalue().rstrip())


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "write", "make", "oracle"),
    [("0.jsonl", write_lines, JsonLines, lines), ("0.csv", write_fields, Csv, fields)],
)
def test_of_damaged_text_the_rows_are_those_of_pythons_reader(
    tmp_path: Path, name: str, write: Any, make: Any, oracle: Any
) -> None:
    write(path := tmp_path / name)
    assert alike(rows_or_none(lambda: make(path)), oracle(path.read_bytes()))
    given = 0
    for at, damaged in damages(path):
        if (found := rows_or_none(lambda: make(path))) is not None:
            assert alike(found, oracle(damaged)), (at, found)
            given += 1
    assert given > 10, "a wrong letter of a text, which nobody can tell"


@pytest.mark.parametrize("text", ["null\n", ' null\n{"a": 1}\n', "null null"])
def test_a_line_of_null_is_told(tmp_path: Path, text: str) -> None:
    """pyarrow ended the process."""
    (tmp_path / "0.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"0.jsonl: is damaged: the first row is null, and no object"):
        JsonLines(tmp_path)


@pytest.mark.parametrize("text", [b"\xef", b'\xef\xbb{"a": 1}\n', b'\xef{"a": 1}\n'])
def test_a_part_of_a_byte_order_mark_is_told(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "0.jsonl").write_bytes(text)
    with pytest.raises(DataError, match=r"0.jsonl: is damaged: .*not UTF-8"):
        JsonLines(tmp_path)


def test_a_byte_order_mark_within_a_file_is_a_value(tmp_path: Path) -> None:
    """As the whole last row, which its text does not end; and where a piece of the file begins."""
    (tmp_path / "0.csv").write_bytes(b"a\r1\r\xef\xbb\xbf")
    assert [item["a"] for item in Csv(tmp_path / "0.csv")] == ["1", "\ufeff"]
    (tmp_path / "1.csv").write_bytes(b"x\ry\r\xef\xbb\xbfz")
    assert [item["a"] for item in Csv(tmp_path / "1.csv", names=["a"])] == ["x", "y", "\ufeffz"]
    (tmp_path / "2.jsonl").write_bytes(b'{"a": 1}\n\xef\xbb\xbf{"a": 2}')
    with pytest.raises(DataError, match=r"2\.jsonl"):
        JsonLines(tmp_path / "2.jsonl")


@pytest.mark.parametrize("text", ['a,b\n0,x\n1,"y\n2,z\n', 'a,b\n0,"x', 'a,b\n0,"x""', 'a,"b'])
def test_a_quote_that_is_not_closed_does_not_swallow_the_rest(tmp_path: Path, text: str) -> None:
    (tmp_path / "0.csv").write_text(text)
    with pytest.raises(
        DataError, match=r"0.csv: is damaged: a quote is not closed in the row that begins at byte \d"
    ):
        Csv(tmp_path)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_of_a_damaged_parquet_file_with_checksums_the_rows_are_the_right_ones(
    tmp_path: Path, compression: Any
) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(
        table, path := tmp_path / "0.parquet", row_group_size=2, write_page_checksum=True, compression=compression
    )
    for at, _ in damages(path, 5):
        found = rows_or_none(lambda: Parquet(path, columns=NAMES))
        assert found is None or found == ROWS, (at, found)


@pytest.mark.full
@pytest.mark.slow
def test_of_a_damaged_arrow_file_no_row_and_no_column_is_lost(tmp_path: Path) -> None:
    """Arrow has no checksums: a number may be another one."""
    feather.write_feather(pa.Table.from_pylist(ROWS), str(path := tmp_path / "0.arrow"), "uncompressed", chunksize=2)
    for at, _ in damages(path, 5):
        found = rows_or_none(lambda: Arrow(path))
        assert found is None or [tuple(row) for row in found] == [NAMES] * len(ROWS), (at, found)


def test_a_record_batch_whose_head_lost_its_rows_is_not_passed_over(tmp_path: Path) -> None:
    """Four bytes are missing, so that numbers are read in the wrong places: 0 rows, in all of them."""
    encoded = FORMS["arrow-uncompressed"].whole()
    with pa.ipc.open_file(encoded) as reader:
        sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
    assert sizes == [2, 2, 2]
    empty = 0
    for at in range(1160, 1240, 4):
        written(tmp_path / "0.arrow", encoded[:at] + encoded[at + 4 :])
        found = rows_or_none(lambda: Arrow(tmp_path / "0.arrow"))
        assert found is None or len(found) == 6, at
        empty += found is None
    assert empty


@pytest.mark.full
@pytest.mark.slow
def test_of_a_damaged_shard_no_sample_and_no_file_of_one_is_lost(tmp_path: Path) -> None:
    """A tar file has checksums of its headers alone."""
    encoded = archive(tmp_path)
    whole = rows_or_none(lambda: WebDataset(written(tmp_path / "0.tar", encoded[: 2 * BLOCK * 9])))
    for at, _ in damages(tmp_path / "0.tar", 11):
        found = rows_or_none(lambda: WebDataset(tmp_path / "0.tar"))
        if at // BLOCK % 2 and at < 16 * BLOCK:  # in the contents of a file
            assert found is None or [tuple(row) for row in found] == [("__key__", "txt", "cls")] * 4, (at, found)
        else:
            assert found is None or found == whole, (at, found)


# Damage of any kind at any place: `make fuzz` draws much of it.

SIGNS = [bytes([byte]) for byte in b'",\n\r;{}[]: \\\t\x00\xff\xc3\xa9-+.e019tfn']
PIECES = st.binary(min_size=1, max_size=6) | st.lists(st.sampled_from(SIGNS), min_size=1, max_size=4).map(b"".join)
# What takes the place of some bytes.
NEW: dict[str, Callable[[bytes, bytes], bytes]] = {
    "changed": lambda there, piece: piece[: len(there)] + there[len(piece) :],
    "inserted": lambda there, piece: piece + there,
    "removed": lambda there, piece: b"",
    "zeroed": lambda there, piece: bytes(len(there)),
    "repeated": lambda there, piece: there + there,
    "another": lambda there, piece: bytes(byte ^ 1 << piece[0] % 8 for byte in there[:1]) + there[1:],
}
SIZES = st.integers(1, 40) | st.integers(1, 1200) | st.just(1 << 20)
EDITS = st.lists(
    st.tuples(st.sampled_from(list(NEW)), st.integers(0, 1 << 16), SIZES, PIECES), min_size=1, max_size=3
)


def edited(encoded: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    """The bytes with each edit made, one after another; one that removes as many as there are cuts the file."""
    for kind, place, size, piece in edits:
        at = place % (len(encoded) + 1)
        encoded = encoded[:at] + NEW[kind](encoded[at : at + size], piece) + encoded[at + size :]
    return encoded


Plain = list[dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """A form of files: what reads it here, a whole file of it, and what another reader finds in a damaged one."""

    suffix: str
    make: Callable[[Path], Any]
    whole: Callable[[], bytes]
    other: Callable[[bytes], Plain]
    is_proof: bool = False  # whether it has checksums of all values


def parquet_form(compression: str, version: str, checksums: bool) -> Form:
    def whole() -> bytes:
        stream = io.BytesIO()
        pq.write_table(
            pa.Table.from_pylist(ROWS),
            stream,
            row_group_size=2,
            compression=compression,
            data_page_version=version,
            write_page_checksum=checksums,
        )
        return stream.getvalue()

    def other(encoded: bytes) -> Plain:
        with pq.ParquetFile(io.BytesIO(encoded), page_checksum_verification=True) as found:
            return list(found.read(columns=list(NAMES)).to_pylist())

    return Form(".parquet", lambda path: Parquet(path, columns=NAMES), whole, other, checksums)


def arrow_form(compression: Any) -> Form:
    def whole() -> bytes:
        feather.write_feather(pa.Table.from_pylist(ROWS), stream := io.BytesIO(), compression, chunksize=2)
        return stream.getvalue()

    def other(encoded: bytes) -> Plain:
        with pa.ipc.open_file(encoded) as found:
            table = found.read_all()
        table.validate(full=True)
        return list(table.to_pylist())

    return Form(".arrow", Arrow, whole, other)


def text_form(suffix: str, make: Any, text: str | bytes, other: Callable[[bytes], Plain]) -> Form:
    return Form(suffix, make, lambda: text if isinstance(text, bytes) else text.encode(), other)


def json_values(encoded: bytes) -> Plain:
    """The values one after another, whatever white space is between them."""
    text, found, at = encoded.decode("utf-8-sig").lstrip(" \t\r\n"), [], 0
    while at < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        found.append(value)
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
    return found


def csv_values(encoded: bytes) -> Plain:
    """The rows as Python's reader finds them, byte by byte, as CSV knows of no encoding; empty lines are no rows."""
    text = encoded.removeprefix(b"\xef\xbb\xbf").decode("latin-1")
    rows = (
        [cell.encode("latin-1").decode() for cell in row] for row in csv.reader(io.StringIO(text, newline="")) if row
    )
    names = next(rows)
    return [dict(zip(names, row, strict=True)) for row in rows]


def tar_form(form: int, long: str) -> Form:
    """Archives whose headers are of one form; `long` is in the middle of each name."""

    def whole() -> bytes:
        with tarfile.open(fileobj=(stream := io.BytesIO()), mode="w", format=form) as tar:
            for key, parts in SAMPLES:
                for extension, contents in parts.items():
                    info = tarfile.TarInfo(f"folder/{long}{key}.{extension}")
                    info.size = len(contents)
                    tar.addfile(info, io.BytesIO(contents))
        return stream.getvalue()

    def other(encoded: bytes) -> Plain:
        found: dict[str, dict[str, Any]] = {}
        with tarfile.open(fileobj=io.BytesIO(encoded)) as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if not (stem and extension):  # hidden, or of another name than it had
                    continue
                contents = tar.extractfile(member)
                assert contents is not None
                found.setdefault(key, {"__key__": key})[extension.lower()] = contents.read()
            assert not encoded[tar.offset :].strip(b"\0"), "there is more than it found"
        return list(found.values())

    as_it_is = dict.fromkeys(("txt", "cls"), bytes)
    return Form(".tar", lambda path: WebDataset(path, decode=as_it_is), whole, other)


TEXTS = {
    "csv": 'id,text\n0,plain\n1,"a, ""b"""\n2,"two\nlines"\n3,\n4,end\n',
    "csv-crlf": "id,price\r\n0,1.5\r\n1,-2e3\r\n2,0.25\r\n",
    "csv-returns": "\ufeffid,x\r1,a\r2,b\r3,c",
    "csv-one": "id\n1\n2\n30\n",
}
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FORMS = {
    **{
        f"parquet-{compression}-{version}{'-checksums' * checksums}": parquet_form(compression, version, checksums)
        for compression, version, checksums in [
            ("none", "1.0", True),
            ("zstd", "2.0", True),
            ("snappy", "1.0", True),
            ("gzip", "1.0", False),
            ("none", "2.0", False),
        ]
    },
    **{f"arrow-{compression}": arrow_form(compression) for compression in ("uncompressed", "zstd", "lz4")},
    "tar-ustar": tar_form(tarfile.USTAR_FORMAT, ""),
    "tar-gnu": tar_form(tarfile.GNU_FORMAT, "long-" * 50),
    "tar-pax": tar_form(tarfile.PAX_FORMAT, "läng-" * 40),
    **{name: text_form(".csv", Csv, text, csv_values) for name, text in TEXTS.items()},
    "jsonl": text_form(".jsonl", JsonLines, LINES, json_values),
    "json": text_form(".json", JsonLines, '\ufeff{"a": {"b": ["x", null]}, "n": 1.5}\r\n' * 3, json_values),
}


def check_damaged(form: Form, whole: bytes, path: Path, edits: list[tuple[str, int, int, bytes]]) -> None:
    damaged = edited(whole, edits)
    written(path, damaged)
    try:
        dataset = form.make(path)
        found = [{name: plain(value) for name, value in item.items()} for item in dataset]
    except DataError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert path.name in said, "the error names the file"
        return
    try:
        wanted = form.other(damaged)
    except Exception as error:
        raise AssertionError(f"another reader finds damage, and here are {found}") from error
    assert alike(found, [{name: plain(value) for name, value in row.items()} for row in wanted]), (found, wanted)
    if form.suffix in (".parquet", ".arrow"):
        assert len(found) == len(ROWS)


@pytest.mark.full(but=["parquet-none-2.0", "arrow-lz4", "tar-ustar", "csv", "jsonl"])
@pytest.mark.parametrize("name", list(FORMS))
@given(edits=EDITS)
@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
def test_any_damage_is_told_or_the_rows_are_those_of_another_reader(
    tmp_path: Path, name: str, edits: list[tuple[str, int, int, bytes]]
) -> None:
    form = FORMS[name]
    check_damaged(form, form.whole(), tmp_path / f"0{form.suffix}", edits)


NUMBERS = torch.arange(6.0)
VALUES = {"x": NUMBERS, "y": ["a", 2]}


@pytest.mark.parametrize("decode", [array, tensors])
@given(edits=EDITS)
@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
def test_a_damaged_member_of_a_shard_gives_no_other_values(
    decode: Any, edits: list[tuple[str, int, int, bytes]]
) -> None:
    """A file of torch has checksums; in one of NumPy a number may be another one, and there are none too few."""
    stream = io.BytesIO()
    np.save(stream, NUMBERS) if decode is array else torch.save(VALUES, stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = decoded({"it": edited(stream.getvalue(), edits)}, {"it": decode})["it"]
        except DataError:
            return
    if decode is tensors:
        assert str(found) == str(VALUES)
    else:
        assert found.numel() * found.element_size() == 24


def test_what_a_file_of_numpy_or_torch_says_of_itself_is_checked() -> None:
    np.save(numbers := io.BytesIO(), np.arange(6))
    with pytest.raises(DataError, match=r"its head tells of the shape \[4\], behind which are 16 more bytes"):
        array(numbers.getvalue().replace(b"(6,)", b"(4,)"))
    torch.save(VALUES, values := io.BytesIO())
    with pytest.raises(DataError, match="is damaged: 'archive/data/0' in it has a wrong checksum"):
        tensors(values.getvalue().replace(NUMBERS.numpy().tobytes(), bytes(24)))
    assert str(tensors(values.getvalue())) == str(VALUES)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(VALUES, without := io.BytesIO())
    finally:
        torch.serialization.set_crc32_options(True)
    assert str(tensors(without.getvalue())) == str(VALUES)
    torch.save(VALUES, older := io.BytesIO(), _use_new_zipfile_serialization=False)
    assert str(tensors(older.getvalue())) == str(VALUES)

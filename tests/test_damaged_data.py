"""Damaged files of data: whatever byte is wrong, they give an error, or the rows that another reader finds."""

import csv
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch

from dp_ray.data import Arrow, Csv, JsonLines, Parquet, WebDataset
from dp_ray.errors import DataError
from tests.support.tables import shard

BLOCK = tarfile.BLOCKSIZE
SAMPLES = [(f"{number:04}", {"txt": f"caption {number}".encode(), "cls": b"%d" % number}) for number in range(4)]


def written(path: Path, encoded: bytes) -> Path:
    path.write_bytes(encoded)
    (path.parent / f".{path.name}.samples.json").unlink(missing_ok=True)  # what was found before
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
        return value.decode()
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


@pytest.mark.parametrize("text", ['a,b\n0,x\n1,"y\n2,z\n', 'a,b\n0,"x', 'a,b\n0,"x""', 'a,"b'])
def test_a_quote_that_is_not_closed_does_not_swallow_the_rest(tmp_path: Path, text: str) -> None:
    (tmp_path / "0.csv").write_text(text)
    with pytest.raises(
        DataError, match=r"0.csv: is damaged: a quote is not closed in the row that begins at byte \d"
    ):
        Csv(tmp_path)


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


@pytest.mark.slow
def test_of_a_damaged_arrow_file_no_row_and_no_column_is_lost(tmp_path: Path) -> None:
    """Arrow has no checksums: a number may be another one."""
    feather.write_feather(pa.Table.from_pylist(ROWS), str(path := tmp_path / "0.arrow"), "uncompressed", chunksize=2)
    for at, _ in damages(path, 5):
        found = rows_or_none(lambda: Arrow(path))
        assert found is None or [tuple(row) for row in found] == [NAMES] * len(ROWS), (at, found)


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

"""Text files as programs write them: values and rows that a reader may lose in silence."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dp_ray.data import Csv, JsonLines, files
from dp_ray.errors import DataError

LARGE = 2**64 - 1


@pytest.fixture(params=[1, 9, 1 << 20])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes are read at once, as if files were large."""
    monkeypatch.setattr(files, "STRETCH_BYTES", request.param)
    return int(request.param)


def read_by_python(text: bytes, delimiter: str = ",") -> list[dict[str, str]]:
    lines = io.StringIO(text.decode("utf-8-sig").lstrip("\r\n"), newline="")
    return list(csv.DictReader(lines, delimiter=delimiter))


@pytest.mark.parametrize(
    "text",
    [
        b"a,b\rx,1\ry,2\rz,3\r",
        b"a,b\rx,1\ry,2",
        b'a,b\r"x\ry",1\r"z ""q""",2\r',
        b"a,b\rx,1\ny,2\r\nz,3\r",
        b"\na,b\nx,1\ny,2\nz,3\n",
        b"\xef\xbb\xbf\r\n\r\na,b\r\nx,1\r\ny,2\r\n",
        b"a,b\nx,1\n\n\n\n\n\n\n\n\n\n\n\ny,2\n\n\n\n\n\n\n\n\n\n",
        b"a,b\n",
        b"a,b",
        b"a,b\r",
    ],
)
def test_rows_of_csv_are_all_read(tmp_path: Path, piece: int, text: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    found = [{name: str(value) for name, value in item.items()} for item in Csv(tmp_path, columns=["a", "b"])]
    assert found == read_by_python(text)


@pytest.mark.parametrize(("text", "delimiter"), [(b"a\tb\nx\ty\n\t", "\t"), (b"a b\nx y\n ", " "), (b"a\nx\n ", ",")])
def test_a_last_row_of_empty_texts_is_one(tmp_path: Path, piece: int, text: bytes, delimiter: str) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    assert list(Csv(tmp_path, delimiter=delimiter)) == read_by_python(text, delimiter)


def test_a_file_of_its_head_alone_adds_no_row_and_no_type(tmp_path: Path) -> None:
    for name, text in (("a", "x,y\n"), ("b", "x,y\n1,2.5\n"), ("c", "y,x\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    assert [(item["x"], item["y"]) for item in Csv(tmp_path, columns=["x", "y"])] == [(1, 2.5)]
    with pytest.raises(DataError, match=r"a\.csv: has no column 'z'; it has x, y"):
        Csv(tmp_path, columns=["z"])
    (tmp_path / "a.csv").write_text("x,x\n")
    with pytest.raises(DataError, match=r"a\.csv: has several columns of the name x"):
        Csv(tmp_path)


def test_an_empty_file_beside_others_lacks_no_column(tmp_path: Path) -> None:
    for name, text in (("a", ""), ("b", '{"x": 1}\n'), ("c", "\n \n")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    assert [item["x"] for item in JsonLines(tmp_path, columns=["x"])] == [1]
    for name, text in (("a", ""), ("b", "1\n"), ("c", "\n\n")):
        (tmp_path / f"{name}.csv").write_text(text)
    assert [item["x"] for item in Csv(tmp_path, names=["x"], columns=["x"])] == [1]


def test_files_of_one_name_in_two_folders_have_heads_of_their_own(tmp_path: Path) -> None:
    for folder, text in (("a", "x,y\n1,2\n"), ("b", "y,x\n3,4\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.csv").write_text(text)
    dataset = Csv([tmp_path / "a" / "rows.csv", tmp_path / "b" / "rows.csv"])
    assert [(item["x"], item["y"]) for item in dataset] == [(1, 2), (4, 3)]


def write_csv(path: Path, values: list[Any]) -> Csv:
    path.with_suffix(".csv").write_text("n,z\n" + "".join(f"{value},0\n" for value in values))
    return Csv(path.with_suffix(".csv"))


def write_json(path: Path, values: list[Any]) -> JsonLines:
    path.with_suffix(".jsonl").write_text("".join(json.dumps({"n": value}) + "\r\n" for value in values))
    return JsonLines(path.with_suffix(".jsonl"))


def read_json_lines(path: str) -> Any:
    return pd.read_json(path, lines=True)


@pytest.mark.parametrize("write", [write_csv, write_json])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([LARGE, 1], "uint64"),
        ([1, 2**63], "uint64"),
        ([2**63 - 1, -(2**63)], "int64"),
        ([2.0**63, 0.5], "float32"),
        ([1e300, 2], "float64"),
        ([2.0**24 + 1, 1], "int64"),
        ([1e9 + 1, 2**40], "int64"),
        ([-(2.0**53) + 1, 1], "int64"),
        ([2.0**53 + 2, 0.0], "float64"),
        ([1, 2.0], "float32"),
        ([1.7e9 + 0.25, 1.7e9 + 1], "float64"),
        ([1.7e9 + 0.25, 1], "float32"),
    ],
)
def test_whole_numbers_are_kept_to_the_last_digit(
    tmp_path: Path, piece: int, write: Callable[[Path, list[Any]], Any], values: list[Any], kind: str
) -> None:
    dataset = write(tmp_path / "a", values)
    assert [item["n"].dtype.name for item in dataset] == [kind] * 2
    if kind != "float32":
        assert [item["n"].item() for item in dataset] == values


@pytest.mark.parametrize("write", [write_csv, write_json])
@pytest.mark.parametrize("values", [[LARGE, -1], [2**64, 1], [-(2**63) - 1, 3]])
def test_whole_numbers_of_more_than_64_bits_are_an_error_until_they_have_a_type(
    tmp_path: Path, write: Callable[[Path, list[Any]], Any], values: list[int]
) -> None:
    with pytest.raises(
        DataError, match=r"a\.\w+: column 'n' has whole numbers that are neither .* types: {n: float64}"
    ):
        write(tmp_path / "a", values)
    kind = Csv if write is write_csv else JsonLines
    assert [item["n"] for item in kind(tmp_path, types={"n": "float64"})] == [float(value) for value in values]
    if kind is Csv:
        assert [item["n"] for item in Csv(tmp_path, types={"n": "string"})] == [str(value) for value in values]


def test_whole_numbers_in_lists_and_structs_are_kept(tmp_path: Path, piece: int) -> None:
    rows: list[dict[str, Any]] = [
        {"list": [LARGE, 0], "struct": {"n": LARGE, "x": 1e20}},
        {"list": [1], "struct": {"n": 1, "x": 0.5}},
        {"list": None, "struct": None},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = JsonLines(tmp_path)
    assert [dataset[at]["list"].tolist() for at in (0, 1)] == [[LARGE, 0], [1]]
    assert [int(dataset[at]["struct"]["n"]) for at in (0, 1)] == [LARGE, 1]


def test_missing_values_beside_large_numbers_stay_missing(tmp_path: Path) -> None:
    dataset = write_csv(tmp_path / "a", [LARGE, "NA", "", f" {LARGE} "])
    assert [int(dataset[at]["n"]) for at in (0, 3)] == [LARGE] * 2
    for at in (1, 2):
        with pytest.raises(DataError, match=f"row {at} of .*column 'n' has no value"):
            dataset[at]


IDS = [2**24 + 1.0, 2**24 + 3.0, 1.7e9]


@pytest.mark.parametrize("write", [write_csv, write_json])
def test_whole_floats_that_float32_would_merge_keep_their_values(
    tmp_path: Path, piece: int, write: Callable[[Path, list[Any]], Any]
) -> None:
    """Decided over all files, whichever has the number that tells; pandas reads the same values."""
    write(tmp_path / "a", [1, 2.0])
    write(tmp_path / "b", IDS)
    kind, read = (Csv, pd.read_csv) if write is write_csv else (JsonLines, read_json_lines)
    dataset = kind(tmp_path)
    wanted = [value for file in dataset.files for value in read(file.folder.file(file.name))["n"].tolist()]
    assert [item["n"].item() for item in dataset] == wanted
    assert {item["n"].dtype.name for item in dataset} == {"int64"}
    batch = dataset.read_columns(range(5), ["n"])
    assert batch is not None
    assert batch["n"].tolist() == wanted
    assert dataset.read_values(4, ["n"]) == {"n": wanted[4]}
    (line,) = dataset.reads_as
    assert line.endswith(
        "column 'n' is read as int64, since float32 would change its numbers; types: {n: float32} reads it so"
    )
    assert kind(tmp_path, types={"n": "float32"})[3]["n"].dtype.name == "float32"
    assert kind(tmp_path, types={"n": "float32"}).reads_as == ()


@pytest.mark.parametrize("write", [write_csv, write_json])
def test_whole_floats_of_which_one_is_missing_are_float64(
    tmp_path: Path, piece: int, write: Callable[[Path, list[Any]], Any]
) -> None:
    dataset = write(tmp_path / "a", [*IDS, "" if write is write_csv else None])
    assert [dataset[at]["n"] for at in range(3)] == IDS
    assert dataset[0]["n"].dtype.name == "float64"
    with pytest.raises(DataError, match="column 'n' has no value"):
        dataset[3]


def test_a_file_of_json_lines_that_lacks_the_column_has_its_values_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"t": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"t": "b", "n": 16777217.0}\n')
    value = JsonLines(tmp_path)[1]["n"]
    assert (value, value.dtype.name) == (16777217.0, "float64")


def test_whole_floats_in_lists_and_structs_keep_their_values(tmp_path: Path, piece: int) -> None:
    rows: list[dict[str, Any]] = [
        {"ids": [1.0, 16777217.0], "at": {"time": 1.7e9 + 1, "x": 0.5}, "x": [0.5, 16777217.0]},
        {"ids": [3], "at": {"time": 2.0, "x": 16777217.0}, "x": [1.0]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = JsonLines(tmp_path)
    assert [(value.tolist(), str(value.dtype)) for value in (first["ids"], second["ids"])] == [
        ([1, 16777217], "torch.int64"),
        ([3], "torch.int64"),
    ]
    assert (first["at"]["time"].item(), first["at"]["time"].dtype.name) == (1700000001, "int64")
    assert (first["at"]["x"].dtype.name, str(first["x"].dtype)) == ("float32", "torch.float32")


@pytest.mark.parametrize("zip_codes", [["01234", "90210"], ["90210", '"01234"'], ["7", " 007"], ["-3", "00"]])
def test_numbers_with_leading_zeros_are_text(tmp_path: Path, piece: int, zip_codes: list[str]) -> None:
    text = "zip,n,x\n" + "".join(f"{code},{n},0{n}.5\n" for n, code in enumerate(zip_codes))
    (tmp_path / "b.csv").write_text(text)
    (tmp_path / "a.csv").write_text("zip,n,x\n12345,0,0\n")
    dataset = Csv(tmp_path)
    rows = read_by_python(b"zip,n,x\n12345,0,0\n" + text.encode().partition(b"\n")[2])
    assert [item["zip"] for item in dataset] == [row["zip"] for row in rows]
    assert [item["n"] for item in dataset] == [int(row["n"]) for row in rows]
    assert [item["x"] for item in dataset] == [float(row["x"]) for row in rows]
    (line,) = dataset.reads_as
    assert "column 'zip' is read as text, since numbers would lose its leading zeros; types: {zip: int64}" in line
    assert [item["zip"] for item in Csv(tmp_path, types={"zip": "int64"})] == [int(row["zip"]) for row in rows]


def test_long_digits_with_leading_zeros_are_text(tmp_path: Path) -> None:
    codes = ["00012345678901234567890", "99912345678901234567890"]
    assert [item["n"] for item in write_csv(tmp_path / "a", codes)] == codes


def test_a_list_of_nothing_but_null_damages_no_other_column(tmp_path: Path) -> None:
    """pyarrow cannot cut such lists."""
    rows = [{"a": 1, "b": [None, None]}, {"a": 2, "b": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [item["a"] for item in JsonLines(tmp_path, columns=["a"])] == [1, 2]
    with pytest.raises(DataError, match=r"a\.jsonl, bytes 0 to 28"):
        JsonLines(tmp_path)[0]

"""The datasets of dp_ray.data: what their items hold, against what wrote the files or another reader."""

import csv
import datetime
import errno
import io
import json
import os
import pickle
import re
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import csv as pacsv
from torch.utils.data import default_collate

from dp_ray.data import Arrow, Csv, Images, JsonLines, Parquet, WebDataset, files, float_image, webdataset
from dp_ray.data import text as text_tables
from dp_ray.data.values import image as decode_image
from dp_ray.data.values import row_getter
from dp_ray.errors import DataError, JobError
from tests.support.chance import examples
from tests.support.tables import ROWS, TYPES, columns, jpeg, json_lines, parquet, sample, shard


def arrow(folder: Path) -> Arrow:
    table = pa.table(columns(), schema=TYPES)
    feather.write_feather(table, str(folder / "all.feather"), chunksize=5, compression="zstd")
    return Arrow(folder)


@pytest.mark.parametrize("make", [parquet, arrow])
def test_items_of_tables_are_what_was_written(make: Any, tmp_path: Path) -> None:
    dataset, wanted = make(tmp_path), columns()
    assert len(dataset) == ROWS
    for number in [0, 5, 22, -1]:
        item = dataset[number]
        assert (item["id"], item["text"]) == (wanted["id"][number], wanted["text"][number])
        assert (item["price"], item["flag"]) == (wanted["price"][number], wanted["flag"][number])
        assert torch.equal(item["vector"], torch.tensor(wanted["vector"][number]))
        assert torch.equal(item["ragged"], torch.tensor(wanted["ragged"][number], dtype=torch.int64))
    with pytest.raises(IndexError):
        dataset[ROWS]


def test_torchs_collate_keeps_the_types_of_columns(tmp_path: Path) -> None:
    batch = default_collate([{k: v for k, v in item.items() if k != "ragged"} for item in parquet(tmp_path)])
    assert {k: v.dtype for k, v in batch.items() if k != "text"} == {
        "id": torch.int32,
        "price": torch.float32,
        "vector": torch.float32,
        "flag": torch.bool,
    }
    assert batch["vector"].shape == (ROWS, 2)


@given(st.lists(st.integers(-ROWS, ROWS - 1)), st.integers(0, 2000))
def test_any_samples_come_in_the_order_asked_for_with_any_cache(
    tmp_path_factory: pytest.TempPathFactory, indices: list[int], cache: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    if not folder.exists():
        folder.mkdir()
        parquet(folder)
    dataset = Parquet(folder, columns=["id"], cache_bytes=cache)
    assert [item["id"] for item in dataset.__getitems__(indices)] == [index % ROWS for index in indices]


def test_a_block_is_read_once_for_samples_that_lie_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, table = parquet(tmp_path), Parquet._table
    reads: list[str] = []

    def counted(self: Parquet, block: Any) -> pa.Table:
        reads.append(str(block))
        return table(self, block)

    monkeypatch.setattr(Parquet, "_table", counted)
    dataset.__getitems__([9, 0, 8, 1, 2, 3])
    assert reads == [f"{tmp_path}/part-0.parquet, row group {number}" for number in (2, 0)]
    assert dataset.block_rows.tolist() == [4, 4, 2, 1, 4, 4, 4]


def test_blocks_that_are_held_are_read_several_at_a_time_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path)
    dataset, table = Parquet(tmp_path, cache_bytes=1), Parquet._table
    reads: list[str] = []
    together = threading.Barrier(3, timeout=100)

    def met(self: Parquet, block: Any) -> pa.Table:
        reads.append(str(block))
        if len(reads) <= 3:
            together.wait()
        return table(self, block)

    monkeypatch.setattr(Parquet, "_table", met)
    dataset.hold_blocks(3)
    indices = [8, 0, 4, 9, 1, 5, 12, 13, 10, 22, 12]
    for _ in range(2):
        assert [item["id"] for item in dataset.__getitems__(indices[:6])] == indices[:6]
    assert [item["id"] for item in dataset.__getitems__(indices)] == indices
    assert len(reads) == len(set(reads)) == 6
    copy = pickle.loads(pickle.dumps(dataset))
    assert [item["id"] for item in copy.__getitems__(indices * 2)] == indices * 2
    assert len(reads) == 12


def test_a_copy_for_another_process_reads_the_same(tmp_path: Path) -> None:
    dataset = parquet(tmp_path)
    dataset[3]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[3]["text"] == dataset[3]["text"]
    assert len(pickle.dumps(dataset)) < 10_000, "what was read is not sent along"


def test_files_are_found_in_folders_by_globs_and_in_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/2.parquet", "b/1.parquet", "a/c/3.parquet", "a/not.txt", "a/.hidden.parquet", "_tmp/4.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"name": [name]}), tmp_path / name)
    monkeypatch.chdir(tmp_path)

    def names(paths: Any) -> list[str]:
        return [item["name"] for item in Parquet(paths)]

    assert names(tmp_path) == names(".") == ["a/c/3.parquet", "b/1.parquet", "b/2.parquet"]
    assert names("b/*.parquet") == names(f"{tmp_path}/b/?.parquet") == ["b/1.parquet", "b/2.parquet"]
    assert names("**/[13].parquet") == ["a/c/3.parquet", "b/1.parquet"]
    assert names("*/*.parquet") == ["b/1.parquet", "b/2.parquet"]
    assert names(["b/2.parquet", tmp_path / "a"]) == ["b/2.parquet", "a/c/3.parquet"]
    assert names(f"file://{tmp_path}/b") == ["b/1.parquet", "b/2.parquet"]


def test_a_file_or_folder_whose_name_looks_like_a_glob_is_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("d[1].parquet", "d1.parquet", "e[1]/1.parquet", "e1/1.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"name": [name]}), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for path, found in (("d[1].parquet",) * 2, ("e[1]", "e[1]/1.parquet"), ("d[12].parquet", "d1.parquet")):
        assert [item["name"] for item in Parquet(path)] == [found]


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ("nowhere", "nowhere: there is no such file or folder"),
        ("empty", "empty: has no files that end with .parquet, .pq"),
        ("empty/*.parquet", r"empty/\*.parquet: no file matches"),
        ([], "no files were given: an empty list"),
        ("damaged.parquet", r"damaged.parquet: is damaged: "),
    ],
)
def test_what_is_not_there_or_damaged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=says):
        Parquet(paths)


def test_a_missing_column_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    parquet(tmp_path)
    says = r"part-0.parquet: has no column 'txt'; did you mean 'text'\?; it has id, text"
    with pytest.raises(DataError, match=says):
        Parquet(tmp_path, columns=["txt"])


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    parquet(tmp_path)
    dataset = Parquet(tmp_path)
    path = tmp_path / "part-0.parquet"
    found = pq.ParquetFile(path).metadata.row_group(1).column(0)
    damaged = bytearray(path.read_bytes())
    damaged[found.dictionary_page_offset : found.dictionary_page_offset + found.total_compressed_size] = b"\xff" * (
        found.total_compressed_size
    )
    path.write_bytes(damaged)
    assert dataset[0]["id"] == 0
    with pytest.raises(DataError, match=r"part-0.parquet, row group 1: "):
        dataset[4]


def test_a_read_that_fails_is_tried_again_and_told_when_it_fails_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, table = parquet(tmp_path), Parquet._table
    failures = [OSError(errno.EIO, "503"), OSError(errno.ECONNRESET, "connection reset")]
    waits: list[float] = []

    def shaky(self: Parquet, block: Any) -> pa.Table:
        if failures:
            raise failures.pop()
        return table(self, block)

    monkeypatch.setattr(Parquet, "_table", shaky)
    monkeypatch.setattr("dp_ray.data.files.time.sleep", waits.append)
    assert dataset[4]["id"] == 4
    assert waits == [0.5, 1.0]
    failures += [OSError(errno.EIO, "503")] * 5
    with pytest.raises(DataError, match=r"part-0.parquet, row group 0: cannot be read, after 5 attempts: .* 503"):
        dataset[0]


def test_local_damage_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_ray.data.files.time.sleep", lambda _: pytest.fail("it was tried again"))
    dataset = parquet(tmp_path)
    (tmp_path / "part-0.parquet").write_bytes((tmp_path / "part-0.parquet").read_bytes()[:-9] + b"\0" * 9)
    (tmp_path / "part-1.parquet").write_bytes(b"\xff" * 4000)
    for index, says in [(0, "part-0.parquet, row group 0: "), (10, "part-1.parquet, row group 0: ")]:
        with pytest.raises(DataError, match=f"{says}is damaged"):
            dataset[index]
    path = tmp_path / "part-2.parquet"
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    damaged = bytearray(path.read_bytes())
    damaged[column.dictionary_page_offset : column.dictionary_page_offset + 30] = b"\xff" * 30
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"part-2.parquet, row group 0: is damaged"):
        dataset[11]
    json_lines(tmp_path)
    lines = JsonLines(tmp_path / "0.jsonl")
    (tmp_path / "0.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"0.jsonl, bytes 0 to \d+: is damaged: got 2 bytes at 0"):
        lines[0]


def test_a_footer_is_read_once_for_all_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, opened = parquet(tmp_path), pq.ParquetFile
    footers: list[bool] = []

    def counted(*args: Any, **keys: Any) -> pq.ParquetFile:
        footers.append(keys.get("metadata") is None)
        return opened(*args, **keys)

    monkeypatch.setattr(pq, "ParquetFile", counted)
    assert [item["id"] for item in dataset] == list(range(ROWS))
    assert len(footers) == 7 + 3, "each row group, and the footer of each file"
    assert sum(footers) == 3
    assert len(pickle.dumps(dataset)) < 10_000, "footers are not sent along"


def test_a_missing_value_is_an_error_that_names_its_file_row_and_column(tmp_path: Path) -> None:
    """In the second file of two, of several row groups: rows are counted from the file's first."""
    rows = 7
    for name in ("a", "b"):
        numbers: list[int | None] = list(range(rows))
        lists: list[Any] = [[1.0, 2.0] for _ in range(rows)]
        nested: list[Any] = [[[1.0], [2.0]] for _ in range(rows)]
        if name == "b":
            numbers[5], lists[4], nested[3] = None, [None, 2.0], [[1.0], [None]]
        table = pa.table({"number": numbers, "list": lists, "nested": nested})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    for column, row, says in (
        ("number", 5, "column 'number' has no value"),
        ("list", 4, "column 'list': a list lacks a value in its middle"),
        ("nested", 3, "column 'nested': a list lacks a value in its middle"),
    ):
        dataset = Parquet(tmp_path, columns=[column])
        assert len([dataset[at] for at in range(2 * rows) if at != rows + row]) == 2 * rows - 1
        told = re.escape(f"row {row} of {tmp_path / 'b.parquet'}, counted from 0: {says}")
        for indices in ([rows + row], [row - rows], [rows + row, 0], list(range(2 * rows))):
            with pytest.raises(DataError, match=told):
                dataset.__getitems__(indices)
        with pytest.raises(DataError, match=told):
            dataset.read_columns_beside([0, rows + row], [], [column])


def test_columns_of_one_name_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,x,y\n1,2,0\n3,4,1\n")
    with pytest.raises(DataError, match=r"a\.csv: has several columns of the name x; give each a name of its own"):
        Csv(tmp_path / "a.csv")
    table = pa.table([[1, 2], [3, 4]], names=["x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: has several columns of the name x"):
        Parquet(tmp_path)


def test_a_missing_value_of_a_text_file_is_told_by_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1.0,0\n2.0,1\n,1\n")
    with pytest.raises(DataError, match=r"row 2 of \S+a\.csv, counted from 0: column 'x' has no value"):
        Csv(tmp_path / "a.csv").__getitems__([0, 2])


def test_nested_values_are_tensors_lists_and_dicts(tmp_path: Path) -> None:
    table = pa.table(
        {
            "matrix": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
            "uneven": [[[1], [2, 3]], [[], [4]]],
            "words": [["a", "b"], []],
            "struct": [{"x": 1.5, "name": "p"}, {"x": 2.5, "name": "q"}],
            "kind": pa.array(["one", "two"]).dictionary_encode(),
            "code": pa.array([7, 8], pa.int16()).dictionary_encode(),
        }
    )
    image = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    pq.write_table(table.append_column("image", image), tmp_path / "a.parquet")
    item = Parquet(tmp_path)[1]
    assert torch.equal(item["matrix"], torch.tensor([[5, 6], [7, 8]]))
    assert [row.tolist() for row in item["uneven"]] == [[], [4]]
    assert (item["words"], item["struct"], item["kind"]) == ([], {"x": 2.5, "name": "q"}, "two")
    assert (item["code"], item["code"].dtype) == (8, np.int16)
    assert torch.equal(item["image"], torch.arange(6, 12, dtype=torch.uint8).reshape(2, 3))


def test_times_dictionaries_and_decimals_are_pythons_own(tmp_path: Path) -> None:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    words = ["b", "a", "b"]
    schema = {"when": pa.timestamp("us", "UTC"), "day": pa.date32(), "price": pa.decimal128(6, 2)}
    table = pa.table(
        {"when": [when] * 3, "day": [when.date()] * 3, "price": [Decimal("1.25")] * 3}, pa.schema(schema)
    )
    table = table.append_column("word", pa.array(words).dictionary_encode())
    pq.write_table(table, tmp_path / "a.parquet")
    for number, item in enumerate(Parquet(tmp_path)):
        assert (item["when"], item["day"], item["price"]) == (when, when.date(), Decimal("1.25"))
        assert item["word"] == words[number]
    with pytest.raises(TypeError, match="datetime"):
        default_collate([item["when"] for item in Parquet(tmp_path)])


def test_an_image_as_a_model_takes_it() -> None:
    assert torch.equal(float_image(jpeg(51)), torch.full((3, 4, 6), 0.2))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_an_image_of_16_bits_keeps_the_upper_ones(tmp_path: Path, form: str) -> None:
    """As Pillow itself narrows colours of 16 bits. It makes all greys above 255 white."""
    grey = np.array([[0, 255, 256, 65535], [1000, 30000, 40000, 12]], np.uint16)
    Image.fromarray(grey).save(tmp_path / f"grey.{form.lower()}", form)
    found = Images(tmp_path)[0]["image"]
    assert found.dtype == torch.uint8
    assert np.array_equal(found, np.stack([grey // 256] * 3))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_an_image_that_lies_on_a_side_is_turned_upright(tmp_path: Path, form: str) -> None:
    """As torchvision's own decoder does with EXIF, and Pillow with a TIFF."""
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8], pixels[:4, 8:] = 200, 100
    turned = {
        1: pixels,
        3: pixels[::-1, ::-1],
        6: np.rot90(pixels, -1),
        8: np.rot90(pixels),
        5: pixels.swapaxes(0, 1),
    }
    for orientation, wanted in turned.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(path := tmp_path / f"{orientation}.{form.lower()}", form, exif=exif)
        for found in (
            decode_image(path.read_bytes()),
            decode_image({"bytes": path.read_bytes()}),
            Images(path)[0]["image"],
        ):
            assert found.shape == (3, *wanted.shape[:2])
            assert np.abs(found.permute(1, 2, 0).numpy() - wanted.astype(int)).max() < 30  # JPEG is not exact
        high = decode_image(path.read_bytes(), size=(4, 2))
        assert high.shape == (3, 4, 2)


def test_an_image_whose_exif_is_damaged_is_read_as_it_lies() -> None:
    Image.new("RGB", (6, 4)).save(png := io.BytesIO(), "png", exif=b"Exif\0\0no such thing")
    assert decode_image(png.getvalue()).shape == (3, 4, 6)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_an_image_of_32_bits_is_refused_by_name(tmp_path: Path, kind: Any) -> None:
    Image.fromarray(np.full((2, 3), 70_000, kind)).save(tmp_path / "deep.tiff")
    with pytest.raises(DataError, match=r"deep.tiff: the pixels of the image are 32-bit"):
        Images(tmp_path)[0]
    shard(tmp_path / "0.tar", [("a", {"tiff": (tmp_path / "deep.tiff").read_bytes()})])
    with pytest.raises(DataError, match=r"0.tar, sample a: 'tiff' cannot be decoded: the pixels"):
        WebDataset(tmp_path)[0]


def test_a_file_whose_name_is_not_utf_8_is_named(tmp_path: Path) -> None:
    Path(os.fsdecode(bytes(tmp_path) + b"/a\xff.png")).write_bytes(jpeg(1))
    with pytest.raises(DataError, match=r"a\\udcff.png': the name is no UTF-8; rename the file"):
        Images(tmp_path)


def double(value: Any) -> Any:
    return value * 2


def looks_up(value: Any) -> Any:
    return {}[value]


@given(st.lists(st.none() | st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1), st.data())
def test_lists_of_a_part_of_an_array_are_those_of_arrow(rows: list[list[int] | None], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows) - 1))
    kinds = (pa.list_(pa.int16()), pa.large_list(pa.float32()), pa.list_(pa.int64(), 3))
    for array in (pa.array(rows, kind).slice(start) for kind in kinds):
        give = row_getter("x", pa.chunked_array([array]))
        wanted = array.to_pylist()
        there = np.array([row for row, value in enumerate(wanted) if value is not None], np.int64)[::-1]
        found = give(there)
        assert [value.tolist() for value in found] == [wanted[row] for row in there]
        for value in found:
            value[0] = 100  # it is the caller's own
        assert [value.tolist() for value in give(there)] == [wanted[row] for row in there]


def test_columns_are_decoded_by_functions_or_their_names(tmp_path: Path) -> None:
    parquet(tmp_path)
    dataset = Parquet(tmp_path, columns=["id", "price"], decode={"id": double, "price": f"{__name__}:double"})
    assert dataset[5] == {"id": 10, "price": 2.5}
    with pytest.raises(JobError, match="decode: 'text' is not among the columns: id"):
        Parquet(tmp_path, columns=["id"], decode={"text": double})
    with pytest.raises(JobError, match="decode: cannot import 'nowhere:it' for 'id'"):
        Parquet(tmp_path, decode={"id": "nowhere:it"})
    with pytest.raises(DataError, match="'text' cannot be decoded: ValueError"):
        Parquet(tmp_path, decode={"text": int})[0]
    with pytest.raises(DataError, match=r"'id' cannot be decoded: KeyError: .*0"):
        Parquet(tmp_path, decode={"id": looks_up})[0]
    with pytest.raises(DataError, match="there is no 'idd' to decode; the item has id, text"):
        Parquet(tmp_path, decode={"idd": double})[0]


def test_json_lines_are_what_json_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "STRETCH_BYTES", 300)
    json_lines(tmp_path)
    wanted = [json.loads(line) for path in sorted(tmp_path.glob("*.jsonl")) for line in path.read_text().splitlines()]
    dataset = JsonLines(tmp_path)
    assert len(dataset) == len(wanted) == ROWS
    assert len(dataset.block_rows) > 5
    for item, row in zip(dataset, wanted, strict=True):
        assert {name: getattr(value, "tolist", lambda v=value: v)() for name, value in item.items()} == row
    assert {item["price"].dtype for item in dataset} == {np.dtype(np.float32)}
    assert dataset[1]["vector"].dtype == torch.float32
    again = JsonLines(tmp_path, columns=["price"], types={"price": "float64"})
    assert [type(item["price"]) for item in again] == [np.float64] * ROWS


def write_csv(folder: Path, newline: str = "\n") -> None:
    names = ["id", "text", "price", "flag"]
    for number, (start, stop) in enumerate([(0, 9), (9, ROWS)]):
        with (folder / f"{number}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator=newline)
            writer.writerow(names)
            writer.writerows(zip(*(columns(start, stop)[name] for name in names), strict=True))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_csv_is_what_pythons_reader_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newline: str) -> None:
    monkeypatch.setattr(files, "STRETCH_BYTES", 100)
    write_csv(tmp_path, newline)
    wanted = []
    for path in sorted(tmp_path.glob("*.csv")):
        with path.open(newline="") as file:
            wanted += list(csv.DictReader(file))
    dataset = Csv(tmp_path)
    assert len(dataset) == len(wanted) == ROWS
    assert len(dataset.block_rows) > 5
    for item, row in zip(dataset, wanted, strict=True):
        assert (item["id"], item["price"]) == (int(row["id"]), float(row["price"]))
        assert (item["text"], str(item["flag"])) == (row["text"], row["flag"])
    assert {(item["id"].dtype.name, item["price"].dtype.name) for item in dataset} == {("int64", "float32")}


def test_csv_without_a_line_of_names_and_with_other_delimiters(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\tx\n2\ty\n")
    dataset = Csv(tmp_path, names=["n", "t"], delimiter="\t", types={"n": "float32"})
    assert [(item["n"], item["t"]) for item in dataset] == [(1.0, "x"), (2.0, "y")]


PLAIN = st.text(alphabet='a" \\', min_size=1, max_size=5).filter(lambda text: not text.startswith('"'))
QUOTED = st.text(alphabet='a",\n\r ', max_size=6).map(lambda text: '"' + text.replace('"', '""') + '"')
BEHIND = st.tuples(QUOTED, st.text(alphabet='a "', max_size=3).filter(lambda text: not text.startswith('"'))).map(
    "".join
)
FIELDS = st.one_of(PLAIN, QUOTED, BEHIND)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=12),
    ends=st.sampled_from(["\n", "\r\n", "\r"]),
    begin=st.sampled_from(["", "\ufeff"]),
    piece=st.sampled_from([1, 7, 40]),
)
def test_csv_is_cut_where_pyarrow_ends_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], ends: str, begin: str, piece: int
) -> None:
    """With quotes within plain values, and text behind quoted ones; the oracle reads the whole file."""
    folder = tmp_path_factory.mktemp("csv")
    text = (begin + "".join(f"{a},{b}{ends}" for a, b in rows)).encode()
    (folder / "a.csv").write_bytes(text)
    kinds = pacsv.ConvertOptions(column_types={"a": pa.string(), "b": pa.string()}, strings_can_be_null=False)
    reads = pacsv.ReadOptions(use_threads=False, column_names=["a", "b"], block_size=1 << 20)
    whole = pacsv.read_csv(io.BytesIO(text), reads, pacsv.ParseOptions(newlines_in_values=True), kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "STRETCH_BYTES", piece)
        found = Csv(folder, names=["a", "b"], types={"a": "string", "b": "string"})
        assert [found[at] for at in range(len(found))] == whole.to_pylist()
    assert len(found.block_rows) == len(rows) or piece > 1


def test_a_stray_quote_does_not_join_the_rows_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('size,name\n5" tall,x\n' + '"6"" tall,\nand wide",y\n' * 50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "STRETCH_BYTES", 100)
        found = Csv(tmp_path)
        assert [item["size"] for item in found] == ['5" tall', *['6" tall,\nand wide'] * 50]
    assert len(found.block_rows) > 10


def test_a_column_has_one_type_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 1.5}\n')
    assert [item["n"].dtype.name for item in JsonLines(tmp_path)] == ["float32", "float32"]
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "b.csv").write_text("n\nx\n")
    assert [item["n"] for item in Csv(tmp_path)] == ["1", "x"]


def test_what_was_found_in_a_file_is_kept_beside_it_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_lines(tmp_path)
    first = len(JsonLines(tmp_path))
    kept = sorted(path.name for path in tmp_path.glob(".*"))
    assert kept == [".0.jsonl.lines.arrow", ".1.jsonl.lines.arrow"]
    looked: list[str] = []
    look = JsonLines._look

    def counted(self: JsonLines, file: Any) -> Any:
        looked.append(file.name)
        return look(self, file)

    monkeypatch.setattr(JsonLines, "_look", counted)
    assert len(JsonLines(tmp_path)) == first
    assert looked == []
    before = JsonLines(tmp_path).pins
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write(json.dumps({"id": 99}) + "\n")
    os.utime(tmp_path / "1.jsonl", ns=(5, 5))
    assert len(JsonLines(tmp_path)) == first + 1
    assert looked == ["1.jsonl"]
    changed = {name for name, pin in JsonLines(tmp_path).pins.items() if before[name] != pin}
    assert changed == {f"{tmp_path}/1.jsonl"}
    (tmp_path / ".0.jsonl.lines.arrow").write_text("damaged")
    assert len(JsonLines(tmp_path)) == first + 1


def test_samples_of_tar_shards_are_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_ray.data.webdataset.STRETCH_BYTES", 10_000)
    shard(tmp_path / "0.tar", [sample(number) for number in range(12)])
    shard(tmp_path / "1.tar", [sample(number) for number in range(12, ROWS)])
    dataset = WebDataset(tmp_path)
    assert len(dataset) == ROWS
    assert len(dataset.block_rows) > 5
    for number, item in enumerate(dataset):
        assert item["__key__"] == sample(number)[0]
        assert (item["cls"], item["txt"], item["meta.json"]) == (number, f"caption {number}", {"n": number})
        assert item["bin"] == bytes([number])
        assert item["npy"].tolist() == list(range(number % 5))
        assert torch.equal(item["png"], torch.full((3, 4, 6), number, dtype=torch.uint8))
    chosen = WebDataset(str(tmp_path / "*.tar"), columns=["cls"], decode={"cls": lambda contents: contents})
    assert chosen[13] == {"__key__": sample(13)[0], "cls": b"13"}


def test_a_sample_without_an_extension_and_a_damaged_shard_are_named(tmp_path: Path) -> None:
    shard(tmp_path / "0.tar", [("a", {"txt": b"x"}), ("b", {"text": b"x"})])
    with pytest.raises(DataError, match=r"0.tar, sample b: has no 'txt'; did you mean 'text'\?; it has text"):
        WebDataset(tmp_path, columns=["txt"])[1]
    (tmp_path / "1.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(DataError, match=r"1.tar: is damaged, or is no tar file"):
        WebDataset(tmp_path)
    shard(tmp_path / "1.tar", [("a", {"txt": b"x" * 5000})])
    os.truncate(tmp_path / "1.tar", 2000)
    with pytest.raises(DataError, match=r"1.tar: is damaged"):
        WebDataset(tmp_path)
    shard(tmp_path / "1.tar", [("c", {"png": b"no image"})])
    with pytest.raises(DataError, match=r"1.tar, sample c: 'png' cannot be decoded"):
        WebDataset(tmp_path)[2]


def test_folders_of_images_with_classes_and_without(tmp_path: Path) -> None:
    for number, name in enumerate(["dog/1.png", "cat/2.PNG", "cat/deep/3.jpg"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(40 * number, "JPEG" if name.endswith("jpg") else "PNG"))
    dataset = Images(tmp_path, classes=True)
    assert dataset.class_names == ["cat", "dog"]
    assert [(item["path"], item["label"]) for item in dataset] == [
        ("cat/2.PNG", 0),
        ("cat/deep/3.jpg", 0),
        ("dog/1.png", 1),
    ]
    assert torch.equal(dataset[0]["image"], torch.full((3, 4, 6), 40, dtype=torch.uint8))
    flat = Images(tmp_path, height=2, width=5)
    assert [set(item) for item in flat] == [{"image", "path"}] * 3
    assert flat[2]["image"].shape == (3, 2, 5)
    (tmp_path / "loose.png").write_bytes(jpeg(1))
    with pytest.raises(DataError, match=r"loose.png: is in no folder that names its class"):
        Images(tmp_path, classes=True)
    (tmp_path / "loose.png").write_bytes(b"no image")
    with pytest.raises(
        DataError, match=r"loose.png: is no image, or is damaged: cannot identify the format of the image$"
    ):
        list(Images(tmp_path))


def test_a_split_that_lacks_a_class_has_the_labels_of_the_others(tmp_path: Path) -> None:
    for name in ("train/ant/1.png", "train/bee/2.png", "train/cat/3.png", "test/ant/4.png", "test/cat/5.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(1, "PNG"))
    names = Images(tmp_path / "train", classes=True).class_names
    test = Images(tmp_path / "test", class_names=names)
    assert [(item["path"], item["label"]) for item in test] == [("ant/4.png", 0), ("cat/5.png", 2)]
    assert test.read_values(1, ["label"]) == {"label": 2}
    assert test.class_names == ["ant", "bee", "cat"]
    with pytest.raises(DataError, match=r"bee/2.png: 'bee' is none of class_names; those are ant, cat"):
        Images(tmp_path / "train", class_names=["ant", "cat"])
    for wrong in ("ant", [], ["ant", "ant"], [1, 2]):
        with pytest.raises(JobError, match="class_names: must be a list of folders' names, each once"):
            Images(tmp_path / "test", class_names=wrong)  # type: ignore[arg-type]


def test_images_are_read_anew_and_belong_to_their_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(jpeg(number, "PNG"))
    decoded: list[int] = []

    def counted(encoded: bytes, size: Any) -> Any:
        decoded.append(1)
        return decode_image(encoded, size)

    monkeypatch.setattr(webdataset, "image", counted)
    dataset = Images(str(tmp_path))
    for index in (0, 1, 2, 3, 0):
        dataset[index]["image"].fill_(9)
    assert len(decoded) == 5, "a folder's images are not all held in memory"
    assert dataset[0]["image"].max() == 0


def test_names_of_a_table_without_a_head_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("1,2\n3,4\n")
    for names in (["a-b", "c"], ["a", "b-c"], ["a/b", "c" * 300]):
        assert list(Csv(str(tmp_path), names=names)[1].values()) == [3, 4]
        assert list(Csv(str(tmp_path), names=names)[1]) == names


def test_the_head_of_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n3,4\n")
    dataset = Csv(str(tmp_path), cache_bytes=0)
    read: list[Any] = []
    rows = text_tables._whole_rows

    def noted(*args: Any) -> Any:
        read.append(args)
        return rows(*args)

    monkeypatch.setattr(text_tables, "_whole_rows", noted)
    assert [dataset[index]["a"] for index in (0, 1, 0)] == [1, 3, 1]
    assert not read


@pytest.mark.parametrize("kind", ["parquet", "feather", "csv"])
def test_a_file_that_lacks_a_column_of_others_is_named(tmp_path: Path, kind: str) -> None:
    """Without the error, rows of the file got what was in memory."""
    write: dict[str, Any] = {"parquet": pq.write_table, "feather": feather.write_feather, "csv": pacsv.write_csv}
    make: dict[str, Any] = {"parquet": Parquet, "feather": Arrow, "csv": Csv}
    write[kind](pa.table({"x": [1, 2], "y": [3, 4]}), str(tmp_path / f"a.{kind}"))
    write[kind](pa.table({"x": [5, 6]}), str(tmp_path / f"b.{kind}"))
    for first, last in [("a", "b"), ("b", "a")]:
        with pytest.raises(
            DataError, match=rf"b.{kind}: has no column 'y', which {tmp_path}/a.{kind} has; .*have: x$"
        ):
            make[kind]([f"{tmp_path}/{name}.{kind}" for name in (first, last)])
    dataset = make[kind](tmp_path, columns=["x"])
    assert [dict(item) for item in dataset] == [{"x": x} for x in (1, 2, 5, 6)]
    columns = dataset.read_columns(range(4), None)
    assert columns is None or columns["x"].tolist() == [1, 2, 5, 6]


def test_a_column_that_a_file_loses_later_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.table({"x": [1, 2], "y": [3, 4]}), tmp_path / f"{name}.parquet")
    dataset = Parquet(tmp_path)
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet: .*'y'"):
        dataset.read_columns([0, 2], None)
    dataset = pickle.loads(pickle.dumps(dataset))  # which has not looked at the file yet
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, row group 0: is damaged: has 1 rows where it had 2"):
        dataset[3]


def test_a_column_is_that_of_its_whole_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1], "a.b": [2]}), tmp_path / "0.parquet")
    assert Parquet(tmp_path, columns=["a"])[0] == {"a": 1}


@pytest.mark.parametrize("order", [[0, 2, 1], [2, 1, 0]])
def test_tensors_are_permuted_as_arrow_says(tmp_path: Path, order: list[int]) -> None:
    stored = np.arange(48, dtype=np.int32).reshape(2, 2, 3, 4)
    wanted = stored.transpose(0, *(1 + dim for dim in order))
    pq.write_table(pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(wanted)}), tmp_path / "0.parquet")
    dataset = Parquet(tmp_path)
    assert np.array_equal(np.stack([item["x"] for item in dataset]), wanted)
    columns = dataset.read_columns([1, 0], None)
    assert columns is not None and np.array_equal(columns["x"], wanted[::-1])


def test_a_permutation_that_writers_understand_in_two_ways_is_refused(tmp_path: Path) -> None:
    """pyarrow itself does not read back what it wrote."""
    written = np.arange(48, dtype=np.int32).reshape(2, 2, 3, 4).transpose(0, 3, 1, 2)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(written)
    pq.write_table(pa.table({"x": array, "y": [1, 2]}), tmp_path / "0.parquet")
    with pytest.raises(DataError, match=r"0.parquet, row group 0: column 'x' holds tensors with the permutation"):
        Parquet(tmp_path)[0]
    assert Parquet(tmp_path, columns=["y"])[1] == {"y": 2}


def test_lists_of_text_nested_or_not_are_lists(tmp_path: Path) -> None:
    texts = [[["a", "b"], []], [["c"]], [[], ["d"]]]
    table = {"deep": texts, "flat": [["a"], [], ["b", "c"]], "records": [[{"a": "x"}], [], [{"a": "y"}]]}
    pq.write_table(pa.table(table), tmp_path / "0.parquet")
    assert [dict(item) for item in Parquet(tmp_path)] == [
        dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)
    ]
    lacking: list[Any] = [[["a", None]], [[None]], ["a", None], [{"a": None}]]
    for number, value in enumerate(lacking):
        pq.write_table(pa.table({"text": [value[:0], value]}), tmp_path / "0.parquet")
        with pytest.raises(DataError, match=r"row 1 of .*0.parquet.*column 'text'.*a list lacks a value"):
            Parquet(tmp_path)[1]
        assert len(Parquet(tmp_path)[0]["text"]) == 0, number


class ReadBytes(io.FileIO):
    """A file that counts what is read of it."""

    total = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size) or b""
        ReadBytes.total += len(found)
        return found


@pytest.mark.parametrize("compression", ["uncompressed", "lz4"])
def test_the_rows_of_arrow_files_are_counted_without_reading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Any
) -> None:
    texts = pa.array([os.urandom(2000) for _ in range(3000)]).dictionary_encode()
    table = pa.table({"text": texts, "list": [list(range(n % 3)) for n in range(3000)]})
    path = tmp_path / "0.feather"
    feather.write_feather(table, str(path), chunksize=700, compression=compression)
    with monkeypatch.context() as patched:
        patched.setattr("dp_ray.data.files.File.open", lambda self: pa.PythonFile(ReadBytes(path), mode="r"))
        before = ReadBytes.total
        dataset = Arrow(tmp_path)
        assert 0 < ReadBytes.total - before < 50_000 < path.stat().st_size / 100
    assert dataset.block_rows.tolist() == [700, 700, 700, 700, 200]
    assert dataset[2999]["text"] == texts[2999].as_py()


def test_an_arrow_file_of_another_layout_is_read_all_the_same(tmp_path: Path) -> None:
    """As Arrow wrote them before 0.15: the heads of messages lie elsewhere."""
    batch = pa.record_batch({"x": [1, 2, 3]})
    with pa.ipc.new_file(
        str(tmp_path / "0.arrow"), batch.schema, options=pa.ipc.IpcWriteOptions(use_legacy_format=True)
    ) as file:
        file.write(batch)
        file.write(batch.slice(1))
    assert Arrow(tmp_path).block_rows.tolist() == [3, 2]

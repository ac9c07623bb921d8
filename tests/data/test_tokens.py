"""Tokenised files as windows and documents: against lists, in every form, and what is damaged."""

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_ray.data import Arrow, JsonLines, Parquet, Tokens, cu_seqlens, document_mask, tokens
from dp_ray.errors import DataError, JobError
from tests.support.chance import examples

Documents = Sequence[Sequence[int]]
CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}  # in Megatron's indexed_dataset.py

documents = st.lists(st.lists(st.integers(0, 200), max_size=12), min_size=1, max_size=12)


def megatron(path: Path, of: Documents, dtype: str = "uint16", per_document: int = 1) -> Path:
    """Write what Megatron's builder writes; a document of several sequences is cut into equal ones."""
    sequences: list[Sequence[int]] = []
    borders = [0]
    for document in of:
        each = -(-len(document) // per_document) or 1
        sequences += [document[at : at + each] for at in range(0, len(document), each)] or [document]
        borders.append(len(sequences))
    numbers = [np.array(sequence, dtype) for sequence in sequences]
    path.write_bytes(b"".join(each.tobytes() for each in numbers))
    sizes = [len(each) for each in numbers]
    starts = [0, *accumulate(each.nbytes for each in numbers)][:-1]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sizes), len(borders))
    parts = np.array(sizes, "<i4"), np.array(starts, "<i8"), np.array(borders, "<i8")
    path.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    return path


def plain(path: Path, of: Documents) -> Path:
    np.array([token for document in of for token in document], np.uint16).tofile(path)
    return path


def npy(path: Path, of: Documents) -> Path:
    np.save(path, np.array([token for document in of for token in document], np.int32))
    return path


def arrow_file(path: Path, of: Documents) -> Path:
    table = pa.table({"input_ids": pa.array(of, pa.list_(pa.uint16()))})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def arrow_stream(path: Path, of: Documents) -> Path:
    table = pa.table({"input_ids": pa.array(of, pa.large_list(pa.int32()))})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def parquet(path: Path, of: Documents) -> Path:
    pq.write_table(pa.table({"input_ids": pa.array(of, pa.list_(pa.int64()))}), path, row_group_size=3)
    return path


FORMS: dict[str, tuple[str, Callable[[Path, Documents], Path]]] = {
    "megatron": (".bin", megatron),
    "sequences": (".bin", lambda path, of: megatron(path, of, "int32", 3)),
    "plain": (".bin", plain),
    "npy": (".npy", npy),
    "arrow file": (".arrow", arrow_file),
    "arrow stream": (".arrow", arrow_stream),
    "parquet": (".parquet", parquet),
}


def windows_of(stream: list[int], length: int) -> list[tuple[list[int], list[int]]]:
    """The definition: each token but the last is an input, and the next one its label."""
    pairs = list(pairwise(stream))
    found = []
    for at in range(0, len(pairs), length):
        some = pairs[at : at + length]
        rest = length - len(some)
        found.append(([first for first, _ in some] + [0] * rest, [after for _, after in some] + [-100] * rest))
    return found


@pytest.mark.full(but=["megatron", "npy", "arrow file", "parquet"])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(25), deadline=None)
@given(
    of=st.lists(documents, min_size=1, max_size=3), length=st.integers(1, 9), block=st.sampled_from([8, 64, 1 << 22])
)
def test_windows_and_documents_are_those_of_lists(
    form: str, of: list[Documents], length: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ending, write = FORMS[form]
    folder = tmp_path_factory.mktemp("tokens")
    paths = [write(folder / f"{number}{ending}", each) for number, each in enumerate(of)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "BLOCK_BYTES", block)
        windows, whole = Tokens(paths, length), Tokens(folder)
    stream = [token for each in of for document in each for token in document]
    expected = windows_of(stream, length)
    assert len(windows) == len(expected)
    items = [(item["input_ids"].tolist(), item["labels"].tolist()) for item in windows]
    assert items == expected
    has_borders = form not in ("plain", "npy")
    lists = (
        [list(document) for each in of for document in each]
        if has_borders
        else [list(chain.from_iterable(each)) for each in of]
    )
    assert [item["input_ids"].tolist() for item in whole] == lists
    assert whole.lengths("input_ids").tolist() == [len(document) for document in lists]
    for dataset in (windows, whole):
        assert dataset.block_rows.sum() == len(dataset) and (dataset.block_rows >= 0).all()
        needed = [dataset.blocks_at(index, index + 1) for index in range(len(dataset))]
        assert {number for some in needed for number in some} <= set(range(dataset.num_blocks))
        assert all(map(len, needed)) or dataset is whole, "an empty document alone needs no block"
    if len(windows):
        columns = windows.read_columns(range(len(windows)), ["labels", "input_ids"])
        assert columns is not None
        assert columns["labels"].tolist() == [labels for _, labels in items]
        assert columns["input_ids"].tolist() == [inputs for inputs, _ in items]
        assert all(value.dtype == torch.int64 for value in columns.values())


def test_the_files_of_datasets_are_read_as_they_lie(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [], [4], [5, 6]] * 600
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": rows, "id": range(len(rows))}).save_to_disk(tmp_path / "saved")
    assert [item["input_ids"].tolist() for item in Tokens(tmp_path / "saved")] == rows
    assert [int(item["id"]) for item in Arrow(tmp_path / "saved")] == list(range(len(rows)))


def test_a_head_of_llm_c_is_no_text(tmp_path: Path) -> None:
    for magic, version, dtype in ((20240520, 1, np.uint16), (20240801, 7, np.uint32)):
        head = np.zeros(256, np.int32)
        head[:3] = magic, version, 5
        path = tmp_path / "shard.bin"
        path.write_bytes(head.tobytes() + np.arange(5, dtype=dtype).tobytes())
        assert [item["input_ids"].tolist() for item in Tokens(path)] == [[0, 1, 2, 3, 4]]
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(DataError, match=r"shard\.bin.*tells 5 tokens, and it has [34]"):
            Tokens(path)


def test_the_type_of_bare_numbers_is_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.array([70000, 3], np.uint32).tobytes())
    assert Tokens(tmp_path, dtype="uint32")[0]["input_ids"].tolist() == [70000, 3]
    assert Tokens(tmp_path)[0]["input_ids"].tolist() == [70000 % 65536, 1, 3, 0]
    np.save(tmp_path / "rows.npy", np.array([[1, 2], [3, 4]], ">u2"))
    assert [item["input_ids"].tolist() for item in Tokens(tmp_path / "rows.npy")] == [[1, 2], [3, 4]]


def broken(change: Callable[[bytearray], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        megatron(folder / "a.bin", [[1, 2], [3, 4, 5], [6]])
        data = bytearray((folder / "a.idx").read_bytes())
        (folder / "a.idx").write_bytes(change(data) or data)

    return write


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def put(form: str, at: int, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(form, data, at, value)


HEAD, LENGTHS, POINTERS, BORDERS = 0, 34, 46, 70  # where they lie in the index of three sequences
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "odd size": (lambda folder: (folder / "a.bin").write_bytes(b"abc"), r"a\.bin: 3 bytes are no whole number of"),
    "no index": (broken(put("<B", HEAD, 0)), r"a\.idx: is damaged, or no index of Megatron"),
    "version": (broken(put("<Q", 9, 2)), r"a\.idx: version 2 with tokens of type 8 is not known"),
    "floats": (broken(put("<B", 17, 7)), r"a\.idx: version 1 with tokens of type 7 is not known"),
    "cut index": (broken(lambda data: data[:-9]), r"a\.idx: is damaged: has 93 bytes, too few for 3 sequences"),
    "a length": (broken(put("<i", LENGTHS + 4, 2)), r"a\.idx: is damaged: sequence 2, of 1 tokens, .* at token 5"),
    "negative": (broken(put("<i", LENGTHS + 4, -3)), r"a\.idx: is damaged: sequence 1, of -3 tokens"),
    "beyond": (broken(put("<i", LENGTHS + 8, 9)), r"a\.idx: is damaged: sequence 2, of 9 tokens, .*a\.bin has 6"),
    "pointer": (broken(put("<q", POINTERS + 8, 6)), r"a\.idx: is damaged: sequence 1, of 3 tokens, .* at token 3"),
    "border": (broken(put("<q", BORDERS + 8, 3)), r"a\.idx: is damaged: document 1 begins at sequence 3 and"),
    "first border": (broken(put("<q", BORDERS, 1)), r"a\.idx: is damaged: its first document begins at"),
    "last border": (broken(put("<q", BORDERS + 24, 7)), r"a\.idx: is damaged: its last document ends at sequence 7"),
    "no borders": (broken(put("<Q", 26, 0)), r"a\.idx: is damaged: it has no borders of documents"),
    "longer": (
        lambda folder: (megatron(folder / "a.bin", [[1]]), (folder / "a.bin").write_bytes(b"abcd")),
        r"a\.idx: is damaged, or of another file: it has 1 tokens, and .*a\.bin 2",
    ),
    "cut npy": (
        lambda folder: cut(npy(folder / "a.npy", [[1, 2]]), 1),
        r"a\.npy: is damaged: has 7 bytes of numbers, and its head tells 8",
    ),
    "no npy": (lambda folder: (folder / "a.npy").write_bytes(b"none"), r"a\.npy: is damaged, or no array of numpy"),
    "float npy": (lambda folder: np.save(folder / "a.npy", np.ones(3)), r"a\.npy: must hold whole numbers"),
    "cut arrow": (
        lambda folder: cut(arrow_stream(folder / "a.arrow", [[1]]), 8),
        r"a\.arrow: is damaged: there is no whole message",
    ),
    "column": (
        lambda folder: pq.write_table(pa.table({"input_id": [[1]]}), folder / "a.parquet"),
        r"a\.parquet: has no column 'input_ids'; did you mean 'input_id'",
    ),
    "text": (
        lambda folder: pq.write_table(pa.table({"input_ids": ["one"]}), folder / "a.parquet"),
        r"a\.parquet, row group 0: column 'input_ids' holds string, where lists of numbers are needed",
    ),
    "null": (
        lambda folder: pq.write_table(pa.table({"input_ids": [[1], None]}), folder / "a.parquet"),
        r"a\.parquet, row group 0: row 1 of it has no list in column 'input_ids'",
    ),
    "float lists": (
        lambda folder: pq.write_table(pa.table({"input_ids": [[1.5]]}), folder / "a.parquet"),
        r"a\.parquet, row group 0: must hold lists of whole numbers.*list<.*double",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named(damage: str, tmp_path: Path) -> None:
    write, says = DAMAGES[damage]
    write(tmp_path)
    with pytest.raises(DataError, match=says):
        Tokens(tmp_path)[0]


@pytest.mark.filterwarnings("ignore:Data type alias 'a':DeprecationWarning")  # of numpy, where a bit makes it of 'u'
@pytest.mark.full(but=["sequences"])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_what_is_damaged_anywhere_is_an_error_or_another_token(
    form: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A bit that is wrong, or an end that is missing: never another error, and never documents of other lengths."""
    ending, write = FORMS[form]
    folder, of = tmp_path_factory.mktemp("damaged"), [[1, 2, 3], [], [4, 5], [6] * 20, [7, 8]]
    write(folder / f"a{ending}", of)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(whole) * 8 - 1))
        whole[at // 8] ^= 1 << at % 8
    path.write_bytes(whole)
    found, says = [], ""
    try:
        found = [len(item["input_ids"]) for item in Tokens(folder / f"a{ending}")]
    except DataError as error:
        says = str(error)
    sizes = list(map(len, of)) if form not in ("plain", "npy") else [sum(map(len, of))]
    assert f"a{ending}" in says or "a.idx" in says or found == sizes or form == "plain"


def test_a_row_group_that_reads_as_empty_is_damaged(tmp_path: Path) -> None:
    """The bit is in the head of a page; without checksums pyarrow reads no row there, and says nothing."""
    ending, write = FORMS["parquet"]
    write(tmp_path / f"a{ending}", [[1, 2, 3], [], [4, 5], [6] * 20, [7, 8]])
    whole = bytearray((tmp_path / f"a{ending}").read_bytes())
    whole[171] ^= 1
    (tmp_path / f"a{ending}").write_bytes(whole)
    with pytest.raises(DataError, match=r"a\.parquet.*is damaged: has 0 rows where it had 2"):
        Tokens(tmp_path / f"a{ending}")


@pytest.mark.parametrize("form", ["npy", "parquet"])
def test_a_token_above_int64_is_named_with_its_place(form: str, tmp_path: Path) -> None:
    rows = np.array([[1, 2**63 - 1, 3], [4, 2**63 + 7, 6]], np.uint64)
    if form == "npy":
        np.save(tmp_path / "a.npy", rows)
    else:
        pq.write_table(
            pa.table({"input_ids": pa.array(rows.tolist(), pa.list_(pa.uint64()))}), tmp_path / "a.parquet"
        )
    says = r"a\.(npy, tokens from 0 on|parquet, row group 0): number 4 in it is 9223372036854775815"
    with pytest.raises(DataError, match=says):
        Tokens(tmp_path, length=2)[1]


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    dataset = Tokens(plain(tmp_path / "a.bin", [[1, 2, 3, 4]]))
    (tmp_path / "a.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match=r"a\.bin, tokens from 0 on: is damaged: has 2 bytes where it had 8"):
        dataset[0]


def test_a_file_of_another_ending_is_not_taken_for_numbers(tmp_path: Path) -> None:
    """A wildcard finds the index beside each file, too."""
    megatron(tmp_path / "a.bin", [[1, 2], [3]])
    (tmp_path / "a.txt").write_text("to be")
    with pytest.raises(DataError, match=r"a\.idx: is an index, without tokens: name the \.bin beside it"):
        Tokens(str(tmp_path / "a*"))
    with pytest.raises(DataError, match=r"a\.txt: Tokens reads a file by its ending, which must be one of \.bin"):
        Tokens(tmp_path / "a.txt")
    assert len(Tokens(str(tmp_path / "*.bin"))) == len(Tokens(tmp_path)) == 2


def test_arguments_are_checked(tmp_path: Path) -> None:
    path = megatron(tmp_path / "a.bin", [[1, 2], [3]])
    with pytest.raises(JobError, match="length: must be a number of tokens from 1 on, or null for documents; got 0"):
        Tokens(path, 0)
    with pytest.raises(JobError, match="dtype: must be one of uint8"):
        Tokens(path, dtype="float32")
    with pytest.raises(DataError, match=r"a\.idx: its tokens are uint16, and dtype is uint32"):
        Tokens(path, dtype="uint32")
    with pytest.raises(DataError, match="windows of 2 tokens need no packing"):
        Tokens(path, 2).lengths("input_ids")
    with pytest.raises(IndexError):
        Tokens(path)[2]
    assert Tokens(path)[-1]["input_ids"].tolist() == [3]
    assert Tokens(path).where(1) == f"document 1 of {path}, counted from 0"
    assert Tokens(path, 2).where(1) == f"document 1 of {path}, counted from 0"


def test_lengths_are_kept_beside_the_file_until_it_changes(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [[1, 2], [], [3]] * 3)
    assert Parquet(path).lengths("input_ids").tolist() == [2, 0, 1] * 3
    (kept,) = (each for each in tmp_path.iterdir() if each != path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parquet, "_table", None)  # no row is read
        assert Parquet(path).lengths("input_ids").tolist() == [2, 0, 1] * 3
    kept.write_bytes(kept.read_bytes()[:-20])
    assert Parquet(path).lengths("input_ids").tolist() == [2, 0, 1] * 3
    parquet(path, [[7]])
    assert Parquet(path).lengths("input_ids").tolist() == [1]


def test_lengths_of_other_forms(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2], "name": "x"}\n{"input_ids": [], "name": "y"}\n')
    rows = JsonLines(tmp_path / "a.jsonl")
    assert rows.lengths("input_ids").tolist() == [2, 0]
    with pytest.raises(DataError, match=r"no column 'inputids' is read.*did you mean 'input_ids'"):
        rows.lengths("inputids")
    decoded = JsonLines(tmp_path / "a.jsonl", decode={"name": list})
    assert decoded.lengths("name").tolist() == [1, 1], "of what the decoder gives"


def test_masks_tell_documents_apart() -> None:
    ids = torch.tensor([[5, 5, 7, 7], [7, 9, -1, -1]])
    mask = document_mask(ids)
    assert mask.shape == (2, 1, 4, 4)
    for row, of in enumerate(ids.tolist()):
        for query in range(4):
            for key in range(4):
                assert bool(mask[row, 0, query, key]) == (of[query] == of[key] and key <= query)
    assert cu_seqlens(ids).tolist() == [0, 2, 4, 5, 6, 8], "a document does not go on in the next row"
    assert cu_seqlens(ids).dtype == torch.int32


@pytest.mark.parametrize("batches", [[], [[]]])
@pytest.mark.parametrize("form", ["file", "stream", "parquet"])
def test_a_file_without_a_row_adds_no_token(form: str, batches: list[Any], tmp_path: Path) -> None:
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    empty, full = tmp_path / f"0.{'parquet' if form == 'parquet' else 'arrow'}", tmp_path / "1.arrow"
    opened = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream, "parquet": pq.ParquetWriter}[form]
    with opened(str(empty), schema) as writer:
        for batch in batches:
            writer.write_batch(pa.record_batch([pa.array(batch, schema.field(0).type)], schema=schema))
    arrow_file(full, [[1, 2], [3, 4, 5]])
    assert [len(Tokens(empty, length=length)) for length in (2, None)] == [0, 0]
    for paths in ([empty, full], [full, empty]):
        assert [item["input_ids"].tolist() for item in Tokens(paths)] == [[1, 2], [3, 4, 5]]
        assert [item["labels"].tolist() for item in Tokens(paths, length=2)] == [[2, 3], [4, 5]]
        lengths = Tokens(paths).lengths("input_ids")
        assert (lengths.tolist(), lengths.dtype.kind) == ([2, 3], "u"), "what pack takes"
    table = (Parquet if form == "parquet" else Arrow)(empty)
    assert (len(table), table.lengths("input_ids").tolist()) == (0, [])

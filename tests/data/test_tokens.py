"""Tokenised files as windows and documents: against lists, in every form, and what is damaged."""

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
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
    pairs = list(zip(stream[:-1], stream[1:], strict=True))
    found = []
    for at in range(0, len(pairs), length):
        some = pairs[at : at + length]
        rest = length - len(some)
        found.append(([first for first, _ in some] + [0] * rest, [after for _, after in some] + [-100] * rest))
    return found


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
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
        else [sum(map(list, each), []) for each in of]
    )
    assert [item["input_ids"].tolist() for item in whole] == lists
    assert whole.lengths("input_ids").tolist() == [len(document) for document in lists]
    for dataset in (windows, whole):
        assert dataset.block_rows.sum() == len(dataset) and (dataset.block_rows >= 0).all()
    if len(windows):
        columns = windows.read_columns(range(len(windows)), ["labels", "input_ids"])
        assert columns is not None
        assert columns["labels"].tolist() == [labels for _, labels in items]
        assert columns["input_ids"].tolist() == [inputs for inputs, _ in items]
        assert all(value.dtype == torch.int64 for value in columns.values())

"""Tensors in safetensors files: read and written by the real library too, and refused when a byte is wrong."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dp_ray.errors import ModelError, StorageError
from dp_ray.storage import Storage
from dp_ray.tensors.files import DTYPES, TensorFile, read_tensors, sha256_of, write_tensors
from dp_ray.tensors.flat import as_bytes

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
LIBRARY_KNOWS = [dtype for dtype in DTYPES.values() if dtype not in (torch.complex64,)]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(shape) * 100).to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(min_size=1), st.tuples(SHAPES, st.sampled_from(LIBRARY_KNOWS)), max_size=5), st.text())
def test_what_is_written_is_read_here_and_by_the_library(
    tmp_path: Path, kinds: dict[str, tuple[tuple[int, ...], torch.dtype]], text: str
) -> None:
    kinds.pop("__metadata__", None)
    tensors = {name: numbers(*kind) for name, kind in kinds.items()}
    storage = Storage(str(tmp_path))
    write_tensors(storage, "file", tensors, text)
    ours, said = read_tensors(storage, "file")
    theirs = load_file(tmp_path / "file")
    assert said == text
    for found in (ours, theirs):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert raw(found[name]) == raw(tensor)
    expected = hashlib.sha256(b"".join(raw(tensors[name]) for name in sorted(tensors)))
    assert sha256_of(TensorFile(storage, "file").tensors()) == expected.hexdigest()


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(3, 4), "b": torch.tensor(7), "empty": torch.zeros(0, 2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "file", {"format": "pt"})
    found, text = read_tensors(Storage(str(tmp_path)), "file")
    assert text == ""
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_views_and_large_tensors_are_written_by_their_numbers(tmp_path: Path) -> None:
    base = torch.randn(3000, 3000)
    tensors = {
        "turned": base.t(),
        "cut": base[::2, 1],
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    write_tensors(Storage(str(tmp_path)), "file", tensors)
    assert all(torch.equal(value, tensors[name]) for name, value in load_file(tmp_path / "file").items())


def test_every_changed_byte_and_every_cut_is_refused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    write_tensors(storage, "file", {"a": torch.arange(5.0), "b": torch.ones(2, dtype=torch.bool)}, "said")
    whole = (tmp_path / "file").read_bytes()
    spaces = len(whole) - 22 - len(whole[8:-22].rstrip())  # the header is padded; a tab there would change nothing
    for place in range(len(whole)):
        if len(whole) - 22 - spaces <= place < len(whole) - 22:
            continue
        (tmp_path / "file").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StorageError, match="is damaged"):
            read_tensors(storage, "file")
        with pytest.raises(StorageError, match="is damaged"):
            TensorFile(storage, "file").check()
    for end in range(len(whole)):
        (tmp_path / "file").write_bytes(whole[:end])
        with pytest.raises(StorageError, match="is damaged"):
            read_tensors(storage, "file")
        with pytest.raises(StorageError, match="is damaged"):
            TensorFile(storage, "file")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]},
        {"dtype": "F32", "shape": [3], "data_offsets": [-12, 0]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-1, -3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3.0], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [1 << 70], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 0]},
        {"dtype": "F99", "shape": [3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3]},
        [],
    ],
)
def test_a_foreign_file_without_a_checksum_whose_table_is_wrong_is_refused(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    for read in (TensorFile, read_tensors):
        with pytest.raises(StorageError, match="is damaged, or no safetensors file"):
            read(Storage(str(tmp_path)), "file")


def test_a_dtype_that_the_format_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a is of torch.complex128"):
        write_tensors(Storage(str(tmp_path)), "file", {"a": torch.zeros(2, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def test_a_column_of_one_row_has_its_bytes() -> None:
    """A dimension of length 1 may have any stride, and such a tensor counts as contiguous."""
    for tensor in (torch.arange(5.0)[None][:, 2], torch.arange(15.0).view(1, 5, 3)[:, 1:2, 2]):
        assert as_bytes(tensor).numpy().tobytes() == tensor.numpy().tobytes()

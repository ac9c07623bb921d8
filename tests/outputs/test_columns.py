"""Outputs to Arrow columns and back, through a real Parquet file, bit by bit."""

import dataclasses
import io
import itertools
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_ray.errors import Error, ModelError, StorageError
from dp_ray.outputs.columns import Column, Layout, from_arrow, layout_key, raw_bytes, rebuild, rows_of, to_arrow
from tests.support.chance import examples
from tests.support.trees import Data, Pair

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]
SHAPES = [(), (1,), (3,), (2, 3), (0,), (2, 0)]
SPECIAL = [math.nan, -0.0, 0.0, math.inf, -math.inf, 1.5, -2.0, 1e-40, 240.0, 2.0**-9]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor with every kind of number that the dtype has."""
    count = math.prod(shape)
    if dtype.is_floating_point or dtype.is_complex:
        special = torch.tensor(list(itertools.islice(itertools.cycle(SPECIAL), count)), dtype=torch.float64)
        if dtype.is_complex:
            special = torch.complex(special, special.flip(0))
        return special.reshape(shape).to(dtype)
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 1).reshape(shape)
    info = torch.iinfo(dtype)
    ends = [info.min, info.max, 0, 1, info.max // 3]
    numbers = np.array(list(itertools.islice(itertools.cycle(ends), count)), str(dtype).removeprefix("torch."))
    return torch.from_numpy(numbers).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    """All that makes two tensors the same, for `==`."""
    plain = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
    return tensor.dtype, tuple(tensor.shape), plain.reshape(-1).view(torch.uint8).tolist() if plain.numel() else []


def tables(outputs: Any, rows: int, batch_dim: int = 0, cuts: int = 1) -> tuple[Layout, pa.Table]:
    """The outputs as a table that was a Parquet file, each column made of `cuts` pieces."""
    layout, leaves = rows_of(outputs, rows, batch_dim)
    columns = [to_arrow(column, leaf.tensor_split(cuts)) for column, leaf in zip(layout.columns, leaves, strict=True)]
    schema = pa.schema(list(layout.schema)[1:], metadata=layout.metadata)
    return layout, reread(pa.table(columns, schema=schema))


def reread(table: pa.Table) -> pa.Table:
    file = io.BytesIO()
    pq.write_table(table, file)
    return pq.read_table(io.BytesIO(file.getvalue()))


def round_trip(outputs: Any, rows: int, batch_dim: int = 0, cuts: int = 1) -> Any:
    layout, table = tables(outputs, rows, batch_dim, cuts)
    read = Layout.from_metadata(table.schema.metadata)
    assert read == layout
    return rebuild(read, [from_arrow(column, table.column(column.name).combine_chunks()) for column in read.columns])


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(got, torch.Tensor):
        assert bits(got) == bits(wanted)
    elif isinstance(got, np.ndarray):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes()
    elif isinstance(got, dict):
        assert_same(list(got.items()), list(wanted.items()))
    elif isinstance(got, tuple | list):
        assert len(got) == len(wanted)
        for left, right in zip(got, wanted, strict=True):
            assert_same(left, right)
    elif dataclasses.is_dataclass(got):
        assert_same(vars(got), vars(wanted))
    else:
        assert got == wanted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_comes_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, 20, *shape)
    assert_same(round_trip(tensor, 20), tensor)
    assert_same(round_trip(tensor, 20, cuts=3), tensor)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_every_number_of_a_small_float_comes_back(dtype: torch.dtype) -> None:
    """All but the payloads of float8's NaNs: e5m2 has six of them."""
    same_size = torch.int8 if dtype.itemsize == 1 else torch.int16
    tensor = torch.arange(2 ** (8 * dtype.itemsize)).to(same_size).view(dtype)
    back = round_trip(tensor, len(tensor))
    exact = ~tensor.isnan() if dtype == torch.float8_e5m2 else torch.ones(len(tensor), dtype=torch.bool)
    assert torch.equal(back.view(same_size)[exact], tensor.view(same_size)[exact])
    assert back[~exact].isnan().all()


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 9),
    shape=st.lists(st.integers(0, 4), max_size=3),
    cuts=st.integers(1, 4),
    batch_dim=st.integers(0, 2),
)
def test_any_tensor_comes_back(dtype: torch.dtype, rows: int, shape: list[int], cuts: int, batch_dim: int) -> None:
    batch_dim = min(batch_dim, len(shape))
    tensor = values(dtype, rows, *shape).movedim(0, batch_dim)
    assert_same(round_trip(tensor, rows, batch_dim, cuts), tensor)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "int64", "uint16", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_a_numpy_array_comes_back_as_one(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(4 * math.prod(shape)).reshape(4, *shape).astype(dtype)
    assert_same(round_trip(array, 4), array)


def test_a_read_only_array_comes_back() -> None:
    array = np.broadcast_to(np.arange(3.0), (4, 3))
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    assert_same(round_trip((array, frozen), 4), (array.copy(), frozen.copy()))


X, Y = values(torch.float32, 4, 3), values(torch.int64, 4)


@pytest.mark.parametrize(
    "outputs",
    [
        {"x": X, "y": {"z": (Y, [X, X])}},
        (X, Y),
        [X, None, "constant", 3, 1.5, True],
        Pair(X, Pair(Y, None)),
        Data(X, {"deep": Y}),
        OrderedDict(b=X, a=Y),
        {1: X, "1": Y, "": X},
        {"x": X, "array": Y.numpy()},
    ],
)
def test_any_nesting_comes_back(outputs: Any) -> None:
    assert_same(round_trip(outputs, 4), outputs)


@pytest.mark.parametrize("batch_dim", [1, 2])
def test_rows_may_stand_in_another_dimension(batch_dim: int) -> None:
    outputs = {"states": values(torch.float32, *[5, 4, 4][: batch_dim + 1], 2), "labels": values(torch.int64, 4)}
    layout, leaves = rows_of(outputs, 4, batch_dim)
    assert [len(leaf) for leaf in leaves] == [4, 4]
    assert bits(leaves[0][3]) == bits(outputs["states"].select(batch_dim, 3))
    assert layout.columns[0].shape == tuple(outputs["states"].select(batch_dim, 0).shape)
    assert_same(round_trip(outputs, 4, batch_dim), outputs)


def test_a_scalar_is_the_output_of_one_row() -> None:
    assert_same(round_trip(torch.tensor(1.5), 1), torch.tensor([1.5]))


def test_conjugated_and_negated_views_come_back() -> None:
    tensor = torch.complex(torch.arange(4.0), torch.ones(4))
    assert_same(round_trip((tensor.conj(), tensor.conj().imag), 4), (tensor.conj().resolve_conj(), -torch.ones(4)))


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (X, ["output"]),
        ((X, Y), ["0", "1"]),
        ({"sample_index": X, "position": Y}, ["sample_index_", "position_"]),
        ({"a.b": X, "a": {"b": Y}}, ["a.b", "a.b_"]),
        ({"a.b": X, "a.b_": Y, "a": {"b": X}}, ["a.b", "a.b_", "a.b__"]),
        ({"": X, "output": Y}, ["output", "output_"]),
    ],
)
def test_names_that_collide_are_told_apart(outputs: Any, names: list[str]) -> None:
    layout, table = tables(outputs, 4)
    assert [column.name for column in layout.columns] == table.column_names == names
    assert_same(round_trip(outputs, 4), outputs)


def test_the_columns_are_what_other_readers_expect() -> None:
    outputs = {"one": Y, "many": values(torch.bfloat16, 4, 3), "pair": values(torch.complex64, 4)}
    _, table = tables(outputs, 4)
    frame = table.to_pandas()
    assert frame["one"].tolist() == Y.tolist()
    np.testing.assert_array_equal(np.stack(frame["many"]), outputs["many"].float().numpy())
    np.testing.assert_array_equal(np.stack(frame["pair"]), torch.view_as_real(outputs["pair"]).numpy())
    assert isinstance(frame, pd.DataFrame)


RAGGED = [(2, 3), (), (0,), (1,), (4, 0, 2), (5,), (5,)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_shapes_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    column = Column("x", str(dtype).removeprefix("torch."), None)
    pieces = [values(dtype, 2, *shape) for shape in RAGGED]
    table = reread(pa.table([to_arrow(column, pieces)], schema=pa.schema([("x", column.arrow_type)])))
    back = from_arrow(column, table.column("x").combine_chunks())
    assert isinstance(back, list)
    assert [bits(row) for row in back] == [bits(row) for piece in pieces for row in piece]
    assert table.to_pandas()["x"].map(lambda row: tuple(row["shape"])).tolist()[::2] == RAGGED


def test_no_rows_of_any_shape_come_back() -> None:
    column = Column("x", "float32", None)
    assert from_arrow(column, to_arrow(column, [])) == []


def test_ragged_rows_come_back_in_a_list_in_their_nesting() -> None:
    first, _ = rows_of({"x": torch.ones(2, 3), "n": np.ones((2, 3))}, 2, 0)
    other, _ = rows_of({"x": torch.ones(1, 4), "n": np.ones((1, 4))}, 1, 0)
    joined = first.join(other)
    assert joined == other.join(first) == joined.join(first) == joined.join(joined)
    rows = [torch.ones(3), torch.ones(4)]
    back = rebuild(joined, [rows, rows])
    assert_same(back, {"x": rows, "n": [row.numpy() for row in rows]})


def test_layouts_that_are_alike_stay_fixed() -> None:
    first, _ = rows_of((X, Y), 4, 0)
    other, _ = rows_of((X[:1], Y[:1]), 1, 0)
    assert first.join(other) == first
    assert first.columns[0].shape == (3,)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"x": X.double(), "y": Y}, "'x'.*float32 on one, float64"),
        ({"x": X, "y": Y.numpy()}, "'y' is not alike"),
        ({"x": X}, "nested alike"),
        ({"x": X, "z": Y}, "nested alike"),
        ((X, Y), "nested alike"),
    ],
)
def test_layouts_that_differ_in_more_than_shapes_do_not_join(other: Any, says: str) -> None:
    first, _ = rows_of({"x": X, "y": Y}, 4, 0)
    second, _ = rows_of(other, 4, 0)
    with pytest.raises(ModelError, match=says):
        first.join(second)


@pytest.mark.parametrize(
    ("outputs", "batch_dim", "says"),
    [
        ({"x": X, "y": X[:3]}, 0, "'y' has 3 rows"),
        (torch.tensor(1.0), 0, "scalar per shard"),
        ({"x": X.T}, 0, "'x' has 3 rows"),
        (X, 1, "has 3 rows"),
        (None, 0, "no tensor to merge, but None"),
        ({}, 0, "no tensor to merge"),
        ({"names": np.array([["a"], ["b"], ["c"], ["d"]])}, 0, "'names' is an array of <U1"),
        ({"when": np.zeros(4, "datetime64[s]")}, 0, "'when' is an array of datetime64"),
    ],
)
def test_outputs_that_cannot_be_merged_are_errors(outputs: Any, batch_dim: int, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        rows_of(outputs, 4, batch_dim)


def test_a_class_that_cannot_be_made_again_is_an_error() -> None:
    locked: Any = type("Locked", (dict,), {"__init__": lambda self: None})
    outputs = locked()
    outputs["x"] = X
    with pytest.raises(Error, match="a Locked cannot be made again from what it holds"):
        rows_of(outputs, 4, 0)


def test_rows_are_the_outputs_as_they_were() -> None:
    tensor, array = torch.ones(4, 3), np.ones(4)
    _, rows = rows_of((tensor, array), 4, 0)
    tensor.zero_()
    array[:] = 0
    assert rows[0].eq(1).all() and rows[1].eq(1).all()


def test_rows_of_a_view_do_not_hold_what_it_is_a_view_of() -> None:
    whole = torch.ones(4, 1000, 3, requires_grad=True)
    _, rows = rows_of((whole[:, -1], whole[:, :1].expand(4, 2, 3)), 4, 0)
    assert [leaf.untyped_storage().nbytes() for leaf in rows] == [4 * 3 * 4, 4 * 2 * 3 * 4]
    assert not any(leaf.requires_grad for leaf in rows)


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if "bfloat" not in str(dtype) and "8_e" not in str(dtype)]
)
def test_raw_bytes_are_those_of_numpy(dtype: torch.dtype) -> None:
    tensor = values(dtype, 4, 6)
    for view in (tensor, tensor.T, tensor[:, 1:3], tensor[:0], tensor[0, 0]):
        assert bytes(raw_bytes(view)) == view.numpy().tobytes()


def test_raw_bytes_of_floats_that_numpy_lacks() -> None:
    assert bytes(raw_bytes(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))) == b"\x80\x3f\x00\xc0"
    assert bytes(raw_bytes(torch.tensor([1.0, -2.0], dtype=torch.float8_e5m2))) == b"\x3c\xc0"


@pytest.mark.parametrize("metadata", [None, {}, {b"pandas": b"{}"}])
def test_a_file_of_something_else_is_an_error(metadata: dict[bytes, bytes] | None) -> None:
    with pytest.raises(StorageError, match="does not hold outputs"):
        Layout.from_metadata(metadata)


@pytest.mark.parametrize("dtype", ["float7", "nn"])
def test_an_unknown_dtype_is_an_error(dtype: str) -> None:
    with pytest.raises(StorageError, match=f"'x' is of the unknown dtype '{dtype}'"):
        _ = Column("x", dtype, ()).torch_dtype


def test_dicts_of_other_keys_that_are_equal_have_other_forms() -> None:
    tensor = torch.ones(2, 3)
    by_number, by_bool = ({key: tensor} for key in (1, True))
    assert layout_key(by_number, [tensor], 2, {}) != layout_key(by_bool, [tensor], 2, {})

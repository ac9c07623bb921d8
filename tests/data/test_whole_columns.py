"""Batches cut from columns are what torch's collate makes of the items."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

import dp_ray
from dp_ray.data import Arrow, JsonLines, Parquet
from dp_ray.engine.loads.items import (
    ColumnSlice,
    ItemKeys,
    WholeColumns,
    passthrough_of,
    split_passthrough,
    whole_columns,
)
from dp_ray.errors import DataError
from dp_ray.job.job import Job
from tests.support.tables import ROWS, json_lines, parquet

NUMBERS = ["int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "bool"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Parquet:
    folder = tmp_path_factory.mktemp("tables")
    columns: dict[str, Any] = {kind: pa.array(np.arange(ROWS).astype(kind)) for kind in NUMBERS}
    columns |= {f"{kind}s": [[n, n + 1, n % 2] for n in range(ROWS)] for kind in NUMBERS}
    schema = [(kind, pa.from_numpy_dtype(kind)) for kind in NUMBERS]
    schema += [(f"{kind}s", pa.list_(pa.from_numpy_dtype(kind), 3 if kind == "int8" else -1)) for kind in NUMBERS]
    columns["bools"] = [[n % 2 == 0, True, False] for n in range(ROWS)]
    columns["float16s"] = [np.array(row, np.float16) for row in columns["int8s"]]
    pq.write_table(pa.table(columns, schema=pa.schema(schema)), folder / "a.parquet", row_group_size=4)
    return Parquet(folder)


@given(st.lists(st.integers(-ROWS, ROWS - 1), min_size=1))
def test_a_batch_is_what_collate_makes_of_the_items(dataset: Parquet, indices: list[int]) -> None:
    found, wanted = dataset.read_columns(indices, None), default_collate(dataset.__getitems__(indices))
    assert found is not None
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype, name
        assert torch.equal(value, wanted[name]), name


def test_a_batch_is_the_callers_own(dataset: Parquet) -> None:
    first = dataset.read_columns([0, 1], ["float32s"])
    assert first is not None
    first["float32s"].fill_(9)
    assert dataset[0]["float32s"].tolist() == [0, 1, 0]


def test_what_collate_must_see_is_read_as_items(tmp_path: Path) -> None:
    tables = parquet(tmp_path)
    assert tables.read_columns([1, 2], ["text"]) is None
    assert tables.read_columns([1, 2], ["ragged"]) is None  # lists of several lengths
    assert tables.read_columns([1, 2], ["nowhere"]) is None
    assert Parquet(tmp_path, decode={"id": str}).read_columns([1], ["id"]) is None
    table = pa.table({"a": [1, 2], "b": [1, None]})
    pq.write_table(table, tmp_path / "null.parquet")
    assert Parquet(tmp_path / "null.parquet").read_columns([0], ["a"]) is None  # its item would be an error


def test_all_tables_cut_batches(tmp_path: Path) -> None:
    json_lines(tmp_path, ("id", "vector"))
    table = pa.table({"id": range(ROWS)})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=5)
    for made in (JsonLines(tmp_path), Arrow(tmp_path)):
        found = made.read_columns([20, 3], ["id"])
        assert found is not None
        assert found["id"].tolist() == [20, 3]


def test_only_torchs_own_collate_is_left_out(dataset: Parquet) -> None:
    def job(**keys: Any) -> Job:
        return Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 3, "workers": 1, **keys}, "job")

    keys = ItemKeys("int8", "bool", as_tensors=True)
    made = whole_columns(job(), dataset, keys)
    assert made is not None
    cut = made.cut([3, 4])
    assert cut is not None
    assert [column.tolist() for column in cut.batch] == [[3, 4], [True, True]]
    assert whole_columns(job(collate="a:b"), dataset, keys) is None
    assert whole_columns(job(batch_dim=1), dataset, keys) is None
    assert whole_columns(job(), [1, 2], None) is None


KEYS = ("text", "id", "price", "ragged", "flag", "vector")


@pytest.mark.slow
@given(indices=st.lists(st.integers(0, ROWS - 1), min_size=1))
def test_what_is_carried_beside_columns_is_what_items_carry(tables: Parquet, indices: list[int]) -> None:
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 3, "outputs": {"carry": [*KEYS]}}, "job")
    keys = ItemKeys("vector", None, as_tensors=True)
    made = whole_columns(job, tables, keys)
    assert made is not None
    cut = made.cut(indices)
    assert cut is not None
    assert torch.equal(cut.batch.batch, default_collate([tables[index]["vector"] for index in indices]))
    wanted = {key: [passthrough_of(tables[index], [key])[0] for index in indices] for key in KEYS}
    found = split_passthrough(cut.batch, np.asarray(indices))[1]
    assert found == wanted
    assert [[type(value) for value in values] for values in found.values()] == [
        [type(value) for value in values] for values in wanted.values()
    ]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Parquet:
    return parquet(tmp_path_factory.mktemp("texts"))


class Items:
    """The same samples, of which only items can be read."""

    def __init__(self, tables: Parquet) -> None:
        self.tables = tables

    def __len__(self) -> int:
        return len(self.tables)

    def __getitem__(self, index: int) -> Any:
        return self.tables[index]


def test_a_prediction_that_carries_reads_no_items(
    tmp_path: Path, tables: Parquet, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"inputs": ["vector"], "batch_size": 5, "shards": 2, "workers": 0, "quiet": True}
    keys |= {"outputs": {"carry": [*KEYS]}, "order": "shuffled", "storage": str(tmp_path)}
    items = dp_ray.run(model=torch.nn.Identity(), dataset=Items(tables), name="items", **keys)
    monkeypatch.setattr(Parquet, "__getitems__", None)
    whole = dp_ray.run(model=torch.nn.Identity(), dataset=tables, name="whole", **keys)
    assert whole.outputs_sha256 == items.outputs_sha256
    assert whole.carried == items.carried and len(whole.carried["text"]) == ROWS


def test_a_column_that_is_not_there_or_cannot_be_carried_is_left_to_the_items(tables: Parquet) -> None:
    def cut(*carry: str, dataset: Any = tables) -> ColumnSlice | None:
        job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 3, "outputs": {"carry": [*carry]}}, "job")
        made = whole_columns(job, dataset, ItemKeys("vector", None, as_tensors=True))
        return made and made.cut([1, 2])

    assert cut("id") is not None
    assert cut("nowhere") is None

    class Columns:
        def read_columns(self, indices: Any, names: Any) -> Any:
            return {}

    assert cut("id", dataset=Columns()) is None


def test_errors_are_left_to_the_items() -> None:
    class Fails:
        def read_columns(self, indices: Any, names: Any) -> Any:
            raise DataError("row group 3 is damaged")

    assert WholeColumns(Fails(), None).cut([1]) is None


def test_a_column_of_tensors_keeps_its_shape(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), [3, 4])
    flat = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(60, dtype=np.float32)), 12)
    pq.write_table(pa.table({"x": pa.ExtensionArray.from_storage(kind, flat)}), tmp_path / "rows.parquet")
    dataset = Parquet(str(tmp_path))
    whole, items = dataset.read_columns([4, 0], None), default_collate(dataset.__getitems__([4, 0]))
    assert whole is not None
    assert whole["x"].shape == (2, 3, 4)
    assert torch.equal(whole["x"], items["x"])

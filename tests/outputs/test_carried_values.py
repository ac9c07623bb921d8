"""Values of the dataset's items that are written beside their outputs, on any number of workers and loaders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.engine.loads.bad_samples import BadSample
from dp_ray.errors import DataError
from dp_ray.job.job import Job
from dp_ray.outputs import parts
from dp_ray.outputs.columns import KINDS, CarriedColumn, Layout, carried_arrays, converted, rows_of
from dp_ray.outputs.files import outputs_sha256
from dp_ray.plan.split import Shard
from dp_ray.rundir.quarantine import QUARANTINE, QuarantineFiles, merge_quarantine, unmerge_quarantine
from dp_ray.storage import Storage
from tests.support.alone import predict_parts
from tests.support.group import StopsBefore
from tests.support.merging import merged

ROWS = 23
DATA = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1))


class Items:
    """Items are dicts with values of all kinds beside the model's input."""

    loader_context = "fork"

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": DATA[index],
            "id": f"row {index}",
            "number": np.int32(index * 3),
            "share": None if index % 5 == 0 else torch.tensor(index / 4),
            "is_even": index % 2 == 0,
            "box": (index, index + 1),
            "vector": DATA[index][:2],
            "tags": ["a"] * (index % 3),
            "late": None if index < 11 else "here",
            "mixed": index if index < 11 else index / 4,
            "sample_index": -index,
            "output": 7,
        }


class Many(Items):
    """Items are read many at once, and draw."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        items = [self[index] for index in indices]
        return [{**item, "x": item["x"] + torch.rand(())} for item in items]


KEYS = ["id", "number", "share", "is_even", "box", "vector", "tags", "late", "mixed", "sample_index", "output"]


def expected(index: int) -> dict[str, Any]:
    """What is carried of a sample."""
    share = None if index % 5 == 0 else index / 4
    plain = {"id": f"row {index}", "number": index * 3, "share": share, "is_even": index % 2 == 0}
    lists = {"box": [index, index + 1], "vector": DATA[index][:2].tolist(), "tags": ["a"] * (index % 3)}
    other = {"late": None if index < 11 else "here", "mixed": index if index < 11 else index / 4}
    return {**plain, **lists, **other, "sample_index": -index, "output": 7}


class Inputs(nn.Module):
    """Twice its inputs."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


def job_of(workers: int = 1, file_bytes: int = 1 << 20, **keys: Any) -> Job:
    given = {"model": Inputs(), "dataset": Items(), "inputs": ["x"], "batch_size": 7, "shards": 3, "workers": workers}
    return Job.make({**given, "outputs": {"carry": KEYS, "file_bytes": file_bytes}, **keys}, "job")


@pytest.mark.parametrize(
    ("workers", "keys"),
    [
        (1, {}),
        (3, {"order": "shuffled"}),
        (2, {"order": "shuffled", "loader": {"processes": 1}}),
        (2, {"file_bytes": 1000}),
        (1, {"dataset": Many(), "loader": {"processes": 1}}),
    ],
    ids=["one", "three", "loaders", "files", "many"],
)
def test_each_row_has_the_values_of_its_sample(tmp_path: Path, workers: int, keys: dict[str, Any]) -> None:
    job = job_of(workers, **keys)
    predict_parts(job, tmp_path)
    found = merged(job, tmp_path, ROWS)
    order = found.sample_index().tolist()
    assert found.carried() == {key: [expected(index)[key] for index in order] for key in KEYS}
    assert (len(found.names) > 1) == ("file_bytes" in keys)
    if not keys.get("dataset"):
        assert torch.equal(found.read(), DATA[order] * 2)


def test_what_is_carried_changes_no_input_and_no_hash(tmp_path: Path) -> None:
    found = []
    for name, keys in (("plain", {}), ("carried", {"carry": KEYS})):
        job = job_of(2, dataset=Many(), outputs=keys)
        predict_parts(job, tmp_path / name)
        found.append(merged(job, tmp_path / name, ROWS))
    assert torch.equal(found[0].read(), found[1].read())
    assert outputs_sha256(found[0].run) == outputs_sha256(found[1].run)
    assert found[0].carried() == {}


def test_a_resumed_run_carries_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(2, order="shuffled")
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)  # each step is a part
    predict_parts(job, tmp_path, StopsBefore(2))
    assert len(list((tmp_path / "parts").iterdir())) == 4
    predict_parts(job, tmp_path)
    found = merged(job, tmp_path, ROWS)
    order = found.sample_index().tolist()
    assert found.carried() == {key: [expected(index)[key] for index in order] for key in KEYS}


@pytest.fixture
def result(tmp_path: Path) -> dp_ray.Result:
    keys: dict[str, Any] = {"storage": str(tmp_path), "name": "run", "batch_size": 7, "workers": 0, "quiet": True}
    return dp_ray.run(model=Inputs(), dataset=Items(), inputs=["x"], outputs={"carry": KEYS}, **keys)


def test_a_result_and_other_programs_read_it(result: dp_ray.Result) -> None:
    assert result.carried == {key: [expected(index)[key] for index in range(ROWS)] for key in KEYS}
    (file,) = Path(str(result.outputs_path)).glob("*.parquet")
    frame = pd.read_parquet(file)
    assert list(frame.columns) == ["sample_index", *KEYS[:-2], "sample_index_", "output", "output_"]
    assert frame["id"].tolist() == result.carried["id"]
    assert frame["number"].dtype == np.int64
    assert frame["sample_index"].tolist() == list(range(ROWS))
    assert frame["sample_index_"].tolist() == [-index for index in range(ROWS)]
    assert torch.equal(torch.tensor(np.stack(frame["output_"].tolist())), DATA * 2)
    assert pl.read_parquet(file)["late"].to_list() == result.carried["late"]
    assert [len(batch) for batch in result.batches()] == [7, 7, 7, 2]


class Bare(Items):
    """Items of which one is another than the rest."""

    def __init__(self, at: int, **values: Any) -> None:
        self.at = at
        self.values = values

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = {"x": DATA[index], "id": index}
        return (
            item
            if index != self.at
            else {key: value for key, value in (item | self.values).items() if value is not ...}
        )


@pytest.mark.parametrize(
    ("dataset", "carry", "says"),
    [
        (
            Items(),
            ["idd"],
            "sample 0 of the dataset: there is no 'idd'; did you mean 'id'?; the item has x, id, number",
        ),
        (Bare(4, id=...), ["id"], "sample 4 of the dataset: there is no 'id'; the item has x"),
        (
            torch.utils.data.TensorDataset(DATA, DATA),
            ["id"],
            "sample 0 of the dataset: outputs.carry names keys of an item, which must be a dict; got a tuple of 2",
        ),
        (
            Bare(4, id=b"4"),
            ["id"],
            "sample 4 of the dataset: outputs.carry: 'id' is a bytes; what can be carried are numbers, text, truth",
        ),
        (
            Bare(0, id=torch.ones(2, 3)),
            ["id"],
            "sample 0 of the dataset: outputs.carry: 'id' is a Tensor of size [2, 3]",
        ),
        (
            Bare(1, id="one"),
            ["id"],
            "step 0, shard 0: outputs.carry: the values of 'id' cannot be one column: they are of several",
        ),
        (Bare(1, id=2**63), ["id"], "'id' cannot be one column: int in sample 0: Python int too large"),
        (
            Bare(22, id="last"),
            ["id"],
            "outputs.carry: the values of 'id' are int in some shards and text in others",
        ),
    ],
)
def test_what_cannot_be_carried_is_told(tmp_path: Path, dataset: Any, carry: list[str], says: str) -> None:
    keys: dict[str, Any] = {"storage": str(tmp_path), "name": "run", "batch_size": 7, "workers": 0, "quiet": True}
    inputs = {} if isinstance(dataset, torch.utils.data.TensorDataset) else {"inputs": ["x"]}
    with pytest.raises(DataError) as caught:
        dp_ray.run(model=Inputs(), dataset=dataset, **inputs, outputs={"carry": carry}, **keys, shards=2)
    assert says in str(caught.value)


def test_a_file_says_no_more_than_before_where_nothing_is_carried() -> None:
    layout, _ = rows_of({"x": DATA}, ROWS, 0)
    assert json.loads(layout.metadata[b"dp_ray"]).keys() == {"spec", "columns", "batch_dim"}
    assert Layout.from_metadata(layout.metadata) == layout and layout.carried == ()
    beside, rows = rows_of({"x": DATA}, ROWS, 0, carried_arrays({"id": ["a"] * ROWS}, np.arange(ROWS)))
    assert Layout.from_metadata(beside.metadata) == beside and len(rows) == 2


class Rotten(Items):
    """Items of which some cannot be read, and some have another shape or no finite numbers."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in (3, 4, 5):
            raise ValueError("rotten")
        return {**super().__getitem__(index), **{8: {"x": DATA[0][:2]}, 20: {"x": DATA[0] / 0}}.get(index, {})}


def test_of_samples_that_are_set_aside_nothing_is_carried(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"storage": str(tmp_path), "name": "run", "batch_size": 7, "workers": 0, "quiet": True}
    keys |= {"inputs": ["x"], "outputs": {"carry": KEYS}, "on_error": {"quarantine": 5, "finite": True}}
    result = dp_ray.run(model=Inputs(), dataset=Rotten(), shards=3, order="shuffled", **keys)
    there = result.sample_index.tolist()
    assert sorted(there) == [index for index in range(ROWS) if index not in (3, 4, 5, 8, 20)]
    assert result.carried == {key: [expected(index)[key] for index in there] for key in KEYS}
    assert torch.equal(result.outputs, DATA[there] * 2)
    (file,) = tmp_path.glob("run/quarantine.parquet")
    found = pq.read_table(file).sort_by("sample_index").to_pylist()
    for row in found:  # of those that could be read, all values; of the others none
        was_read = row["sample_index"] in (8, 20)
        assert was_read or row["type"] == "ValueError"
        wanted = expected(row["sample_index"]) if was_read else dict.fromkeys(KEYS)
        assert {key: row[f"carried.{key}"] for key in KEYS} == {key: wanted[key] for key in KEYS}


def decoded(value: int) -> torch.Tensor:
    if value % 5 == 0:
        raise OSError("not an image")
    return torch.tensor([value]).repeat(3 if value % 7 else 4).float()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_row_of_a_table_that_cannot_be_decoded_is_set_aside_with_what_it_carries(
    tmp_path: Path, processes: int
) -> None:
    """But for what is decoded itself, and what has no value."""
    rows: dict[str, Any] = {"x": range(1, 31), "id": [f"row {n}" for n in range(1, 31)], "size": range(30)}
    rows["gap"] = [None if n == 9 else n / 2 for n in range(30)]
    pq.write_table(pa.table(rows), tmp_path / "x.parquet", row_group_size=8)
    args = {"paths": str(tmp_path / "x.parquet"), "decode": {"x": f"{__name__}:decoded", "size": "builtins:int"}}
    keys: dict[str, Any] = {"storage": str(tmp_path), "name": "run", "batch_size": 7, "workers": 0, "quiet": True}
    keys |= {"loader": {"processes": processes}}
    keys |= {"inputs": ["x"], "outputs": {"carry": ["id", "size", "gap"]}, "on_error": {"quarantine": 11}}
    result = dp_ray.run(model=Inputs(), dataset={"target": "dp_ray.data:Parquet", "args": args}, shards=3, **keys)
    found = pq.read_table(tmp_path / "run" / "quarantine.parquet").to_pylist()
    assert [record["sample_index"] for record in found] == [4, 6, 9, 13, 14, 19, 20, 24, 27, 29]
    assert [record["carried.id"] for record in found] == [
        f"row {n + 1}" for n in (4, 6, 9, 13, 14, 19, 20, 24, 27, 29)
    ]
    sizes = [6, 13, 20, 27]  # misshapen ones were decoded
    assert [record["carried.size"] for record in found] == [
        n if n in sizes else None for n in (4, *[6, 9, 13, 14, 19, 20, 24, 27, 29])
    ]
    assert [record["carried.gap"] for record in found][:4] == [2.0, 3.0, None, 6.5]
    assert len(result.carried["id"]) == 20


def test_a_quarantine_is_merged_and_taken_apart_again_with_what_is_carried(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.child(QUARANTINE).create()
    files = QuarantineFiles(run, "dataset", 10, None, lambda text: None)
    rows: list[Any] = [{"id": 1, "mixed": 2}, {"id": None, "mixed": "two"}, None]
    for at, carried in enumerate(rows):
        files.keep(Shard(at, 0, at, at + 1), {at: BadSample(at, "Misshapen", "", "", carried)})
    merge_quarantine(run, ("id", "mixed"))
    found = pq.read_table(tmp_path / "quarantine.parquet")
    assert found["carried.id"].to_pylist() == [1, None, None]
    assert found["carried.mixed"].to_pylist() == ["2", "two", None]
    run.child(QUARANTINE).remove()
    unmerge_quarantine(run)
    merge_quarantine(run, ("id", "mixed"))
    assert pq.read_table(tmp_path / "quarantine.parquet").equals(found)
    merge_quarantine(run)
    assert "carried.id" not in pq.read_table(tmp_path / "quarantine.parquet").column_names


def test_columns_cut_as_a_whole_give_what_is_carried_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": DATA.tolist(), "id": [f"row {n}" for n in range(ROWS)]}), tmp_path / "x.parquet")
    keys: dict[str, Any] = {"storage": str(tmp_path), "name": "run", "batch_size": 7, "workers": 0, "quiet": True}
    source = {"target": "dp_ray.data:Parquet", "args": {"paths": str(tmp_path / "x.parquet")}}
    result = dp_ray.run(model=Inputs(), dataset=source, inputs=["x"], outputs={"carry": ["id"]}, **keys)
    assert result.carried["id"] == [f"row {n}" for n in range(ROWS)]
    assert torch.equal(result.outputs.float(), DATA * 2)


def test_the_other_tasks_carry_nothing(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"storage": str(tmp_path), "name": "run", "batch_size": 7, "workers": 0, "quiet": True}
    pairs = torch.utils.data.TensorDataset(DATA, DATA)
    given = {"task": "evaluate", "loss": "torch.nn:MSELoss", "outputs": {"carry": ["id"], "keep": ["none"]}}
    assert dp_ray.run(model=Inputs(), dataset=pairs, **given, **keys).metrics["loss"] > 0


def test_kinds_join_in_either_order() -> None:
    for kind in KINDS:
        for other in KINDS:
            assert joined(kind, other) == joined(other, kind)
    assert joined("none", "text") == "text"
    assert joined("int", "float") == "float"
    assert joined("list of none", "list of float") == "list of float"
    assert joined("bool", "int") is None and joined("text", "int") is None


def joined(kind: str, other: str) -> str | None:
    try:
        return CarriedColumn("id", "id", kind).join(CarriedColumn("id", "id", other)).kind
    except DataError:
        return None


def test_a_whole_number_that_no_float_holds_is_told_by_its_key() -> None:
    column = CarriedColumn("id", "id", "int").join(CarriedColumn("id", "id", "float"))
    assert column.array([pa.array([1, 2])]).to_pylist() == [1.0, 2.0]
    with pytest.raises(DataError, match="the values of 'id' are float in some shards: Integer value"):
        column.array([pa.array([2**53 + 1])])
    with pytest.raises(DataError, match="the values of 'id'"):
        converted(CarriedColumn("id", "id", "int"), column, pa.array([2**53 + 1]))

"""Columns that become a tensor: `columns: {x: [a, b]}`, against torch.stack of what the files' own readers give."""

import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate

from dp_ray.data import Arrow, Csv, JsonLines, Mix, Parquet
from dp_ray.errors import DataError, JobError
from tests.support.cli import status_of

ROWS = 23
TABLE = pa.table(
    {
        "id": [f"row-{row}" for row in range(ROWS)],
        "a_1": pa.array([row / 8 for row in range(ROWS)], pa.float32()),
        "a_2": pa.array([row * 3 for row in range(ROWS)], pa.int64()),
        "b": pa.array([row % 2 == 0 for row in range(ROWS)], pa.bool_()),
        "a_10": pa.array([-row for row in range(ROWS)], pa.int64()),
        "price": pa.array([row / 4 for row in range(ROWS)], pa.float32()),
    }
)


def written(kind: str, folder: Path, table: pa.Table = TABLE, name: str = "rows") -> Any:
    """Write the table in a form, in several blocks where it has them; return the class that reads it."""
    if kind == "parquet":
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=7)
    elif kind == "arrow":
        feather.write_feather(table, str(folder / f"{name}.arrow"), chunksize=7, compression="uncompressed")
    elif kind == "csv":
        table.to_pandas().to_csv(folder / f"{name}.csv", index=False)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
        (folder / f"{name}.jsonl").write_text(lines)
    return {"parquet": Parquet, "arrow": Arrow, "csv": Csv, "jsonl": JsonLines}[kind]


KINDS = pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "jsonl"])


def stacked(*names: str) -> torch.Tensor:
    return torch.stack([torch.tensor(TABLE[name].to_pylist(), dtype=torch.float32) for name in names], 1)


@KINDS
def test_columns_become_one_tensor_in_the_order_named(kind: str, tmp_path: Path) -> None:
    columns = {"x": ["a_10", "a_1", "b"], "whole": ["a_2", "a_10"], "y": "price", "id": "id"}
    data = written(kind, tmp_path)(tmp_path, columns=columns)
    indices = [22, 0, 7, 6, 7]
    items = data.__getitems__(indices)
    assert list(items[0]) == list(columns)
    batch = default_collate(items)
    assert torch.equal(batch["x"], stacked("a_10", "a_1", "b")[indices]) and batch["x"].dtype is torch.float32
    assert torch.equal(batch["whole"], stacked("a_2", "a_10").long()[indices]) and batch["whole"].dtype is torch.int64
    assert torch.equal(batch["y"], stacked("price")[indices, 0])
    assert batch["id"] == [f"row-{row}" for row in indices]
    whole = data.read_columns(indices, ["x", "whole", "y"])
    assert all(torch.equal(whole[name], batch[name]) and whole[name].dtype is batch[name].dtype for name in whole)
    items[0]["x"].zero_()  # an item is the reader's own
    assert torch.equal(data[22]["x"], stacked("a_10", "a_1", "b")[22])


@KINDS
def test_a_pattern_takes_what_fits_in_the_files_order_but_what_another_key_names(kind: str, tmp_path: Path) -> None:
    make = written(kind, tmp_path)
    assert torch.equal(make(tmp_path, columns={"x": "a_*"})[5]["x"], stacked("a_1", "a_2", "a_10")[5])
    data = make(tmp_path, columns={"x": ["b", "a_*"], "y": "a_2", "z": ["price"]})
    assert torch.equal(data[5]["x"], stacked("b", "a_1", "a_10")[5])
    assert (data[5]["y"], data[5]["z"].tolist()) == (15, [1.25])
    with pytest.raises(DataError, match=r"columns\.x: '\[a\]_2' fits no column that no other key names"):
        make(tmp_path, columns={"x": "[a]_2", "y": "a_2"})


@KINDS
def test_what_cannot_be_joined_is_told_by_key_and_column(kind: str, tmp_path: Path) -> None:
    make = written(kind, tmp_path)
    with pytest.raises(DataError, match=r"columns\.x: has no column 'a_3'; did you mean 'a_.* it has id, a_1, a_2"):
        make(tmp_path, columns={"x": ["a_1", "a_3"]})
    with pytest.raises(DataError, match=r"columns\.x: no column fits 'c_\*'; it has id, a_1"):
        make(tmp_path, columns={"x": "c_*"})
    with pytest.raises(DataError, match=r"columns\.x: column 'id' holds string, .* \{id: id\}"):
        make(tmp_path, columns={"x": ["a_1", "id"]})
    with pytest.raises(DataError, match=r"columns\.x has 'a_1' twice"):
        make(tmp_path, columns={"x": ["a_1", "b", "a_1"]})
    with pytest.raises(JobError, match=r"columns\.x: must be a column, or several: .* got \[\]"):
        make(tmp_path, columns={"x": []})
    with pytest.raises(JobError, match=r"columns: must be a list of columns, .* got 'a_1'"):
        make(tmp_path, columns="a_1")
    with pytest.raises(DataError, match=r"no column 'x' is read"):
        make(tmp_path, columns={"x": ["a_1", "b"]}).lengths("x")


@KINDS
def test_files_of_which_one_has_more_that_fits_are_told(kind: str, tmp_path: Path) -> None:
    make = written(kind, tmp_path)
    written(kind, tmp_path, TABLE.append_column("a_11", TABLE["a_1"]), name="rows2")
    if kind == "jsonl":  # there a column may be missing in rows, and so in files
        with pytest.raises(DataError, match=r"row 0 of .*: column 'a_11' has no value"):
            make(tmp_path, columns={"x": "a_*"})[0]
    else:
        with pytest.raises(DataError, match=r"rows\.\w+: has no column 'a_11', which .*rows2\.\w+ has"):
            make(tmp_path, columns={"x": "a_*"})
    assert len(make(tmp_path, columns={"x": ["a_1", "a_2"]})) == 2 * ROWS


@KINDS
def test_a_missing_value_is_told_by_its_column(kind: str, tmp_path: Path) -> None:
    values = [None if row == 9 else row / 2 for row in range(ROWS)]
    make = written(kind, tmp_path, TABLE.append_column("gap", pa.array(values, pa.float32())))
    data = make(tmp_path, columns={"x": ["a_1", "gap"]})
    assert data[8]["x"].tolist() == [1.0, 4.0]
    with pytest.raises(DataError, match=r"row 9 of .*: column 'gap' has no value"):
        data[9]
    assert data.read_columns([9], None) is None


def test_a_dtype_holds_all_files(tmp_path: Path) -> None:
    written("parquet", tmp_path)
    wide = TABLE.set_column(1, "a_1", TABLE["a_1"].cast(pa.float64()))
    written("parquet", tmp_path, wide, name="rows2")
    data = Parquet(tmp_path, columns={"x": ["a_1", "a_2"]})
    assert {data[0]["x"].dtype, data[ROWS]["x"].dtype} == {torch.float64}


def test_folders_name_columns_too_and_a_decoder_gets_the_tensor(tmp_path: Path) -> None:
    for kind in range(2):
        (tmp_path / f"kind={kind}").mkdir()
        written("csv", tmp_path / f"kind={kind}")
    data = Csv(tmp_path, columns={"x": ["kind", "a_1"]}, decode={"x": torch.Tensor.double})
    assert data[ROWS + 2]["x"].tolist() == [1.0, 0.25] and data[0]["x"].dtype is torch.float64


def test_sources_of_a_mix_whose_tensors_differ_are_told(tmp_path: Path) -> None:
    data = [written("csv", tmp_path)(tmp_path, columns={"x": names}) for names in (["a_1", "b"], ["a_2", "a_10"])]
    with pytest.raises(DataError, match=r"column 'x' is float32 \[2\] in source 'one', and int64 \[2\] in source"):
        Mix(dict(zip(("one", "two"), data, strict=True)), {"one": "1/2", "two": "1/2"})


def test_plan_shows_the_columns_and_names_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wide = pandas.DataFrame({f"pixel_{at}": [at / 2, 1.0] for at in range(12)} | {"digit": [0, 1]})
    wide.to_csv(tmp_path / "digits.csv", index=False)
    monkeypatch.chdir(tmp_path)
    args = {"paths": "digits.csv", "columns": {"x": "pixel_*", "digit": "digit"}}
    job = {"task": "predict", "model": "torch.nn:Identity", "batch_size": 2, "inputs": ["x"], "workers": 0}
    Path("job.yaml").write_text(json.dumps(job | {"dataset": {"target": "dp_ray.data:Csv", "args": args}}))
    assert status_of(monkeypatch, "plan", "job.yaml") == 0
    assert "digits.csv: 'x' is a tensor of float32 [12]: pixel_0, pixel_1, " in "".join(capfd.readouterr())
    wrong = "dataset.args.columns.x=[pixel_0, pixel_12]"
    assert status_of(monkeypatch, "plan", "job.yaml", "--set", wrong) == 1
    assert "columns.x: has no column 'pixel_12'; did you mean 'pixel_" in capfd.readouterr().err

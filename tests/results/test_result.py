"""A result read back from its run directory: numbers, outputs and shape reports."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dp_ray.engine.world import World
from dp_ray.errors import StorageError
from dp_ray.messages import Sizes
from dp_ray.plan.order import Order
from dp_ray.plan.split import FilePlan, Split, Work
from dp_ray.results.result import Result, load
from dp_ray.results.text import Table
from dp_ray.rundir.files import RESULT, SHAPES
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.telemetry.reports import ReportTables
from dp_ray.telemetry.shapes import Recorder, ShardReport
from tests.support.builders import writer_of
from tests.support.merging import begin, merge

OUTPUTS = torch.arange(20.0).reshape(10, 2)
SPLIT = Split(10, 6, 2)


def make_outputs(run: Storage) -> None:
    begin(run)
    with writer_of(run.child(PARTS), 2, FilePlan(1, 2)) as writer:
        for step, shards in Work(SPLIT):
            for shard in shards:
                writer.on_shard(shard, np.arange(shard.start, shard.stop), OUTPUTS[shard.start : shard.stop])
            writer.on_step(step)
    merge(run, SPLIT, Order(10, shuffle=False))


def make_shapes(run: Storage) -> None:
    tables = ReportTables(run, SPLIT.total_steps)
    with Recorder(World(), tables.add, 3600.0) as recorder:
        for step, shards in Work(SPLIT):
            for shard in shards:
                recorder.on_shard(shard, Sizes(f"[{shard.rows}, 5]", f"[{shard.rows}, 2]", shard.rows), 1.5)
            recorder.on_step(step)
    tables.close()


@pytest.fixture
def result(tmp_path: Path) -> Result:
    """A finished run of two steps, saved."""
    run = Storage(str(tmp_path / "run"))
    run.create()
    make_outputs(run)
    make_shapes(run)
    made = Result(
        run_dir=str(run),
        name="digits",
        task="predict",
        status="done",
        rows=10,
        steps=2,
        batch_size=6,
        shards=2,
        world_sizes=[2, 1],
        workers=[{"rank": 0, "node": "10.0.0.1", "gpu_ids": [3]}],
        restarts=1,
        metrics={"loss": 0.1},
        seconds=1.5,
        outputs_path=f"{run}/outputs",
        outputs_sha256="abc",
    )
    made.save(Storage(made.run_dir))
    return made


def test_what_was_saved_is_loaded(result: Result) -> None:
    assert load(result.run_dir) == result
    assert load(Path(result.run_dir)) == result
    assert load(f"file://{result.run_dir}") == result


def test_the_file_is_plain_json_with_the_promised_keys(result: Result) -> None:
    said = json.loads((Path(result.run_dir) / RESULT).read_text())
    promised = "status task name run_dir rows steps epochs batch_size shards world_sizes restarts metrics seconds"
    assert set(f"{promised} outputs outputs_sha256 weights_sha256".split()) <= said.keys()
    assert said["outputs"] == f"{result.run_dir}/outputs"
    assert said["weights_sha256"] is None
    assert said == result.to_json()


def test_a_run_directory_may_be_moved(result: Result, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    Path(result.run_dir).rename(moved)
    found = load(moved)
    assert found.run_dir == str(moved)
    assert found.outputs_path == f"{moved}/outputs"
    assert torch.equal(found.outputs, OUTPUTS)


def test_a_relative_run_directory_is_found(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(result.run_dir).parent)
    assert load("run") == result


def test_a_result_with_keys_of_another_version_is_loaded(result: Result) -> None:
    path = Path(result.run_dir) / RESULT
    said = json.loads(path.read_text())
    del said["workers"]
    path.write_text(json.dumps({**said, "new": 1}))
    assert load(path.parent) == dataclasses.replace(result, workers=[])


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()])
def test_a_folder_without_a_result_is_an_error_that_names_it(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "run")
    with pytest.raises(StorageError, match=r"run: holds no result\.json"):
        load(tmp_path / "run")


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "3", '"x"', "null", '{"outputs": null}', "\udcff"])
def test_a_damaged_result_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / RESULT).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StorageError, match=r"result\.json: is damaged"):
        load(tmp_path)


def test_the_outputs_are_read_whole_or_by_batches(result: Result) -> None:
    found = load(result.run_dir)
    assert torch.equal(found.outputs, OUTPUTS)
    assert found.outputs is found.outputs
    assert [batch.tolist() for batch in found.batches()] == [batch.tolist() for batch in torch.split(OUTPUTS, 6)]


@pytest.mark.parametrize("read", [lambda result: result.outputs, lambda result: next(result.batches())])
def test_a_run_without_outputs_says_so(result: Result, read: Callable[[Result], Any]) -> None:
    failed = dataclasses.replace(result, status="failed", outputs_path=None, error="ModelError: no")
    failed.save(Storage(failed.run_dir))
    found = load(result.run_dir)
    assert found.error == "ModelError: no"
    with pytest.raises(StorageError, match=r"no merged outputs \(task predict, status failed\)"):
        read(found)


def test_outputs_that_are_gone_are_an_error_that_names_them(result: Result) -> None:
    (Path(result.run_dir) / "outputs" / "00000-of-00001.parquet").unlink()
    with pytest.raises(StorageError, match=r"00000-of-00001\.parquet"):
        _ = load(result.run_dir).outputs


def expected_reports() -> list[ShardReport]:
    """By torch.chunk: six rows and four, in two shards each."""
    return [
        ShardReport(step, shard, 0, "localhost", "cpu", rows, torch.Size([rows, 5]), torch.Size([rows, 2]), 1.5)
        for step, rows in [(0, 3), (1, 2)]
        for shard in (0, 1)
    ]


def test_the_shape_reports_are_read_one_by_one_or_all(result: Result) -> None:
    found = load(result.run_dir)
    assert found.shapes == expected_reports()
    one_by_one = found.iter_shapes()
    assert next(one_by_one) == expected_reports()[0]
    assert list(one_by_one) == expected_reports()[1:]


def test_the_lines_are_those_of_the_run(result: Result) -> None:
    assert list(load(result.run_dir).shape_lines()) == [
        "\tIn Model: input size torch.Size([3, 5]) output size torch.Size([3, 2])",
        "\tIn Model: input size torch.Size([3, 5]) output size torch.Size([3, 2])",
        "Outside: input size torch.Size([6, 5]) output_size torch.Size([6, 2])",
        "\tIn Model: input size torch.Size([2, 5]) output size torch.Size([2, 2])",
        "\tIn Model: input size torch.Size([2, 5]) output size torch.Size([2, 2])",
        "Outside: input size torch.Size([4, 5]) output_size torch.Size([4, 2])",
    ]


def test_a_result_shows_itself_as_a_small_table(result: Result) -> None:
    where = Path(result.run_dir)
    assert repr(result).splitlines() == [
        "name            digits",
        "task            predict",
        "status          done",
        "rows            10",
        "steps           2",
        "metrics         loss 0.1",
        "seconds         1.5",
        f"outputs         {where / 'outputs'}",
        f"run_dir         {where}",
    ]
    shown = dataclasses.replace(result, status="failed", error="ModelError: a < b", metrics={"a": 1.0, "b": math.nan})
    cells = re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", shown._repr_html_())
    assert ("error", "ModelError: a &lt; b") in cells and ("metrics", "a 1<br>b nan") in cells


def test_tables_are_lists_that_show_themselves_and_go_to_pandas(result: Result) -> None:
    shapes = result.shapes
    assert isinstance(shapes, list) and len(shapes) == 4 and shapes[1:3] == expected_reports()[1:3]
    frame = shapes.to_pandas()
    assert list(frame.columns) == [field.name for field in dataclasses.fields(ShardReport)]
    assert frame["rows"].tolist() == [3, 3, 2, 2] and frame["input_size"][2] == torch.Size([2, 5])
    text = repr(shapes).splitlines()
    assert text[0].split()[:6] == ["step", "shard", "rank", "node", "device", "rows"]
    assert (text[3].split()[:6], text[-1]) == (["1", "0", "0", "localhost", "cpu", "2"], "4 rows")


def test_a_long_table_shows_its_ends() -> None:
    rows = [{"step": step, "loss": 1 / 3, "eval_<loss>": None if step else 0.5} for step in range(100)]
    table = Table(rows)
    assert table == rows and list(table) == rows and json.loads(json.dumps(table)) == rows
    lines = repr(table).splitlines()
    assert [line.split()[0] for line in lines] == ["step", *"01234", "...", *map(str, range(95, 100)), "100"]
    assert lines[1].split() == ["0", "0.333333", "0.5"] and lines[2].split() == ["1", "0.333333", "-"]
    html = table._repr_html_()
    assert "<th>eval_&lt;loss&gt;</th>" in html and html.count("<tr>") == 12 and "100 rows" in html
    assert table.to_pandas()["eval_<loss>"].isna().sum() == 99
    assert (repr(Table()), Table().to_pandas().empty) == ("no rows", True)
    assert "no rows" in Table()._repr_html_()


def test_without_pandas_a_table_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
        Table([{"step": 0}]).to_pandas()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_shape_reports_that_cannot_be_read_are_an_error(result: Result, damage: Callable[[Path], Any]) -> None:
    damage(Path(result.run_dir) / SHAPES)
    with pytest.raises(StorageError, match=r"shapes\.parquet"):
        _ = load(result.run_dir).shapes

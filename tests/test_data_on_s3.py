"""The datasets of dp_ray.data on an object store, also one that fails now and then; a run pins their files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import dp_ray
from dp_ray.data import Parquet, WebDataset, files
from dp_ray.errors import DataError
from tests.support.models import Rows
from tests.support.s3 import SECRET, Server
from tests.support.tables import ROWS, columns, parquet, sample, shard

pytestmark = pytest.mark.slow

KEYS: dict[str, Any] = {"batch_size": 5, "workers": 0, "shards": 3, "quiet": True, "inputs": ["vector"]}
KEYS |= {"model": {"target": "torch.nn:Linear", "args": {"in_features": 2, "out_features": 2}}}


def upload(server: Server, folder: Path, to: str) -> str:
    for path in folder.iterdir():
        server.client().upload_file(str(path), "bucket", f"{to}/{path.name}")
    return server.url(to)


class Vectors(Rows):
    """The vectors of the tables, from memory."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.data = torch.tensor(columns()["vector"])


def test_parquet_by_url_gives_the_outputs_of_a_dataset_in_memory(server: Server, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    parquet(tmp_path / "tables")
    url = upload(server, tmp_path / "tables", "tables")
    source = {"target": "dp_ray.data:Parquet", "args": {"paths": url}}
    memory = dp_ray.run(**{**KEYS, "inputs": "all"}, dataset=Vectors(), storage=str(tmp_path), name="memory")
    for processes in (0, 2):
        keys = {**KEYS, "loader": {"processes": processes}, "storage": str(tmp_path), "name": f"s3-{processes}"}
        result = dp_ray.run(**keys, dataset=source)
        assert result.outputs_sha256 == memory.outputs_sha256
        assert all(SECRET not in path.read_text() for path in Path(result.run_dir).glob("*.json"))


def test_a_glob_by_url_finds_shards_whose_index_is_kept_beside_them(server: Server, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shard(tmp_path / "shards" / "0.tar", [sample(number) for number in range(7)])
    shard(tmp_path / "shards" / "1.tar", [sample(number) for number in range(7, 9)])
    url = upload(server, tmp_path / "shards", "shards").replace("/shards?", "/shards/*.tar?")
    dataset = WebDataset(url)
    assert [item["cls"] for item in dataset] == list(range(9))
    assert dataset.loader_context == "spawn"
    assert ".0.tar.samples.json" in server.objects("shards")
    assert [item["cls"] for item in WebDataset(url)] == list(range(9))
    assert set(dataset.pins) == {"s3://bucket/shards/0.tar", "s3://bucket/shards/1.tar"}


def test_keys_of_any_name_are_found_by_url(server: Server, tmp_path: Path) -> None:
    """In a folder, by a glob and in a list, percent-encoded or not."""
    for number, name in enumerate(("a b.parquet", "ü+%.parquet", "_c.parquet")):
        pq.write_table(pa.table({"n": [number]}), tmp_path / name)
    url = upload(server, tmp_path, "odd names")
    encoded, options = url.replace(" ", "%20").split("?")
    for base in (url.split("?")[0], encoded):
        for paths, wanted in (
            (f"{base}?{options}", [0, 1]),
            (f"{base}/*?{options}", [0, 1]),
            (
                [f"{base}/{name}?{options}" for name in ("%C3%BC+%25.parquet", "ü+%.parquet", "a b.parquet")],
                [1, 1, 0],
            ),
            ([f"{base}/{name}.parquet?{options}" for name in ("a%20b", "a%20*", "_c")], [0, 0, 2]),
        ):
            dataset = Parquet(paths)
            assert [item["n"] for item in dataset] == wanted
            pins = ("a b.parquet", "ü+%.parquet", "_c.parquet")
            assert set(dataset.pins) == {f"s3://bucket/odd%20names/{pins[number]}" for number in wanted}


def test_a_store_that_fails_now_and_then_loses_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WAIT_SECONDS", 0.01)
    parquet(tmp_path)
    url = upload(server, tmp_path, "shaky/tables")
    assert [item["id"] for item in Parquet(url)] == list(range(ROWS))
    told = server.log.read_text()
    assert told.count("FAIL") > 1
    assert told.count("CUT") > 1


def test_a_file_that_is_gone_is_named(server: Server, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "gone.parquet")
    dataset = Parquet(upload(server, tmp_path, "gone"))
    server.client().delete_object(Bucket="bucket", Key="gone/gone.parquet")
    with pytest.raises(DataError, match=r"s3://bucket/gone/gone\.parquet, row group 0: "):
        dataset[0]


def test_a_resumed_run_refuses_files_that_changed(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    parquet(tmp_path / "tables")
    keys = {**KEYS, "dataset": {"target": "dp_ray.data:Parquet", "args": {"paths": str(tmp_path / "tables")}}}
    keys |= {"storage": str(tmp_path), "name": "run", "task": "train", "target": "flag", "max_steps": 3}
    keys |= {"loss": "tests.test_data_on_s3:loss", "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}}
    dp_ray.run(**keys)
    assert dp_ray.run(**{**keys, "max_steps": 4}).total_steps == 4
    changed = tmp_path / "tables" / "part-1.parquet"
    pq.write_table(pq.read_table(changed), changed, compression="zstd")
    with pytest.raises(DataError, match=r"its files changed since the run began: .*/part-1.parquet had \d+ byt"):
        dp_ray.run(**{**keys, "max_steps": 5})
    assert dp_ray.run(**{**keys, "max_steps": 5, "name": "other"}).total_steps == 5


def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.sum(1) - target.float()) ** 2

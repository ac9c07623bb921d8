"""Data on an object store: the same samples and bits as from memory, on any workers, after kills, through faults."""

import io
import itertools
import os
import re
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dp_ray
from dp_ray.data import Parquet, Tokens, WebDataset, files, tokens
from dp_ray.data.blocks import Block
from dp_ray.driver.from_run import reopened, retried
from dp_ray.driver.run import Options, execute
from dp_ray.errors import DataError
from dp_ray.storage import Storage
from tests.data.test_tokens import FORMS
from tests.support import tables
from tests.support.chance import examples
from tests.support.feeds import MEMORY, PREDICT, ROWS, InMemory, job_of, predicted, rows, trained
from tests.support.group import ProcessExit, run_group
from tests.support.models import Rows
from tests.support.names import found_at, trees, ways

pytestmark = pytest.mark.slow

if TYPE_CHECKING:  # processes import this module, and boto3 is slow to import
    from tests.support.s3 import Server

KEYS: dict[str, Any] = {"batch_size": 5, "workers": 0, "shards": 3, "quiet": True, "inputs": ["vector"]}
KEYS |= {"model": {"target": "torch.nn:Linear", "args": {"in_features": 2, "out_features": 2}}}


def upload(server: "Server", folder: Path, to: str) -> str:
    for path in folder.iterdir():
        server.client().upload_file(str(path), "bucket", f"{to}/{path.name}")
    return server.url(to)


class Vectors(Rows):
    """The vectors of the tables, from memory."""

    def __init__(self) -> None:
        super().__init__(tables.ROWS)
        self.data = torch.tensor(tables.columns()["vector"])


@pytest.mark.full
def test_parquet_by_url_gives_the_outputs_of_a_dataset_in_memory(server: "Server", tmp_path: Path) -> None:
    from tests.support.s3 import SECRET

    (tmp_path / "tables").mkdir()
    tables.parquet(tmp_path / "tables")
    url = upload(server, tmp_path / "tables", "tables")
    source = {"target": "dp_ray.data:Parquet", "args": {"paths": url}}
    memory = dp_ray.run(**{**KEYS, "inputs": "all"}, dataset=Vectors(), storage=str(tmp_path), name="memory")
    for processes in (0, 2):
        keys = {**KEYS, "loader": {"processes": processes}, "storage": str(tmp_path), "name": f"s3-{processes}"}
        result = dp_ray.run(**keys, dataset=source)
        assert result.outputs_sha256 == memory.outputs_sha256
        assert all(SECRET not in path.read_text() for path in Path(result.run_dir).glob("*.json"))


def test_a_glob_by_url_finds_shards_whose_index_is_kept_beside_them(server: "Server", tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    tables.shard(tmp_path / "shards" / "0.tar", [tables.sample(number) for number in range(7)])
    tables.shard(tmp_path / "shards" / "1.tar", [tables.sample(number) for number in range(7, 9)])
    url = upload(server, tmp_path / "shards", "shards").replace("/shards?", "/shards/*.tar?")
    dataset = WebDataset(url)
    assert [item["cls"] for item in dataset] == list(range(9))
    assert dataset.loader_context == "spawn"
    assert ".0.tar.samples.arrow" in server.objects("shards")
    assert [item["cls"] for item in WebDataset(url)] == list(range(9))
    assert set(dataset.pins) == {"s3://bucket/shards/0.tar", "s3://bucket/shards/1.tar"}


@pytest.mark.full
def test_tokens_by_url_are_those_of_the_disk_and_keep_their_lengths_beside_them(
    server: "Server", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.s3 import SECRET

    monkeypatch.setattr(tokens, "BLOCK_BYTES", 64)
    documents = [[number] * (number % 7) for number in range(40)]
    for name, (ending, write) in FORMS.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        write(folder / f"a{ending}", documents)
        url = upload(server, folder, f"tokens/{folder.name}")
        for length in (None, 9):
            here, there = Tokens(folder / f"a{ending}", length), Tokens(url, length)
            assert there.loader_context == "spawn" and there.block_rows.tolist() == here.block_rows.tolist()
            for mine, its in zip(there, here, strict=True):
                assert all(torch.equal(mine[key], its[key]) for key in its)
        assert all(SECRET not in text for text in there.pins)
    (kept,) = (name for name in server.objects("tokens/parquet") if name != "a.parquet")
    assert kept == ".a.parquet.lengths-input_ids.arrow"
    monkeypatch.setattr(Parquet, "_table", None)
    url = server.url("tokens/parquet")
    assert Parquet(url).lengths("input_ids").tolist() == [len(document) for document in documents]


def test_an_object_that_is_replaced_within_a_second_has_another_version(server: "Server", tmp_path: Path) -> None:
    """The times of objects are in whole seconds; their ETags tell the contents, also of Megatron's index."""
    write = FORMS["megatron"][1]
    write(tmp_path / "a.bin", [[1, 2], [3]])
    url = upload(server, tmp_path, "replaced")
    first = Tokens(url).pins
    write(tmp_path / "a.bin", [[1], [2, 4]])
    upload(server, tmp_path, "replaced")
    second = Tokens(url).pins
    assert first.keys() == second.keys() and len(first) == 2
    assert all(second[name] != pin and len(pin.partition(", ")[2]) == 32 for name, pin in first.items())
    upload(server, tmp_path, "replaced")
    assert Tokens(url).pins == second


def test_keys_of_any_name_are_found_by_url(server: "Server", tmp_path: Path) -> None:
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


def test_a_dataset_on_a_store_that_fails_now_and_then_loses_nothing(
    server: "Server", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WAIT_SECONDS", 0.01)
    tables.parquet(tmp_path)
    url = upload(server, tmp_path, "shaky/tables")
    assert [item["id"] for item in Parquet(url)] == list(range(tables.ROWS))
    told = server.log.read_text()
    assert told.count("FAIL") > 1
    assert told.count("CUT") > 1


def test_a_file_that_is_gone_is_named(server: "Server", tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "gone.parquet")
    dataset = Parquet(upload(server, tmp_path, "gone"))
    server.client().delete_object(Bucket="bucket", Key="gone/gone.parquet")
    with pytest.raises(DataError, match=r"s3://bucket/gone/gone\.parquet, row group 0: "):
        dataset[0]


def test_a_resumed_run_refuses_files_that_changed(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    tables.parquet(tmp_path / "tables")
    keys = {**KEYS, "dataset": {"target": "dp_ray.data:Parquet", "args": {"paths": str(tmp_path / "tables")}}}
    keys |= {"storage": str(tmp_path), "name": "run", "task": "train", "target": "flag", "max_steps": 3}
    keys |= {"loss": "tests.data.test_on_s3:loss", "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}}
    dp_ray.run(**keys)
    assert dp_ray.run(**{**keys, "max_steps": 4}).total_steps == 4
    changed = tmp_path / "tables" / "part-1.parquet"
    pq.write_table(pq.read_table(changed), changed, compression="zstd")
    with pytest.raises(DataError, match=r"its files changed since the run began: .*/part-1.parquet had \d+ byt"):
        dp_ray.run(**{**keys, "max_steps": 5})
    assert dp_ray.run(**{**keys, "max_steps": 5, "name": "other"}).total_steps == 5


def test_a_run_that_has_kept_the_times_of_objects_goes_on(server: "Server", tmp_path: Path) -> None:
    """As those of earlier versions have, which read no ETag; another size is another file."""
    (tmp_path / "tables").mkdir()
    tables.parquet(tmp_path / "tables")
    url = upload(server, tmp_path / "tables", "with times")
    keys = {**KEYS, "dataset": {"target": "dp_ray.data:Parquet", "args": {"paths": url}}}
    keys |= {"storage": str(tmp_path), "name": "run", "task": "train", "target": "flag", "max_steps": 3}
    keys |= {"loss": "tests.data.test_on_s3:loss", "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}}}
    dp_ray.run(**keys)
    kept = tmp_path / "run" / "files-of-dataset.json"
    kept.write_text(re.sub(r"bytes, \w+", "bytes, 1795818428000000000", kept.read_text()))
    assert dp_ray.run(**{**keys, "max_steps": 4}).total_steps == 4
    kept.write_text(re.sub(r"\d+ bytes", "7 bytes", kept.read_text()))
    with pytest.raises(DataError, match="its files changed since the run began"):
        dp_ray.run(**{**keys, "max_steps": 5})


def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.sum(1) - target.float()) ** 2


def parquet(folder: Path) -> None:
    """Two files of row groups of 5 rows."""
    x, y = (column.tolist() for column in rows())
    schema = pa.schema([("x", pa.list_(pa.float32())), ("y", pa.int64())])
    for number, (start, stop) in enumerate([(0, 21), (21, ROWS)]):
        table = pa.table({"x": x[start:stop], "y": y[start:stop]}, schema=schema)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=5)


def shards(folder: Path) -> None:
    """Two tar shards."""
    samples = [(f"{number:04}", members(*row)) for number, row in enumerate(zip(*rows(), strict=True))]
    tables.shard(folder / "0.tar", samples[:30])
    tables.shard(folder / "1.tar", samples[30:])


def members(x: torch.Tensor, y: torch.Tensor) -> dict[str, bytes]:
    array = io.BytesIO()
    np.save(array, x.numpy())
    return {"x.npy": array.getvalue(), "cls": str(y.item()).encode()}


def source(server: "Server", write: Callable[[Path], None], to: str, folder: Path) -> dict[str, Any]:
    """The keys of a dataset whose files are on the server, below the folder `to`."""
    folder.mkdir()
    write(folder)
    url = upload(server, folder, to)
    kind, picks = ("Parquet", ("x", "y")) if write is parquet else ("WebDataset", ("x.npy", "cls"))
    dataset = {"target": f"dp_ray.data:{kind}", "args": {"paths": url}}
    return {"dataset": dataset, "inputs": [picks[0]], "target": picks[1]}


class Wanted(NamedTuple):
    """What one worker gives over the rows in memory."""

    weights: dict[str, Any]
    outputs: str


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    folder = tmp_path_factory.mktemp("memory")
    weights = trained(folder / "train", MEMORY, workers=1)
    return Wanted(weights, predicted(folder / "predict", {**MEMORY, "inputs": "first"}, workers=1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("write", "workers_and_processes"),
    [(parquet, [(1, 2), (2, 0), (3, 0)]), (shards, [(2, 2), (1, 0), (3, 0)])],
)
def test_any_workers_and_loaders_give_the_bits_of_memory(
    server: "Server",
    tmp_path: Path,
    wanted: Wanted,
    write: Callable[[Path], None],
    workers_and_processes: list[tuple[int, int]],
) -> None:
    given = source(server, write, f"jobs-{write.__name__}", tmp_path / "files")
    for workers, processes in workers_and_processes:
        keys = {"workers": workers, "loader": {"processes": processes}}
        assert trained(tmp_path / f"train-{workers}", given, **keys) == wanted.weights
        assert predicted(tmp_path / f"predict-{workers}", given, **keys) == wanted.outputs


class Mortal(Parquet):
    """Kills its process in the middle of reading a row group, once: before the file `died` is there."""

    def __init__(self, died: str, **args: Any) -> None:
        super().__init__(**args)
        self._died = Path(died)

    def _table(self, block: Block[int]) -> pa.Table:
        if block.source == 2 and self._is_first():
            with block.file.open() as stream:
                stream.read(block.file.size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._table(block)

    def _is_first(self) -> bool:
        with suppress(FileExistsError):
            self._died.touch(exist_ok=False)
            return True
        return False


class MortalAhead(Mortal):
    """The same, of a row group that is read before it is needed."""

    def _is_first(self) -> bool:
        return threading.current_thread() is not threading.main_thread() and super()._is_first()


class InBlocks(InMemory):
    """The rows in memory, in the blocks that the files have."""

    block_rows = (5, 5, 5, 5, 1, 5, 5, 5, 5, 5)


def mortal(given: dict[str, Any], folder: Path, kind: type[Mortal] = Mortal) -> dict[str, Any]:
    args = {**given["dataset"]["args"], "died": str(folder / "died")}
    return {**given, "dataset": {"target": f"tests.data.test_on_s3:{kind.__name__}", "args": args}}


@pytest.mark.full
def test_a_worker_killed_within_a_row_group_loses_nothing(server: "Server", tmp_path: Path, wanted: Wanted) -> None:
    given = mortal(source(server, parquet, "mortal", tmp_path / "files"), tmp_path)
    checkpoint = {"every_steps": 1}
    with pytest.raises(ProcessExit, match="another worker was lost"):
        trained(tmp_path / "train", given, workers=2, checkpoint=checkpoint)
    assert trained(tmp_path / "train", given, workers=3, checkpoint=checkpoint) == wanted.weights
    (tmp_path / "died").unlink()
    run_group(job_of({**PREDICT, **given}, workers=1), tmp_path / "predict")
    assert (tmp_path / "died").exists()
    assert predicted(tmp_path / "predict", given, workers=3) == wanted.outputs


@pytest.mark.full
def test_a_worker_killed_while_it_reads_ahead_loses_nothing(server: "Server", tmp_path: Path) -> None:
    given = mortal(source(server, parquet, "ahead", tmp_path / "files"), tmp_path, MortalAhead)
    memory = {"dataset": "tests.data.test_on_s3:InBlocks"}
    keys: dict[str, Any] = {"shuffle": {"window_blocks": 3}, "checkpoint": {"every_steps": 1}}
    with pytest.raises(ProcessExit, match="another worker was lost"):
        trained(tmp_path / "train", given, workers=2, **keys)
    wanted = trained(tmp_path / "memory", memory, workers=1, **keys)
    assert trained(tmp_path / "train", given, workers=3, **keys) == wanted
    (tmp_path / "died").unlink()
    in_order = {"order": "dataset"}
    run_group(job_of({**PREDICT, **given}, workers=1, **in_order), tmp_path / "predict")
    assert (tmp_path / "died").exists()
    alone = predicted(tmp_path / "alone", {**memory, "inputs": "first"}, workers=1, **in_order)
    assert predicted(tmp_path / "predict", given, workers=3, **in_order) == alone


@pytest.mark.full
def test_a_store_that_fails_now_and_then_loses_nothing(server: "Server", tmp_path: Path, wanted: Wanted) -> None:
    given = source(server, parquet, "shaky/jobs", tmp_path / "files")
    before = len(server.log.read_text())
    assert trained(tmp_path / "shaky", given, workers=2) == wanted.weights
    told = server.log.read_text()[before:]
    assert min(told.count(what) for what in ("FAIL", "CUT", "HALF")) > 2


@pytest.mark.full
def test_a_store_that_fails_for_good_is_told(
    server: "Server", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ATTEMPTS", 1)  # each takes seconds: the client of the store tries again, too
    dataset = Parquet(source(server, parquet, "broken", tmp_path / "files")["dataset"]["args"]["paths"])
    with breaking(server), pytest.raises(DataError) as caught:
        dataset[0]
    assert "s3://bucket/broken/0.parquet, row group 0: cannot be read, after 1 attempts: AWS Error" in str(
        caught.value
    )
    assert "GetObject" in str(caught.value)
    assert dataset[0]["y"] == rows()[1][0]


@contextmanager
def breaking(server: "Server") -> Iterator[None]:
    """All that is read below the folder `broken` gets an error, while the block lasts."""
    broken = server.log.with_suffix(".broken")
    broken.touch()
    try:
        yield
    finally:
        broken.unlink()


ROTTEN = {4, 30}


def good(number: int) -> int:
    """A decoder that raises for some numbers."""
    if number in ROTTEN:
        raise ValueError(f"{number} is rotten")
    return number


@pytest.mark.full
def test_bad_records_of_data_and_of_runs_on_a_store(server: "Server") -> None:
    """They are set aside with what they carry, and what is mended takes its place."""
    numbers = range(ROWS)
    table = pa.table({"x": rows()[0].tolist(), "number": numbers, "id": [f"row {number}" for number in numbers]})
    with Storage(server.url("bad-data")).writing("a.parquet") as stream:
        pq.write_table(table, stream, row_group_size=5)
    args = {"paths": server.url("bad-data"), "decode": {"number": f"{__name__}:good"}}
    keys: dict[str, Any] = {"dataset": {"target": "dp_ray.data:Parquet", "args": args}, "inputs": ["x"], "shards": 3}
    keys |= {"model": "torch.nn:Identity", "batch_size": 9, "workers": 0, "order": "shuffled", "quiet": True}
    keys |= {"outputs": {"carry": ["id"]}, "on_error": {"quarantine": 2}, "storage": server.url("bad-runs")}
    first = dp_ray.run(**keys, name="run")
    assert sorted(first.sample_index.tolist()) == [number for number in numbers if number not in ROTTEN]
    run = Storage(server.url("bad-runs/run"))
    with run.open("quarantine.parquet") as stream:
        found = pq.read_table(stream).to_pylist()
    assert sorted((record["sample_index"], record["carried.id"]) for record in found) == [
        (4, "row 4"),
        (30, "row 30"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "ROTTEN", {4})
        second = execute(retried(run.location, {}), Options(quiet=True), reopen=reopened)
    there = second.sample_index.tolist()
    assert second.quarantined == 1 and sorted(there) == [number for number in numbers if number != 4]
    assert second.carried["id"] == [f"row {index}" for index in there]
    assert torch.equal(second.outputs.float(), rows()[0][there])


@given(names=trees(), data=st.data())
@settings(max_examples=examples(5), suppress_health_check=list(HealthCheck))
def test_files_of_a_store_are_named_by_the_same_rule(server: "Server", names: list[str], data: st.DataObject) -> None:
    folder, client = f"names-{uuid.uuid4()}", server.client()
    for name in names:
        client.put_object(Bucket="bucket", Key=f"{folder}/{name}", Body=b"")
    base, _, options = server.url(folder).partition("?")
    for way in data.draw(st.lists(ways(names), min_size=1, max_size=3)):
        if ("?", True) in itertools.chain(*way.parts):
            continue  # a question mark begins the options
        for plain in (True, False):
            there = found_at(f"{base}/{way.url(plain)}?{options}")
            assert there == [f"bucket/{folder}/{name}" for name in way.takes(names, way.plain)], way.url(plain)

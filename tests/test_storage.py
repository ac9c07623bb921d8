"""Storage on a local folder, a file:// URL and an object store in memory, looked at from outside while it is used."""

import os
import resource
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from dp_ray import storage as storage_module
from dp_ray.errors import StorageError
from dp_ray.records import Damaged, Record
from dp_ray.storage import Storage
from dp_ray.tables import read_table, write_table

if TYPE_CHECKING:
    from tests.support.s3 import Server


@pytest.fixture(params=["folder", "file://", "mock://"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    location = {"folder": str(tmp_path / "run"), "file://": f"file://{tmp_path}/run", "mock://": "mock:///run"}
    made = Storage(location[request.param])
    made.create()
    return made


def all_files(storage: Storage) -> dict[str, bytes]:
    """Everything that a plain listing of the file system shows, temporary files too."""
    found = storage.fs.get_file_info(fs.FileSelector(storage.path, recursive=True))
    paths = [info.path for info in found if info.is_file]
    return {path.split("/")[-1]: storage.fs.open_input_file(path).readall() for path in paths}


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process may grow past `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_folder_above_one_at_the_top_is_the_root() -> None:
    assert Storage("/nowhere").parent.location == Storage("/").location == "/"
    assert Storage("/some/where").parent.location == "/some"


def test_text_comes_back(storage: Storage) -> None:
    storage.write_text("a.json", "grüße\n")
    assert storage.read_text("a.json") == "grüße\n"
    assert all_files(storage) == {"a.json": "grüße\n".encode()}


def test_no_name_makes_the_storage_compress(storage: Storage) -> None:
    with storage.writing("a.json.gz") as stream:
        stream.write(b"as it is")
    assert all_files(storage) == {"a.json.gz": b"as it is"}
    assert storage.read_bytes("a.json.gz") == b"as it is"


def test_a_file_appears_only_when_it_is_whole(storage: Storage) -> None:
    with storage.writing("x.bin") as stream:
        stream.write(b"half")
        assert storage.names() == [] and not storage.exists("x.bin")
        assert "x.bin" not in all_files(storage)
        stream.write(b" and half")
    assert storage.names() == ["x.bin"] and storage.exists("x.bin")
    assert all_files(storage) == {"x.bin": b"half and half"}


def test_readers_see_the_old_file_until_the_new_one_is_whole(storage: Storage) -> None:
    storage.write_text("x", "old")
    with storage.writing("x") as stream:
        stream.write(b"new")
        assert storage.read_text("x") == "old"
    assert all_files(storage) == {"x": b"new"}


def fail(storage: Storage, error: type[BaseException]) -> None:
    with storage.writing("x") as stream:
        stream.write(b"new")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_an_error_while_writing_leaves_nothing(storage: Storage, error: type[BaseException]) -> None:
    with pytest.raises(error):
        fail(storage, error)
    assert all_files(storage) == {}


def test_an_error_while_writing_leaves_the_old_file(storage: Storage) -> None:
    storage.write_text("x", "old")
    with pytest.raises(ValueError):
        fail(storage, ValueError)
    assert all_files(storage) == {"x": b"old"}


def test_writers_of_one_name_do_not_mix(storage: Storage) -> None:
    with storage.writing("x") as first, storage.writing("x") as second:
        first.write(b"1" * 10)
        second.write(b"2" * 5)
    assert all_files(storage) == {"x": b"1" * 10}


def test_names_are_those_of_whole_files_sorted(storage: Storage) -> None:
    storage.child("folder").create()
    for name in ("b", "a", "c"):
        storage.write_text(name, "")
    with storage.writing("d"):
        assert storage.names() == ["a", "b", "c"]
    assert storage.names() == ["a", "b", "c", "d"]
    assert storage.child("absent").names() == []


def test_entries_are_files_and_folders_that_hold_files(storage: Storage) -> None:
    assert storage.entries() == set()
    deep = storage.child("kept").child("deep")
    for folder in (deep, storage.child("empty")):
        folder.create()
    deep.write_text("x", "")
    storage.write_text("a.json", "")
    assert storage.entries() == {"a.json", "kept"}


def test_a_folder_does_not_exist_as_a_file(storage: Storage) -> None:
    storage.child("folder").create()
    assert not storage.exists("folder") and not storage.exists("absent")


def test_a_child_is_a_folder_of_the_same_store(storage: Storage) -> None:
    child = storage.child("a").child("b")
    child.create()
    child.write_text("x", "1")
    assert str(child) == f"{storage}/a/b"
    assert child.path == f"{storage.path}/a/b"
    assert storage.fs.get_file_info(f"{storage.path}/a/b/x").size == 1


def test_a_folder_is_removed_with_all_that_is_in_it(storage: Storage) -> None:
    child = storage.child("a")
    child.remove()
    child.create()
    child.write_text("x", "1")
    child.remove()
    child.remove()
    assert all_files(storage) == {} and child.names() == []


@pytest.mark.parametrize("location", ["bogus://x", "http://host/x", "file://host/x", "mock:///a b"])
def test_a_bad_url_is_an_error_that_names_it(location: str) -> None:
    with pytest.raises(StorageError, match=location):
        Storage(location)


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Storage("runs/x").location == Storage(f"file://{tmp_path}/runs/x").location == f"{tmp_path}/runs/x"


@pytest.mark.parametrize("name", ["with space", "per%20cent", "what?", "hash#", "ünïcode"])
def test_a_local_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    child = Storage(str(tmp_path / name)).child("a")
    child.create()
    child.write_text("x", "1")
    assert (tmp_path / name / "a" / "x").read_text() == "1"
    assert child.location == str(tmp_path / name / "a")


@pytest.mark.parametrize(
    ("url", "is_in"),
    [
        ("s3://other:secret@bucket/runs/a/weights.safetensors?region=y", True),
        ("s3://bucket/runs//b/../a", True),
        ("s3://bucket/runs/a", True),
        ("s3://bucket/runs/ab/weights.safetensors", False),
        ("s3://bucket/runs", False),
        ("s3://another/runs/a", False),
        ("gs://bucket/runs/a", False),
        ("/bucket/runs/a", False),
    ],
)
def test_what_a_folder_of_an_object_store_holds(url: str, is_in: bool) -> None:
    options = "scheme=http&endpoint_override=127.0.0.1:1&region=us-east-1"
    assert Storage(f"s3://key:secret@bucket/runs/a/?{options}").holds(url) == is_in


def test_the_options_of_a_url_stay_behind_its_path() -> None:
    child = Storage("mock:///bucket/run?endpoint=localhost:9000").child("parts")
    assert child.location == "mock:///bucket/run/parts?endpoint=localhost:9000"
    assert child.path == Storage(child.location).path == "bucket/run/parts"


@pytest.mark.parametrize(
    ("act", "names"),
    [
        (lambda run: run.read_text("absent"), "absent"),
        (lambda run: run.open("absent"), "absent"),
        (lambda run: run.child("no-folder").write_text("x", "1"), "no-folder.*cannot write x"),
        (lambda run: run.child("file").create(), "file: cannot be made"),
        (lambda run: run.child("file").child("below").create(), "file/below: cannot be made"),
        (lambda run: run.child("file").write_text("x", "1"), "cannot write x"),
        (lambda run: run.child("file").names(), "file: cannot be listed"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_names_it(
    storage: Storage, act: Callable[[Storage], object], names: str
) -> None:
    storage.write_text("file", "")
    with pytest.raises(StorageError, match=names):
        act(storage)


NOBODY = 65534


@pytest.fixture
def not_root() -> Iterator[None]:
    """Be a user who may not write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    yield
    os.seteuid(user)


def test_a_read_only_folder_is_an_error(not_root: None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage(folder)
        storage.write_text("y", "1")
        Path(folder).chmod(0o555)
        try:
            with pytest.raises(StorageError, match=r"cannot write x: .*Permission denied"):
                storage.write_text("x", "1")
        finally:
            Path(folder).chmod(0o755)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with full_disk(1000), pytest.raises(StorageError, match=r"cannot write x\.bin"):
        Storage(str(tmp_path)).write_text("x.bin", "x" * 2000)
    assert list(tmp_path.iterdir()) == []


def write_parquet(storage: Storage) -> None:
    table = pa.table({"x": range(5000)})
    with storage.writing("x.parquet") as stream, pq.ParquetWriter(stream, table.schema) as writer:
        writer.write_table(table)


def test_a_full_disk_is_an_error_of_parquet_files_too(tmp_path: Path) -> None:
    with full_disk(1000), pytest.raises(StorageError, match=r"cannot write x\.parquet"):
        write_parquet(Storage(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
    write_parquet(Storage(str(tmp_path)))
    assert pq.read_table(tmp_path / "x.parquet")["x"].to_pylist() == list(range(5000))


def acting(storage: Storage, act: Callable[[], object]) -> Storage:
    """The storage as it is read while another changes it: `act` is done once, when a file has been opened."""
    view, acts = Storage(storage.location), [act]

    class Files:
        def __getattr__(self, name: str) -> Any:
            return getattr(storage.fs, name)

        def open_input_file(self, path: str) -> pa.NativeFile:
            opened = storage.fs.open_input_file(path)
            if acts:
                acts.pop()()
            return opened

    view.fs = Files()
    return view


LEASE: Record[dict[str, Any] | None] = Record(dict[str, Any], "lease.json", missing=None)


def test_an_object_that_is_removed_amid_its_reading_is_missing(server: "Server") -> None:
    folder = Storage(server.url("removed"))
    LEASE.write(folder, {"a": 1})
    assert LEASE.read(acting(folder, lambda: folder.delete("lease.json"))) is None
    LEASE.write(folder, {"a": 1})
    with pytest.raises(StorageError, match=r"removed.*: cannot read lease.json") as told:
        acting(folder, lambda: folder.delete("lease.json")).read_bytes("lease.json")
    assert isinstance(told.value.__cause__, FileNotFoundError)


def test_an_object_that_is_replaced_amid_its_reading_is_read_whole(server: "Server") -> None:
    folder = Storage(server.url("replaced"))
    long = {"long": "x" * 1000}
    LEASE.write(folder, {"a": 1})
    assert LEASE.read(acting(folder, lambda: LEASE.write(folder, long))) == long
    write_table(folder, "t.parquet", pa.table({"a": [1]}))
    longer = pa.table({"a": list(range(10_000))})
    assert read_table(acting(folder, lambda: write_table(folder, "t.parquet", longer)), "t.parquet") == longer


def test_a_damaged_object_is_damaged_however_often_it_is_read(server: "Server") -> None:
    folder = Storage(server.url("damaged"))
    folder.write_text("lease.json", "{")
    with pytest.raises(Damaged, match=r"damaged.*/lease.json: is damaged"):
        LEASE.read(folder)


@pytest.mark.parametrize(
    "url",
    [
        "s3:///runs",
        "s3://ab/runs",
        "s3://bucket:9000/runs",
        "s3://-bucket/x",
        "s3://a..b/x",
        "gs://Upper/x",
        "gcs://a/x",
    ],
)
def test_a_bucket_whose_name_its_store_refuses_is_told_at_once(url: str) -> None:
    with pytest.raises(StorageError, match=r"storage .* is no name of a bucket, which has 3 to"):
        Storage(url)


def test_a_temporary_file_that_gets_its_name_as_the_folder_is_cleared_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the lease's does, whose thread writes it meanwhile: a run failed so at its end, once in thousands."""
    run = Storage(str(tmp_path))
    unfinished, left = (tmp_path / f"{storage_module.TEMPORARY}{name}" for name in ("lease.json", "other.json"))
    unfinished.touch()
    left.touch()
    listed = storage_module.with_names

    def and_renamed(infos: Iterable[fs.FileInfo]) -> Iterator[fs.FileInfo]:
        found = listed(infos)
        unfinished.rename(tmp_path / "lease.json")
        return found

    monkeypatch.setattr(storage_module, "with_names", and_renamed)
    run.remove_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == ["lease.json"]

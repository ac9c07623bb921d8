"""A run is brought here from the cluster that ran it: whole, once, and never half."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.cluster import fetch as fetching
from dp_ray.cluster.fetch import FetchRequest, FromHere, fetch_run
from dp_ray.cluster.internals.variables import VARIABLES
from dp_ray.driver.from_run import follow_up
from dp_ray.errors import ClusterError, Error, JobError, StorageError
from dp_ray.rundir.content import FETCHED, Content, Entry, check_names, chosen_files
from dp_ray.storage import Storage
from tests.support.cli import status_of
from tests.support.cluster import ROOT, Cluster
from tests.support.drivers import SLOW
from tests.support.s3 import IN_URL, SECRET, Server
from tests.support.within import within

QUICK: dict[str, Any] = {**SLOW, "dataset": {"target": "tests.support.models:SlowPairs"}}


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, but for the note that fetching leaves."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items() if name != FETCHED}


def quiet(_: str) -> None:
    """Say nothing."""


def bring(storage: Path, folder: Path, *kinds: str, name: str = "trained", overwrite: bool = False) -> list[Path]:
    """Fetch a run from a storage that this machine reads."""
    return fetch_run(FetchRequest(name, kinds, str(storage), None, overwrite), folder, quiet)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with a training, `trained`."""
    storage = tmp_path_factory.mktemp("there")
    dp_ray.run(**QUICK, name="trained", workers=0, storage=str(storage), quiet=True)
    return storage


def test_what_is_asked_for_comes_and_what_tells_of_the_run() -> None:
    about = ["run.json", "result.json", "metrics.parquet", "history/rows-0.parquet", "outputs_manifest.json"]
    drivers = ["lease.json", "stop.json", ".tmp-12-weights.safetensors"]
    weights = ["weights.safetensors", "best.safetensors"]
    many = ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    old, new = ["checkpoints/step-9.safetensors"], ["checkpoints/step-12.safetensors"]
    pieces = ["checkpoints/pieces/step-12.0-of-2.safetensors"]
    outputs = ["outputs/00000-of-00001.parquet", "outputs.parquet", "parts/steps-0-1-shards-0-1.arrow"]
    rest = ["report.html", "tensorboard/events"]
    names = [*about, *drivers, *weights, *many, *old, *new, *pieces, *outputs, *rest]
    assert set(chosen_files(names, ())) == set(names) - set(drivers)
    assert set(chosen_files(names, ["weights"])) == {*about, *weights, *many}
    assert set(chosen_files(names, ["outputs"])) == {*about, *outputs}
    assert set(chosen_files(names, ["page", "outputs"])) == {*about, *outputs, "report.html"}
    goes_on = [name for name in names if name not in (*weights, *many)]
    assert set(chosen_files(goes_on, ["weights"])) == {*about, *new, *pieces}


@pytest.mark.parametrize("path", ["r/../x", "/etc/x", "x", "r/", "r//x", "../r/x", "r/./x", "r/a\0b", "r/\x1b[2Jx"])
def test_a_list_of_files_that_leads_elsewhere_is_refused(path: str) -> None:
    check_names(Content({"r/outputs/00000.parquet": Entry(1)}), "r")
    with pytest.raises(StorageError, match="which no run directory holds: not fetched"):
        check_names(Content({"r/run.json": Entry(1), path: Entry(1)}), "r")


@pytest.mark.full
def test_a_run_that_was_fetched_is_read_reported_and_goes_on(trained: Path, tmp_path: Path) -> None:
    (run_dir,) = bring(trained, tmp_path / "runs")
    assert run_dir == tmp_path / "runs" / "trained"
    assert digests(run_dir) == digests(trained / "trained")
    assert os.listdir(tmp_path / "runs") == ["trained"], "the folder that gathered the files is gone"
    there, here = dp_ray.load(trained / "trained"), dp_ray.load(run_dir)
    assert here.run_dir == str(run_dir)
    assert here.weights_sha256 == there.weights_sha256
    assert [row["loss"] for row in here.history] == [row["loss"] for row in there.history]
    bring(trained, tmp_path / "some", "weights")
    assert not (tmp_path / "some" / "trained" / "report.html").exists()
    answers = {
        run: dp_ray.run(
            task="predict",
            model=SLOW["model"],
            collate=SLOW["collate"],
            dataset=QUICK["dataset"],
            batch_size=10,
            shards=8,
            init_from=str(run),
            name="p",
            storage=str(tmp_path / name),
            workers=0,
            quiet=True,
        ).outputs_sha256
        for name, run in (("there", trained / "trained"), ("here", tmp_path / "some" / "trained"))
    }
    assert len(set(answers.values())) == 1
    bring(trained, tmp_path / "page", "page")
    lacks = rf"was fetched without its weights; `dp-ray fetch trained .*page --weights --storage {trained}` brings"
    with pytest.raises(StorageError, match=lacks):
        dp_ray.load(tmp_path / "page" / "trained").weights  # noqa: B018
    with pytest.raises(StorageError, match=lacks):
        follow_up("predict", str(tmp_path / "page" / "trained"), None, {})
    for there_is_none in (dp_ray.load, lambda run: follow_up("predict", run, None, {})):
        with pytest.raises(Error, match=r"if a cluster ran it, `dp-ray fetch lost .*page --address .*` brings it"):
            there_is_none(str(tmp_path / "page" / "lost"))
    bring(trained, tmp_path / "page", "weights")  # joins what is there
    assert dp_ray.load(tmp_path / "page" / "trained").weights.keys() == there.weights.keys()
    bring(trained, tmp_path / "some", "page")
    bring(trained, tmp_path / "some")
    assert digests(tmp_path / "some" / "trained") == digests(trained / "trained")


def test_what_is_there_is_not_overwritten_without_a_word(trained: Path, tmp_path: Path) -> None:
    bring(trained, tmp_path)
    before = digests(tmp_path / "trained")
    bring(trained, tmp_path)  # nothing has changed, so nothing comes
    noted = json.loads((tmp_path / "trained" / FETCHED).read_text())
    noted["files"]["result.json"]["modified"] += 1
    (tmp_path / "trained" / FETCHED).write_text(json.dumps(noted))
    (tmp_path / "trained" / "mine.txt").write_text("mine")
    with pytest.raises(
        JobError, match=r"holds an earlier state of the run: result\.json has changed since; .*--overw"
    ):
        bring(trained, tmp_path)
    assert (tmp_path / "trained" / "mine.txt").exists()
    bring(trained, tmp_path, overwrite=True)
    assert digests(tmp_path / "trained") == before
    (tmp_path / "trained" / FETCHED).unlink()
    with pytest.raises(JobError, match="is there already, and was not fetched"):
        bring(trained, tmp_path)
    foreign = tmp_path / "other" / "trained"
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(JobError, match="is there already, and was not fetched"):
            bring(trained, tmp_path / "other", overwrite=overwrite)
    assert os.listdir(foreign) == ["thesis.tex"]
    assert os.listdir(tmp_path / "other") == ["trained"]


@pytest.mark.parametrize("way", ["plain", "linked", "by another path", "within"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_is_not_fetched_over_itself(trained: Path, tmp_path: Path, way: str, overwrite: bool) -> None:
    """Source and target are one: what was not asked for would be deleted."""
    storage = tmp_path / "runs"
    shutil.copytree(trained, storage)
    folder = storage
    if way == "linked":
        folder = tmp_path / "link"
        folder.symlink_to(storage)
    elif way == "by another path":  # as a disk that is mounted twice: no path tells, the file's time does
        folder = tmp_path / "mounted"
        shutil.copytree(storage, folder)
    elif way == "within":
        storage = folder / "trained" / "runs"
        shutil.copytree(trained, storage)
    before = digests(tmp_path)
    with pytest.raises(JobError, match="is where the run lies; fetch into another folder"):
        bring(storage, folder, "weights", overwrite=overwrite)
    assert digests(tmp_path) == before
    assert any("checkpoints/" in name for name in before), "the training keeps some"


def test_what_is_in_the_way_is_told_before_anything_comes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FromHere, "pieces", lambda *_: pytest.fail("files came before it was told"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    for number, place in enumerate([tmp_path / "empty", tmp_path / "nowhere", tmp_path / "file"]):
        folder = tmp_path / f"links-{number}"
        folder.mkdir()
        (folder / "trained").symlink_to(place)
        with pytest.raises(JobError, match=f"trained is a link to {place}; name the folder that is to hold"):
            bring(trained, folder)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"):
        with pytest.raises(JobError, match=rf"{folder.name} cannot be made a folder: .*another folder"):
            bring(trained, folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_half_done_target_is_completed_or_told(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier run is back if the new one cannot take its place; where a folder is in a file's, that is told."""
    bring(trained, tmp_path, "page")
    (tmp_path / "trained" / "weights.safetensors").mkdir()
    with pytest.raises(
        StorageError, match=r"weights\.safetensors.*: all files came, and lie in .*same command goes on"
    ):
        bring(trained, tmp_path)
    (tmp_path / "trained" / "weights.safetensors").rmdir()
    bring(trained, tmp_path)
    assert digests(tmp_path / "trained") == digests(trained / "trained")

    (tmp_path / "trained" / FETCHED).unlink()
    (tmp_path / "trained" / "mine.txt").write_text("mine")
    rename, to_fail = os.rename, [1]

    def fails(source: Any, target: Any) -> None:
        if str(target) == str(tmp_path / "trained") and to_fail and to_fail.pop():
            raise OSError(16, "Device or resource busy", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(StorageError, match=r"busy.*: all files came"):
        bring(trained, tmp_path, overwrite=True)
    assert (tmp_path / "trained" / "mine.txt").read_text() == "mine"
    old = tmp_path / ".dp_ray-fetch-trained" / ".tmp-trained" / "history"  # left by a process that was killed there
    old.mkdir(parents=True)
    bring(trained, tmp_path, overwrite=True)
    assert digests(tmp_path / "trained") == digests(trained / "trained")
    assert not (tmp_path / ".dp_ray-fetch-trained").exists()


def test_an_interrupted_fetch_leaves_nothing_half_and_goes_on(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def broken(self: FromHere, path: str) -> Any:
        read.append(path)
        return pieces(self, path)

    @contextmanager
    def pieces(self: FromHere, path: str) -> Iterator[Iterator[bytes]]:
        with whole(self, path) as all_of_it:
            yield cut(all_of_it) if len(read) == 4 else all_of_it

    def cut(all_of_it: Iterator[bytes]) -> Iterator[bytes]:
        yield next(all_of_it)[:10]
        raise KeyboardInterrupt

    whole = FromHere.pieces
    monkeypatch.setattr(FromHere, "pieces", broken)
    with pytest.raises(KeyboardInterrupt, match="interrupted; the same command goes on from there"):
        bring(trained, tmp_path)
    assert not (tmp_path / "trained").exists()
    came, read[:] = read[:3], ["no 4th any more"] * 4
    (tmp_path / ".dp_ray-fetch-trained" / "trained" / "of-other-times.bin").write_bytes(b"stale")
    bring(trained, tmp_path)
    assert not set(came) & set(read), "what is there does not come again"
    assert digests(tmp_path / "trained") == digests(trained / "trained")


def test_a_file_that_changes_meanwhile_is_told(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "AGAIN_SECONDS", 0.0)

    @contextmanager
    def shorter(self: FromHere, path: str) -> Iterator[Iterator[bytes]]:
        yield iter([b"short"])

    monkeypatch.setattr(FromHere, "pieces", shorter)
    with pytest.raises(StorageError, match=r"trained/.* is not what was listed \(5 bytes came, "):
        bring(trained, tmp_path)
    assert not (tmp_path / "trained").exists()


def test_what_cannot_be_fetched_is_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nobody holds no run; the runs there: .*trained"):
        bring(trained, tmp_path, name="nobody")
    with pytest.raises(JobError, match=r"trained has no outputs; fetch it without --outputs"):
        bring(trained, tmp_path, "outputs")
    with pytest.raises(JobError, match="is no name of a run"):
        bring(trained, tmp_path, name="../trained")
    with pytest.raises(JobError, match="give --address"):
        fetch_run(FetchRequest("trained"), tmp_path, quiet)
    assert os.listdir(tmp_path) == []


def test_a_connection_that_breaks_is_made_again(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file begins anew then; one that does not come at all is told, and what has come stays for the next time."""
    tries: dict[str, int] = {}

    @contextmanager
    def breaks(self: FromHere, path: str) -> Iterator[Iterator[bytes]]:
        tries[path] = tries.get(path, 0) + 1
        with whole(self, path) as all_of_it:
            yield first_half(all_of_it) if tries[path] <= broken else all_of_it

    def first_half(all_of_it: Iterator[bytes]) -> Iterator[bytes]:
        yield next(all_of_it)[:10]
        raise ClusterError("the dashboard no longer answers")

    whole, broken = FromHere.pieces, fetching.TRIES
    monkeypatch.setattr(FromHere, "pieces", breaks)
    monkeypatch.setattr(fetching, "AGAIN_SECONDS", 0.0)
    with pytest.raises(ClusterError, match="does not come: the dashboard no longer answers; the same command"):
        bring(trained, tmp_path)
    assert max(tries.values()) == fetching.TRIES
    broken = 2
    tries.clear()
    bring(trained, tmp_path)
    assert max(tries.values()) == 3
    assert digests(tmp_path / "trained") == digests(trained / "trained")


@pytest.mark.places
def test_a_sweep_comes_with_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps({**QUICK, "name": "s"}))
    monkeypatch.chdir(ROOT)
    over = ["--over", "optimizer.args.lr=0.01,0.02", "--workers", "0", "--storage", str(tmp_path / "there")]
    assert status_of(monkeypatch, "sweep", str(tmp_path / "job.yaml"), *over) == 0
    (name,) = [path.parent.name for path in (tmp_path / "there").glob("*/sweep.json")]
    came = bring(tmp_path / "there", tmp_path / "here", name=name)
    assert len(came) == 3
    for run_dir in came:
        assert digests(run_dir) == digests(tmp_path / "there" / run_dir.name)


def test_a_run_in_a_store_with_a_url_is_read_from_here(trained: Path, tmp_path: Path, server: Server) -> None:
    url = server.url("fetched")
    store = Storage(url).child("trained")
    for path in (trained / "trained").rglob("*"):
        if path.is_file():
            with store.writing(path.relative_to(trained / "trained").as_posix()) as stream:
                stream.write(path.read_bytes())
    fetch_run(FetchRequest("trained", (), url), tmp_path, quiet)
    assert digests(tmp_path / "trained") == digests(trained / "trained")
    noted = (tmp_path / "trained" / FETCHED).read_text()
    assert "s3://bucket/fetched" in noted
    assert SECRET not in noted and IN_URL not in noted


def program(*args: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
    line = [sys.executable, "-m", "dp_ray", *args]
    return subprocess.run(
        line, cwd=cwd, env={**kept, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.usefixtures("variables_kept")
def test_a_run_comes_through_the_cluster(trained: Path, cluster: Cluster, tmp_path: Path) -> None:
    """And large files, of any bytes, come as they are; the cluster keeps nothing of it."""
    there = tmp_path / "there" / "trained"
    shutil.copytree(trained / "trained", there)
    (there / "files").mkdir()
    (there / "files" / "empty").touch()
    (there / "files" / "any bytes").write_bytes(os.urandom(40_000_000))
    said: list[str] = []
    request = FetchRequest("trained", (), str(there.parent), cluster.dashboard)
    assert fetch_run(request, tmp_path / "here", said.append) == [tmp_path / "here" / "trained"]
    assert "through the cluster at" in said[0]
    assert digests(tmp_path / "here" / "trained") == digests(there)
    assert within(60, lambda: not list(cluster.folder.rglob("session_*/logs/dp_ray-own-*"))), "its folder is gone"


@pytest.mark.ray
@pytest.mark.places
def test_the_run_of_a_submitted_job_is_found_by_its_name_and_its_id(cluster: Cluster, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({**QUICK, "name": "far", "workers": 0}))
    there, at = tmp_path / "there", ("--address", cluster.dashboard)
    submitted = program("submit", str(job), "--storage", str(there), *at)
    assert submitted.returncode == 0, submitted.stderr
    assert f"the run will lie in {there}/far; dp-ray fetch far {shlex.join(at)} brings it here" in submitted.stderr
    fetched = program("fetch", "far", *at, cwd=tmp_path)
    assert (fetched.returncode, fetched.stdout) == (0, "runs/far\n"), fetched.stderr
    assert digests(tmp_path / "runs" / "far") == digests(there / "far")
    (row,) = [row for row in json.loads(program("status", *at, "--json").stdout) if row["name"] == "far"]
    some = program("fetch", row["id"], "some", "--weights", *at, cwd=tmp_path)
    assert some.returncode == 0, some.stderr
    assert dp_ray.load(tmp_path / "some" / "far").weights.keys() == dp_ray.load(there / "far").weights.keys()
    lost = program("fetch", "gone", "--storage", str(there), *at, cwd=tmp_path)
    assert lost.returncode == 2
    assert f"cannot offer gone: {there}/gone holds no run; the runs there: {there}/far" in lost.stderr
    assert "dp_ray-own" not in program("status", *at).stdout
